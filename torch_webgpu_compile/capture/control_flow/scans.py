"""`ElementwiseScan`: a scan in three parts, of which only the middle one is a loop.

What a step computes without the carry is computed for all steps at once, before the loop; what the
next carry does not need, after it. A carry to which each step only adds is a sum over all steps.
What is left of many scans is elementwise: then it is a call of ``webgpu::scan``, one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...torch_ops import scans as _scans  # noqa: F401  defines webgpu::scan
from ...torch_ops.elementwise import (
    Operand,
    Reference,
    Step,
    constant_of,
    is_elementwise,
    step_of,
)
from ...torch_ops.scans import ScanFunction
from ...torch_private import OpOverload, tree_map_only
from ..tracing import Traced, is_random

aten = torch.ops.aten

_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.detach_copy.default)
# Every GPU binds eight storage buffers to a kernel; what it reads in one dtype can be one of them.
_MOST_RESULTS, _MOST_DTYPES = 5, 3


class NotInlined(Exception):
    """An operator has to stay; the message says why."""


def on_rows(function: Callable[..., tuple[Tensor, ...]], xs: Sequence[Any]) -> tuple[Tensor, ...]:
    """One call of a function on all rows of tensors. Raises NotInlined where that cannot be."""
    try:
        made: tuple[Tensor, ...] = torch.func.vmap(function, randomness="error")(*xs)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotInlined(str(error)) from error
    return made


@dataclass
class _Loop:
    """Nodes that are steps of the loop."""

    nodes: list[Node]
    rows: list[Node] = field(default_factory=list)  # what is needed of each step
    operands: list[Node] = field(default_factory=list)


class ElementwiseScan:
    """The last carries and the stacked rows, computed in the trace that is going on.

    Args:
        traced: one step, of carries, of the elements of ``xs`` along their first dimension, and of
            ``others``; its results are the next carries, then the rows.
        others: without the tensors that a step has from elsewhere.
        outer: as ``webgpu::scan`` has it.
    """

    def __init__(
        self,
        traced: Traced,
        init: Sequence[Tensor],
        xs: Sequence[Tensor],
        others: Sequence[Any],
        outer: int = 0,
    ) -> None:
        self._outer = outer
        self._init = init
        self._length: int | torch.SymInt = xs[0].shape[0]
        graph = traced.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        count = len(init)
        self._carries = placeholders[:count]
        self._elements = dict(zip(placeholders[count : count + len(xs)], xs, strict=True))
        constants = (*others, *traced.captured)
        invariants = zip(placeholders[count + len(xs) :], constants, strict=True)
        self._known: dict[Node, Any] = dict(invariants)  # what is the same in all steps
        self._stacked: dict[Node, Tensor] = dict(self._elements)  # of each step, by step
        self._next = [_source(result) for result in traced.results[:count]]
        self._results = [_source(result) for result in traced.results[count:]]
        self._copies: dict[Node, list[Tensor]] = {}  # rows that nothing else is returned as
        self._calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        if any(map(is_random, self._calls)):
            raise NotInlined("random numbers, others in each step")

    def run(self) -> list[Any]:
        """Raises NotInlined: the loop is more than elementwise operators, or has many tensors."""
        finals: list[Any] = [None] * len(self._carries)
        for k, (carry, following) in enumerate(zip(self._carries, self._next, strict=True)):
            if following is carry:
                self._known[carry] = self._init[k]
                finals[k] = self._init[k].clone()
        added = self._sums()
        looped = [k for k, final in enumerate(finals) if final is None and k not in added]
        dependent = self._dependent({self._carries[k] for k in (*looped, *added)})
        wanted = [*self._results, *added.values()]
        needed = _needed([*wanted, *(self._next[k] for k in looped)])
        after = [node for node in self._calls if node in dependent and node in needed]
        loop = self._loop(looped, after, wanted) if looped else None
        self._before([n for n in self._calls if n in needed and n not in dependent])
        if loop is not None:
            made = self._call(loop, looped)
            for k, last in zip(looped, made, strict=False):
                finals[k] = _narrowed(last, self._init[k].shape, 0)
            for node, rows in zip(loop.rows, made[len(looped) :], strict=True):
                self._stacked[node] = _narrowed(rows, _value(node).shape, 1)
                self._copies.setdefault(node, []).append(self._stacked[node])
            after = [node for node in after if node not in loop.nodes]
        self._compute(after)
        for k, node in added.items():
            finals[k] = self._init[k] + self._rows_of(node).sum(0, dtype=self._init[k].dtype)
        return [*finals, *map(self._row_result, self._results)]

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
            if constant_of(node) is None and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _before(self, nodes: Sequence[Node]) -> None:
        """Computes what does not depend on a carry."""
        varying: list[Node] = []
        for node in nodes:
            value, number = _value(node), constant_of(node)
            if node.op == "get_attr":
                raise NotInlined("a tensor that it makes")
            if number is not None:
                self._known[node] = torch.full(
                    value.shape, number, dtype=value.dtype, device=value.device
                )
            elif all(argument in self._known for argument in node.all_input_nodes):
                self._known[node] = _called(node, self._known)
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
                values[node] = _called(node, values)
            return tuple(values[node] for node in wanted)

        made = on_rows(on_row, [self._stacked[node] for node in given])
        self._stacked.update(zip(wanted, made, strict=True))

    def _rows_of(self, node: Node) -> Tensor:
        """What a node is in each step, a row for each."""
        if node in self._stacked:
            return self._stacked[node]
        value: Tensor = self._known[node]
        return value.expand(self._length, *value.shape)

    def _row_result(self, result: Any) -> Any:
        """One of the stacked results: a tensor of its own."""
        if not isinstance(result, Node):
            return result
        copies = self._copies.get(result)
        if copies:
            return copies.pop()
        rows = self._rows_of(result)
        if result in self._known or result in self._elements or copies is not None:
            return rows.clone()
        self._copies[result] = []
        return rows

    # ---- the loop

    def _loop(self, looped: Sequence[int], after: Sequence[Node], wanted: Sequence[Any]) -> _Loop:
        """What the loop computes: the next carries, and what else it can, if a kernel can."""
        lanes = self._lanes(looped)
        following = _needed([self._next[k] for k in looped])
        nodes = [node for node in after if node in following]
        for node in nodes:
            if not _is_step(node, lanes):
                raise NotInlined(str(node.target))
        carries = {self._carries[k] for k in looped}
        computed = {*carries}
        more: list[Node] = []
        for node in after:
            others = (n for n in node.all_input_nodes if n not in computed and n in after)
            if node in following or (_is_step(node, lanes) and not any(others)):
                more.append(node)
                computed.add(node)
        for candidate in (more, nodes):
            loop = self._connected(candidate, carries, after, wanted)
            results = len(looped) + len(loop.rows)
            dtypes = {_value(node).dtype for node in (*carries, *loop.operands)}
            if results <= _MOST_RESULTS and len(dtypes) <= _MOST_DTYPES:
                return loop
        raise NotInlined(f"a loop with {results} results in {len(dtypes)} dtypes")

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
        rows: list[Node] = []
        for node in (*carries, *nodes):
            if node in used:
                rows += [node] * max(1, self._results.count(node))
        return _Loop(nodes, rows, list(operands))

    def _lanes(self, looped: Sequence[int]) -> torch.Size:
        try:
            shapes = [self._init[k].shape for k in looped]
            found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise NotInlined("carries of different sizes") from error
        return found

    def _call(self, loop: _Loop, looped: Sequence[int]) -> list[Tensor]:
        """The call of ``webgpu::scan``."""
        lanes = self._lanes(looped)
        varying = [node for node in loop.operands if node in self._stacked]
        constants = [node for node in loop.operands if node not in self._stacked]
        references: dict[Node, Operand] = {
            self._carries[k]: Reference("carry", n) for n, k in enumerate(looped)
        }
        for number, node in enumerate((*varying, *constants)):
            references[node] = Reference("operand", number)
        steps: list[Step] = []
        for node in loop.nodes:
            source = _source(node)
            if source is not node:
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
                raise NotInlined("a carry that is no tensor")
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
            self._outer,
        )
        return made


def _needed(results: Sequence[Any]) -> set[Node]:
    """The nodes that results depend on, themselves included."""
    waiting = [node for node in results if isinstance(node, Node)]
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _source(value: Any) -> Any:
    """The node whose value a node copies, or the value itself."""
    while isinstance(value, Node):
        if value.target in _SAME:
            source = value.args[0]
        elif value.target is aten.copy.default and _is_like(value, value.args[1]):
            source = value.args[1]
        else:
            break
        value = source
    return value


def _is_like(node: Node, source: Any) -> bool:
    mine, other = _value(node), _value(source)
    return bool(mine.shape == other.shape and mine.dtype == other.dtype)


def _called(node: Node, values: Mapping[Node, Any]) -> Any:
    """What a node's operator gives for these arguments."""
    if node.target in _SAME:  # some of them have no rule for rows
        return values[node.args[0]].clone()  # type: ignore[index]
    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_step(node: Node, lanes: Sequence[Any]) -> bool:
    """Whether a node is an elementwise operator on lanes."""
    value = _value(node)
    if not isinstance(value, Tensor) or value.dtype.is_complex or value.dtype == torch.float64:
        return False
    if not _broadcasts(value.shape, lanes):
        return False
    if _source(node) is not node:
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


def _number(argument: Any) -> Operand:
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
