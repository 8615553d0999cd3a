"""Several calls of operators on lists, one after the other: what they do to one entry of each list.

An operator on lists computes every entry of its results from the entries at the same place. So a
sequence of calls falls into `Lane`s, which have nothing to do with each other but tensors that all
of them read: an optimizer's step has one for each parameter. Lanes that do the same are captured
once, as one graph of lists with one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any

from ...errors import UnsupportedOp
from ...ir.access import VECTOR
from ...symbolic.sizes import may_overlap, storage_span
from ...torch_private import OpOverload, tree_leaves, tree_map_only
from .arguments import key_of, number_dtype, symbolic_leaves
from .calls import CapturedCall, TensorSpec
from .capture import Traceable, apply_op, capture


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument that is leaf number ``position`` of the sequence: a tensor, or a float."""

    position: int


@dataclass(frozen=True, slots=True)
class Made:
    """An argument that is tensor number ``position`` of those that calls return, in their order."""

    position: int


@dataclass(frozen=True)
class SequenceCall:
    """A call of a sequence.

    Attributes:
        op: what is called; it returns nothing, or a list of tensors.
        args, kwargs: with a `Leaf` or `Made` in place of tensors and of numbers that may differ
            from sequence to sequence.
        made: how many tensors it returns.
    """

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: int


@dataclass(frozen=True, slots=True)
class Local:
    """An argument in a lane: number ``position`` of one of its lists, see `Lane.kinds`."""

    kind: str
    position: int


@dataclass(frozen=True)
class Lane:
    """What a sequence does to entries that belong together.

    Attributes:
        own: the leaves that only this lane has: tensors, which it may change.
        shared: the leaves with tensors that other lanes read, too.
        shared_numbers, own_numbers: the leaves with floats.
        made: which tensors of the sequence are those that its calls return, in their order.
        calls: operators, their arguments and keywords, with a `Local` in place of tensors and
            floats, and lists of one entry.
    """

    own: tuple[int, ...]
    shared: tuple[int, ...]
    shared_numbers: tuple[int, ...]
    own_numbers: tuple[int, ...]
    made: tuple[int, ...]
    calls: tuple[tuple[OpOverload, list[Any], dict[str, Any]], ...]

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves, in the order in which a graph of the lane has them."""
        return self.own + self.shared + self.shared_numbers + self.own_numbers

    def position(self, local: Local) -> int:
        """Where an argument is among the leaves; of a made tensor, among those."""
        if local.kind == "made":
            return local.position
        before = _KINDS[: _KINDS.index(local.kind)]
        return sum(len(getattr(self, kind)) for kind in before) + local.position


_KINDS = ("own", "shared", "shared_numbers", "own_numbers", "made")  # the lists of a lane


# ---- which entries belong together


def divide(calls: Sequence[SequenceCall], leaves: Sequence[Any]) -> dict[Any, list[Lane]]:
    """The lanes of a sequence, by a key that is equal for those that do the same.

    Args:
        leaves: of the sequence: floats, and a `TensorSpec` or tensor for each tensor.

    Raises:
        UnsupportedOp: a call does not treat its lists entry by entry.
    """
    first = count()
    lists = [_Lists(call, leaves, [~next(first) for _ in range(call.made)]) for call in calls]
    written = {place for found in lists for place in found.written}
    union = _Union()
    for found in lists:
        if any(place < 0 or place in written for place in found.shared):
            raise UnsupportedOp(
                str(found.call.op), "it changes a tensor of all entries", "call it alone"
            )
        for entry in range(found.length):
            union.join(p for p in found.tensors(entry) if p < 0 or p in written)
    # In the order of their first entries.
    builders: dict[int, _Builder] = {}
    for found in lists:
        for entry in range(found.length):
            owned = next((p for p in found.tensors(entry) if p < 0 or p in written), None)
            lane = _ALONE - len(builders) if owned is None else union.root(owned)
            builders.setdefault(lane, _Builder(leaves)).add(found, entry)
    lanes: dict[Any, list[Lane]] = {}
    for builder in builders.values():
        lanes.setdefault(builder.key(), []).append(builder.lane())
    return lanes


_ALONE = -(1 << 40)  # no place of a tensor


class _Lists:
    """The lists among the arguments of a call. Places of made tensors are ``~position``.

    Attributes:
        length: of all of them.
        made: the places of what the call returns.
        shared: those of tensors that are no entries.
        written: those of all tensors that the call changes.
    """

    def __init__(self, call: SequenceCall, leaves: Sequence[Any], made: Sequence[int]) -> None:
        self.call = call
        self.made = made
        arguments = call.op._schema.arguments
        writes = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        names = [a.name for a in arguments]
        self._columns: list[list[int | None]] = []
        self.shared: list[int] = []
        self.written: list[int] = []
        for name, value in (*zip(names, call.args, strict=False), *call.kwargs.items()):
            is_list = _is_list(value)
            found = [_place(x, leaves) for x in (value if is_list else [value])]
            places = [place for place in found if place is not None]
            if is_list:
                self._columns.append(found)
            else:
                self.shared += places
            self.written += places if name in writes else ()
        lengths = {len(column) for column in self._columns}
        self.length = max(lengths, default=0)
        if len(lengths) != 1 or call.made not in (0, self.length):
            raise UnsupportedOp(str(call.op), "its lists differ in length", "call it alone")

    def tensors(self, entry: int) -> list[int]:
        """The tensors of one entry, what is returned among them."""
        found = (column[entry] for column in self._columns)
        return [*(p for p in found if p is not None), *self.made[entry : entry + 1]]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


def _place(value: Any, leaves: Sequence[Any]) -> int | None:
    """That of a tensor: a leaf's position, or ``~position`` of a made one; None of all else."""
    if isinstance(value, Made):
        return ~value.position
    is_tensor = isinstance(value, Leaf) and type(leaves[value.position]) is not float
    return value.position if is_tensor else None


class _Union:
    """Sets of places that were found to belong together."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, place: int) -> int:
        parent = self._parent
        while (above := parent.setdefault(place, place)) != place:
            parent[place] = place = parent.setdefault(above, above)
        return place

    def join(self, places: Iterator[int]) -> None:
        first = next(places, None)
        for place in places:
            assert first is not None
            self._parent[self.root(place)] = self.root(first)


class _Builder:
    """A lane that is put together."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._local: dict[int, Local] = {}
        self._found: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        self._calls: list[tuple[OpOverload, list[Any], dict[str, Any]]] = []

    def add(self, lists: _Lists, entry: int) -> None:
        """Adds what a call does to one entry."""

        def local(value: Any) -> Any:
            if _is_list(value):
                return [self._local_of(value[entry], "own")]
            return self._local_of(value, "shared")

        call = lists.call
        args, kwargs = [local(x) for x in call.args], {n: local(x) for n, x in call.kwargs.items()}
        self._calls.append((call.op, args, kwargs))
        for place in lists.made[entry : entry + 1]:
            self._numbered(place, "made")

    def _local_of(self, value: Any, kind: str) -> Any:
        place = _place(value, self._leaves)
        if place is None and isinstance(value, Leaf):
            return self._numbered(value.position, f"{kind}_numbers")
        return value if place is None else self._numbered(place, kind if place >= 0 else "made")

    def _numbered(self, place: int, kind: str) -> Local:
        found = self._local.get(place)
        if found is None:
            places = self._found[kind]
            found = self._local[place] = Local(kind, len(places))
            places.append(place if place >= 0 else ~place)
        return found

    def key(self) -> Any:
        """Equal for lanes that do the same, apart from what their tensors are like."""
        return tuple(
            (op, _key(args), _key(list(kwargs.items()))) for op, args, kwargs in self._calls
        )

    def lane(self) -> Lane:
        """The lane."""
        own, shared, of_all, of_each, made = (tuple(self._found[kind]) for kind in _KINDS)
        return Lane(own, shared, of_all, of_each, made, tuple(self._calls))


def _key(value: Any) -> Any:
    """A nested argument as what has a hash, in which 1, 1.0 and True differ."""
    return (list, *map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)


# ---- what they compute


@dataclass(frozen=True)
class LaneLayout:
    """What the tensors of a lane are like to its graph.

    Tensors of one dense layout are as good as one-dimensional, of whole vectors where they are: so
    the same graph serves parameters of all shapes.

    Attributes:
        specs: of the lane's own and shared tensors, in their order.
        made: of those that its calls return.
        length: the first size of those that have several elements, where it is a symbol; else 0.
    """

    specs: tuple[TensorSpec, ...]
    made: tuple[TensorSpec, ...]
    length: int

    @property
    def key(self) -> Any:
        """Equal for lanes that one graph serves, if they do the same."""
        if not self.length:
            return tuple(map(key_of, (*self.specs, *self.made)))
        each = [(s.dtype, s.sizes[1:], len(s.sizes), s.offset != 0) for s in self.specs]
        return *each, *((s.dtype, s.sizes[1:], len(s.sizes)) for s in self.made)


def layout_of(
    specs: Sequence[TensorSpec], made: Sequence[TensorSpec], most_nbytes: int
) -> LaneLayout:
    """What tensors, none of which is empty, are like to a lane's graph.

    Args:
        specs, made: see `LaneLayout`.
        most_nbytes: of a tensor that kernels for any size reach.
    """
    everything = (*specs, *made)
    numels = [prod(spec.sizes) for spec in everything]
    large = [spec for spec, numel in zip(everything, numels, strict=True) if numel > 1]
    first = large[0] if large else TensorSpec(everything[0].dtype, (1,), (1,))
    numel = prod(first.sizes)
    same = all(s.sizes == first.sizes and s.strides == first.strides for s in large)
    is_dense = storage_span(first.sizes, first.strides) == numel
    if not (same and is_dense) or may_overlap(first.sizes, first.strides):
        return LaneLayout(tuple(specs), tuple(made), 0)
    reduced = 1 in numels[len(specs) :]
    sizes = (
        (numel,) if numel % VECTOR or numel < 2 * VECTOR or reduced else (numel // VECTOR, VECTOR)
    )

    def flat(spec: TensorSpec, numel: int) -> TensorSpec:
        if numel == 1:
            rank = min(1, len(spec.sizes))
            return replace(spec, sizes=(1,) * rank, strides=(1,) * rank)
        return replace(spec, sizes=sizes, strides=(VECTOR, 1)[-len(sizes) :])

    flattened = tuple(map(flat, everything, numels))
    nbytes = max(numel * s.dtype.itemsize for s in everything)
    length = 0 if reduced or numel == 1 or nbytes > most_nbytes else sizes[0]
    return LaneLayout(flattened[: len(specs)], flattened[len(specs) :], length)


def capture_lane(
    lane: Lane,
    layout: LaneLayout,
    leaves: Sequence[Any],
    wanted: Sequence[int],
    native: frozenset[OpOverload],
) -> CapturedCall:
    """Captures a lane as a graph, which reads its `Lane.leaves`, changes them as the calls do, and
    gives what is ``wanted``.

    Args:
        leaves: of the sequence.
        wanted: positions among what the calls of the lane return.

    Raises:
        UnsupportedOp: the calls cannot be traced.
    """
    calls = lane.calls
    own = [*layout.specs, *(leaves[place] for place in lane.leaves[len(layout.specs) :])]
    chosen: dict[int, frozenset[float]] = {}
    for op, args, kwargs in calls:
        places = tree_leaves((args, kwargs))
        described = given, named = _filled((args, kwargs), lane, own, layout.made)
        for k, others in symbolic_leaves(op, given, named, tree_leaves(described)).items():
            if isinstance(places[k], Local) and type(own[lane.position(places[k])]) is float:
                leaf = lane.position(places[k])
                chosen[leaf] = chosen.get(leaf, others) | others

    def apply(filled: Sequence[Any]) -> list[Any]:
        made: list[Any] = []
        for op, args, kwargs in calls:
            made += apply_op(op, *_filled((args, kwargs), lane, filled, made)) or ()
        return [made[position] for position in wanted]

    first, last = calls[0][0], calls[-1][0]
    name = str(first) if len(calls) == 1 else f"the {len(calls)} operators from {first} to {last}"
    short = f"{len(calls)}_from_{first._schema.name.split('::')[-1]}"
    traceable = Traceable(name, short, apply, True, False)
    held_in = number_dtype(leaves)  # the numbers of all lanes are in one tensor
    return capture(traceable, own, chosen, native, length=layout.length, held_in=held_in)


def _filled(tree: Any, lane: Lane, leaves: Sequence[Any], made: Sequence[Any]) -> Any:
    """Arguments in a lane with values in place of each `Local`."""

    def value_of(local: Local) -> Any:
        return (made if local.kind == "made" else leaves)[lane.position(local)]

    return tree_map_only(Local, value_of, tree)
