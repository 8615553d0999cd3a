"""Scalar functions whose accuracy is measured: how they are called, what is right, the limits.

A limit is the maximum error in units in the last place (ULP) that the CUDA C++ Programming Guide
gives for the single-precision function (appendix "Mathematical Functions"), half a unit more where
that is one unit, or else PyTorch's tolerance for float32 results, which its CUDA
tests use: |error| ≤ 1e-5 + 1.3e-6 · |value|. WGSL promises 2.5 ULP for division and has no square
root better than that, so those and what is one operation away from them have that limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
import torch.nn.functional as F

Array = npt.NDArray[Any]
aten = torch.ops.aten

_EXACT = """
abs angle bitwise_not ceil clamp clamp.Tensor clamp_max clamp_min clone floor frac hardtanh
isinf isnan leaky_relu logical_not nan_to_num neg positive
prims.convert_element_type relu round sign signbit threshold trunc add.Tensor
clamp_max.Tensor clamp_min.Tensor copysign.Tensor eq.Tensor fmax fmin ge.Tensor gt.Tensor
heaviside le.Tensor logical_and logical_or logical_xor lt.Tensor maximum minimum mul.Tensor
ne.Tensor nextafter sub.Tensor threshold_backward
"""
_INTEGER = """
__lshift__.Tensor __rshift__.Tensor bitwise_and.Tensor bitwise_left_shift.Tensor
bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_xor.Tensor gcd lcm
"""
# Lowerings of pointwise operators on one or two tensors that are not in the table, and why.
EXEMPT: dict[str, str] = {
    **dict.fromkeys(_EXACT.split(), "moves, compares, or rounds once"),
    **dict.fromkeys(_INTEGER.split(), "of integers"),
    "true_divide.Tensor": "is div",
    "special_modified_bessel_i0": "is i0",
    "special_modified_bessel_i1": "is special_i1",
}


@dataclass(frozen=True)
class Function:
    """One row of the page.

    Attributes:
        name: the ATen operator.
        call: on float32 tensors of any device.
        reference: on float64 arrays; ``call`` on float64 CPU tensors when None.
        ulps: the limit in ULP, or None for PyTorch's tolerance.
        low, high: the range of each argument, where it is not everything.
        whole: whether the second argument is a whole number.
        source: what the reference is.
    """

    name: str
    call: Callable[..., torch.Tensor]
    reference: Callable[..., Array] | None = None
    ulps: float | None = None
    low: tuple[float, ...] = (-math.inf,)
    high: tuple[float, ...] = (math.inf,)
    whole: bool = False
    source: str = "torch, float64"

    @property
    def arity(self) -> int:
        return len(self.low)


def _exact(name: str, ulps: float | None = None) -> Function:
    return Function(name, _operator(name), ulps=ulps)


def _operator(name: str) -> Callable[..., torch.Tensor]:
    packet, _, overload = name.partition(".")
    found: Callable[..., torch.Tensor] = getattr(getattr(aten, packet), overload or "default")
    return found


def _scipy(name: str, at: Callable[..., Any], ulps: float | None = None, **more: Any) -> Function:
    """Numbers by SciPy, where PyTorch's float64 is not right to 1e-13; its infinities and NaN."""
    call = more.pop("call", None) or _operator(name)

    def reference(*arguments: Array) -> Array:
        ends = call(*map(torch.from_numpy, arguments)).numpy()
        finite = np.logical_and.reduce([np.isfinite(a) for a in arguments])
        return np.where(finite, at(*arguments), ends)

    return Function(name, call, reference, ulps, source="scipy, float64", **more)


def _pair(name: str, ulps: float | None = None, **more: Any) -> Function:
    return Function(
        name,
        _operator(name),
        **{"ulps": ulps, "low": (-math.inf,) * 2, "high": (math.inf,) * 2} | more,
    )


def _degrees(name: str, most: int, low: float = -1.0) -> Function:
    """A polynomial of degree 0 to ``most``."""
    fn = _operator(name)

    def reference(x: Array, n: Array) -> Array:
        # PyTorch's result for NaN is whatever its variable held: its recurrence stops at once.
        found = fn(torch.from_numpy(x), torch.from_numpy(n)).numpy()
        return np.where(np.isnan(x) & (n >= 1) & np.isfinite(n), math.nan, found)

    return _pair(name, reference=reference, low=(low, 0.0), high=(1.0, float(most)), whole=True)


def _polygamma(n: int) -> Function:
    at = partial(scipy.special.polygamma, n)
    return _scipy(f"polygamma({n})", at, call=partial(torch.polygamma, n), low=(0.05,))


# WGSL: division 2.5 ULP, sqrt as 1 / inverseSqrt.
_DIVISION = 3.0

FUNCTIONS: tuple[Function, ...] = (
    # The guide's table.
    _exact("exp", 2),
    _exact("exp2", 2),
    _exact("expm1", 1.5),
    _exact("log", 1.5),
    _exact("log2", 1.5),
    _exact("log10", 2.5),
    _exact("log1p", 1.5),
    _exact("sin", 2),
    _exact("cos", 2),
    _exact("tan", 4),
    _exact("asin", 4),
    _exact("acos", 3),
    _exact("atan", 2),
    _exact("sinh", 3),
    _exact("cosh", 2),
    _exact("tanh", 2),
    _exact("asinh", 3),
    _exact("acosh", 4),
    _exact("atanh", 3),
    _exact("erf", 2),
    _scipy("erfc", scipy.special.erfc, 6),
    _scipy("erfinv", scipy.special.erfinv, 5),
    _scipy("special_erfcx", scipy.special.erfcx, 6),
    _scipy("special_ndtri", scipy.special.ndtri, 5),
    _scipy("i0", scipy.special.i0, 6),
    _scipy("special_i1", scipy.special.i1, 6),
    _pair("atan2", 3),
    _pair("hypot", 3),
    _pair("pow.Tensor_Tensor", 8),
    _pair("fmod.Tensor", 0),
    _pair("remainder.Tensor"),
    # WGSL's own promises.
    _exact("sqrt", _DIVISION),
    _exact("rsqrt", _DIVISION),
    _exact("reciprocal", _DIVISION),
    _pair("div.Tensor", _DIVISION),
    # PyTorch's tolerance.
    _scipy("digamma", scipy.special.digamma),
    _scipy("lgamma", scipy.special.gammaln),
    _scipy("special_i0e", scipy.special.i0e),
    _scipy("special_i1e", scipy.special.i1e),
    _scipy("special_log_ndtr", scipy.special.log_ndtr),
    _scipy("special_modified_bessel_k0", scipy.special.k0),
    _scipy("special_modified_bessel_k1", scipy.special.k1),
    _scipy("special_scaled_modified_bessel_k0", scipy.special.k0e),
    _scipy("special_scaled_modified_bessel_k1", scipy.special.k1e),
    _scipy("special_bessel_j0", scipy.special.j0),
    _scipy("special_bessel_j1", scipy.special.j1),
    _scipy("special_bessel_y0", scipy.special.y0),
    _scipy("special_bessel_y1", scipy.special.y1),
    _exact("special_spherical_bessel_j0"),
    _scipy("special_airy_ai", lambda x: scipy.special.airy(x)[0], low=(-30.0,), high=(103.0,)),
    *(_polygamma(n) for n in (1, 2, 5)),
    _exact("sigmoid"),
    _exact("silu"),
    _exact("mish"),
    _exact("logit"),
    Function("elu", F.elu),
    Function("gelu", F.gelu),
    Function("hardsigmoid", F.hardsigmoid),
    Function("softplus", F.softplus),
    _pair("sigmoid_backward", low=(-8.0, 0.0), high=(8.0, 1.0)),
    _pair("tanh_backward", low=(-8.0, -1.0), high=(8.0, 1.0)),
    _pair("silu_backward", low=(-8.0, -math.inf), high=(8.0, math.inf)),
    _pair("gelu_backward", low=(-8.0, -math.inf), high=(8.0, math.inf)),
    _pair("special_zeta", low=(1.001, 1e-3), high=(60.0, 1e6)),
    _scipy("igamma", scipy.special.gammainc, low=(1e-3, 0.0), high=(1e3, 1e4)),
    _scipy("igammac", scipy.special.gammaincc, low=(1e-3, 0.0), high=(1e3, 1e4)),
    _degrees("special_chebyshev_polynomial_t", 12),
    *(_degrees(f"special_chebyshev_polynomial_{kind}", 8) for kind in "uvw"),
    *(_degrees(f"special_shifted_chebyshev_polynomial_{kind}", 6, 0.0) for kind in "tuvw"),
    _degrees("special_hermite_polynomial_h", 4),
    _degrees("special_hermite_polynomial_he", 6),
    _degrees("special_laguerre_polynomial_l", 9),
    _degrees("special_legendre_polynomial_p", 9),
)
BY_NAME = {function.name: function for function in FUNCTIONS}


def samples(function: Function, count: int) -> tuple[Array, ...]:
    """At least ``count`` float32 arguments, the same at every call.

    Half of them are bit patterns spread over all of float32; the rest lie densely where functions
    have their zeros, poles, and changes of method.
    """
    arguments = tuple(_argument(function, k, count) for k in range(function.arity))
    if function.arity == 1:
        return arguments
    shorter = min(len(a) for a in arguments)
    return tuple(a[:shorter] for a in arguments)


# Odd multipliers that walk through all 2³² bit patterns evenly (R. P. Brent's and Knuth's).
_STEPS = (2654435769, 1812433253)


def _argument(function: Function, place: int, count: int) -> Array:
    low, high = function.low[place], function.high[place]
    walk = np.arange(count // 2, dtype=np.uint64) * np.uint64(_STEPS[place]) + np.uint64(place)
    patterns = (walk & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    share = walk.astype(np.float64) % 2**32 / 2**32
    parts = [patterns, _within(share[: count // 4], low, high), _within(share[: count // 8], -3, 3)]
    parts.append(10.0 ** _within(share[: count // 8], -4, 3.5))
    found = np.concatenate([np.asarray(p, np.float32) for p in parts])
    if function.arity == 1:
        found = np.concatenate([_edges(), found])
    else:  # so that the parts of one argument meet those of the other
        order = np.argsort(
            (np.arange(len(found)) * np.uint64(_STEPS[1 - place])) % np.uint64(2**32)
        )
        found = found[order]
        specials = np.asarray([math.nan, math.inf, -math.inf, 0, -0.0, 1, -1, 2.5, -3], np.float32)
        repeat = np.repeat if place else np.tile
        found = np.concatenate([repeat(specials, len(specials)), found])
    if function.whole and place:
        found = np.where(
            np.isfinite(found), np.round(np.nan_to_num(np.clip(found, low, high))), found
        )
    outside = (found < low) | (found > high)
    if function.arity == 1:
        return found[~outside]
    inside = found[~outside]
    return np.where(outside, np.resize(inside, len(found)), found)


def _within(share: Array, low: float, high: float) -> Array:
    """Evenly spread over a range, of an open one over 40 to each side of 0."""
    first, last = max(low, -40.0), min(high, 40.0)
    result: Array = first + share * (last - first)
    return result


def _edges() -> Array:
    """Specials, whole numbers, multiples of π/2, and zeros of functions, with their neighbours."""
    whole = np.arange(-200, 201, dtype=np.float64)
    quarters = np.arange(1, 2000) * (math.pi / 2)
    far = np.arange(1, 400) * 2.0**20 * (math.pi / 2)
    thresholds = np.asarray(
        [88.72284, 87.33655, 103.97208, 89.41599, 126.0, 149.0, 2.09, 8.32, 1e5]
    )
    zeros = np.concatenate(
        [scipy.special.jn_zeros(n, 60) for n in (0, 1)]
        + [scipy.special.yn_zeros(n, 60) for n in (0, 1)]
        + [-scipy.special.ai_zeros(60)[0], np.asarray([1.4616321449683623])]
    )
    near = np.concatenate(
        [whole, whole / 8, quarters, -quarters, far, thresholds, -thresholds, zeros]
    )
    near32 = near.astype(np.float32)
    steps = [near32]
    up = down = near32
    for _ in range(3):
        up = np.nextafter(up, np.float32(np.inf))
        down = np.nextafter(down, np.float32(-np.inf))
        steps += [up, down]
    tiny = np.asarray([1, 2, 0x3FFFFF, 0x7FFFFF, 0x800000, 0x800001], np.uint32).view(np.float32)
    ends = np.asarray([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4028235e38, -3.4028235e38])
    return np.concatenate([*steps, tiny, -tiny, ends.astype(np.float32)])
