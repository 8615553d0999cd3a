"""Operators whose results have as many rows as data says: made of others, and of one number.

Kernels work on as many elements as the arguments have, whatever they choose; the number of chosen
ones is read from the GPU, and is the size of the results from then on. (`device.eager` has the same
for calls in eager mode.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from ...torch_private import free_unbacked_symbols, statically_known_true

aten = torch.ops.aten
sym_ite: Callable[[Any, Any, Any], Any] = torch.sym_ite
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min


@dataclass(frozen=True)
class Choice:
    """A call in two halves.

    Attributes:
        count: a node of one element: the number to read; it is less than 0 for arguments that the
            operator refuses. Or a symbolic number.
        finish: makes the results, of the number as a symbol.
        refusal: the error for those arguments.
        offset: where the result is in the argument's memory, if PyTorch has a view of it.
    """

    count: Node | torch.SymInt
    finish: Callable[[Any], Sequence[Node]]
    refusal: str = ""
    offset: Any = None


class Around(Protocol):
    """The graph that has the call."""

    def emit(self, operation: Any, *args: Any, **kwargs: Any) -> Node:
        """A node before it."""


@dataclass(frozen=True)
class _Mask:
    """The elements of a mask in row-major order.

    Attributes:
        flat: bool (n,).
        ranks: int32 (n,): of each element, how many are chosen up to it.
    """

    to: Around
    flat: Node
    ranks: Node

    @staticmethod
    def of(to: Around, mask: Node) -> _Mask:
        flat = to.emit(aten.reshape.default, mask, [-1])
        if _fake(flat).dtype is not torch.bool:
            flat = to.emit(aten.ne.Scalar, flat, 0)
        return _Mask(to, flat, to.emit(aten.cumsum.default, flat, 0, dtype=torch.int32))

    def count(self) -> Node:
        return self.to.emit(aten.sum.default, self.flat)

    def take(self, rows: Node) -> Node:
        """The chosen rows, and what is behind them has no meaning; ``rows``: (n, …)."""
        to, fake = self.to, _fake(rows)
        count = fake.shape[0]
        last = to.emit(aten.full.default, [], count, dtype=torch.int32, device=fake.device)
        place = to.emit(aten.sub.Tensor, self.ranks, 1)
        places = to.emit(aten.where.self, self.flat, place, last)  # the others go to one row more
        options = {"dtype": fake.dtype, "device": fake.device}
        table = to.emit(aten.empty.memory_format, [count + 1, *fake.shape[1:]], **options)
        return to.emit(aten._unsafe_index_put.default, table, [places], rows)


def _fake(node: Node) -> Tensor:
    found: Tensor = node.meta["val"]
    return found


def _first(to: Around, table: Node) -> Callable[[Any], Sequence[Node]]:
    return lambda count: [to.emit(aten.slice.Tensor, table, 0, 0, count)]


def _nonzero(to: Around, tensor: Node) -> Choice:
    fake, mask = _fake(tensor), _Mask.of(to, tensor)
    columns = []
    for dim, size in enumerate(fake.shape):
        place = to.emit(aten.arange.default, size, device=fake.device)
        for _ in fake.shape[dim + 1 :]:
            place = to.emit(aten.unsqueeze.default, place, -1)
        whole = to.emit(aten.expand.default, place, list(fake.shape))
        flat = to.emit(aten.reshape.default, whole, [-1])
        columns.append(to.emit(aten.unsqueeze.default, flat, 1))
    return Choice(mask.count(), _first(to, mask.take(to.emit(aten.cat.default, columns, 1))))


def _masked_select(to: Around, tensor: Node, mask: Node) -> Choice:
    shape = torch.broadcast_shapes(_fake(tensor).shape, _fake(mask).shape)  # type: ignore[no-untyped-call]
    whole, chosen = (to.emit(aten.expand.default, node, list(shape)) for node in (tensor, mask))
    flat = to.emit(aten.reshape.default, whole, [-1])
    found = _Mask.of(to, chosen)
    return Choice(found.count(), _first(to, found.take(flat)))


def _index(to: Around, tensor: Node, indices: Sequence[Any]) -> Choice | None:
    """``tensor[mask]``; None with other indices."""
    (mask, *others) = indices
    if mask is None or any(other is not None for other in others):
        return None
    if _fake(mask).dtype is not torch.bool or not _fake(mask).dim():
        return None
    rest = list(_fake(tensor).shape[_fake(mask).dim() :])
    found = _Mask.of(to, mask)
    rows = to.emit(aten.reshape.default, tensor, [_fake(found.flat).shape[0], *rest])
    return Choice(found.count(), _first(to, found.take(rows)))


def _repeat_interleave(to: Around, repeats: Node, output_size: Any = None) -> Choice | None:
    if output_size is not None:
        return None
    fake = _fake(repeats)
    ends = to.emit(aten.cumsum.default, repeats, 0)
    wrong = to.emit(aten.any.default, to.emit(aten.lt.Scalar, repeats, 0))
    total = to.emit(aten.sum.default, repeats)
    minus = to.emit(aten.full.default, [], -1, dtype=torch.int64, device=fake.device)

    def finish(count: Any) -> Sequence[Node]:
        place = to.emit(aten.arange.default, count, device=fake.device)
        found = to.emit(aten.searchsorted.Tensor, ends, place, right=True)
        return [to.emit(aten._to_copy.default, found, dtype=fake.dtype)]

    count = to.emit(aten.where.self, wrong, minus, total)
    return Choice(count, finish, "repeats can not be negative")


def _bincount(to: Around, places: Node, weights: Any = None, minlength: int = 0) -> Choice | None:
    fake = _fake(places)
    if weights is not None or fake.is_floating_point() or fake.dtype is torch.bool:
        return None
    options = {"dtype": torch.int64, "device": fake.device}
    wide = to.emit(aten._to_copy.default, places, dtype=torch.int64)
    least = to.emit(aten.full.default, [1], minlength - 1, **options)
    size = to.emit(aten.add.Tensor, to.emit(aten.amax.default, _joined(to, wide, least), [0]), 1)
    wrong = to.emit(aten.any.default, to.emit(aten.lt.Scalar, wide, 0))
    minus = to.emit(aten.full.default, [], -1, **options)
    count = to.emit(aten.where.self, wrong, minus, size)

    def finish(count: Any) -> Sequence[Node]:
        return [_counted(to, count, wide)]

    return Choice(count, finish, "bincount only supports 1-d non-negative integral inputs.")


def _slice(
    to: Around, tensor: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Choice | None:
    """Bounds that are read: Python's rules for them make the size."""
    fake = _fake(tensor)
    size = fake.shape[dim]
    start, end = (b.meta["val"] if isinstance(b, Node) else b for b in (start, end))
    bounds = [b for b in (start, end, size) if isinstance(b, torch.SymInt)]
    if not any(map(free_unbacked_symbols, bounds)):
        return None

    def bound(given: Any, default: Any) -> Any:
        place = default if given is None else given
        if isinstance(place, int):
            place = place + size if place < 0 else place
        else:
            place = sym_ite(place < 0, place + size, place)
        return sym_min(sym_max(place, 0), size)

    first = bound(start, 0)
    count = (sym_max(bound(end, size) - first, 0) + (step - 1)) // step

    def finish(count: Any) -> Sequence[Node]:
        place = to.emit(aten.arange.default, count, device=fake.device)
        place = to.emit(aten.add.Tensor, to.emit(aten.mul.Tensor, place, step), first)
        indices = [None] * (dim % fake.dim())
        return [to.emit(aten._unsafe_index.Tensor, tensor, [*indices, place])]

    return Choice(count, finish, offset=fake.storage_offset() + first * fake.stride(dim))


def _unique(
    to: Around, tensor: Node, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> Choice | None:
    if not _has_some(tensor):
        return None
    flat = to.emit(aten.reshape.default, tensor, [-1])
    ordered = to.emit(aten.sort.stable, flat, stable=True, dim=0)
    values, order = (to.emit(operator.getitem, ordered, k) for k in range(2))
    return _of_runs(to, tensor, values, order, inverse=inverse, counts=counts)


def _unique_consecutive(
    to: Around, tensor: Node, inverse: bool = False, counts: bool = False, dim: Any = None
) -> Choice | None:
    if dim is not None or not _has_some(tensor):
        return None
    flat = to.emit(aten.reshape.default, tensor, [-1])
    return _of_runs(to, tensor, flat, None, inverse=inverse, counts=counts)


def _of_runs(
    to: Around, tensor: Node, values: Node, order: Node | None, *, inverse: bool, counts: bool
) -> Choice:
    """Of each run of equal values one, in the order of ``values``."""
    fake = _fake(tensor)
    later = to.emit(aten.slice.Tensor, values, 0, 1)
    before = to.emit(aten.slice.Tensor, values, 0, 0, -1)
    first = to.emit(aten.ones.default, [1], dtype=torch.bool, device=fake.device)
    mask = _Mask.of(to, _joined(to, first, to.emit(aten.ne.Tensor, later, before)))
    table = mask.take(values)
    wide = to.emit(aten._to_copy.default, mask.ranks, dtype=torch.int64)
    places = to.emit(aten.sub.Tensor, wide, 1)
    none = to.emit(aten.full.default, [0], 0, dtype=torch.int64, device=fake.device)
    inverted = none
    if inverse:
        inverted = places
        if order is not None:
            like = to.emit(aten.empty_like.default, places)
            inverted = to.emit(aten._unsafe_index_put.default, like, [order], places)
        inverted = to.emit(aten.reshape.default, inverted, list(fake.shape))

    def finish(count: Any) -> Sequence[Node]:
        (found,) = _first(to, table)(count)
        return [found, inverted, _counted(to, count, places) if counts else none]

    return Choice(mask.count(), finish)


def _counted(to: Around, size: Any, places: Node) -> Node:
    """How often each number below ``size`` is there."""
    options = {"dtype": torch.int64, "device": _fake(places).device}
    zeros = to.emit(aten.zeros.default, [size], **options)
    ones = to.emit(aten.ones.default, list(_fake(places).shape), **options)
    return to.emit(aten.index_add.default, zeros, 0, places, ones)


def _joined(to: Around, *parts: Node) -> Node:
    return to.emit(aten.cat.default, list(parts), 0)


def _has_some(tensor: Node) -> bool:
    """Whether a tensor is known to have elements."""
    count = _fake(tensor).numel()
    return count > 0 if isinstance(count, int) else statically_known_true(count > 0)


CHOICES: dict[Any, Callable[..., Choice | None]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten.slice.Tensor: _slice,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
}
"""By the operator; None for a call that is made as it is."""
