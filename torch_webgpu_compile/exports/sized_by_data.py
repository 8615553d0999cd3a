"""Operators whose results have sizes that data decide, as a number that is read, and others.

They are `control_flow.choices`, made while the function runs: so there are no symbols for their
sizes but those of numbers that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..capture.control_flow.choices import CHOICES, Choice
from ..torch_private import OpOverload, _check

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def _chosen(build: Callable[..., Choice | None], *args: Any, **kwargs: Any) -> Any:
    choice = build(*args, **kwargs)
    if choice is None:
        return NotImplemented
    size = choice.count.item()  # type: ignore[union-attr]
    _check(size >= 0)  # type: ignore[no-untyped-call]
    if choice.refusal:
        aten._assert_scalar.default(size >= 0, choice.refusal)
    # Not slices: PyTorch has another symbol for the size of one that ends where data say.
    first = [t.index_select(0, torch.arange(size, device=t.device)) for t in choice.tables]
    results = [*first, *choice.finish(size)]
    return results[0] if len(results) == 1 else tuple(results)


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with positions in the place of masks; None where there are no masks."""
    if not any(k is not None and k.dtype in _MASKS for k in indices):
        return None
    found: list[Tensor | None] = []
    for given in indices:
        is_mask = given is not None and given.dtype in _MASKS
        found += aten.nonzero.default(given).unbind(1) if is_mask else [given]
    return found


def _index(self: Tensor, indices: Sequence[Tensor | None]) -> Any:
    made = _chosen(CHOICES[aten.index.Tensor], self, indices)
    found = _positions(indices) if made is NotImplemented else None
    return made if found is None else aten.index.Tensor(self, found)


def _put(operation: OpOverload, self: Tensor, indices: Any, values: Tensor, *more: bool) -> Any:
    """``tensor[indices] = values``, where a mask takes as many as it chooses, or the same one."""
    is_same = all(type(size) is int and size == 1 for size in values.shape)
    found = None if is_same else _positions(indices)
    return NotImplemented if found is None else operation(self, found, values, *more)


def _unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> Any:
    return aten._unique2.default(self, sorted, return_inverse)[:2]


_PUTS = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)

SIZED_BY_DATA: Mapping[OpOverload, Callable[..., Any]] = {
    # A view may be written before the capture is functional.
    **{op: partial(_chosen, build) for op, build in CHOICES.items() if not op.is_view},
    **{operation: partial(_put, operation) for operation in _PUTS},
    aten.index.Tensor: _index,
    aten._unique.default: _unique,
}
"""By operator; NotImplemented is a call of it as it is."""
