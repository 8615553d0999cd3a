"""`elementwise_scan`: a scan in three parts, of which only the middle one is a loop.

What a step computes without the carry is computed for all steps at once, before the loop; what the
next carry does not need, after it. A carry to which each step only adds is a sum over all steps.
What is left of many scans is elementwise: then it is a call of ``webgpu::scan``, one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from ...torch_ops import scans as _scans  # noqa: F401  defines webgpu::scan
from ...torch_ops.elementwise import (
    Argument,
    NotElementwise,
    Reference,
    Step,
    is_elementwise,
    step_of,
)
from ...torch_ops.scans import ScanFunction
from ..tracing import Traced

aten = torch.ops.aten

_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.detach_copy.default)
_MOST_TENSORS = 8  # storage buffers of a kernel that every GPU has

VMap = Callable[[Callable[..., tuple[Tensor, ...]], Sequence[Tensor]], Sequence[Tensor]]


def elementwise_scan(
    traced: Traced,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    others: Sequence[Any],
    length: int | torch.SymInt,
    on_rows: VMap,
) -> list[Any]:
    """The last carries and the stacked rows, computed in the trace that is going on.

    Args:
        traced: one step, of carries, of the elements of ``xs`` along their first dimension, and of
            ``others``; its results are the next carries, then the rows.
        on_rows: calls a function for all elements of tensors along their first dimension.

    Raises:
        NotElementwise: the loop itself is more than elementwise operators, or has many tensors.
    """
    return _Scan(traced, init, xs, others, length, on_rows).run()


@dataclass
class _Loop:
    """Nodes that are steps of the loop."""

    nodes: list[Node]
    rows: list[Node] = field(default_factory=list)  # what is needed of each step
    operands: list[Node] = field(default_factory=list)


class _Scan:
    def __init__(
        self,
        traced: Traced,
        init: Sequence[Tensor],
        xs: Sequence[Tensor],
        others: Sequence[Any],
        length: int | torch.SymInt,
        on_rows: VMap,
    ) -> None:
        self._traced = traced
        self._init = init
        self._xs = xs
        self._length = length
        self._on_rows = on_rows
        graph = traced.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        count = len(init)
        self._carries = placeholders[:count]
        self._elements = dict(zip(placeholders[count : count + len(xs)], xs, strict=True))
        invariants = zip(placeholders[count + len(xs) :], others, strict=True)
        self._known: dict[Node, Any] = dict(invariants)  # what is the same in all steps
        self._stacked: dict[Node, Tensor] = dict(self._elements)  # of each step, by step
        self._next = list(traced.results[:count])
        self._results = list(traced.results[count:])
        self._calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]

    def run(self) -> list[Any]:
        finals: list[Any] = [None] * len(self._carries)
        for k, (carry, following) in enumerate(zip(self._carries, self._next, strict=True)):
            if following is carry:
                self._known[carry] = self._init[k]
                finals[k] = self._init[k].clone()
        added = self._sums()
        summed = {self._carries[k] for k in added}
        looped = [k for k, final in enumerate(finals) if final is None and k not in added]
        carries = [self._carries[k] for k in looped]
        dependent = self._dependent({*carries, *summed})
        needed = self._needed([*self._results, *added.values(), *(self._next[k] for k in looped)])
        self._before(dependent, needed)
        after = [node for node in self._calls if node in dependent and node in needed]
        if looped:
            loop = self._loop(looped, after, [*self._results, *added.values()])
            made = self._call(loop, looped)
            for k, last in zip(looped, made, strict=False):
                finals[k] = _narrowed(last, self._init[k].shape, 0)
            for node, rows in zip(loop.rows, made[len(looped) :], strict=True):
                self._stacked[node] = _narrowed(rows, _value(node).shape, 1)
            after = [node for node in after if node not in loop.nodes]
        self._compute(after)
        for k, node in added.items():
            finals[k] = self._init[k] + self._rows_of(node).sum(0, dtype=self._init[k].dtype)
        return [*finals, *self._row_results()]

    # ---- what is not the loop

    def _sums(self) -> dict[int, Node]:
        """The carries to which each step only adds, and what it adds, which is no carry."""
        found: dict[int, Node] = {}
        for k, (carry, following) in enumerate(zip(self._carries, self._next, strict=True)):
            is_sum = (
                isinstance(following, Node)
                and following.target is aten.add.Tensor
                and not following.kwargs
                and not following.users
                and carry not in self._results
                and self._results.count(following) + self._next.count(following) == 1
                and list(carry.users) == [following]
                and _value(carry).dtype == _value(following).dtype
                and not _value(carry).dtype.is_complex
            )
            if not is_sum:
                continue
            others = [argument for argument in following.args if argument is not carry]
            if len(others) == 1 and isinstance(others[0], Node) and others[0].op != "placeholder":
                found[k] = others[0]
        return found

    def _dependent(self, carries: set[Node]) -> set[Node]:
        """The nodes that are not known before the loop."""
        found = set(carries)
        for node in self._calls:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _needed(self, results: Sequence[Any]) -> set[Node]:
        """The nodes that results depend on."""
        waiting = [node for node in results if isinstance(node, Node)]
        found: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def _before(self, dependent: set[Node], needed: set[Node]) -> None:
        """Computes what does not depend on a carry."""
        varying: list[Node] = []
        for node in self._calls:
            if node in dependent or node not in needed:
                continue
            if node.op == "get_attr":
                raise NotElementwise("a tensor that it makes")
            if all(argument in self._known for argument in node.all_input_nodes):
                args, kwargs = self._given(node, self._known)
                self._known[node] = node.target(*args, **kwargs)
            else:
                varying.append(node)
        self._compute(varying)

    def _compute(self, nodes: Sequence[Node]) -> None:
        """Computes nodes for all steps at once, of what is known and stacked."""
        if not nodes:
            return
        inside = set(nodes)
        given = {
            argument: None
            for node in nodes
            for argument in node.all_input_nodes
            if argument not in inside and argument not in self._known
        }
        wanted = [node for node in nodes if isinstance(_value(node), Tensor)]

        def on_row(*rows: Tensor) -> tuple[Tensor, ...]:
            values = {**self._known, **dict(zip(given, rows, strict=True))}
            for node in nodes:
                args, kwargs = self._given(node, values)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return tuple(values[node] for node in wanted)

        made = self._on_rows(on_row, [self._stacked[node] for node in given])
        self._stacked.update(zip(wanted, made, strict=True))

    def _given(self, node: Node, values: dict[Node, Any]) -> Any:
        return tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))

    def _rows_of(self, node: Node) -> Tensor:
        """What a node is in each step, a row for each."""
        if node in self._stacked:
            return self._stacked[node]
        value: Tensor = self._known[node]
        return value.expand(self._length, *value.shape)

    def _row_results(self) -> list[Any]:
        """The stacked results: every one a tensor of its own."""
        found: list[Any] = []
        own: set[Node] = {*self._elements}
        for result in self._results:
            if not isinstance(result, Node):
                found.append(result)
                continue
            rows = self._rows_of(result)
            found.append(rows.clone() if result in own or result in self._known else rows)
            own.add(result)
        return found

    # ---- the loop

    def _loop(self, looped: Sequence[int], after: Sequence[Node], wanted: Sequence[Any]) -> _Loop:
        """What the loop computes: the next carries, and what else it can, if a kernel can."""
        lanes = self._lanes(looped)
        following = self._needed([self._next[k] for k in looped])
        nodes = [node for node in after if node in following]
        for node in nodes:
            if not _is_step(node, lanes):
                raise NotElementwise(str(node.target))
        carries = {self._carries[k] for k in looped}
        more = list(nodes)
        available = {*carries, *nodes}
        for node in after:
            if node not in available and _is_step(node, lanes):
                outside = [n for n in node.all_input_nodes if n in after and n not in available]
                if not outside:
                    more.append(node)
                    available.add(node)
        order = {node: k for k, node in enumerate(self._calls)}
        candidates = [sorted(more, key=order.__getitem__), nodes]
        for candidate in candidates:
            loop = self._connected(candidate, carries, after, wanted)
            tensors = 2 * len(looped) + len(loop.rows) + len(loop.operands)
            if tensors <= _MOST_TENSORS:
                return loop
        raise NotElementwise(f"a loop with {tensors} tensors")

    def _connected(
        self, nodes: list[Node], carries: set[Node], after: Sequence[Node], wanted: Sequence[Any]
    ) -> _Loop:
        """What goes in and out of a loop of these nodes."""
        inside = {*nodes, *carries}
        outside = [node for node in after if node not in inside]
        used = {argument for node in outside for argument in node.all_input_nodes}
        used.update(node for node in wanted if isinstance(node, Node))
        operands = {n: None for node in nodes for n in node.all_input_nodes if n not in inside}
        for k, carry in enumerate(self._carries):
            following = self._next[k]
            if carry in carries and isinstance(following, Node) and following not in inside:
                operands[following] = None
        rows = [node for node in (*self._carries, *nodes) if node in inside and node in used]
        return _Loop(nodes, rows, list(operands))

    def _lanes(self, looped: Sequence[int]) -> torch.Size:
        try:
            shapes = [self._init[k].shape for k in looped]
            found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise NotElementwise("carries of different sizes") from error
        return found

    def _call(self, loop: _Loop, looped: Sequence[int]) -> list[Tensor]:
        """The call of ``webgpu::scan``."""
        lanes = self._lanes(looped)
        varying = [node for node in loop.operands if node in self._stacked]
        constants = [node for node in loop.operands if node not in self._stacked]
        references: dict[Node, Argument] = {
            self._carries[k]: Reference("carry", n) for n, k in enumerate(looped)
        }
        for number, node in enumerate((*varying, *constants)):
            references[node] = Reference("operand", number)
        steps: list[Step] = []
        for node in loop.nodes:
            if node.target in _SAME:
                source = node.args[0]
                assert isinstance(source, Node)
                references[node] = references[source]
                continue
            arguments = tuple(
                references[a] if isinstance(a, Node) else _number(a) for a in node.args
            )
            steps.append(step_of(node, arguments, _keywords(node)))
            references[node] = Reference("step", len(steps) - 1)
        carried = []
        for k in looped:
            following = self._next[k]
            if not isinstance(following, Node):
                raise NotElementwise("a carry that is no tensor")
            carried.append(references[following])
        function = ScanFunction(
            tuple(steps), tuple(carried), tuple(references[node] for node in loop.rows)
        )
        made: list[Tensor] = torch.ops.webgpu.scan(
            [self._init[k].expand(lanes) for k in looped],
            [self._stacked[node] for node in varying],
            [self._known[node] for node in constants],
            self._length,
            function.text,
        )
        return made


def _is_step(node: Node, lanes: Sequence[Any]) -> bool:
    """Whether a node is an elementwise operator on lanes."""
    value = _value(node)
    if not isinstance(value, Tensor) or value.dtype.is_complex or value.dtype == torch.float64:
        return False
    if not _broadcasts(value.shape, lanes):
        return False
    if node.target in _SAME:
        return True
    numbers = (a for a in node.args if not isinstance(a, Node))
    if not all(a is None or isinstance(a, (bool, int, float)) for a in numbers):
        return False
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    if target is aten._to_copy.default:
        return True
    named = all(isinstance(v, (bool, int, float, str)) for v in node.kwargs.values())
    return is_elementwise(target) and named and not _promotes_numbers(node)


def _promotes_numbers(node: Node) -> bool:
    """Whether a tensor without dimensions, which counts as a number there, has another dtype."""
    tensors = [_value(n) for n in node.all_input_nodes if isinstance(_value(n), Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype != torch.bool}
    return len(dtypes) > 1 and len({tensor.dim() == 0 for tensor in tensors}) > 1


def _broadcasts(shape: Sequence[Any], lanes: Sequence[Any]) -> bool:
    if len(shape) > len(lanes):
        return False
    pairs = zip(reversed(shape), reversed(lanes), strict=False)
    return all((type(a) is int and a == 1) or a == b for a, b in pairs)


def _keywords(node: Node) -> tuple[tuple[str, Any], ...]:
    if node.target is aten._to_copy.default:
        return ()
    return tuple(node.kwargs.items())


def _number(argument: Any) -> Argument:
    assert argument is None or isinstance(argument, (bool, int, float)), argument
    return argument


def _narrowed(value: Tensor, shape: Sequence[Any], before: int) -> Tensor:
    """The first of equal elements where lanes have a dimension that ``shape`` has not, or has as 1.

    The first ``before`` dimensions are not lanes'.
    """
    for _ in range(value.dim() - before - len(shape)):
        value = value.select(before, 0)
    for dim, size in enumerate(shape, before):
        if type(size) is int and size == 1 and value.shape[dim] is not size:
            value = value.narrow(dim, 0, 1)
    return value


def _value(node: Node) -> Any:
    return node.meta.get("val")
