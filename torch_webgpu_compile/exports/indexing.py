"""`get_item` and `set_item`: indexing by 0-d tensors, of which Python would read the values.

PyTorch takes a 0-d integer tensor for a number, and asks for it: ``table[t]`` is a view of the row
``int(t)``. Here it is an index as that of ``table[t[None]][0]`` is: the GPU counts from the end and
reports what is out of range. The row is a copy then; see `Copies` for where that would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOp
from ..node_text import line_of_user
from ..tensors.aliasing import written_by
from ..torch_private import FakeTensor, OpOverload, is_functorch_wrapped_tensor

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)  # also without dimensions


def get_item(tensor: Tensor, index: Any) -> Tensor | None:
    """``tensor[index]``; None where no part of the index is a number that the GPU has."""
    items = list(index) if isinstance(index, tuple) else [index]
    found = _first_number(tensor, items)
    if found is None:
        return None
    position, dim, number = found
    items[position] = 0  # as a number, it does not take part in how indices are broadcast
    rest = tuple(items)
    part = _part(tensor, dim, number)
    inner = get_item(part, rest)
    return part[rest] if inner is None else inner


def set_item(tensor: Tensor, index: Any, value: Any) -> bool:
    """``tensor[index] = value``; False where no part of the index is such a number."""
    items = list(index) if isinstance(index, tuple) else [index]
    found = _first_number(tensor, items)
    if found is None:
        return False
    position, dim, number = found
    items[position] = 0
    rest = tuple(items)
    part = _part(tensor, dim, number)
    if not set_item(part, rest, value):
        part[rest] = value
    aten.index_put_.default(tensor, [*[None] * dim, number.reshape(1)], part)
    return True


def _part(tensor: Tensor, dim: int, number: Tensor) -> Tensor:
    """Of size 1 in a dimension."""
    part: Tensor = aten.index.Tensor(tensor, [*[None] * dim, number.reshape(1)])
    return part


def _first_number(tensor: Tensor, items: Sequence[Any]) -> tuple[int, int, Tensor] | None:
    """Where the first number is among the items, its dimension, and itself as an index."""
    if not any(map(_is_number, items)):
        return None
    dim = 0
    for position, item in enumerate(items):
        if _is_number(item):
            return (position, dim, item.long()) if dim < tensor.dim() else None
        if item is Ellipsis:
            dim = tensor.dim() - sum(map(_dimensions, items[position + 1 :]))
        else:
            dim += _dimensions(item)
    return None


def _is_number(item: Any) -> bool:
    return (
        isinstance(item, Tensor)
        and item.dim() == 0
        and not item.is_floating_point()
        and not item.is_complex()
        and item.dtype not in _MASKS
        # What `torch.tensor(3)` makes while the function is captured is known.
        and (not isinstance(item, FakeTensor) or item.constant is None)
    )


def _keeps_views(item: Any) -> bool:
    is_number = isinstance(item, Tensor) and item.dim() == 0 and item.dtype not in _MASKS
    return is_number or isinstance(item, (int, slice)) or item is None or item is Ellipsis


def _dimensions(item: Any) -> int:
    """How many of the tensor's dimensions an item of an index takes."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in _MASKS:
        return item.dim()
    if isinstance(item, (list, tuple)) or type(item).__module__ == "numpy":
        item = torch.as_tensor(item)
        return item.dim() if item.dtype in _MASKS else 1
    return 1


class Copies:
    """The results of `get_item`, which PyTorch has as views of the tensors that they are of.

    That one is no view would be seen where it or its tensor is changed in place, and the other one
    is read after that. Both are refused, but for ``table[t] += 1``, which writes the row back.

    Args:
        stand_in: gives the fake tensor that stands for a real one.
    """

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        self._stand_in = stand_in
        self._known: dict[int, tuple[Tensor, Tensor, Any]] = {}  # by memory: copy, of, index
        self._changed: dict[int, str] = {}  # copies that are not written back yet, and by what
        self._outdated: set[int] = set()

    def add(self, copy: Tensor, tensor: Tensor, index: Any) -> None:
        """Notes that ``copy`` is ``tensor[index]``, where PyTorch has it as a view."""
        items = index if isinstance(index, tuple) else (index,)
        # Tensors of `torch.func` have no memory.
        if all(map(_keeps_views, items)) and not is_functorch_wrapped_tensor(copy):
            self._known[_memory(copy)] = copy, self._stand_in(tensor), index

    @contextmanager
    def written(self, tensor: Tensor, index: Any, value: Any) -> Iterator[None]:
        """Around ``tensor[index] = value``."""
        written = [m for m, known in self._known.items() if known[0] is value]
        back = [
            memory
            for memory in written
            if self._known[memory][1] is self._stand_in(tensor) and self._known[memory][2] is index
        ]
        for memory in back:
            self._changed.pop(memory, None)
        yield
        self._outdated.difference_update(back)

    def change(self, func: OpOverload, args: Sequence[Any], kwargs: Any) -> None:
        """Notes what an operator changes."""
        if not self._known or not func._schema.is_mutable:
            return
        for changed in map(_memory, written_by(func, args, kwargs)):
            if changed in self._known:
                self._changed[changed] = str(func)
            self._outdated |= {k for k, (_, of, _) in self._known.items() if _memory(of) == changed}

    def check(self, tensor: Tensor | None = None, stack_trace: str | None = None) -> None:
        """Before a tensor is read in a line of the user's, and at the end.

        Raises:
            UnsupportedOp: it would have another value if copies were views.
        """
        for memory, operator in self._changed.items():
            if tensor is None or _memory(tensor) == _memory(self._known[memory][1]):
                raise UnsupportedOp(
                    operator,
                    "it changes a row that a 0-d tensor chose, which is a copy in a bundle",
                    "assign the new row (table[t] = new_row)",
                    line_of_user(stack_trace or ""),
                )
        if tensor is not None and self._outdated and _memory(tensor) in self._outdated:
            raise UnsupportedOp(
                "indexing",
                "a row that a 0-d tensor chose, which is a copy in a bundle, is used after its "
                "tensor has changed",
                "choose it again where it is used (table[t]), or keep table[t].clone()",
                line_of_user(stack_trace or ""),
            )


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
