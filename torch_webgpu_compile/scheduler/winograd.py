"""Convolutions by 3×3 kernels with 2.25 times fewer multiplications: Winograd's F(2×2, 3×3).

A tile of 2×2 results, of which neighbours share nothing, comes from 4×4 images values d and the
kernel g as Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A (Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015, section 4.1). Summed over the input channels, the elementwise product is 16
products of matrices: one contraction with a batch of 16. The transforms of images and results are
pointwise nodes, so that what follows the convolution fuses with the latter one; that of the weight
is prepared (`preparation`).

Rounding errors stay near those of the direct sum, as all numbers in A and B are 0 or ±1. Where the
images have an infinity, the same results are not finite as in a direct sum, but may be NaN instead
of an infinity: inf − inf among the transformed values. cuDNN's Winograd kernels do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import dtypes
from ..ir.graph import Buffer, BufferOrigin, LoopGraph
from ..ir.nodes import Contraction, Pointwise, outputs_of
from ..ir.scalar import Const, Index, Load, Masked, Scalar, apply, const
from ..ir.spaces import iteration_symbols
from ..sizes import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    contiguous_strides,
    is_less,
    is_nonnegative,
)
from .convolutions import Convolution
from .mapping import load_index
from .memory import alive_nbytes, held_nbytes

# Not measured yet. A script that measures sets it, and clears `plan_cache`.
ENABLED = False

_TILE = 2
_KERNEL = 3
_PRODUCTS = (_TILE + _KERNEL - 1) ** 2

# Costs are bytes of memory traffic. On an H200, products of matrices reach 35 TFLOP/s while about
# 3 TB/s pass through memory, and a dispatch takes 2 µs.
_NBYTES_PER_FLOP = 3 / 35
_DISPATCH_NBYTES = 6_000_000

# Transformed images and results are four times as large as they were. They may raise the peak of
# the memory that a call holds by this part; what is prepared takes more (see `preparation`).
_PART_OF_A_CALL = 32


@dataclass(frozen=True, slots=True)
class Winograd:
    """A convolution that can be computed so.

    Attributes:
        node: result [images, out, height, width].
        image, weight: buffers [images, in, ...] and [out, in, 3, 3], float32.
        padding: zeros before the first row and column.
    """

    node: Contraction
    image: str
    weight: str
    padding: tuple[int, int]


def choose(
    graph: LoopGraph, convolutions: Mapping[str, Convolution], buffers: Mapping[str, Buffer]
) -> dict[str, Winograd]:
    """The convolutions for which that pays, by their results.

    Args:
        convolutions: of the graph, by their results.
        buffers: the graph's, with the layouts that were chosen.
    """
    if not ENABLED:
        return {}
    static = {spec.buffer for spec in graph.inputs if spec.static}
    alive = alive_nbytes(graph)
    limit = max(alive, default=0) + held_nbytes(graph) // _PART_OF_A_CALL
    chosen: dict[str, Winograd] = {}
    for at, node in enumerate(graph.nodes):
        convolution = next((convolutions[n] for n in outputs_of(node) if n in convolutions), None)
        found = None if convolution is None else recognise(convolution, buffers)
        if found is None or found.weight not in static:
            continue
        if _pays(found, buffers) and alive[at] + _transformed_nbytes(found, buffers) <= limit:
            chosen[found.node.output] = found
    return chosen


def recognise(convolution: Convolution, buffers: Mapping[str, Buffer]) -> Winograd | None:
    """A convolution by a 3×3 kernel with stride 1 in float32, all of it channels-last, or None."""
    node, weight = convolution.node, convolution.weight
    image = node.rhs.body if isinstance(node.rhs, Masked) else node.rhs
    if node.lhs is not weight or not isinstance(image, Load) or weight.dtype is not dtypes.float32:
        return None
    if isinstance(node.rhs, Masked) and not (
        isinstance(node.rhs.other, Const) and node.rhs.other.value == 0
    ):
        return None
    at, of = load_index(image), load_index(weight)
    if at is None or of is None or not len(at) == len(of) == len(node.index) == 4:
        return None
    same = at[0] is node.index[0] and at[1] is of[1] and of[0] is node.index[1]
    # Where a tap reads, from where the result is.
    shifts = [at[k] - node.index[k] - of[k] for k in (2, 3)]
    if not same or not all(s.is_constant and -_KERNEL < s.constant <= 0 for s in shifts):
        return None
    output, source, taps = (buffers[n] for n in (node.output, image.buffer, weight.buffer))
    sizes = (*output.sizes, *source.sizes, *taps.sizes)
    if not all(size.is_constant for size in sizes):
        return None
    whole = (output.sizes[1], source.sizes[1], as_expr(_KERNEL), as_expr(_KERNEL))
    if taps.sizes != whole or not (_is_channels_last(output) and _is_channels_last(source)):
        return None
    down, right = (-s.constant for s in shifts)
    return Winograd(node, image.buffer, weight.buffer, (down, right))


def _is_channels_last(buffer: Buffer) -> bool:
    channels = buffer.sizes[1]
    return buffer.strides[1] is ONE and channels.constant % 4 == 0


# -- what it costs ---------------------------------------------------------------------------------


def _numbers(found: Winograd, buffers: Mapping[str, Buffer]) -> tuple[int, int, int, int]:
    """(results per channel, tiles, input channels, output channels)."""
    images, outputs, height, width = (s.constant for s in buffers[found.node.output].sizes)
    tiles = images * -(-height // _TILE) * -(-width // _TILE)
    return images * height * width, tiles, buffers[found.image].sizes[1].constant, outputs


def _pays(found: Winograd, buffers: Mapping[str, Buffer]) -> bool:
    """Whether multiplications saved outweigh what the transforms write and read back.

    Also if the weight's has to be done in every call, because it may not fit into the budget.
    """
    points, tiles, inputs, outputs = _numbers(found, buffers)
    direct = 2 * _KERNEL**2 * inputs * outputs * points
    products = 2 * _PRODUCTS * inputs * outputs * tiles
    moved = 2 * _transformed_nbytes(found, buffers)
    moved += (_PRODUCTS + _KERNEL**2) * inputs * outputs * dtypes.float32.itemsize
    return (direct - products) * _NBYTES_PER_FLOP > moved + 3 * _DISPATCH_NBYTES


def _transformed_nbytes(found: Winograd, buffers: Mapping[str, Buffer]) -> int:
    """Bytes of the transformed images and results."""
    _, tiles, inputs, outputs = _numbers(found, buffers)
    return _PRODUCTS * tiles * (inputs + outputs) * dtypes.float32.itemsize


# -- how it is written -----------------------------------------------------------------------------


class Writer:
    """Writes convolutions so; each weight is transformed once.

    Args:
        buffers: those of the graph, to which the new ones are added.
    """

    def __init__(self, buffers: dict[str, Buffer]) -> None:
        self._buffers = buffers
        self._weights: dict[str, str] = {}

    def nodes(self, found: Winograd) -> list[Pointwise | Contraction]:
        """What computes the convolution's result, in order."""
        buffers, node = self._buffers, found.node
        output, channels = buffers[node.output], buffers[found.image].sizes[1]
        images, outputs = output.sizes[:2]
        tiles = (images, *(_tiles(size) for size in output.sizes[2:]))
        products = as_expr(_PRODUCTS)
        made: list[Pointwise | Contraction] = []
        weight = self._weights.get(found.weight)
        if weight is None:
            weight = self._new(f"{found.weight}_transformed", (products, channels, outputs))
            self._weights[found.weight] = weight
            made.append(Pointwise(weight, buffers[weight].sizes, self._of_weight(found.weight)))
        image = self._new(f"{node.output}_windows", (products, *tiles, channels))
        made.append(Pointwise(image, buffers[image].sizes, self._of_image(found)))
        result = self._new(f"{node.output}_products", (products, *tiles, outputs))
        (b,) = iteration_symbols("b", [products])
        m = _points("m", tiles)
        (n,), (k,) = _points("n", [outputs]), _points("k", [channels])
        made.append(
            Contraction(
                result,
                (products,),
                tiles,
                (outputs,),
                (channels,),
                _load(image, (b, *m, k)),
                _load(weight, (b, k, n)),
                (b, *m, n),
            )
        )
        made.append(Pointwise(node.output, output.sizes, self._of_result(result, output)))
        return [_from(entry, node) for entry in made]

    def _new(self, name: str, sizes: Sequence[Expr]) -> str:
        while name in self._buffers:
            name += "_"
        strides = contiguous_strides(sizes)
        self._buffers[name] = Buffer(
            name, dtypes.float32, tuple(sizes), strides, ZERO, BufferOrigin.INTERMEDIATE
        )
        return name

    def _of_weight(self, weight: str) -> Scalar:
        """(G g Gᵀ)[a, b] at the symbols (4a + b, channel, output channel)."""
        sizes = self._buffers[weight].sizes
        (i,) = iteration_symbols("i", [_PRODUCTS])
        c, o = _points("i", [as_expr(_PRODUCTS), sizes[1], sizes[0]])[1:]

        def column(x: int) -> Scalar:
            taps = [_load(weight, (o, c, as_expr(y), as_expr(x))) for y in range(_KERNEL)]
            return _weighted(i // 4, taps)

        return _weighted(i % 4, [column(x) for x in range(_KERNEL)])

    def _of_image(self, found: Winograd) -> Scalar:
        """(Bᵀ d B)[a, b] at the symbols (4a + b, image, tile row, tile column, channel)."""
        sizes, output = self._buffers[found.image].sizes, self._buffers[found.node.output].sizes
        tiles = [_tiles(size) for size in output[2:]]
        (i,) = iteration_symbols("i", [_PRODUCTS])
        image, y, x, c = _points("i", [as_expr(_PRODUCTS), sizes[0], *tiles, sizes[1]])[1:]
        down, right = found.padding

        def value(row: Expr, column: Expr) -> Scalar:
            at = (y * _TILE + row - down, x * _TILE + column - right)
            conditions = [_inside(p, size) for p, size in zip(at, sizes[2:], strict=True)]
            condition = apply("bitwise_and", *conditions)
            load = _load(found.image, (image, c, *at))
            return Masked(condition, load, const(0, dtypes.float32))

        a, b = i // 4, i % 4

        def row(at: Expr) -> Scalar:
            return _signed(_eq(b, 1), value(at, _first(b)), value(at, _second(b)))

        return _signed(_eq(a, 1), row(_first(a)), row(_second(a)))

    def _of_result(self, products: str, output: Buffer) -> Scalar:
        """(Aᵀ m A)[y % 2, x % 2] of the tile (y // 2, x // 2) at (image, channel, y, x)."""
        image, channel, y, x = _points("i", output.sizes)
        u, v = y % _TILE, x % _TILE

        def value(row: int, column: int) -> Scalar:
            at = (u + row) * 4 + v + column
            return _load(products, (at, image, y // _TILE, x // _TILE, channel))

        def three(first: Expr, values: Sequence[Scalar]) -> Scalar:
            """The sum of three neighbours; from the second one on, the others are subtracted."""
            rest = apply("add", values[1], values[2])
            return _signed(_eq(first, 0), values[0], rest)

        return three(u, [three(v, [value(j, k) for k in range(3)]) for j in range(3)])


def _tiles(size: Expr) -> Expr:
    return (size + _TILE - 1) // _TILE


def _points(prefix: str, sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """Iteration symbols, 0 for those of extent 1 (see `units`)."""
    symbols = iteration_symbols(prefix, sizes)
    return tuple(ZERO if size is ONE else s for s, size in zip(symbols, sizes, strict=True))


def _from(made: Pointwise | Contraction, node: Contraction) -> Pointwise | Contraction:
    return replace(made, origins=node.origins)


def _load(buffer: str, at: Sequence[Expr]) -> Load:
    return Load(buffer, tuple(map(Index, at)), dtypes.float32)


def _eq(expr: Expr, number: int) -> Scalar:
    return apply("eq", Index(expr), const(number, dtypes.int64))


def _signed(plus: Scalar, first: Scalar, second: Scalar) -> Scalar:
    """first ± second."""
    return apply("where", plus, apply("add", first, second), apply("sub", first, second))


def _first(row: Expr) -> Expr:
    """0, 1, 2, 1: the column of the positive number in a row of Bᵀ, or of the first of two."""
    return row - row // 3 * 2


def _second(row: Expr) -> Expr:
    """2, 2, 1, 3: that of the other number, which is positive in row 1 only."""
    return row // 3 * 2 - row // 2 + 2


def _weighted(row: Expr, taps: Sequence[Scalar]) -> Scalar:
    """A row of G, one of (1 0 0), (½ ½ ½), (½ −½ ½), (0 0 1), times three numbers."""
    half = const(0.5, dtypes.float32)
    ends = apply("add", taps[0], taps[2])
    inner = apply("mul", half, _signed(_eq(row, 1), ends, taps[1]))
    return apply("where", _eq(row, 0), taps[0], apply("where", _eq(row, 3), taps[2], inner))


def _inside(position: Expr, size: Expr) -> Scalar:
    """Whether 0 ≤ position < size."""
    conditions = []
    if not is_nonnegative(position):
        conditions.append(apply("ge", Index(position), const(0, dtypes.int64)))
    if not is_less(position, size):
        conditions.append(apply("lt", Index(position), Index(size)))
    total: Scalar = const(True, dtypes.bool_)
    for condition in conditions:
        total = condition if isinstance(total, Const) else apply("bitwise_and", total, condition)
    return total
