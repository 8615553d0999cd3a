"""Map groups that read and write in different memory orders, and the tiles that they go through.

A kernel of such a map is best by itself: both the scheduler and code generation ask here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    atom_expr,
    linearize,
    magnitudes,
    product,
    substitute,
    symbols_of,
    typical,
)
from ..target import Target
from .access import VECTOR, load_index, workgroup_type
from .buffers import Buffer
from .graph import MapGroup
from .scalar import Load, Masked, Scalar, children
from .spaces import numbered

# Elements that one step of a symbol moves an access; symbols that do not move it have 0.
Strides = Mapping[Symbol, Expr]


@dataclass(frozen=True, slots=True)
class TransposeTiling:
    """How a workgroup moves elements between two memory orders, through workgroup memory.

    Attributes:
        inner: elements of a tile along the input's fastest dimension.
        outer: elements of a tile along the output's fastest dimension.
        workgroup: invocations.
        load_lanes: neighbouring elements that an invocation loads at once (1 or 4).
        store_lanes: neighbouring elements that it stores at once (1 or 4).
    """

    inner: int
    outer: int
    workgroup: int
    load_lanes: int
    store_lanes: int

    def nbytes(self, element_nbytes: int) -> int:
        """Workgroup memory of one tile; a column more keeps its columns in different banks."""
        return self.inner * (self.outer + 1) * element_nbytes


# Below this many elements a kernel's launch takes longer than strided reads from the cache.
_TRANSPOSED_NUMEL = 1 << 15


def choose_transpose_tiling(
    inner: Expr, outer: Expr, numel: Expr, tile_nbytes: int, target: Target, lanes: tuple[int, int]
) -> TransposeTiling | None:
    """The tiling for dimensions ``inner`` (fastest in the input) and ``outer`` (in the output).

    ``tile_nbytes``: bytes that one element of the tile takes in workgroup memory, all inputs
    together. ``lanes``: elements that one load, and one store, can be. None where strided reads
    are no slower, or for symbolic sizes of which it is not known how large they are.
    """
    if target.software:
        return None  # a CPU's caches hold the columns: tiles took twice as long on lavapipe
    known = magnitudes(inner, outer, numel)
    if known is None:
        return None
    shorter, count = min(known[:2]), known[2]
    if shorter < 16 or count < _TRANSPOSED_NUMEL:
        return None
    # Tiles of 64×32, where they still give each multiprocessor eight workgroups, move 8192² f32 at
    # 86 % of copy bandwidth on an H200; 32×32 82 %, 64×64 76 %, strided reads 10 %.
    many = count >= 8 * target.machine.multiprocessors * 64 * 32
    large = many and shorter >= 48
    workgroup = target.workgroup_invocations
    for rows, columns in ((64, 32), (32, 32)) if large else ((32, 32),):
        tiling = TransposeTiling(rows, columns, workgroup, *lanes)
        if tiling.nbytes(tile_nbytes) <= target.max_workgroup_nbytes:
            return tiling
    return None


@dataclass(frozen=True, slots=True)
class Transposition:
    """The dimensions of a map group, split for tiles; each list is in memory order, slowest first.

    Attributes:
        batch: dimensions that a tile has one index of.
        inner: dimensions that are fastest in the inputs ``loads``.
        outer: dimensions that are fastest in the outputs.
        loads: the loads that go through tiles.
    """

    batch: tuple[Symbol, ...]
    inner: tuple[Symbol, ...]
    outer: tuple[Symbol, ...]
    loads: tuple[Load, ...]
    tiling: TransposeTiling


def find_transposition(
    group: MapGroup, buffers: dict[str, Buffer], target: Target
) -> Transposition | None:
    """How the group is tiled; None where its loads follow the order of its stores."""
    symbols = [s for s in numbered("i", group.ranges) if s.extent is not ONE]
    written: list[tuple[Buffer, Strides]] = []
    for member in group.members:
        if member.store:
            strides = _strides(buffers[member.output], member.index, symbols)
            if strides is None:
                return None
            written.append((buffers[member.output], strides))
    outer_order = _in_memory_order(symbols, written[0][1])
    if not symbols or any(strides[outer_order[-1]] is not ONE for _, strides in written):
        return None
    read = dict(_affine_loads(group, buffers, symbols))
    last = outer_order[-1]
    strided = [
        load
        for load, strides in read.items()
        if typical(strides[last]) > 1 and ONE in strides.values()
    ]
    if not strided:
        return None
    main = read[max(strided, key=lambda load: typical(buffers[load.buffer].numel))]
    accesses = [*(strides for _, strides in written), *read.values()]
    inner_order = _in_memory_order([s for s in symbols if main[s] is not ZERO], main)
    inner = _run(inner_order, accesses, {last})
    outer = _run(outer_order, accesses, set(inner))
    loads = tuple(load for load in strided if read[load][inner[-1]] is ONE)
    lanes = (
        _lanes([(buffers[load.buffer], read[load]) for load in loads], inner),
        _lanes(written, outer),
    )
    if lanes[1] == 1 and any(buffer.dtype.packing > 1 for buffer, _ in written):
        return None  # an invocation should own the words that it stores
    tiling = choose_transpose_tiling(
        extent_of(inner),
        extent_of(outer),
        extent_of(symbols),
        sum(workgroup_type(load.dtype)[1] for load in loads),
        target,
        lanes,
    )
    batch = tuple(s for s in outer_order if s not in inner and s not in outer)
    return None if tiling is None else Transposition(batch, inner, outer, loads, tiling)


def _in_memory_order(symbols: Sequence[Symbol], strides: Strides) -> list[Symbol]:
    """Symbols by their strides, the largest first."""
    return sorted(symbols, key=lambda symbol: -typical(strides[symbol]))


def extent_of(symbols: Sequence[Symbol]) -> Expr:
    """Points that these symbols number together."""
    return product(s.extent for s in symbols if s.extent is not None)


def _strides(buffer: Buffer, index: Sequence[Expr], symbols: Sequence[Symbol]) -> Strides | None:
    """How an access moves, when it is a sum of symbols times sizes; else None."""
    found = dict.fromkeys(symbols, ZERO)
    address = linearize(index, buffer.strides)
    for symbol in symbols:
        found[symbol] = substitute(address, {symbol: ONE}) - substitute(address, {symbol: ZERO})
    start = substitute(address, dict.fromkeys(symbols, ZERO))
    total = start + linearize(list(map(atom_expr, symbols)), list(found.values()))
    is_linear = total is address and not any(s.extent is not None for s in symbols_of(start))
    return found if is_linear else None


def _affine_loads(
    group: MapGroup, buffers: dict[str, Buffer], symbols: Sequence[Symbol]
) -> Iterator[tuple[Load, Strides]]:
    """Loads of memory that every point makes, at indices that are linear in the symbols."""
    computed = {m.output for m in group.members}
    seen: set[Scalar] = set()
    stack: list[Scalar] = [m.body for m in group.members]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        # What is masked may lie outside of the buffer at other points.
        stack += (node.condition, node.other) if isinstance(node, Masked) else children(node)
        if isinstance(node, Load) and node.buffer not in computed:
            index = load_index(node)
            if index is not None:
                strides = _strides(buffers[node.buffer], index, symbols)
                if strides is not None:
                    yield node, strides


def _run(
    order: Sequence[Symbol], accesses: Sequence[Strides], excluded: set[Symbol]
) -> tuple[Symbol, ...]:
    """The fastest dimensions of ``order`` that every access walks through as if they were one."""
    run = [order[-1]]
    for symbol in reversed(order[:-1]):
        extent = extent_of(run[:1])
        joined = all(strides[symbol] is strides[run[0]] * extent for strides in accesses)
        if symbol in excluded or not joined:
            break
        run.insert(0, symbol)
    return tuple(run)


def _lanes(accesses: Sequence[tuple[Buffer, Strides]], run: Sequence[Symbol]) -> int:
    """Elements along ``run`` that every one of these accesses can move at once."""
    for buffer, strides in accesses:
        steps = [stride for symbol, stride in strides.items() if symbol not in run]
        steps += [extent_of(run), buffer.offset]
        if buffer.dtype.itemsize > 4 or any(step.divisor % VECTOR for step in steps):
            return 1
    return VECTOR
