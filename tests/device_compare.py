"""Compares what an operator gives on the device with what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo
from torch.utils._pytree import tree_leaves, tree_map


def _tolerances(info: Any) -> dict[torch.dtype, tuple[float, float]]:
    """PyTorch's own tolerances of an operator: (relative, absolute), where it has any."""
    found: dict[torch.dtype, tuple[float, float]] = {}
    for entry in info.decorators:
        for rule in entry.decorators if isinstance(entry, DecorateInfo) else [entry]:
            if isinstance(rule, toleranceOverride):
                given = {dtype: (tol.rtol, tol.atol) for dtype, tol in rule.d.items()}
            elif isinstance(rule, precisionOverride):
                given = {dtype: (atol, atol) for dtype, atol in rule.d.items()}
            else:
                continue
            for dtype, (rtol, atol) in given.items():
                r, a = found.get(dtype, (0.0, 0.0))
                found[dtype] = max(r, rtol), max(a, atol)
    return found


# Functions that turn the last bit of their argument into several of their result.
_NEAR_POLES = frozenset({"polygamma", "special.polygamma", "digamma"})

# Operators that round to 16 bits within, as on CUDA: a sum that cancels keeps the rounding of its
# terms. Cross entropy does so by PyTorch's choice, on devices that it does not know.
_ROUNDED_WITHIN = {"nn.functional.bilinear": 1e-2, "nn.functional.linear_cross_entropy": 3e-2}

# Operators that divide by a difference of sums of weights.
_NEAR_ZERO = frozenset({"cov"})

# What the CPU gives at a pole, at least.
_POLE = 1e12

# Differences of numbers that are hundreds of times as large; so are polynomials near their roots.
_DIFFERENCES = frozenset(
    {"nn.functional.triplet_margin_loss", "nn.functional.triplet_margin_with_distance_loss"}
)

# The CPU's vectors give NaN where the quotient overflows; the exact remainder is below the divisor.
_REMAINDERS = frozenset({"fmod", "remainder", "__rmod__"})
_TINY = 1e-30

# Operators that find positions of elements, which are open among equal ones.
_POSITIONS = frozenset({"argsort", "kthvalue", "mode", "sort", "topk"})

_DEFAULT = {
    # Sums of a few hundred elements in another order; PyTorch's default is 1.3e-6 and 1e-5.
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    torch.float64: (1e-7, 1e-7),  # PyTorch's default
    torch.complex128: (1e-7, 1e-7),
    torch.float16: (2e-3, 1e-4),  # two roundings: the CPU's and the device's
    torch.bfloat16: (1.6e-2, 1e-4),
}


def same(
    info: Any,
    got: Any,
    wanted: Any,
    near: Callable[[], Any] | None = None,
    scale: float = 1.0,
) -> None:
    """Values, dtypes and sizes.

    Args:
        near: gives the same computed in wider numbers, which is right as well.
    """
    got_leaves, wanted_leaves = tree_leaves(got), tree_leaves(wanted)
    assert len(got_leaves) == len(wanted_leaves), (len(got_leaves), len(wanted_leaves))
    for k, (g, w) in enumerate(zip(got_leaves, wanted_leaves, strict=True)):
        if not isinstance(w, Tensor):
            if isinstance(w, (float, complex)):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)
            else:
                assert g == w or isinstance(w, torch.device), (g, w)
            continue
        assert isinstance(g, Tensor), type(g)
        try:
            _same_tensor(info, g, w, scale)
        except AssertionError:
            wide = None if near is None else tree_leaves(near())[k]
            if not isinstance(wide, Tensor) or wide.shape != w.shape or wide.dtype is w.dtype:
                raise
            if w.dtype in _NARROW:
                _same_tensor(info, g, wide.to(w.dtype), scale)
            elif not _error(g, wide) <= _error(w, wide):
                raise


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest error of an element; NaN and infinities must be the same."""
    found = found.detach().cpu().to(exact.dtype)
    special = ~exact.isfinite() | ~found.isfinite()
    torch.testing.assert_close(found[special], exact[special], equal_nan=True)
    return float((found - exact)[~special].abs().max()) if (~special).any() else 0.0


def _same_tensor(info: Any, got: Tensor, wanted: Tensor, scale: float) -> None:
    rtol, atol = _DEFAULT.get(wanted.dtype, (None, None))
    own = _tolerances(info).get(wanted.dtype)
    if rtol is not None and own is not None:
        rtol, atol = max(rtol, own[0]), max(atol, own[1])
    if rtol is not None:
        rtol, atol = rtol * scale, atol * scale
    if info.name in _NEAR_ZERO or (wanted.is_floating_point() and info.name in _NEAR_POLES):
        rtol = max(rtol or 0.0, 1e-4)
    if info.name in _ROUNDED_WITHIN and wanted.dtype in (torch.float16, torch.bfloat16):
        atol = max(atol or 0.0, _ROUNDED_WITHIN[info.name])
    cancels = info.name in _DIFFERENCES or "_polynomial_" in info.name
    if cancels and wanted.dtype is torch.float32:
        atol = max(atol or 0.0, 1e-4)
    got = got.detach().cpu()
    if info.name in _REMAINDERS and wanted.is_floating_point():
        wanted = torch.where(wanted.isnan() & (got.abs() < _TINY), got, wanted)
    if info.name in _NEAR_POLES:
        # The CPU divides by the square of sin(πx), which rounding of πx keeps from being 0.
        pole = got.isinf() & (wanted.abs() > _POLE) & (got.sign() == wanted.sign())
        wanted = torch.where(pole, got, wanted)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


_NARROW = (torch.float16, torch.bfloat16)
_WIDE = {
    **dict.fromkeys(_NARROW, torch.float32),
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def wide(values: Any) -> Any:
    """Floats in the next wider dtype."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _WIDE:
            return value.detach().to(_WIDE[value.dtype]).requires_grad_(value.requires_grad)
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    return tree_map(widen, values)


def has_ties(info: Any, values: tuple[Any, Any, Any]) -> bool:
    """Whether gradients may go to any of several equal elements: random numbers of 16 bits."""
    input = values[0]
    finds = info.name in _POSITIONS or info.name == "msort"
    return finds and isinstance(input, Tensor) and input.dtype in _NARROW


def without_ties(info: Any, values: tuple[Any, Any, Any], results: Any) -> Any:
    """Elements in the place of positions, where equal elements may come in any order."""
    input, args, kwargs = values
    if results is None or info.name not in _POSITIONS or kwargs.get("stable"):
        return results
    numbers = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    takes_count = info.name in ("topk", "kthvalue")
    dim = kwargs.get("dim", numbers[takes_count] if len(numbers) > takes_count else -1)

    def look_up(result: Tensor) -> Tensor:
        if result.dtype is not torch.int64 or not input.dim():
            return result
        positions = result if result.dim() == input.dim() else result.unsqueeze(dim)
        return input.detach().cpu().gather(dim, positions.cpu()).reshape(result.shape)

    if isinstance(results, Tensor):
        return look_up(results) if info.name == "argsort" else results
    elements, positions = results
    return [elements, look_up(positions)]
