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


@dataclass(frozen=True)
class Lane:
    """What a sequence does to entries that belong together.

    Attributes:
        own: the leaves that only this lane has: tensors, which it may change.
        shared: the leaves with tensors that other lanes read, too.
        shared_numbers, own_numbers: the leaves with floats.
        made: which tensors of the sequence are those that its calls return, in their order.
        calls: each with the positions at which the lists have its entries.
    """

    own: tuple[int, ...]
    shared: tuple[int, ...]
    shared_numbers: tuple[int, ...]
    own_numbers: tuple[int, ...]
    made: tuple[int, ...]
    calls: tuple[tuple[SequenceCall, int], ...]

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves, in the order in which a graph of the lane has them."""
        return self.own + self.shared + self.shared_numbers + self.own_numbers


# ---- which entries belong together


def divide(calls: Sequence[SequenceCall], leaves: Sequence[Any]) -> dict[Any, list[Lane]]:
    """The lanes of a sequence, by a key that is equal for those that do the same.

    Args:
        leaves: of the sequence: floats, and a `TensorSpec` or tensor for each tensor.

    Raises:
        UnsupportedOp: a call does not treat its lists entry by entry.
    """
    lists = [_Lists(call, leaves) for call in calls]
    written = {place for found in lists for place in found.written()}
    union = _Union()
    first = count()
    for found in lists:
        found.made = [~next(first) for _ in range(found.call.made)]
        if not written.isdisjoint(found.shared) or any(place < 0 for place in found.shared):
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
            builders.setdefault(lane, _Builder()).add(found, entry)
    lanes: dict[Any, list[Lane]] = {}
    for builder in builders.values():
        lanes.setdefault(builder.key(), []).append(builder.lane())
    return lanes


_ALONE = -(1 << 40)  # no place of a tensor


class _Lists:
    """The lists among the arguments of a call.

    Attributes:
        length: of all of them.
        shared: tensors that are no entries; made ones are ``~position``, here as everywhere.
        constants: all that is neither a list's nor a tensor nor a float.
        made: what the call returns.
    """

    def __init__(self, call: SequenceCall, leaves: Sequence[Any]) -> None:
        self.call = call
        self.shared: list[int] = []
        self.shared_numbers: list[int] = []
        self.made: list[int] = []
        self._columns: list[list[Any]] = []
        self._written: list[list[Any]] = []
        constants: list[Any] = [call.op, tuple(call.kwargs)]
        arguments = call.op._schema.arguments
        writes = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        names = [a.name for a in arguments]
        for name, value in (*zip(names, call.args, strict=False), *call.kwargs.items()):
            if isinstance(value, (list, tuple)) and value:
                column = [_place(entry) for entry in value]
                self._columns.append(column)
                constants.append(list)
                if name in writes:
                    self._written.append(column)
            elif isinstance(value, Leaf) and type(leaves[value.position]) is float:
                self.shared_numbers.append(value.position)
                constants.append(float)
            elif isinstance(value, (Leaf, Made)):
                self.shared.append(_place(value))
                constants.append(Leaf)
                if name in writes:
                    self._written.append([_place(value)])
            else:
                constants.append((type(value), value if value != [] else ()))
        lengths = {len(column) for column in self._columns}
        self.length = len(self._columns[0]) if self._columns else 0
        if len(lengths) != 1 or call.made not in (0, self.length):
            raise UnsupportedOp(str(call.op), "its lists differ in length", "call it alone")
        self._is_number = [
            type(column[0]) is int and column[0] >= 0 and type(leaves[column[0]]) is float
            for column in self._columns
        ]
        self.constants = tuple(constants)

    def written(self) -> Iterator[int]:
        """All tensors that the call changes."""
        for column in self._written:
            yield from column

    def tensors(self, entry: int) -> list[int]:
        """The tensors of one entry, what is returned among them."""
        columns = zip(self._columns, self._is_number, strict=True)
        found = [c[entry] for c, is_number in columns if not is_number]
        return [*(p for p in found if type(p) is int), *(self.made[entry : entry + 1])]

    def entries(self, entry: int) -> Iterator[tuple[Any, bool]]:
        """(place or constant, whether it is a float leaf) of each list at one entry."""
        for column, number in zip(self._columns, self._is_number, strict=True):
            yield column[entry], number


def _place(value: Any) -> Any:
    """A leaf's position, that of a made tensor as ``~position``, or a constant."""
    if isinstance(value, Leaf):
        return value.position
    return ~value.position if isinstance(value, Made) else (type(value), value)


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


_KINDS = ("own", "shared", "all", "each", "made")  # the fields of a lane, in their order


class _Builder:
    """A lane that is put together."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._local: dict[int, tuple[str, int]] = {}
        self._found: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        self._calls: list[tuple[SequenceCall, int]] = []

    def add(self, lists: _Lists, entry: int) -> None:
        """Adds what a call does to one entry."""
        key: list[Any] = [lists.constants]
        key += [self._number_of(place, "shared") for place in lists.shared]
        key += [self._number_of(place, "all") for place in lists.shared_numbers]
        for place, is_number in lists.entries(entry):
            if type(place) is int:
                key.append(self._number_of(place, "each" if is_number else "own"))
            else:
                key.append(place)
        if lists.made:
            key.append(self._number_of(lists.made[entry], "made"))
        self._key.append(tuple(key))
        self._calls.append((lists.call, entry))

    def _number_of(self, place: int, kind: str) -> tuple[str, int]:
        kind = "made" if place < 0 else kind
        found = self._local.get(place)
        if found is None:
            numbers = self._found[kind]
            found = self._local[place] = kind, len(numbers)
            numbers.append(place if place >= 0 else ~place)
        return found

    def key(self) -> Any:
        """Equal for lanes that do the same, apart from what their tensors are like."""
        return tuple(self._key)

    def lane(self) -> Lane:
        """The lane."""
        own, shared, of_all, of_each, made = (tuple(self._found[kind]) for kind in _KINDS)
        return Lane(own, shared, of_all, of_each, made, tuple(self._calls))


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
    places = {place: k for k, place in enumerate(lane.leaves)}
    made_places = {place: k for k, place in enumerate(lane.made)}
    numbers = lane.leaves[len(layout.specs) :]
    own = [*layout.specs, *(leaves[place] for place in numbers)]

    def local(value: Any, entry: int) -> Any:
        if isinstance(value, (list, tuple)) and value:
            return [local(value[entry], entry)]
        if isinstance(value, Leaf):
            return Leaf(places[value.position])
        return Made(made_places[value.position]) if isinstance(value, Made) else value

    calls = [
        (c.op, [local(v, k) for v in c.args], {n: local(v, k) for n, v in c.kwargs.items()})
        for c, k in lane.calls
    ]
    chosen: dict[int, frozenset[float]] = {}
    for op, args, kwargs in calls:
        for leaf, others in _symbols(op, (args, kwargs), own, layout.made).items():
            chosen[leaf] = chosen.get(leaf, others) | others

    def apply(filled: Sequence[Any]) -> list[Any]:
        made: list[Any] = []

        def value_of(place: Leaf | Made) -> Any:
            return (filled if isinstance(place, Leaf) else made)[place.position]

        for op, args, kwargs in calls:
            made += apply_op(op, *tree_map_only((Leaf, Made), value_of, (args, kwargs))) or ()
        return [made[position] for position in wanted]

    first, last = calls[0][0], calls[-1][0]
    name = str(first) if len(calls) == 1 else f"the {len(calls)} operators from {first} to {last}"
    short = f"{len(calls)}_from_{first._schema.name.split('::')[-1]}"
    traceable = Traceable(name, short, apply, True, False)
    held_in = number_dtype(leaves)  # the numbers of all lanes are in one tensor
    return capture(traceable, own, chosen, native, length=layout.length, held_in=held_in)


def _symbols(
    op: OpOverload, given: Any, leaves: Sequence[Any], made: Sequence[TensorSpec]
) -> dict[int, frozenset[float]]:
    """The leaves whose numbers may be any to a call, but for some values."""
    places = tree_leaves(given)

    def described(place: Leaf | Made) -> Any:
        return (leaves if isinstance(place, Leaf) else made)[place.position]

    args, kwargs = tree_map_only((Leaf, Made), described, given)
    found = symbolic_leaves(op, args, kwargs, tree_leaves((args, kwargs)))
    return {
        places[k].position: others
        for k, others in found.items()
        if isinstance(places[k], Leaf) and type(leaves[places[k].position]) is float
    }
