"""Readable text of every compilation stage, printed or written to files on request."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .captured import CapturedGraph
from .errors import VerificationError
from .ir.graph import (
    AnchorGroup,
    Buffer,
    KernelGroup,
    LoopGraph,
    MapGroup,
    Member,
    RowGroup,
    Schedule,
    SingleGroup,
)
from .ir.nodes import (
    Attention,
    Contraction,
    HostCall,
    Node,
    Pointwise,
    Reduction,
    Scatter,
)
from .ir.scalar import Const, Index, Load, Masked, Op, Scalar, children, walk
from .options import CompileOptions
from .plan import serialize
from .plan.model import CopyBuffer, Dispatch, HostBuffer, HostStep, Kernel, KernelCall, Plan


def fx_text(captured: CapturedGraph) -> str:
    """The FX graph as Python code with shapes and user lines."""
    text = captured.module.print_readable(print_output=False)
    static = ", ".join(map(str, sorted(captured.static_inputs)))
    return f"# {captured.name}; parameters and buffers: arguments {static or 'none'}\n{text}"


# ---- IR


def scalar_text(root: Scalar) -> str:
    """One expression; sub-expressions used more than once are named first (``v0 = …; …``)."""
    uses: dict[Scalar, int] = {}
    for node in walk(root):
        for child in children(node):
            uses[child] = uses.get(child, 0) + 1
    names: dict[Scalar, str] = {}
    rendered: dict[Scalar, str] = {}
    lines: list[str] = []
    for node in walk(root):
        text = _scalar_text(node, rendered)
        if uses.get(node, 0) > 1 and isinstance(node, (Op, Masked)):
            names[node] = f"v{len(names)}"
            lines.append(f"{names[node]} = {text}")
            text = names[node]
        rendered[node] = text
    return "; ".join([*lines, rendered[root]])


def _scalar_text(node: Scalar, known: dict[Scalar, str]) -> str:
    match node:
        case Const(value, dtype):
            return f"{value}:{dtype}"
        case Index(expr):
            return f"[{expr}]"
        case Load(buffer, index, _):
            inner = ", ".join(known[i].removeprefix("[").removesuffix("]") for i in index)
            return f"{buffer}[{inner}]"
        case Op("cast" | "bitcast", (argument,), dtype):
            return f"{dtype}({known[argument]})"
        case Op(name, arguments, _):
            return f"{name}({', '.join(known[a] for a in arguments)})"
        case Masked(condition, body, other):
            return f"({known[body]} if {known[condition]} else {known[other]})"


def _buffer_text(buffer: Buffer) -> str:
    sizes, strides = list(buffer.sizes), list(buffer.strides)
    return f"{buffer.name}: {buffer.dtype}{sizes} strides {strides} ({buffer.origin.value})"


def _ranges(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def node_text(node: Node) -> str:
    """A node in a few lines."""
    match node:
        case Pointwise():
            return f"{node.output} = pointwise{_ranges(node.ranges)}\n    {scalar_text(node.body)}"
        case Reduction():
            space = f"{_ranges(node.ranges)} over {_ranges(node.reduce_ranges)}"
            return f"{node.output} = {node.kind}{space}\n    {scalar_text(node.body)}"
        case Contraction():
            sizes = (node.batch, node.rows, node.columns, node.inner)
            shape = " ".join(f"{n}{_ranges(s)}" for n, s in zip("bmnk", sizes, strict=True))
            parts = [f"lhs {scalar_text(node.lhs)}", f"rhs {scalar_text(node.rhs)}"]
            return "\n    ".join([f"{node.output}{list(node.index)} = contraction {shape}", *parts])
        case Attention():
            parts = [
                f"{name} {scalar_text(body)}"
                for name in ("query", "key", "value", "bias")
                if (body := getattr(node, name)) is not None
            ]
            head = f"{node.output} = attention{_ranges(node.sizes)}"
            return "\n    ".join([f"{head} causal={node.causal} scale={node.scale:g}", *parts])
        case Scatter():
            verb = "+=" if node.accumulate else "="
            index = ", ".join(scalar_text(i) for i in node.index)
            head = f"{node.output} = scatter{_ranges(node.ranges)} into {node.initial}"
            return f"{head}\n    [{index}] {verb} {scalar_text(node.body)}"
        case HostCall():
            outputs = ", ".join(node.outputs)
            return f"{outputs} = host {node.target}{node.arguments} {dict(node.keywords)}"


def graph_text(graph: LoopGraph) -> str:
    """Buffers, nodes and outputs."""
    lines = [f"graph {graph.name}", "", "buffers:"]
    lines += [f"  {_buffer_text(buffer)}" for buffer in graph.buffers.values()]
    lines += ["", "nodes:"]
    for node in graph.nodes:
        origins = ", ".join(dict.fromkeys(o.op for o in node.origins))
        lines.append(f"  # {origins}" if origins else "  #")
        lines.append("  " + node_text(node).replace("\n", "\n  "))
    lines += ["", "outputs:", *(f"  {output}" for output in graph.outputs)]
    return "\n".join(lines)


def _member_text(member: Member) -> str:
    kind = f"{member.reduction} of " if member.reduction else ""
    where = f"{member.output}{list(member.index)}"
    return f"{'store ' if member.store else ''}{where} = {kind}{scalar_text(member.body)}"


def group_text(group: KernelGroup) -> str:
    """A kernel group in a few lines."""
    match group:
        case MapGroup():
            head = f"map {_ranges(group.ranges)}"
            members = group.members
        case RowGroup():
            head = f"rows {_ranges(group.rows)} of {_ranges(group.elements)}"
            members = group.members
        case AnchorGroup():
            head = f"anchor {node_text(group.anchor)}"
            members = group.epilogue
        case SingleGroup():
            return f"single {node_text(group.node)}"
    return "\n  ".join([head, *map(_member_text, members)])


def schedule_text(schedule: Schedule) -> str:
    """Every kernel group, numbered."""
    lines = [f"schedule of {schedule.graph.name}: {len(schedule.groups)} groups"]
    for number, group in enumerate(schedule.groups):
        lines.append(f"\n{number}: {group_text(group)}")
    return "\n".join(lines)


# ---- kernels and plans


def kernel_text(kernel: Kernel) -> str:
    """The WGSL with a header of what it computes and for which lines of code."""
    header = [
        f"// {kernel.name}: {kernel.kind}, workgroup {'×'.join(map(str, kernel.workgroup_size))}",
        f"// computes {', '.join(kernel.ops) or 'nothing of ATen'}",
        *(f"// from {source}" for source in kernel.sources),
    ]
    return "\n".join(header) + "\n" + kernel.wgsl


def calls_text(calls: Sequence[KernelCall | HostCall]) -> str:
    """All generated kernels in order."""
    return "\n\n".join(
        kernel_text(call.kernel) if isinstance(call, KernelCall) else f"// {node_text(call)}"
        for call in calls
    )


def plan_text(plan: Plan) -> str:
    """Buffers, steps, inputs and outputs of a plan."""
    lines = [f"plan {plan.name}: {plan.dispatch_count} dispatches of {len(plan.kernels)} kernels"]
    lines += ["", "buffers:"]
    for buffer in plan.buffers.values():
        slot = "" if buffer.slot is None else f" slot {buffer.slot}"
        shape = f"{buffer.dtype}{list(buffer.sizes)} strides {list(buffer.strides)}"
        lines.append(f"  {buffer.name}: {shape}, {buffer.nbytes} bytes, {buffer.role}{slot}")
    lines += ["", "steps:", *(f"  {step_text(plan, step)}" for step in plan.steps)]
    lines += ["", "inputs:", *(f"  {entry}" for entry in plan.inputs)]
    lines += ["", "outputs:", *(f"  {entry}" for entry in plan.outputs)]
    return "\n".join(lines)


def step_text(plan: Plan, step: Any) -> str:
    """A step in one line."""
    match step:
        case Dispatch():
            kernel = plan.kernels[step.kernel]
            bound = ", ".join(
                f"{'→' if binding.writable else ''}{where.buffer}"
                for binding, where in zip(kernel.bindings, step.bindings, strict=True)
            )
            grid = "×".join(str(size) for size in step.grid)
            return f"dispatch {kernel.name} grid {grid} on {bound}"
        case CopyBuffer():
            return f"copy {step.source} → {step.destination}"
        case HostStep():
            return f"host {step.target}{step.arguments} → {', '.join(step.outputs)}"
        case _:
            raise TypeError(f"not a step: {step!r}")


def host_step_buffers(step: HostStep) -> list[str]:
    """Names of the plan buffers that a host step reads."""

    def visit(value: Any) -> list[str]:
        if isinstance(value, tuple):
            return [name for item in value for name in visit(item)]
        return [value.buffer] if isinstance(value, HostBuffer) else []

    return visit((step.arguments, step.keywords))


def verify_plan(plan: Plan) -> None:
    """Raises VerificationError when a plan names what it does not have."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {plan.name}: {what}")

    for step in plan.steps:
        if isinstance(step, Dispatch):
            require(0 <= step.kernel < len(plan.kernels), f"no kernel {step.kernel}")
            kernel = plan.kernels[step.kernel]
            require(
                len(kernel.bindings) == len(step.bindings)
                and kernel.parameter_count == len(step.parameters),
                f"{kernel.name} is called with the wrong number of bindings or parameters",
            )
            for binding in step.bindings:
                require(binding.buffer in plan.buffers, f"no buffer {binding.buffer}")
    names = [entry.buffer for entry in (*plan.inputs, *plan.outputs) if entry.buffer is not None]
    for name in (*names, *plan.constants):
        require(name in plan.buffers, f"no buffer {name}")


# ---- showing


class Shower:
    """Prints and writes the stages that the options ask for."""

    def __init__(self, name: str, options: CompileOptions) -> None:
        self._name = name
        self._stages = options.debug
        self._folder = None if options.dump is None else Path(options.dump) / name
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, stage: str, text: Callable[[], str]) -> None:
        """Shows a stage; ``text`` is only called when somebody wants it."""
        if stage in self._stages:
            print(f"==== {self._name}: {stage}\n{text()}\n", file=sys.stderr, flush=True)
        if self._folder is not None and stage != "wgsl":
            (self._folder / f"{stage}.txt").write_text(text() + "\n", encoding="utf-8")

    def write_kernels(self, plan: Plan) -> None:
        """One ``.wgsl`` per kernel, and the plan as JSON."""
        if self._folder is None:
            return
        for number, kernel in enumerate(plan.kernels):
            name = re.sub(r"\W", "_", kernel.name)
            path = self._folder / f"{number:03}_{name}.wgsl"
            path.write_text(kernel_text(kernel) + "\n", encoding="utf-8")
        text = json.dumps(serialize.to_json(plan), indent=1)
        (self._folder / "plan.json").write_text(text, encoding="utf-8")


