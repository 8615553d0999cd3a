"""Runs `HostStep`s: ATen overloads on the CPU, from bytes to bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..counters import counters
from ..plan.model import HostStep, Plan, PlanBuffer, view_at
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import Expr, evaluate
from ..torch_ops.dtypes import torch_dtype


def find_overload(target: str) -> torch._ops.OpOverload:
    """The overload with this name, e.g. ``aten.sort.stable``. Raises ValueError for none."""
    try:
        namespace, name, overload = target.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"there is no operator {target}") from error
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{target} is no operator")
    return found


def _constant(name: str) -> Any:
    """A dtype, layout or memory format of PyTorch by name."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"{name} is no dtype, layout or memory format")
    return found


def call_overload(
    target: str,
    arguments: Sequence[Any],
    keywords: Sequence[tuple[str, Any]],
    tensor: Callable[[str], torch.Tensor],
    sizes: Mapping[str, int],
) -> list[torch.Tensor]:
    """Calls an operator with arguments as `lowering.fallback` encodes them; its tensor results.

    Args:
        tensor: gives the CPU tensor in a buffer, for each `HostBuffer` in order.
        sizes: the values of size symbols.
    """

    def decode(value: Any) -> Any:
        match value:
            case HostBuffer(name):
                return tensor(name)
            case Expr():
                return evaluate(value, sizes)
            case tuple():
                return [decode(item) for item in value]
            case str() if value.startswith("'"):
                return value[1:]
            case str() if value.startswith("torch."):
                return _constant(value)
            case _:
                return value

    values = [decode(value) for value in arguments]
    named = {name: decode(value) for name, value in keywords}
    with torch.no_grad():
        results = find_overload(target)(*values, **named)
    flat = results if isinstance(results, (tuple, list)) else (results,)
    tensors = [result for result in flat if isinstance(result, torch.Tensor)]
    if not is_collective(target):
        return tensors
    return [torch.ops._c10d_functional.wait_tensor(result) for result in tensors]


def is_collective(target: str) -> bool:
    """Whether an operator talks to other processes: it has results only when it was waited for."""
    return target.startswith("_c10d_functional.")


class HostCalls:
    """Runs the host steps of a plan with PyTorch; given to an `Executor` as ``host_call``."""

    def __init__(self, plan: Plan) -> None:
        self._buffers = plan.buffers

    def __call__(
        self, step: HostStep, arrays: Sequence[Any], sizes: Mapping[str, int]
    ) -> list[Any]:
        """Runs a step.

        Args:
            arrays: the bytes of the step's `HostBuffer`s, in order.
            sizes: the values of the plan's size symbols.

        Returns:
            The bytes of the step's outputs in the layouts of their plan buffers; None for an output
            without a name.
        """
        remaining = iter(arrays)

        def tensor(name: str) -> torch.Tensor:
            return tensor_of(self._buffers[name], next(remaining), sizes)

        tensors = call_overload(step.target, step.arguments, step.keywords, tensor, sizes)
        if not is_collective(step.target):
            counters.add_fallback(step.target)
        return [
            None if not name else self._encode(self._buffers[name], tensor, sizes)
            for name, tensor in zip(step.outputs, tensors, strict=False)
        ]

    def _encode(self, buffer: PlanBuffer, tensor: torch.Tensor, sizes: Mapping[str, int]) -> Any:
        dtype = torch_dtype(buffer.dtype)
        data = np.zeros(evaluate(buffer.nbytes, sizes), np.uint8)
        if data.size:
            tensor_of(buffer, data, sizes).copy_(tensor.to(dtype))
        return data


def tensor_of(buffer: PlanBuffer, data: Any, sizes: Mapping[str, int]) -> torch.Tensor:
    """The tensor that ``data``, the bytes of a plan buffer, holds; it shares their memory."""
    dtype = torch_dtype(buffer.dtype)
    shape, strides, offset = view_at(buffer, sizes)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    count = len(data) // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count)
    return flat.as_strided(shape, strides, offset)
