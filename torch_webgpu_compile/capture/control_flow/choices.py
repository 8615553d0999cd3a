"""Operators whose results have as many rows as data says: made of others, and of one number.

Kernels work on as many elements as the arguments have, whatever they choose; the number of chosen
ones is read from the GPU, and is the size of the results from then on. (`device.eager` has the same
for calls in eager mode.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch_private import free_unbacked_symbols, statically_known_true

aten = torch.ops.aten
sym_ite: Callable[[Any, Any, Any], Any] = torch.sym_ite
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min


def _nothing(count: Any) -> Sequence[Tensor]:
    return ()


@dataclass(frozen=True)
class Choice:
    """A call in two halves.

    Attributes:
        count: a tensor of one element: the number to read; it is less than 0 for arguments that the
            operator refuses. Or a symbolic number.
        tables: as many rows of each as the number says are the first results.
        finish: makes the other results, of the number as a symbol.
        refusal: the error for those arguments.
        offset: where the result is in the argument's memory, if PyTorch has a view of it.
    """

    count: Tensor | torch.SymInt
    tables: Sequence[Tensor] = ()
    finish: Callable[[Any], Sequence[Tensor]] = _nothing
    refusal: str = ""
    offset: Any = None


@dataclass(frozen=True)
class _Mask:
    """The elements of a mask in row-major order.

    Attributes:
        flat: bool (n,).
        ranks: int32 (n,): of each element, how many are chosen up to it.
    """

    flat: Tensor
    ranks: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Mask:
        flat = mask.reshape(-1)
        if flat.dtype is not torch.bool:
            flat = flat != 0
        return _Mask(flat, flat.cumsum(0, dtype=torch.int32))

    def choice(self, rows: Tensor, finish: Callable[[Any], Sequence[Tensor]] = _nothing) -> Choice:
        """The chosen rows, and more results; ``rows``: (n, …)."""
        count, device = rows.shape[0], rows.device
        last = torch.full((), count, dtype=torch.int32, device=device)
        places = torch.where(self.flat, self.ranks - 1, last)  # the others go to one row more
        table = torch.empty((count + 1, *rows.shape[1:]), dtype=rows.dtype, device=device)
        table = aten._unsafe_index_put.default(table, [places], rows)
        return Choice(self.flat.sum(), (table,), finish)


def _nonzero(tensor: Tensor) -> Choice:
    columns = []
    for dim, size in enumerate(tensor.shape):
        place = torch.arange(size, device=tensor.device)
        place = place.reshape(-1, *[1] * (tensor.dim() - dim - 1))
        columns.append(place.expand(tensor.shape).reshape(-1, 1))
    if not columns:  # a number has one element, and no positions
        columns.append(torch.empty((1, 0), dtype=torch.int64, device=tensor.device))
    return _Mask.of(tensor).choice(torch.cat(columns, 1))


def _masked_select(tensor: Tensor, mask: Tensor) -> Choice:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return _Mask.of(mask.expand(shape)).choice(tensor.expand(shape).reshape(-1))


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Choice | None:
    """``tensor[mask]``; None with other indices."""
    (mask, *others) = indices
    if mask is None or any(other is not None for other in others):
        return None
    if mask.dtype is not torch.bool or not mask.dim():
        return None
    found = _Mask.of(mask)
    return found.choice(tensor.reshape(found.flat.shape[0], *tensor.shape[mask.dim() :]))


def _repeat_interleave(repeats: Tensor, output_size: Any = None) -> Choice | None:
    if output_size is not None:
        return None
    ends = repeats.cumsum(0)

    def finish(count: Any) -> Sequence[Tensor]:
        place = torch.arange(count, device=repeats.device)
        return [torch.searchsorted(ends, place, right=True).to(repeats.dtype)]

    count = _unless((repeats < 0).any(), repeats.sum())
    return Choice(count, (), finish, "repeats can not be negative")


def _bincount(places: Tensor, weights: Any = None, minlength: int = 0) -> Choice | None:
    if weights is not None or places.is_floating_point() or places.dtype is torch.bool:
        return None
    wide = places.to(torch.int64)
    least = torch.full((1,), minlength - 1, dtype=torch.int64, device=places.device)
    count = _unless((wide < 0).any(), torch.cat([wide, least]).amax(0) + 1)

    def finish(count: Any) -> Sequence[Tensor]:
        return [_counted(count, wide)]

    return Choice(count, (), finish, "bincount only supports 1-d non-negative integral inputs.")


def _unless(wrong: Tensor, count: Tensor) -> Tensor:
    """A number to read, for arguments that may be refused."""
    minus = torch.full((), -1, dtype=torch.int64, device=count.device)
    return torch.where(wrong, minus, count)


def _slice(
    tensor: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Choice | None:
    """Bounds that are read: Python's rules for them make the size."""
    size = tensor.shape[dim]
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

    def finish(count: Any) -> Sequence[Tensor]:
        place = torch.arange(count, device=tensor.device) * step + first
        indices = [None] * (dim % tensor.dim())
        return [aten._unsafe_index.Tensor(tensor, [*indices, place])]

    offset = tensor.storage_offset() + first * tensor.stride(dim)
    return Choice(count, (), finish, offset=offset)


def _unique(
    tensor: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> Choice | None:
    if not _has_some(tensor):
        return None
    values, order = tensor.reshape(-1).sort(stable=True, dim=0)
    return _of_runs(tensor, values, order, inverse=inverse, counts=counts)


def _unique_consecutive(
    tensor: Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> Choice | None:
    if dim is not None or not _has_some(tensor):
        return None
    return _of_runs(tensor, tensor.reshape(-1), None, inverse=inverse, counts=counts)


def _of_runs(
    tensor: Tensor, values: Tensor, order: Tensor | None, *, inverse: bool, counts: bool
) -> Choice:
    """Of each run of equal values one, in the order of ``values``."""
    first = torch.ones(1, dtype=torch.bool, device=tensor.device)
    mask = _Mask.of(torch.cat([first, values[1:] != values[:-1]]))
    places = mask.ranks.to(torch.int64) - 1
    inverted = none = torch.zeros(0, dtype=torch.int64, device=tensor.device)
    if inverse:
        inverted = places
        if order is not None:
            like = torch.empty_like(places)
            inverted = aten._unsafe_index_put.default(like, [order], places)
        inverted = inverted.reshape(tensor.shape)

    def finish(count: Any) -> Sequence[Tensor]:
        return [inverted, _counted(count, places) if counts else none]

    return mask.choice(values, finish)


def _counted(size: Any, places: Tensor) -> Tensor:
    """How often each number below ``size`` is there."""
    zeros = torch.zeros(size, dtype=torch.int64, device=places.device)
    return zeros.index_add(0, places, torch.ones_like(places))


def _has_some(tensor: Tensor) -> bool:
    """Whether a tensor is known to have elements."""
    count = tensor.numel()
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
