"""Random operators with the checks of their numbers, which are data to a kernel.

PyTorch's kernels for the CPU check them before they look at a tensor: an empty one there is enough
to be told what is wrong, or to be warned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload
from .dispatch import run

aten = torch.ops.aten


@lru_cache(maxsize=1024)
def _check(op: OpOverload, *arguments: Any, **keywords: Any) -> None:
    """Has PyTorch check a call, with a dtype in place of each tensor, if there is one.

    Raises:
        Exception: what PyTorch raises about the numbers.
    """
    values = [
        torch.empty(0, dtype=value, device="cpu") if isinstance(value, torch.dtype) else value
        for value in arguments
    ]
    op(*values, **keywords)


def _with_deviations(op: OpOverload, mean: Tensor | float, std: Tensor, **keywords: Any) -> Tensor:
    """``normal`` with a deviation for each element; to look at them is to wait, as on CUDA.

    Raises:
        RuntimeError: one of them is negative or NaN.
    """
    if not std.is_complex() and std.numel() and not (std >= 0).all():
        raise RuntimeError("normal expects all elements of std >= 0.0")
    found: Tensor = run(op, mean, std, **keywords)
    return found


def _check_bounds(dtype: torch.dtype, *bounds: int | None, op: OpOverload | None = None) -> None:
    """`_check` of whole numbers; PyTorch warns, each time, of those that a float type lacks."""
    largest = max(abs(bound or 0) for bound in bounds)  # None: as far as the dtype goes
    is_exact = not dtype.is_floating_point or largest <= 2 / torch.finfo(dtype).eps
    (_check if is_exact else _check.__wrapped__)(op or _random, dtype, *bounds)


def _with_integers(op: OpOverload, tensor: Tensor, *bounds: int | None, **keywords: Any) -> Any:
    _check_bounds(tensor.dtype, *bounds, op=op)
    return run(op, tensor, *bounds, **keywords)


def _in_sizes(op: OpOverload, *arguments: Any, **keywords: Any) -> Any:
    """``randint``: (low,) high, sizes."""
    dtype = keywords.get("dtype") or torch.int64
    _check_bounds(dtype, *(0, *arguments[:-1])[-2:])
    return run(op, *arguments, **keywords)


def _like(op: OpOverload, tensor: Tensor, *bounds: int, **keywords: Any) -> Any:
    """``randint_like``: (low,) high."""
    _check_bounds(keywords.get("dtype") or tensor.dtype, *(0, *bounds)[-2:])
    return run(op, tensor, *bounds, **keywords)


_random: OpOverload = getattr(aten.random_, "from")

KERNELS: dict[str, Callable[..., Any]] = {
    **{
        f"normal.{overload}": partial(_with_deviations, getattr(aten.normal, overload))
        for kind in ("float_Tensor", "Tensor_Tensor")
        for overload in (kind, f"{kind}_out")
    },
    "random_.from": partial(_with_integers, _random),
    "random_.to": partial(_with_integers, aten.random_.to),
    **{
        f"{name}.{overload}".removesuffix(".default"): partial(kernel, getattr(packet, overload))
        for name, packet, kernel, overloads in (
            ("randint", aten.randint, _in_sizes, ("default", "low", "generator", "low_generator")),
            ("randint_like", aten.randint_like, _like, ("default", "low_dtype")),
        )
        for overload in overloads
    },
}
