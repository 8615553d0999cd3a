"""Loops over rows of tensors as loops whose turns count, on the GPU, which row they are at.

A turn of ``scan``, ``map`` and the like is given whole tensors and the number of the turn in one:
it reads its row of each, and writes a row of each result in place. So a loop is the same turn again
and again, on the same buffers, and nobody waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...plan.model import Loop
from ...torch_private import FakeTensorMode, _check, tree_map_only
from ..fx_graphs import memory_like

aten = torch.ops.aten

_FIRST_ROWS = 8  # of a result that may get more rows


class Around(Protocol):
    """The graph that has the loop, or another higher-order operator."""

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call before it, of and with nodes in place of tensors."""

    def module_of(self, node: Any) -> GraphModule:
        """A function among its arguments."""

    def part_of(self, module: GraphModule) -> int:
        """The number of a function's plan."""

    def values(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The names of several tensors and numbers."""

    def results(self, node: Node) -> tuple[str, ...]:
        """Names for its results."""


def scan(
    to: Around, node: Node, step: Any, init: Sequence[Any], xs: Sequence[Node], others: Any = ()
) -> Loop:
    """``scan``; of no ``init`` it is ``map``."""
    stacks = [to.emit(memory_like, result) for result in node.meta["val"][len(init) :]]
    return _over_rows(to, node, step, init, stacks, xs, others)


def map_rows(to: Around, node: Node, function: Any, xs: Sequence[Node], others: Any = ()) -> Loop:
    """``map``."""
    return scan(to, node, function, (), xs, others)


def associative_scan(
    to: Around, node: Node, combine: Any, xs: Sequence[Node], others: Any = ()
) -> Loop:
    """``associative_scan``, one element after the other: the first row is there before."""
    first = [to.emit(aten.select.int, x, 0, 0) for x in xs]
    stacks = [
        to.emit(aten.select_scatter.default, to.emit(memory_like, result), row, 0, 0)
        for result, row in zip(node.meta["val"], first, strict=True)
    ]
    return _over_rows(to, node, combine, first, stacks, xs, others, begin=1)


def _over_rows(
    to: Around,
    node: Node,
    function: Any,
    carried: Sequence[Any],
    stacks: Sequence[Node],
    xs: Sequence[Node],
    others: Any,
    begin: int = 0,
) -> Loop:
    """A loop that reads a row of ``xs`` in each turn, from row ``begin`` on, and writes others.

    The last results of its function are the rows of ``stacks``, the first what is carried: of an
    associative scan these are the same ones.
    """
    turn = _Turn(to.module_of(function), node)
    state, more = turn.given[: len(carried)], turn.given[len(carried) + len(xs) :]
    k = to.emit(aten.full.default, [], begin, dtype=torch.int64, device=turn.device)
    given = [turn.like(value) for value in state]
    written = [turn.argument(stack.meta["val"]) for stack in stacks]
    read = [turn.row(turn.argument(x.meta["val"])) for x in xs]
    rest = [turn.like(value) for value in more]
    made = turn.inline([*given, *read, *rest])
    for stack, row in zip(written, made[len(made) - len(stacks) :], strict=True):
        turn.write(stack, row)
    body = turn.module([turn.next_number(), *made[: len(carried)]])
    count = xs[0].meta["val"].shape[0] - begin
    return _loop(to, node, body, [k, *carried, *stacks], [*xs, *others], count)


def while_loop_stacked(
    to: Around, node: Node, condition: Any, body: Any, carried: Sequence[Any], others: Any = ()
) -> Loop:
    """``while_loop_stack_output``: how many rows there will be, nobody knows before."""
    stacks = [to.emit(_some_rows, value) for value in carried]
    modules = []
    for function in (condition, body):
        turn = _Turn(to.module_of(function), node)
        given = [turn.like(value) for value in turn.given[: len(carried)]]
        written = [turn.argument(turn.with_some_rows(s.meta["val"])) for s in stacks]
        rest = [turn.like(value) for value in turn.given[len(carried) :]]
        made = turn.inline([*given, *rest])
        if function is body:
            for stack, row in zip(written, made, strict=True):
                turn.write(stack, row)
            made.insert(0, turn.next_number())
        modules.append(turn.module(made))
    first = to.emit(aten.full.default, [], 0, dtype=torch.int64, device=turn.device)
    places = tuple(range(1 + len(carried), 1 + 2 * len(carried)))
    return _loop(to, node, modules[1], [first, *carried, *stacks], others, None, modules[0], places)


def _loop(
    to: Around,
    node: Node,
    body: GraphModule,
    carried: Sequence[Any],
    others: Sequence[Any],
    count: Any,
    condition: GraphModule | None = None,
    stacked: tuple[int, ...] = (),
) -> Loop:
    """The step, of FX nodes and numbers; the last of ``carried`` become its results."""
    names = to.results(node)
    return Loop(
        to.part_of(body),
        None if condition is None else to.part_of(condition),
        None if count is None else to.values([count])[0],
        to.values(carried),
        to.values(others),
        ("",) * (len(carried) - len(names)) + names,
        stacked,
    )


def _some_rows(first: Tensor) -> Tensor:
    rows = torch.empty((_FIRST_ROWS, *first.shape), dtype=first.dtype, device=first.device)
    return rows.select_scatter(first, 0, 0)


class _Turn:
    """The graph of one turn, in the making. Its first argument is the number of the turn.

    Args:
        function: of the loop.
        node: the loop.

    Attributes:
        given: the function's arguments.
        device: of what is computed.
    """

    def __init__(self, function: GraphModule, node: Node) -> None:
        self._graph, self._function = Graph(), function
        self.given = function.graph.find_nodes(op="placeholder")
        leaf = next(v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor))
        self.device = leaf.device
        self._mode: FakeTensorMode = leaf.fake_mode  # type: ignore[attr-defined]
        with self._mode:
            number = torch.empty((), dtype=torch.int64, device=self.device)
        self._number = self.argument(number)
        self._place = self.call(aten.unsqueeze.default, self._number, 0)

    def argument(self, value: Any) -> Node:
        """One more argument of the turn."""
        node = self._graph.placeholder(f"turn{len(self._graph.nodes)}")
        node.meta["val"] = value
        return node

    def like(self, placeholder: Node) -> Node:
        """An argument like one of the function's."""
        return self.argument(placeholder.meta.get("val"))

    def next_number(self) -> Node:
        """The number of the next turn."""
        return self.call(aten.add.Tensor, self._number, 1)

    def with_some_rows(self, stack: Tensor) -> Tensor:
        """A tensor like this one, with a number of rows that is not known."""
        env = self._mode.shape_env
        assert env is not None
        rows = env.create_unbacked_symint()
        _check(rows >= 1)  # type: ignore[no-untyped-call]
        with self._mode:
            return torch.empty((rows, *stack.shape[1:]), dtype=stack.dtype, device=stack.device)

    def call(self, operation: Any, *args: Any) -> Node:
        """A call of an operator."""
        node = self._graph.create_node("call_function", operation)
        node.args = args  # FX warns of symbols when it is given these
        with self._mode:
            node.meta["val"] = operation(*tree_map_only(Node, lambda n: n.meta["val"], args))
        return node

    def row(self, tensor: Node) -> Node:
        """The turn's row."""
        rows = self.call(aten._unsafe_index.Tensor, tensor, [self._place])
        return self.call(aten.squeeze.dim, rows, 0)

    def write(self, stack: Node, row: Any) -> None:
        """Writes the turn's row."""
        rows = self.call(aten.unsqueeze.default, row, 0)
        made = self.call(aten._unsafe_index_put.default, stack, [self._place], rows)
        self.call(aten.copy_.default, stack, made)

    def inline(self, arguments: Sequence[Node]) -> list[Any]:
        """The function's results, computed in this graph."""
        copies = dict(zip(self.given, arguments, strict=True))
        found: Any = self._graph.graph_copy(self._function.graph, copies)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def module(self, results: Sequence[Any]) -> GraphModule:
        """The graph, which gives these."""
        self._graph.output(tuple(results))
        return GraphModule(self._function, self._graph)
