"""Convolutions among contractions: recognising them, and writing them for a memory layout.

Lowering makes a convolution a contraction whose rows are output channels and whose columns are
positions. Where the result is channels-last, rows and columns change sides, so that neighbouring
columns are neighbours in memory; where the images are, the taps come before the channels in the
inner dimension, so that neighbours along it are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.access import VECTOR, address_of, load_index, step_of
from ...ir.buffers import Buffer, BufferOrigin
from ...ir.nodes import Contraction, Pointwise
from ...ir.renaming import rename_loads
from ...ir.scalar import Index, Load, Scalar, loads_of, scalar_symbols, substitute_symbols
from ...ir.spaces import Origin, numbered
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_symbol,
    contiguous_strides,
    linearize,
    product,
    substitute,
    symbols_of,
    typical,
)
from ...target import Target
from .. import cost
from ..mapping import extent_of, point_of


@dataclass(frozen=True, slots=True)
class Convolution:
    """A contraction of a weight with windows of images.

    Attributes:
        images: the loads of the windows, of the result's rank.
        weight: the load of the weight.
        row: the symbol of the output channel (within its group), None of extent 1.
        channel: the inner symbol of the input channel (within its group), None of extent 1.
    """

    node: Contraction
    images: tuple[Load, ...]
    weight: Load
    row: Symbol | None
    channel: Symbol | None


def recognise(node: Contraction) -> Convolution | None:
    """The convolution that a contraction is, or None."""
    rank = len(node.index)
    if rank < 3 or len(node.rows) != 1 or node.lhs.dtype.itemsize > VECTOR:
        return None
    (m,) = numbered("m", node.rows)
    row = None if m.extent is ONE else m
    places = [node.index[0], *node.index[2:]]
    if any(place is not ZERO and as_symbol(place) is None for place in places):
        return None
    images, weights = _whole_loads(node.rhs, rank), _whole_loads(node.lhs, rank)
    where = frozenset().union(*(symbols_of(place) for place in places))
    if not images or len(weights) != 1 or row in where or where & scalar_symbols(node.lhs):
        return None
    columns = numbered("n", node.columns)
    if any(s not in where for s in columns if s.extent is not ONE):
        return None
    inner = numbered("k", node.inner)
    channels = {s for o in images for s in symbols_of(_entry(o, 1)) & set(inner)}
    elsewhere = {s for o in images for k in range(rank) if k != 1 for s in symbols_of(_entry(o, k))}
    if len(channels) > 1 or channels & elsewhere:
        return None
    return Convolution(node, images, weights[0], row, next(iter(channels), None))


def _whole_loads(body: Scalar, rank: int) -> tuple[Load, ...]:
    """Loads of tensors of a rank, without those that gather."""
    found = [o for o in loads_of(body) if len(o.index) == rank and load_index(o) is not None]
    return tuple(found)


def _entry(load: Load, dim: int) -> Expr:
    entry = load.index[dim]
    assert isinstance(entry, Index)
    return entry.expr


def _is_divisible(symbol: Symbol) -> bool:
    """Whether full vectors cover a symbol's range."""
    return extent_of(symbol).divisor % VECTOR == 0


def reads_channels(convolution: Convolution, strides: Mapping[str, Sequence[Expr]]) -> bool:
    """Whether four neighbouring channels of the images are one access."""
    channel = convolution.channel
    return (
        channel is not None
        and _is_divisible(channel)
        and all(step_of(address_of(o, strides[o.buffer]), channel) == 1 for o in convolution.images)
    )


def reads_positions(convolution: Convolution, strides: Mapping[str, Sequence[Expr]]) -> bool:
    """Whether four neighbouring columns of a convolution by a 1×1 kernel are one access."""
    node = convolution.node
    columns = numbered("n", node.columns)
    channels = ONE if convolution.channel is None else extent_of(convolution.channel)
    return product(node.inner) is channels and all(
        _in_vectors(address_of(o, strides[o.buffer]), columns) for o in convolution.images
    )


def stores_positions(node: Contraction, strides: Sequence[Expr]) -> bool:
    """Whether four neighbouring columns of the result are one access."""
    columns = numbered("n", node.columns)
    return _in_vectors(linearize(node.index, strides), columns)


def _in_vectors(address: Expr, symbols: Sequence[Symbol]) -> bool:
    """Whether the elements along the last symbols lie in dense runs of full vectors."""
    run = 1
    for symbol in reversed([s for s in symbols if s.extent is not ONE]):
        extent = extent_of(symbol)
        if step_of(address, symbol) != run:
            break
        run *= extent.divisor
        if not extent.is_constant:
            break
    return run > 1 and run % VECTOR == 0


def positions_of(node: Contraction) -> Expr:
    """The number of windows."""
    places = (node.index[0], *node.index[2:])
    return product(extent_of(s) for place in places for s in symbols_of(place))


# -- writing a convolution for a layout ------------------------------------------------------------


def turned(node: Contraction) -> Contraction:
    """The same contraction with lhs and rhs exchanged: positions as rows, channels as columns."""
    batch = numbered("b", node.batch)
    columns = numbered("n", node.columns)
    (row,) = numbered("m", node.rows)
    places = [as_symbol(place) for place in (node.index[0], *node.index[2:])]
    rows = [s for s in places if s is not None]
    kept = [s for s in batch if s not in rows and s.extent is not ONE]
    new: dict[Symbol, Expr] = dict.fromkeys((*batch, *columns, row), ZERO)
    for prefix, symbols in (("b", kept), ("m", rows), ("n", [row])):
        fresh = numbered(prefix, [extent_of(s) for s in symbols])
        new.update(zip(symbols, point_of(fresh), strict=True))
    return replace(
        node,
        batch=tuple(extent_of(s) for s in kept),
        rows=tuple(extent_of(s) for s in rows) or (ONE,),
        columns=node.rows,
        lhs=substitute_symbols(node.rhs, new),
        rhs=substitute_symbols(node.lhs, new),
        index=tuple(substitute(i, new) for i in node.index),
    )


def channel_last(node: Contraction, channel: Symbol) -> Contraction:
    """The same contraction with the channel as the fastest of the inner dimensions."""
    inner = numbered("k", node.inner)
    order = [*(s for s in inner if s is not channel), channel]
    sizes = tuple(extent_of(s) for s in order)
    new = dict(zip(order, point_of(numbered("k", sizes)), strict=True))
    return replace(
        node,
        inner=sizes,
        lhs=substitute_symbols(node.lhs, new),
        rhs=substitute_symbols(node.rhs, new),
    )


def _reads_weight_vectors(
    convolution: Convolution, inner: Sequence[Symbol], strides: Sequence[Expr]
) -> bool:
    """Whether four neighbours of the weight along ``inner``, or output channels, are one access."""
    address = address_of(convolution.weight, strides)
    row = convolution.row
    if row is not None and _is_divisible(row) and step_of(address, row) == 1:
        return True
    return _in_vectors(address, inner)


def _vector_layout(convolution: Convolution, buffer: Buffer) -> tuple[Expr, ...] | None:
    """Strides of the weight with output channels fastest, or else input channels.

    Rows of the former go to workgroup memory as they are: no element has to change its place. The
    other dimensions keep their order, so that a workgroup that copies reads whole sectors.
    """
    fastest = [convolution.row, convolution.channel]
    symbol = next((s for s in fastest if s is not None and _is_divisible(s)), None)
    index = load_index(convolution.weight)
    if symbol is None or index is None:
        return None
    dims = [k for k, entry in enumerate(index) if symbol in symbols_of(entry)]
    if len(dims) != 1 or step_of(index[dims[0]], symbol) != 1:
        return None
    return strides_in([*(k for k in range(len(index)) if k not in dims), *dims], buffer.sizes)


def strides_in(order: Sequence[int], sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """Dense strides with the last dimension of ``order`` fastest."""
    by_dim = dict(zip(order, contiguous_strides([sizes[k] for k in order]), strict=True))
    return tuple(by_dim[k] for k in range(len(sizes)))


class WeightCopies:
    """Copies of weights in other layouts, each made once."""

    def __init__(self, buffers: dict[str, Buffer]) -> None:
        self.buffers = buffers
        self.made: dict[tuple[str, tuple[Expr, ...]], str] = {}

    def copy(
        self, weight: str, strides: tuple[Expr, ...], origins: tuple[Origin, ...]
    ) -> tuple[str, list[Pointwise]]:
        """(the name of the weight's copy with these strides, the node that makes it, if new)."""
        key = (weight, strides)
        if key in self.made:
            return self.made[key], []
        source = self.buffers[weight]
        name = f"{weight}_layout"
        while name in self.buffers:
            name += "_"
        self.made[key] = name
        self.buffers[name] = replace(
            source, name=name, strides=strides, offset=ZERO, origin=BufferOrigin.INTERMEDIATE
        )
        symbols = numbered("i", source.sizes)
        body = Load(weight, tuple(Index(i) for i in point_of(symbols)), source.dtype)
        return name, [Pointwise(name, source.sizes, body, origins=origins)]


def written_for(
    convolution: Convolution,
    buffers: Mapping[str, Buffer],
    copies: WeightCopies,
    turn: bool,
    target: Target,
) -> list[Pointwise | Contraction]:
    """The convolution in the form that suits its buffers' layouts.

    Before it comes the node that copies its weight, if the form needs a copy of that in another
    layout, and is the first that does. ``turn``: whether positions are to be rows, see `turned`.
    """
    node = convolution.node
    strides = {name: buffer.strides for name, buffer in buffers.items()}
    weight = buffers[convolution.weight.buffer]
    inner = numbered("k", node.inner)
    reorders = reads_channels(convolution, strides)
    after = list(inner)
    if reorders:
        after.sort(key=lambda s: s is convolution.channel)
    copied: list[Pointwise] = []
    if (reorders or turn) and not _reads_weight_vectors(convolution, after, weight.strides):
        pays = cost.weight_copy_pays(typical(positions_of(node)), target)
        layout = _vector_layout(convolution, weight)
        if pays and layout is not None:
            name, copied = copies.copy(weight.name, layout, node.origins)
            node = replace(node, lhs=rename_loads(node.lhs, {weight.name: name}))
        elif not pays and _reads_weight_vectors(convolution, inner, weight.strides):
            reorders = False  # few positions: the weight is most of what is read
    if reorders:
        assert convolution.channel is not None
        node = channel_last(node, convolution.channel)
    return [*copied, turned(node) if turn else node]
