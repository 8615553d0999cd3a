"""Calls ATen overloads with the arguments of host steps and host calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import DeviceError
from ..ir.nodes import HostCall
from ..plan.model import HostStep, PlanBuffer, view_at
from ..plan.numbers import HostNumber, python_number
from ..symbolic.nested import HostBuffer, HostView
from ..symbolic.sizes import Expr, evaluate, may_overlap
from ..torch_ops.dtypes import torch_dtype
from ..torch_private import OpOverload, _DisableAutocast, tree_leaves


def find_overload(target: str) -> OpOverload:
    """The overload with this name, e.g. ``aten.sort.stable``. Raises ValueError for none."""
    try:
        namespace, name, overload = target.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"there is no operator {target}") from error
    if not isinstance(found, OpOverload):
        raise ValueError(f"{target} is no operator")
    return found


def _constant(name: str) -> Any:
    """A dtype, layout or memory format of PyTorch by name."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"{name} is no dtype, layout or memory format")
    return found


Tensors = Callable[[HostBuffer], torch.Tensor]
"""Gives the tensor that is in a buffer, which the operator may keep or change."""


def call_overload(
    step: HostStep | HostCall,
    tensor: Tensors,
    sizes: Mapping[str, int],
    count: int,
    changeable: Tensors | None = None,
) -> list[torch.Tensor]:
    """Calls an operator with arguments as `lowering.fallback` encodes them.

    Args:
        tensor: is asked for each `HostBuffer`: for what is changed, then for arguments in order.
        sizes: the values of size symbols.
        count: of the tensors that are needed: the last of the operator's tensor results and of what
            it changed.
        changeable: is asked in place of ``tensor`` for what is changed.
    """
    results, changed = called(step, tensor, sizes, changeable)
    found = [result for result in results if isinstance(result, torch.Tensor)]
    tensors = [*found, *changed]
    if len(tensors) < count:
        raise DeviceError(
            f"{step.target} gave {len(found)} tensors, not the {count - len(changed)} that its "
            "fake implementation (register_fake) gives; make them agree"
        )
    tensors = tensors[len(tensors) - count :]
    if not is_collective(step.target):
        return tensors
    return [torch.ops._c10d_functional.wait_tensor(result) for result in tensors]


def called(
    step: HostStep | HostCall,
    tensor: Tensors,
    names: Mapping[str, Any],
    changeable: Tensors | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Calls an operator; its results, in one list, and what it has changed.

    Args:
        tensor, changeable: as of `call_overload`.
        names: the values of symbols, and of other numbers that have names.
    """
    changed = [(changeable or tensor)(buffer) for buffer in step.changed]

    def decode(value: Any) -> Any:
        match value:
            case HostBuffer():
                return tensor(value)
            case HostView(number):
                return _part(changed[number], value, names)
            case Expr() | HostNumber():
                return python_number(value, names)
            case tuple():
                return [decode(item) for item in value]
            case str() if value.startswith("'"):
                return value[1:]
            case str() if value.startswith("torch."):
                return _constant(value)
            case _:
                return value

    values = [decode(value) for value in step.arguments]
    named = {name: decode(value) for name, value in step.keywords}
    with torch.no_grad(), _DisableAutocast():
        results = find_overload(step.target)(*values, **named)
    return tree_leaves(results), changed


def _part(tensor: torch.Tensor, view: HostView, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [evaluate(size, sizes) for size in view.sizes]
    strides = [evaluate(stride, sizes) for stride in view.strides]
    offset = tensor.storage_offset() + evaluate(view.offset, sizes)
    return tensor.as_strided(shape, strides, offset)


def laid_out(
    tensor: torch.Tensor, strides: tuple[Expr, ...] | None, sizes: Mapping[str, int]
) -> torch.Tensor:
    """The tensor with the strides that an operator is to see; a copy where it has others.

    Where elements would be at one place in another way than by a stride of 0, it stays as it is.
    """
    if strides is None:
        return tensor
    wanted = [evaluate(stride, sizes) for stride in strides]
    pairs = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    if not tensor.numel() or all(n == 1 or have == want for n, have, want in pairs):
        return tensor
    narrow = tensor
    for dim, stride in enumerate(wanted):
        if stride == 0:
            narrow = narrow.narrow(dim, 0, 1)
    if may_overlap(narrow.shape, wanted):
        return tensor
    made = torch.empty_strided(narrow.shape, wanted, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(narrow).as_strided(tensor.shape, wanted)


def check_result(step: HostStep, result: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises DeviceError where an operator gives something else than its fake implementation."""
    if result.shape != wanted.shape or (
        result.dtype != wanted.dtype and not step.target.startswith("aten.")
    ):
        raise DeviceError(
            f"{step.target} gave {result.dtype}{list(result.shape)}, its fake implementation "
            f"(register_fake) {wanted.dtype}{list(wanted.shape)}; make them agree"
        )


def is_collective(target: str) -> bool:
    """Whether an operator talks to other processes: it has results only when it was waited for."""
    return target.startswith("_c10d_functional.")


def tensor_of(buffer: PlanBuffer, data: Any, sizes: Mapping[str, int]) -> torch.Tensor:
    """The tensor that ``data``, the bytes of a plan buffer, holds; it shares their memory."""
    dtype = torch_dtype(buffer.dtype)
    shape, strides, offset = view_at(buffer, sizes)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    count = len(data) // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count)
    return flat.as_strided(shape, strides, offset)
