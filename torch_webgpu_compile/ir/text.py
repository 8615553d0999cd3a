"""The text of the IR: one line per buffer and node, the same in every run.

Graphs of which it is equal are equal: it is a part of the key under which plans are cached, and
what ``TORCH_WEBGPU_DEBUG=ir`` prints. The syntax is Python's:

    s0 = size(2)
    in0: f32[s0, 4] = input()
    add: f32[s0, 4] = buffer()
    add = pointwise([s0, 4], add(in0[i0, i1], f32(1.0)))  # aten.add.Tensor "model.py:3: x + 1"

A subexpression that is used more than once is named ``t0``, ``t1``, … in keyword arguments. A
function that a user has written is there with all of its text, and is called by a name that is made
of it: ``swish_3f2a91c0 = function('mylib::swish', 'fn swish(x: f32) -> f32 { … }')``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..symbolic.nested import HostBuffer, HostView
from ..symbolic.sizes import Expr, Symbol, contiguous_strides, symbols_of
from .buffers import Buffer, BufferOrigin
from .graph import (
    AnchorGroup,
    ForeachGroup,
    GraphOutput,
    JointGroup,
    KernelGroup,
    LoopGraph,
    MapGroup,
    Member,
    PairGroup,
    RowGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
)
from .nodes import Scatter, bodies_of, outputs_of
from .scalar import (
    SCALARS,
    Checked,
    Const,
    FunctionCall,
    Index,
    Load,
    Local,
    Masked,
    Op,
    Scalar,
    children,
    functions_of,
    scalar_symbols,
    walk,
)
from .spaces import Node, Origin, operands_of


class ScalarText:
    """Text of several scalars that share subexpressions."""

    def __init__(self, roots: Sequence[Scalar]) -> None:
        uses: Counter[Scalar] = Counter(roots)
        order: dict[Scalar, None] = {}
        for root in roots:
            for node in walk(root):
                if node not in order:
                    order[node] = None
                    uses.update(children(node))
        self._done: dict[Scalar, str] = {}
        self.shared: list[tuple[str, str]] = []
        for node in order:
            text = self._plain(node)
            if uses[node] > 1 and isinstance(node, (Op, Masked, Load, Checked, FunctionCall)):
                name = f"t{len(self.shared)}"
                self.shared.append((name, text))
                text = name
            self._done[node] = text

    def text(self, root: Scalar) -> str:
        """The text of one of the roots."""
        return self._done[root]

    @property
    def definitions(self) -> str:
        """``, t0=…, t1=…`` in order of definition."""
        return "".join(f", {name}={text}" for name, text in self.shared)

    def _plain(self, node: Scalar) -> str:
        match node:
            case Const(value, dtype):
                return f"{dtype.short}({value!r})"
            case Index(expr):
                return f"index({expr!r})"
            case Load(buffer, index, _):
                entries = [repr(e.expr) if isinstance(e, Index) else self._done[e] for e in index]
                return f"{buffer}[{', '.join(entries) or '()'}]"
            case Op(name, args, dtype):
                prefix = f"{name}_{dtype.short}" if name in ("cast", "bitcast") else name
                return f"{prefix}({', '.join(self._done[a] for a in args)})"
            case Local(name, _):
                return name
            case Masked():
                return f"masked({', '.join(self._done[c] for c in children(node))})"
            case Checked(check=check):
                operands = ", ".join(self._done[c] for c in children(node))
                return f"checked({operands}, {check.op!r}, {check.dim}, {check.source!r})"
            case FunctionCall(function, args, result):
                member = function.results[result][0]
                called = f"{function.unique}({', '.join(self._done[a] for a in args)})"
                return f"{called}.{member}" if member else called


def format_scalar(root: Scalar) -> str:
    """A scalar on one line: ``body`` or ``let(body, t0=…)``."""
    text = ScalarText([root])
    body = text.text(root)
    return f"let({body}{text.definitions})" if text.shared else body


def format_graph(graph: LoopGraph) -> str:
    """The whole graph."""
    lines = [f"graph({graph.name!r})"]
    lines += [f"{s.name} = size({_range_text(s)})" for s in _size_symbols(graph)]
    bodies = (body for node in graph.nodes for body in bodies_of(node))
    functions = dict.fromkeys(function for body in bodies for function in functions_of(body))
    lines += [f"{f.unique} = function({f.name!r}, {f.text!r})" for f in functions]
    lines += [_format_buffer(buffer) for buffer in graph.buffers.values()]
    for spec in graph.inputs:
        if spec.buffer is not None:
            lines.append(f"argument({spec.buffer}{', static=True' if spec.static else ''})")
        else:
            lines.append(f"argument(size={'None' if spec.size is None else repr(spec.size)})")
    lines += [format_node(node) for node in graph.nodes]
    lines += [_format_output(output) for output in graph.outputs]
    return "\n".join(lines) + "\n"


def _range_text(size: Symbol) -> str:
    if size.most is not None:
        return f"{size.lower}, {size.most}"
    return str(size.lower) if size.usual is None else f"{size.lower}, usual={size.usual}"


def _size_symbols(graph: LoopGraph) -> list[Symbol]:
    """Every size symbol of a graph, by name."""
    exprs = [spec.size for spec in graph.inputs]
    tensors: list[Buffer | GraphOutput] = [*graph.buffers.values(), *graph.outputs]
    for shaped in tensors:
        exprs += (*shaped.sizes, *shaped.strides, shaped.offset)
    exprs += (output.size for output in graph.outputs)
    found = set[Symbol]().union(*(symbols_of(expr) for expr in exprs if expr is not None))
    found.update(*(scalar_symbols(body) for node in graph.nodes for body in bodies_of(node)))
    return sorted((s for s in found if s.extent is None), key=lambda s: s.name)


def _format_buffer(buffer: Buffer) -> str:
    contiguous = buffer.strides == contiguous_strides(buffer.sizes)
    layout = "" if contiguous else f"strides={list(buffer.strides)!r}"
    if buffer.offset.terms or buffer.offset.constant:
        layout += f"{', ' if layout else ''}offset={buffer.offset!r}"
    kind = "buffer" if buffer.origin is BufferOrigin.INTERMEDIATE else buffer.origin.value
    sizes = ", ".join(map(repr, buffer.sizes)) or "()"
    return f"{buffer.name}: {buffer.dtype.short}[{sizes}] = {kind}({layout})"


def format_node(node: Node) -> str:
    """One node on one line, with its origins as a comment.

    Behind its outputs and mnemonic are all other fields, up to the last that is not None.
    """
    text = ScalarText(bodies_of(node))
    operands = operands_of(node)
    values = [getattr(node, field) for field in operands]
    while values and values[-1] is None:
        values.pop()
    shown = [
        value if field in node.INPUTS and isinstance(value, str) else _operand(value, text)
        for field, value in zip(operands, values, strict=False)
    ]
    code = f"{', '.join(outputs_of(node)) or '()'} = {node.mnemonic}({', '.join(shown)}"
    return f"{code}{text.definitions}){_format_origins(node.origins)}"


def _operand(value: Any, text: ScalarText) -> str:
    """A field of a node, or an entry of one."""
    match value:
        case _ if isinstance(value, SCALARS):
            return text.text(value)
        case HostBuffer(buffer, strides):
            return f"argument({buffer}{'' if strides is None else f', {_sizes(strides)}'})"
        case HostView(changed, sizes, strides, offset):
            return f"view({changed}, {_sizes(sizes)}, {_sizes(strides)}, {offset!r})"
        case Expr():
            return f"index({value!r})"
        case tuple() if all(isinstance(entry, Expr) for entry in value):
            return _sizes(value)
        case tuple():
            shown = ", ".join(_operand(entry, text) for entry in value)
            if all(isinstance(entry, SCALARS) for entry in value):
                return f"[{shown}]"
            return f"({shown},)" if len(value) == 1 else f"({shown})"
        case _:
            return repr(value)


def _sizes(sizes: Sequence[Expr]) -> str:
    return f"[{', '.join(map(repr, sizes))}]"


def _format_origins(origins: Sequence[Origin]) -> str:
    if not origins:
        return ""
    return "  # " + ", ".join(f"{o.op} {json.dumps(o.source)}" for o in origins)


def _format_output(output: GraphOutput) -> str:
    if output.buffer is None:
        shown = f"size={output.size!r}" if output.size is not None else f"{output.constant!r}"
        return f"result({shown})"
    mutates = "" if output.mutates is None else f", mutates={output.mutates}"
    return (
        f"result({output.buffer}, sizes={_sizes(output.sizes)}, "
        f"strides={_sizes(output.strides)}, offset={output.offset!r}{mutates})"
    )


def format_schedule(schedule: Schedule) -> str:
    """Kernel groups in order, one line per member."""
    lines = [f"schedule({schedule.graph.name!r})"]
    for number, group in enumerate(schedule.groups):
        lines += _format_group(number, group)
        for part in group.groups if isinstance(group, JointGroup) else (group,):
            if isinstance(part, SingleGroup) and isinstance(part.node, Scatter):
                name = part.node.output
                initial = schedule.graph.buffers[name].shares
                lines += [] if initial is None else [f"  {name} in the memory of {initial}"]
    return "\n".join(lines) + "\n"


_SEVERAL = {
    SiblingGroup: "siblings",
    PairGroup: "pair",
    ForeachGroup: "foreach",
    JointGroup: "joint",
}


def _format_group(number: int, group: KernelGroup) -> list[str]:
    match group:
        case SingleGroup(node):
            return [f"group {number}:", f"  {format_node(node)}"]
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            together: Sequence[KernelGroup] = groups
            parts = [line for k, part in enumerate(together) for line in _format_group(k, part)]
            kind = _SEVERAL[type(group)]
            return [f"group {number}: {kind}", *(f"  {line}" for line in parts)]
        case MapGroup(ranges, members):
            head = f"group {number}: map over {_sizes(ranges)}"
        case RowGroup(rows, elements, members):
            head = f"group {number}: rows {_sizes(rows)} of elements {_sizes(elements)}"
        case AnchorGroup(anchor, members, store_anchor):
            stored = "stored" if store_anchor else "kept in registers"
            head = f"group {number}: anchor {stored}: {format_node(anchor)}"
    return [head, *(f"  {_format_member(member)}" for member in members)]


def _format_member(member: Member) -> str:
    reduction = f"{member.reduction} of " if member.reduction else ""
    arrow = "=>" if member.store else "->"
    body = format_scalar(member.body)
    target = f"{member.output}[{', '.join(map(repr, member.index)) or '()'}]"
    return f"{reduction}{body} {arrow} {target}{_format_origins(member.origins)}"
