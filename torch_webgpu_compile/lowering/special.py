"""Special functions as scalar expressions. Source: ATen ``Math.h`` unless one says otherwise."""

from __future__ import annotations

import math

import torch

from .. import dtypes
from ..ir.scalar import Scalar, apply, cast, const
from .builder import Builder
from .pointwise import elementwise
from .promotion import compute_dtype, float_dtype
from .registry import lowers
from .series import is_double, number, polynomial
from .value import Value

aten = torch.ops.aten


# As M. Giles, "Approximating the erfinv function" (2010), has it: polynomials in w = -log(1 - y²),
# less 2.5 below 5 (scripts/fit_math_f64.py), and in its root less 3 from there (his); erfinv is y
# times them.
_ERFINV_NEAR = (
    4.67194068e-10, -8.7390119e-09, 1.59842948e-08, 4.65417425e-07, -3.42341422e-06,
    -4.95969186e-06, 0.000218257724, -0.0012527485, -0.00417732004, 0.246640289, 1.50140935,
)  # fmt: skip
_ERFINV_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def erfinv(y: Scalar) -> Scalar:
    """The x with erf(x) = y: ±∞ at ±1, NaN beyond."""
    if is_double(y):
        return _erfinv_double(y)
    one, magnitude = number(1, y), apply("abs", y)
    inside = apply("mul", apply("sub", one, magnitude), apply("add", one, magnitude))
    w = apply("neg", apply("log", inside))
    near = polynomial(apply("sub", w, number(2.5, y)), _ERFINV_NEAR)
    far = polynomial(apply("sub", apply("sqrt", w), number(3, y)), _ERFINV_FAR)
    x = apply("mul", apply("where", apply("lt", w, number(5, y)), near, far), y)
    return _erfinv_ends(x, y)


def _erfinv_double(y: Scalar) -> Scalar:
    """A rational approximation, then two steps of Newton's method."""
    square = apply("square", y)
    numerator = polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    denominator = polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1))
    central = apply("div", apply("mul", y, numerator), denominator)
    magnitude = apply("abs", y)
    rest = apply("mul", apply("sub", number(1, y), magnitude), number(0.5, y))
    z = apply("sqrt", apply("neg", apply("log", rest)))
    numerator = polynomial(z, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    tail = apply("div", numerator, polynomial(z, (1.6370678, 3.5438892, 1)))
    x = apply("where", _le(magnitude, 0.7), central, apply("copysign", tail, y))
    for _ in range(2):
        slope = apply("exp", apply("neg", apply("square", x)))
        slope = apply("mul", slope, number(2 / math.sqrt(math.pi), x))
        x = apply("sub", x, apply("div", apply("sub", apply("erf", x), y), slope))
    return _erfinv_ends(x, y)


def _erfinv_ends(x: Scalar, y: Scalar) -> Scalar:
    infinity = apply("copysign", number(math.inf, y), y)
    magnitude = apply("abs", y)
    x = apply("where", apply("eq", magnitude, number(1, y)), infinity, x)
    return apply("where", _le(magnitude, 1), x, number(math.nan, y))


def _le(x: Scalar, bound: float) -> Scalar:
    return apply("le", x, number(bound, x))


# Lanczos' approximation with g = 7 (Godfrey's coefficients).
_LANCZOS = (
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)


def _lgamma_positive(x: Scalar) -> Scalar:
    """log Γ(x) for x ≥ 0.5."""
    one = number(1, x)
    series = number(0.99999999999980993, x)
    for k, coefficient in enumerate(_LANCZOS):
        term = apply("div", number(coefficient, x), apply("add", x, number(float(k), x)))
        series = apply("add", series, term)
    t = apply("add", x, number(6.5, x))
    power = apply("mul", apply("sub", x, number(0.5, x)), apply("sub", apply("log", t), one))
    total = apply("sub", power, number(7.0 - 0.5 * math.log(2 * math.pi), x))
    return apply("add", total, apply("log", series))


# log Γ(1 + t) / (t (t − 1)) for −0.3 ≤ t ≤ 1.3 (scripts/fit_math_f64.py).
_LGAMMA_MIDDLE = (
    0.000689656831, -0.00524169609, 0.017754463, -0.0361819341, 0.0519513214, -0.0609318744,
    0.0676170879, -0.077301056, 0.0921682601, -0.115139977, 0.155435936, -0.245251507, 0.577215658,
)  # fmt: skip


def _lgamma_positive_single(x: Scalar) -> Scalar:
    """log Γ(x) for x ≥ 0.5, with the digits of its zeros at 1 and 2: shifted to 0.7 … 2.3, below 8.

    From there by Stirling's series.
    """
    one = number(1, x)
    low = apply("lt", x, number(0.7, x))
    y = apply("where", low, apply("add", x, one), x)
    factor = apply("where", low, x, one)
    for _ in range(6):
        high = apply("gt", y, number(2.3, x))
        below = apply("sub", y, one)
        factor = apply("where", high, apply("mul", factor, below), factor)
        y = apply("where", high, below, y)
    t, rest = apply("sub", y, one), apply("sub", y, number(2, x))
    middle = apply("mul", apply("mul", t, rest), polynomial(t, _LGAMMA_MIDDLE))
    shift = apply("log", factor)
    middle = apply("add", middle, apply("where", low, apply("neg", shift), shift))
    inverse = apply("reciprocal", x)
    tail = polynomial(apply("square", inverse), (1 / 1260, -1 / 360, 1 / 12))
    tail = apply("add", apply("mul", tail, inverse), number(0.5 * math.log(2 * math.pi) - 0.5, x))
    power = apply("sub", x, number(0.5, x))
    far = apply("mul", power, apply("sub", apply("log", x), one))
    return apply("where", apply("lt", x, number(8, x)), middle, apply("add", far, tail))


def _lgamma(x: Scalar) -> Scalar:
    """By reflection below 0.5: log(π / |sin πx|) − log Γ(1 − x)."""
    below = apply("lt", x, number(0.5, x))
    one = number(1, x)
    above = _lgamma_positive if is_double(x) else _lgamma_positive_single
    positive = above(apply("where", below, apply("sub", one, x), x))
    fraction = apply("abs", apply("sub", x, apply("round", x)))
    sine = apply("sin", apply("mul", fraction, number(math.pi, x)))
    turned = apply("sub", number(math.log(math.pi), x), apply("log", sine))
    # π times a subnormal number has few digits.
    tiny = apply("lt", fraction, number(1e-9, x))
    turned = apply("where", tiny, apply("neg", apply("log", fraction)), turned)
    value = apply("where", below, apply("sub", turned, positive), positive)
    pole = apply("bitwise_and", _le(x, 0), apply("eq", fraction, number(0, x)))
    return apply("where", apply("bitwise_or", pole, apply("isinf", x)), number(math.inf, x), value)


# −Bₖ / k for k = 14, 12, …, 2, and a 0.
_BERNOULLI = (-1 / 12, 691 / 32760, -1 / 132, 1 / 240, -1 / 252, 1 / 120, -1 / 12, 0)


def _digamma_positive(x: Scalar) -> Scalar:
    """Steps of ψ(x) = ψ(x + 1) − 1/x, then the asymptotic series log y − 1/2y − Σ Bₖ / (k · yᵏ).

    Its first omitted term is 1e-10 at y = 6 with 4 terms, and 4e-17 at y = 10 with 7.
    """
    steps, terms = (10, 8) if x.dtype is dtypes.float64 else (6, 5)
    total = number(0, x)
    for k in range(steps):
        step = apply("reciprocal", apply("add", x, number(float(k), x)))
        total = apply("sub", total, step)
    y = apply("add", x, number(float(steps), x))
    z = apply("reciprocal", apply("square", y))
    tail = polynomial(z, _BERNOULLI[-terms:])
    half = apply("div", number(0.5, y), y)
    series = apply("add", apply("sub", apply("log", y), half), tail)
    return apply("add", total, series)


def _digamma(x: Scalar) -> Scalar:
    """By reflection at and below 0: ψ(1 − x) − π / tan(πx)."""
    zero, one = number(0, x), number(1, x)
    below = _le(x, 0)
    positive = _digamma_positive(apply("where", below, apply("sub", one, x), x))
    fraction = apply("sub", x, apply("round", x))
    cotangent = apply("tan", apply("mul", fraction, number(math.pi, x)))
    reflected = apply("sub", positive, apply("div", number(math.pi, x), cotangent))
    value = apply("where", below, reflected, positive)
    whole = apply("bitwise_and", below, apply("eq", fraction, zero))
    value = apply("where", whole, number(math.nan, x), value)
    pole = apply("copysign", number(math.inf, x), apply("neg", x))
    return apply("where", apply("eq", x, zero), pole, value)


@lowers(aten.erfinv.default)
def lower_erfinv(builder: Builder, self: Value) -> Value:
    """The inverse of erf: ±∞ at ±1, NaN beyond. Integers become the default float."""
    return elementwise(builder, erfinv, self, dtype=float_dtype(self.dtype))


@lowers(aten.lgamma.default)
def lower_lgamma(builder: Builder, self: Value) -> Value:
    """``log |Γ(x)|``: ∞ at 0, at negative integers and at ±∞. Integers become the default float."""
    return elementwise(builder, _lgamma, self, dtype=float_dtype(self.dtype))


@lowers(aten.digamma.default)
def lower_digamma(builder: Builder, self: Value) -> Value:
    """The derivative of log Γ: NaN at negative integers, ∓∞ at ±0.

    Integers are computed in the default float dtype.
    """
    return elementwise(builder, _digamma, self, dtype=float_dtype(self.dtype))


@lowers(aten.frexp.Tensor)
def lower_frexp(builder: Builder, self: Value) -> tuple[Value, Value]:
    """(mantissa in ±[½, 1), exponent), from the bits; of 0, infinities and NaN (itself, 0)."""
    dtype = compute_dtype(self.dtype)
    bits, fraction, lift = (dtypes.int64, 52, 54) if dtype.itemsize == 8 else (dtypes.int32, 23, 24)
    field = (1 << (dtype.bits - 1 - fraction)) - 1
    x = cast(self.body, dtype)
    low = apply("lt", apply("abs", x), number(2.0 ** (2 - (field + 1) // 2), x))
    word = apply(
        "bitcast", apply("where", low, apply("mul", x, number(2.0**lift, x)), x), dtype=bits
    )
    biased = apply(
        "bitwise_and", apply("shift_right", word, const(fraction, bits)), const(field, bits)
    )
    half = field // 2 - 1  # the field of numbers in [½, 1)
    sized = apply("bitwise_and", word, const(~(field << fraction), bits))
    mantissa = apply(
        "bitcast", apply("bitwise_or", sized, const(half << fraction, bits)), dtype=dtype
    )
    lifted = apply("where", low, const(half + lift, bits), const(half, bits))
    exponent = cast(apply("sub", biased, lifted), dtypes.int32)
    whole = apply("bitwise_or", apply("eq", x, number(0, x)), apply("isinf", x))
    whole = apply("bitwise_or", whole, apply("isnan", x))
    mantissa = cast(apply("where", whole, x, mantissa), self.dtype)
    exponent = apply("where", whole, const(0, dtypes.int32), exponent)
    return builder.pointwise(mantissa, self.sizes), builder.pointwise(exponent, self.sizes)


@lowers(aten.angle.default)
def lower_angle(builder: Builder, self: Value) -> Value:
    """Of real numbers: π below 0, NaN of NaN."""

    def body(x: Scalar) -> Scalar:
        angle = apply("where", apply("lt", x, number(0, x)), number(math.pi, x), number(0, x))
        return apply("where", apply("isnan", x), x, angle)

    return elementwise(builder, body, self, dtype=float_dtype(self.dtype))
