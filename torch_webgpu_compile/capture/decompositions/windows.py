"""Window functions and the frequencies of Fourier transforms.

Numbers at the places 0, …, n - 1, computed in float32 or float64. Source: ATen
``TensorFactories.cpp``, ``SpectralOps.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _places(count: Any, keywords: dict[str, Any]) -> Tensor:
    """0, …, count - 1 as floats, in the dtype that is computed in."""
    dtype = keywords.get("dtype") or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    return torch.arange(count, dtype=wide, device=keywords.get("device"))


def _window(rule: Callable[..., Tensor]) -> Callable[..., Any]:
    """A window operator from a function of places and of how many steps a period has."""

    def call(window_length: int, periodic: bool = True, *numbers: float, **keywords: Any) -> Any:
        dtype = keywords.get("dtype") or torch.get_default_dtype()
        if window_length < 0 or not dtype.is_floating_point:
            return NotImplemented  # PyTorch says what is wrong
        if window_length < 2:
            return torch.ones(window_length, dtype=dtype, device=keywords.get("device"))
        steps = window_length if periodic else window_length - 1
        return rule(_places(window_length, keywords), steps, *numbers).to(dtype)

    return call


def _cosines(place: Tensor, steps: int, factors: tuple[float, ...]) -> Tensor:
    """Σ (-1)ᵏ · factor k · cos(k · 2π · place / steps)."""
    total = torch.full_like(place, factors[0])
    for k, factor in enumerate(factors[1:], 1):
        total = total + (place * (2 * math.pi * k / steps)).cos() * (-factor if k % 2 else factor)
    return total


def _hamming(place: Tensor, steps: int, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return _cosines(place, steps, (alpha, beta))


def _bartlett(place: Tensor, steps: int) -> Tensor:
    rising = place * (2.0 / steps)
    return torch.where(rising <= 1, rising, 2 - rising)


def _kaiser(place: Tensor, steps: int, beta: float = 12.0) -> Tensor:
    distance = place * (2.0 / steps) - 1
    inside = (1 - distance * distance).clamp_min(0).sqrt()
    found: Tensor = torch.special.i0(inside * beta) / torch.special.i0(
        torch.full_like(place[:1], beta)
    )
    return found


def frequencies(is_real: bool, n: int, d: float = 1.0, **keywords: Any) -> Any:
    """0, 1, …, then the negative ones up to -1, of n places in all, over n · d.

    ``is_real``: 0, 1, …, n // 2.
    """
    dtype = keywords.get("dtype") or torch.get_default_dtype()
    if n < 1 or not dtype.is_floating_point:
        return NotImplemented
    place = _places(n // 2 + 1 if is_real else n, keywords)
    if not is_real:
        place = torch.where(place < (n + 1) // 2, place, place - n)
    return (place * (1.0 / (n * d))).to(dtype)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.fft_fftfreq.default: partial(frequencies, False),
    aten.fft_rfftfreq.default: partial(frequencies, True),
}
for _packet, _rule in (
    (aten.hamming_window, _hamming),
    (aten.hann_window, lambda place, steps: _cosines(place, steps, (0.5, 0.5))),
    (aten.blackman_window, lambda place, steps: _cosines(place, steps, (0.42, 0.5, 0.08))),
    (aten.bartlett_window, _bartlett),
    (aten.kaiser_window, _kaiser),
):
    for _overload in _packet.overloads():  # type: ignore[no-untyped-call]
        if not _overload.endswith("out"):
            DECOMPOSITIONS[getattr(_packet, _overload)] = _window(_rule)
