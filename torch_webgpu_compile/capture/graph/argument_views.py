"""Outputs that are arguments, or views of those with symbolic sizes: made by the caller.

AOTAutograd returns a view of the caller's tensor for such an output. Where sizes are constants it
replays the view's operators. Where they are symbols it takes sizes, strides *and the storage
offset* from what the compiled graph returned (``gen_alias_from_base``), so a computed copy would
select other elements. These outputs are taken out of the graph, which then need not copy them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node

from ...errors import UnsupportedOp
from ...torch_private import OutputType
from ..control_flow.numbers import NumbersOf, Read, function_of, readers_of

_ALIASES = (OutputType.alias_of_input, OutputType.is_input)


@dataclass(frozen=True)
class Layout:
    """Sizes, strides and offset of a view, computed of what is read from a call's arguments."""

    compute: NumbersOf
    readers: tuple[Read, ...]

    def __call__(self, arguments: Sequence[Any]) -> list[int]:
        """See `ArgumentView.layout`."""
        return list(map(int, self.compute(*[read(arguments) for read in self.readers])))


@dataclass(frozen=True)
class ArgumentView:
    """An output that shows the memory of an argument.

    Attributes:
        output, argument: positions.
        layout: of a call's arguments, followed by the numbers that the graph returns for it, the
            view's sizes, strides and offset in elements from the argument's first one, as one list.
        of_parts: whether the view is of a complex argument's real and imaginary parts.
    """

    output: int
    argument: int
    layout: Layout
    of_parts: bool

    def of(self, arguments: Sequence[Any]) -> torch.Tensor:
        """The view as a tensor; ``arguments`` as `layout` takes them."""
        tensor: torch.Tensor = arguments[self.argument]
        if self.of_parts:
            tensor = torch.view_as_real(tensor)
        *values, offset = self.layout(arguments)
        rank = len(values) // 2
        start = tensor.storage_offset() + offset
        return torch.as_strided(tensor, values[:rank], values[rank:], start)


@dataclass(frozen=True)
class ArgumentViews:
    """Outputs that were taken out of a graph.

    Attributes:
        views: how each is made.
        numbers: how many integers the graph returns for that after its other outputs: sizes that
            data decides within it.
    """

    views: tuple[ArgumentView, ...] = ()
    numbers: int = 0


def take_views(
    graph: torch.fx.GraphModule, metadata: Any, *, decides: bool = False
) -> ArgumentViews:
    """Replaces views of arguments with symbolic layouts among a graph's outputs by None.

    Args:
        metadata: AOTAutograd's ``ViewAndMutationMeta`` of a forward or inference graph, or None.
        decides: whether the graph has sizes that data decides, and may return them.

    Raises:
        UnsupportedOp: a size in a layout does not follow from the arguments.
    """
    if metadata is None:
        return ArgumentViews()
    output = graph.graph.find_nodes(op="output")[0]
    placeholders = graph.graph.find_nodes(op="placeholder")
    first = metadata.num_mutated_inp_runtime_indices + token_count(metadata)
    (returned,) = output.args
    results = list(returned)
    bases = _bases(placeholders)
    readers = readers_of(placeholders)
    numbers: list[torch.SymInt] = []
    views = []
    for position, info in enumerate(metadata.output_info, first):
        node = results[position] if position < len(results) else None
        if info.output_type not in _ALIASES or not isinstance(node, Node) or node in placeholders:
            continue
        value: Any = node.meta.get("val")
        argument = bases.get(_storage(value))
        if argument is None or not _is_symbolic(value):
            continue
        base = placeholders[argument].meta["val"]
        of_parts = value.dtype != base.dtype
        if of_parts and value.dtype != base.dtype.to_real():
            continue
        if (value.is_conj(), value.is_neg()) != (base.is_conj(), base.is_neg()):
            continue
        if decides:
            for number in _unread(value, readers):
                readers[str(number)] = Read(len(placeholders) + len(numbers))
                numbers.append(number)
        layout = _layout(value, base, readers)
        views.append(ArgumentView(position, argument, layout, of_parts))
        results[position] = None
    if views:
        output.args = ((*results, *numbers),)
        graph.recompile()
    return ArgumentViews(tuple(views), len(numbers))


def take_forwarded(graph: torch.fx.GraphModule) -> tuple[tuple[int, int], ...]:
    """Replaces arguments among a graph's outputs by None; (output, input) positions of each.

    Also those that the graph changes: they are returned as the ``copy_`` into them.
    """
    output = graph.graph.find_nodes(op="output")[0]
    positions = {node: k for k, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in positions:
            positions[node] = positions[node.args[0]]
    (returned,) = output.args
    nodes = [(k, item) for k, item in enumerate(returned) if isinstance(item, Node)]
    found = {k: positions[node] for k, node in nodes if node in positions}
    if found:
        output.args = (tuple(None if k in found else item for k, item in enumerate(returned)),)
        graph.recompile()
    return tuple(found.items())


def token_count(metadata: Any) -> int:
    """How many tokens of effects a graph has before its other arguments, and its other outputs."""
    return 0 if metadata is None else len(metadata.tokens)


def with_views(
    run: Callable[[list[Any]], Sequence[Any]], taken: ArgumentViews
) -> Callable[[list[Any]], Sequence[Any]]:
    """``run``, which empties its list of arguments, with the views among its results."""
    return partial(_with_views_and_numbers if taken.numbers else _with_views, run, taken)


def _with_views(
    run: Callable[[list[Any]], Sequence[Any]], taken: ArgumentViews, arguments: list[Any]
) -> Sequence[Any]:
    made = [(view.output, view.of(arguments)) for view in taken.views]
    results = list(run(arguments))
    for position, tensor in made:
        results[position] = tensor
    return results


def _with_views_and_numbers(
    run: Callable[[list[Any]], Sequence[Any]], taken: ArgumentViews, arguments: list[Any]
) -> Sequence[Any]:
    given = arguments[:]
    results = list(run(arguments))
    given += results[-taken.numbers :]
    del results[-taken.numbers :]
    for view in taken.views:
        results[view.output] = view.of(given)
    return results


def _unread(value: torch.Tensor, readers: Mapping[str, Read]) -> list[torch.SymInt]:
    """The symbols of a layout that no argument gives."""
    found: dict[str, torch.SymInt] = {}
    for number in _numbers(value):
        if isinstance(number, torch.SymInt):
            for symbol in number.node.expr.free_symbols:
                if str(symbol) not in readers:
                    found[str(symbol)] = number.node.shape_env.create_symintnode(symbol, hint=None)
    return list(found.values())


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _bases(placeholders: Sequence[Node]) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for position, node in enumerate(placeholders):
        storage = _storage(node.meta.get("val"))
        if storage is not None:
            found.setdefault(storage, position)
    return found


def _numbers(value: torch.Tensor) -> list[Any]:
    return [*value.shape, *value.stride(), value.storage_offset()]


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(number, torch.SymInt) for number in _numbers(value))


def _expression(value: Any) -> sympy.Expr:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _layout(value: torch.Tensor, base: torch.Tensor, readers: Mapping[str, Read]) -> Layout:
    """The layout as a function of the arguments; see `ArgumentView`."""
    expressions = [_expression(number) for number in _numbers(value)]
    scale = base.element_size() // value.element_size()  # 2 for parts of complex numbers
    expressions[-1] -= scale * _expression(base.storage_offset())
    compute = function_of(expressions)
    unknown = [name for name in compute.names if name not in readers]
    if unknown:
        raise UnsupportedOp(
            "a view of an argument",
            f"its size {unknown[0]} does not follow from the arguments",
            "return a copy of it (.clone()), or compile with dynamic=False",
        )
    return Layout(compute, tuple(readers[name] for name in compute.names))
