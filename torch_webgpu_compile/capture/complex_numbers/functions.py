"""Arithmetic, comparisons and elementary functions of complex elements.

Real operands are promoted, as in ATen. Where they are finite, results of functions are as accurate
as the real functions are; special values follow C99 Annex G for the arguments that PyTorch's tests
have, infinities and NaN among them. Branch cuts are those of C99: the sign of a zero says on which
side of a cut an argument lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...torch_private import OpOverload
from .pair import Pair, as_pair, choose, constant
from .registry import ComplexCall, rule

aten = torch.ops.aten

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Above, |z| ± 1 is |z| in float32 and float64, and squares may overflow in float32.
_LARGE = 1e17
# Hull, Fairgrieve, Tang: Implementing the complex arcsine and arccosine functions (1997).
_B_CROSSOVER = 0.6417
_A_CROSSOVER = 1.5


def elementwise(*ops: OpOverload) -> Callable[[_Function], _Function]:
    """Registers a function of pairs: every positional argument is made one."""

    def add(function: _Function) -> _Function:
        def apply(call: ComplexCall, *args: Any, **_: Any) -> Any:
            return function(*(as_pair(value, call.dtype) for value in args))

        rule(*ops)(apply)
        return function

    return add


def _sum(place: int, function: Callable[..., Pair]) -> Callable[..., Pair]:
    """The rule of a function of pairs, with ``alpha`` or ``value`` as a factor of one of them."""

    def apply(call: ComplexCall, *args: Any, **kwargs: Any) -> Pair:
        named = dict(zip((a.name for a in call.op._schema.arguments), args, strict=False)) | kwargs
        factor = named.pop("alpha", named.pop("value", 1))
        pairs = [as_pair(value, call.dtype) for value in named.values()]
        if factor != 1:
            pairs[place] = pairs[place] * as_pair(factor, call.dtype)
        return function(*pairs)

    return apply


rule(aten.add.Tensor, aten.add.Scalar)(_sum(1, lambda a, b: a + b))
rule(aten.sub.Tensor, aten.sub.Scalar)(_sum(1, lambda a, b: a - b))
rule(aten.rsub.Tensor, aten.rsub.Scalar)(_sum(0, lambda a, b: b - a))
rule(aten.addcmul.default)(_sum(1, lambda a, b, c: a + b * c))
rule(aten.addcdiv.default)(_sum(1, lambda a, b, c: a + b / c))


@elementwise(aten.reciprocal.default)
def reciprocal(z: Pair) -> Pair:
    """``1 / z``."""
    return constant(1, z.dtype) / z


@elementwise(aten.lerp.Tensor, aten.lerp.Scalar)
def _lerp(start: Pair, stop: Pair, weight: Pair) -> Pair:
    """From the nearer end, as ATen: by the absolute value of the weight."""
    step = stop - start
    near = start + weight * step
    far = stop - step * (constant(1, start.dtype) - weight)
    return choose(weight.re * weight.re + weight.im * weight.im < 0.25, near, far)


def absolute(z: Pair) -> Tensor:
    """``|z|``, without an overflow of squares."""
    return torch.hypot(z.re, z.im)


def argument(z: Pair) -> Tensor:
    """The angle of z, in [−π, π]."""
    return torch.atan2(z.im, z.re)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """A product in which zero times infinity or NaN is zero, with the sign of the product."""
    one = torch.ones_like(a)
    zero = 0.0 * torch.copysign(one, a) * torch.copysign(one, b)
    return torch.where((a == 0) | (b == 0), zero, a * b)


def _times_cos(size: Tensor, angle: Tensor) -> Tensor:
    """The product with a cosine; infinity in an unknown direction is infinity."""
    cos = torch.cos(angle)
    unknown = torch.isinf(size) & torch.isnan(cos)
    return torch.where(unknown, size, _times(size, cos))


@elementwise(aten.exp.default)
def exp(z: Pair) -> Pair:
    """``e^z``: e^re · (cos im + i · sin im)."""
    size = torch.exp(z.re)
    vanishes = (z.re == -math.inf) & ~torch.isfinite(z.im)
    re = torch.where(vanishes, 0.0, _times_cos(size, z.im))
    im = torch.where(vanishes, 0.0, _times(size, torch.sin(z.im)))
    return Pair(re, im)


@elementwise(aten.expm1.default)
def _expm1(z: Pair) -> Pair:
    half = torch.sin(z.im * 0.5)
    re = _times_cos(torch.expm1(z.re), z.im) - 2 * half * half
    return Pair(re, exp(z).im)


@elementwise(aten.log.default)
def log(z: Pair) -> Pair:
    """The principal logarithm: log |z| + i · argument."""
    return Pair(torch.log(absolute(z)), argument(z))


@elementwise(aten.log1p.default)
def _log1p(z: Pair) -> Pair:
    x, y = z.re, z.im
    near = torch.log1p(x * (2 + x) + y * y) * 0.5
    far = torch.log(torch.hypot(x + 1, y))
    return Pair(torch.where(absolute(z) < 0.5, near, far), torch.atan2(y, x + 1))


@elementwise(aten.sqrt.default)
def sqrt(z: Pair) -> Pair:
    """The principal square root, without an overflow of squares."""
    x, y = z.re, z.im
    # Halves, so that the sum does not overflow.
    root = 2 * torch.sqrt(torch.hypot(x / 8, y / 8) + x.abs() / 8)
    small = torch.where(root == 0, y.abs(), y.abs() / (2 * root))
    small = torch.where(torch.isinf(x) & torch.isfinite(y), 0.0, small)
    right = (x >= 0) | torch.isnan(x)
    re, im = torch.where(right, root, small), torch.where(right, small, root)
    infinite = torch.isinf(y)
    re, im = torch.where(infinite, math.inf, re), torch.where(infinite, math.inf, im)
    return Pair(re, torch.copysign(im, y))


@elementwise(aten.sinh.default)
def sinh(z: Pair) -> Pair:
    """sinh(re) · cos(im) + i · cosh(re) · sin(im)."""
    x, y = z.re, z.im
    return Pair(_times_cos(torch.sinh(x), y), _times(torch.cosh(x), torch.sin(y)))


@elementwise(aten.cosh.default)
def cosh(z: Pair) -> Pair:
    """cosh(re) · cos(im) + i · sinh(re) · sin(im)."""
    x, y = z.re, z.im
    return Pair(_times_cos(torch.cosh(x), y), _times(torch.sinh(x), torch.sin(y)))


@elementwise(aten.tanh.default)
def tanh(z: Pair) -> Pair:
    """The hyperbolic tangent."""
    x, y = z.re, z.im
    sin, cos, s = torch.sin(y), torch.cos(y), torch.sinh(x.clamp(-12, 12))
    size = cos * cos + s * s
    re, im = s * torch.sqrt(1 + s * s) / size, sin * cos / size
    # tanh(x + iy) → ±1 + 4i·sin(y)·cos(y)·exp(-2|x|)
    far = x.abs() > 11
    decay = torch.exp(-2 * x.abs())
    vanishing = torch.where(torch.isfinite(y), 4 * sin * cos * decay, 0.0)
    re = torch.where(far, torch.copysign(torch.ones_like(x), x), re)
    im = torch.where(far, torch.where(torch.isinf(x), vanishing, 4 * sin * cos * decay), im)
    im = torch.where(y == 0, y, im)  # also where x is NaN
    re = torch.where(x == 0, x, re)  # also where y is infinite
    return Pair(re, im)


def _hull(z: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """(asin(b), acos(b), log(a + √(a² - 1))) for |z|'s elliptic coordinates a and b, where
    asin(|z|) = asin(b) + i·log(a + √(a² - 1)); the first two without cancellation near 1.
    """
    x, y = z.re.abs(), z.im.abs()
    size = torch.hypot(x, y)
    large = size > _LARGE
    # An argument at which nothing overflows, where the result is taken from elsewhere.
    x, y = torch.where(large, 0.0, x), torch.where(large, 0.0, y)
    r, s = torch.hypot(x + 1, y), torch.hypot(x - 1, y)
    a = 0.5 * (r + s)
    b = x / a
    # (r - (x + 1), s - (1 - x)) without cancellation; 0/0 where both vanish.
    below = y * y / (r + (x + 1))
    inside = torch.where(s + (1 - x) == 0, 0.0, y * y / (s + (1 - x)))
    outside = torch.where(s + (x - 1) == 0, 0.0, y * y / (s + (x - 1)))
    within = x <= 1
    # a² - x²
    root = torch.sqrt(0.5 * (a + x) * (below + torch.where(within, s + (1 - x), outside)))
    flat = b <= _B_CROSSOVER
    asin = torch.where(flat, torch.asin(b.clamp(max=1)), torch.atan2(x, root))
    acos = torch.where(flat, torch.acos(b.clamp(max=1)), torch.atan2(root, x))
    # Also where y is NaN.
    asin, acos = torch.where(x == 0, 0.0, asin), torch.where(x == 0, math.pi / 2, acos)
    # a - 1
    above = 0.5 * (below + torch.where(x < 1, inside, s + (x - 1)))
    grown = torch.where(
        a <= _A_CROSSOVER,
        torch.log1p(above + torch.sqrt(above * (a + 1))),
        torch.log(a + torch.sqrt(a * a - 1)),
    )
    u, v = z.re.abs(), z.im.abs()
    return (
        torch.where(large, torch.atan2(u, v), asin),
        torch.where(large, torch.atan2(v, u), acos),
        torch.where(large, math.log(2) + torch.log(size), grown),
    )


@elementwise(aten.asin.default)
def asin(z: Pair) -> Pair:
    """The principal arcsine, after Hull, Fairgrieve and Tang."""
    re, _, im = _hull(z)
    im = torch.where(absolute(z) < 1e-5, z.im.abs(), im)  # their squares may vanish
    return Pair(torch.copysign(re, z.re), torch.copysign(im, z.im))


@elementwise(aten.acos.default)
def acos(z: Pair) -> Pair:
    """The principal arccosine, after Hull, Fairgrieve and Tang."""
    _, re, im = _hull(z)
    re = torch.where(torch.signbit(z.re), math.pi - re, re)
    return Pair(re, -torch.copysign(im, z.im))


@elementwise(aten.acosh.default)
def _acosh(z: Pair) -> Pair:
    found = acos(z)
    return Pair(found.im.abs(), torch.copysign(found.re, z.im))


@elementwise(aten.atanh.default)
def atanh(z: Pair) -> Pair:
    """The principal inverse hyperbolic tangent."""
    x, y = z.re, z.im
    size = absolute(z)
    large = size > _LARGE
    u, v = torch.where(large, 0.0, x.abs()), torch.where(large, 0.0, y)
    distance = torch.hypot(1 - u, v)  # from the pole, where its square may vanish
    re = torch.where(
        distance < 1e-3,
        0.5 * (torch.log(torch.hypot(1 + u, v)) - torch.log(distance)),
        0.25 * torch.log1p(4 * u / ((1 - u) * (1 - u) + v * v)),
    )
    im = 0.5 * torch.atan2(2 * v, (1 - u) * (1 + u) - v * v)
    # x/|z|²
    far = torch.where(torch.isinf(size), 0.0, x.abs() / size / size)
    quarter = torch.copysign(torch.full_like(y, math.pi / 2), y)
    re, im = torch.where(large, far, re), torch.where(large, quarter, im)
    re = torch.where(x == 0, 0.0, re)
    return Pair(
        torch.copysign(re, x), torch.where(torch.isnan(size) | torch.isnan(y), math.nan, im)
    )


@elementwise(aten.sigmoid.default)
def sigmoid(z: Pair) -> Pair:
    """``1 / (1 + e^−z)``."""
    return reciprocal(constant(1, z.dtype) + exp(-z))


def power(z: Pair, w: Pair) -> Pair:
    """The principal value of z^w; 1 for w = 0, and 0 for z = 0 with re(w) > 0."""
    size, phase = absolute(z), argument(z)
    # exp(w·log z), with the accuracy of a real power.
    radius = torch.pow(size, w.re) * torch.exp(-w.im * phase)
    angle = w.re * phase + w.im * torch.log(size)
    found = Pair(_times(radius, torch.cos(angle)), _times(radius, torch.sin(angle)))
    one, zero = torch.ones_like(found.re), torch.zeros_like(found.re)
    vanishes = z.is_zero() & (w.re > 0)
    found = choose(vanishes, Pair(zero, zero), found)
    return choose(w.is_zero(), Pair(one, zero), found)


# The exponents for which ATen multiplies.
_POWERS: dict[float, Callable[[Pair], Pair]] = {
    0.5: sqrt,
    1.0: lambda z: z,
    2.0: lambda z: z * z,
    3.0: lambda z: z * z * z,
    -0.5: lambda z: reciprocal(sqrt(z)),
    -1.0: reciprocal,
    -2.0: lambda z: reciprocal(z * z),
}


@rule(aten.pow.Tensor_Scalar)
def _pow_scalar(call: ComplexCall, self: Any, exponent: Any) -> Pair:
    z = as_pair(self, call.dtype)
    if isinstance(exponent, (bool, int, float, complex)):
        number = complex(exponent)
        chosen = _POWERS.get(number.real) if number.imag == 0 else None
        if chosen is not None:
            return chosen(z)
        if number == 0:
            return Pair(torch.ones_like(z.re), torch.zeros_like(z.re))
    return power(z, as_pair(exponent, call.dtype))


# Rules that are one expression, and functions that others use, too.
_EXPRESSIONS: dict[tuple[OpOverload, ...], Callable[..., Any]] = {
    (aten.abs.default,): absolute,
    (aten.angle.default,): argument,
    (aten.mul.Tensor, aten.mul.Scalar): lambda a, b: a * b,
    (aten.div.Tensor, aten.div.Scalar): lambda a, b: a / b,
    (aten.true_divide.Tensor, aten.true_divide.Scalar): lambda a, b: a / b,
    (aten.square.default,): lambda z: z * z,
    (aten._conj.default, aten._conj_copy.default): lambda z: z.conj(),
    (aten._conj_physical.default, aten.conj_physical.default): lambda z: z.conj(),
    (aten._neg_view.default, aten._neg_view_copy.default): lambda z: -z,
    (aten.eq.Tensor, aten.eq.Scalar): lambda a, b: (a.re == b.re) & (a.im == b.im),
    (aten.ne.Tensor, aten.ne.Scalar): lambda a, b: (a.re != b.re) | (a.im != b.im),
    (aten.isnan.default,): lambda z: torch.isnan(z.re) | torch.isnan(z.im),
    (aten.isinf.default,): lambda z: torch.isinf(z.re) | torch.isinf(z.im),
    (aten.isfinite.default,): lambda z: torch.isfinite(z.re) & torch.isfinite(z.im),
    (aten.logical_not.default,): lambda z: z.is_zero(),
    (aten.logical_and.default,): lambda a, b: ~a.is_zero() & ~b.is_zero(),
    (aten.logical_or.default,): lambda a, b: ~a.is_zero() | ~b.is_zero(),
    (aten.logical_xor.default,): lambda a, b: a.is_zero() ^ b.is_zero(),
    (aten.exp2.default,): lambda z: exp(z.scaled(math.log(2))),
    (aten.log2.default,): lambda z: log(z).scaled(1 / math.log(2)),
    (aten.log10.default,): lambda z: log(z).scaled(1 / math.log(10)),
    (aten.rsqrt.default,): lambda z: reciprocal(sqrt(z)),
    (aten.sin.default,): lambda z: sinh(z.times_i()).over_i(),
    (aten.cos.default,): lambda z: cosh(z.times_i()),
    (aten.tan.default,): lambda z: tanh(z.times_i()).over_i(),
    (aten.asinh.default,): lambda z: asin(z.times_i()).over_i(),
    (aten.atan.default,): lambda z: atanh(z.times_i()).over_i(),
    (aten.silu.default,): lambda z: z * sigmoid(z),
    (aten.sigmoid_backward.default,): lambda g, y: g * ((constant(1, y.dtype) - y) * y).conj(),
    (aten.tanh_backward.default,): lambda g, y: g * (constant(1, y.dtype) - y * y).conj(),
    (aten.pow.Tensor_Tensor, aten.pow.Scalar): power,
}
for _ops, _rule in _EXPRESSIONS.items():
    elementwise(*_ops)(_rule)
