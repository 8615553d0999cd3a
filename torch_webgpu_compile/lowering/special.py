"""Special functions as scalar expressions. Source: ATen ``Math.h`` unless one says otherwise.

Those of a single tensor, but for Bessel functions, and those of two tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from .. import dtypes
from ..ir import numeric
from ..ir.scalar import Scalar, apply, cast, const, where
from ..symbolic.sizes import IntLike
from ..torch_private import _disable_current_modes
from .builder import Builder
from .pointwise import elementwise, lowers_elementwise, register_binary
from .promotion import compute_dtype, float_dtype, result_dtype
from .registry import NotLowered, lowers
from .value import Value

aten = torch.ops.aten


def polynomial(x: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Horner's rule, the coefficient of the highest power first."""
    total: Scalar = const(coefficients[0], x.dtype)
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def is_double(x: Scalar) -> bool:
    """Whether results have 53 bits, not 24."""
    return x.dtype is dtypes.float64


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


@lowers_elementwise(aten.erfinv.default, to_float=True)
def erfinv(y: Scalar) -> Scalar:
    """The x with erf(x) = y: ±∞ at ±1, NaN beyond."""
    magnitude = abs(y)
    x = _erfinv_double(y) if is_double(y) else _erfinv_single(y)
    x = where(apply("eq", magnitude, 1), apply("copysign", math.inf, y), x)
    return where(magnitude <= 1, x, math.nan)


def _erfinv_single(y: Scalar) -> Scalar:
    magnitude = abs(y)
    w = -apply("log", (1 - magnitude) * (1 + magnitude))
    near = polynomial(w - 2.5, _ERFINV_NEAR)
    far = polynomial(apply("sqrt", w) - 3, _ERFINV_FAR)
    return where(w < 5, near, far) * y


def _erfinv_double(y: Scalar) -> Scalar:
    """A rational approximation, then two steps of Newton's method."""
    square = apply("square", y)
    numerator = polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    denominator = polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1))
    central = y * numerator / denominator
    magnitude = abs(y)
    z = apply("sqrt", -apply("log", (1 - magnitude) * 0.5))
    numerator = polynomial(z, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    tail = numerator / polynomial(z, (1.6370678, 3.5438892, 1))
    x = where(magnitude <= 0.7, central, apply("copysign", tail, y))
    for _ in range(2):
        slope = apply("exp", -apply("square", x)) * (2 / math.sqrt(math.pi))
        x -= (apply("erf", x) - y) / slope
    return x


# Lanczos' approximation with g = 7 (Godfrey's coefficients).
_LANCZOS = (
    676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip


def _lgamma_positive(x: Scalar) -> Scalar:
    """log Γ(x) for x ≥ 0.5."""
    series: Scalar = const(0.99999999999980993, x.dtype)
    for k, coefficient in enumerate(_LANCZOS):
        series += coefficient / (x + k)
    power = (x - 0.5) * (apply("log", x + 6.5) - 1)
    return power - (7.0 - 0.5 * math.log(2 * math.pi)) + apply("log", series)


# log Γ(1 + t) / (t (t − 1)) for −0.3 ≤ t ≤ 1.3 (scripts/fit_math_f64.py).
_LGAMMA_MIDDLE = (
    0.000689656831, -0.00524169609, 0.017754463, -0.0361819341, 0.0519513214, -0.0609318744,
    0.0676170879, -0.077301056, 0.0921682601, -0.115139977, 0.155435936, -0.245251507, 0.577215658,
)  # fmt: skip


def _lgamma_positive_single(x: Scalar) -> Scalar:
    """log Γ(x) for x ≥ 0.5, with the digits of its zeros at 1 and 2: shifted to 0.7 … 2.3, below 8.

    From there by Stirling's series.
    """
    low = x < 0.7
    y = where(low, x + 1, x)
    factor = where(low, x, 1)
    for _ in range(6):
        high = y > 2.3
        below = y - 1
        factor = where(high, factor * below, factor)
        y = where(high, below, y)
    t, rest = y - 1, y - 2
    middle = t * rest * polynomial(t, _LGAMMA_MIDDLE)
    shift = apply("log", factor)
    middle += where(low, -shift, shift)
    inverse = apply("reciprocal", x)
    tail = polynomial(apply("square", inverse), (1 / 1260, -1 / 360, 1 / 12))
    tail = tail * inverse + (0.5 * math.log(2 * math.pi) - 0.5)
    far = (x - 0.5) * (apply("log", x) - 1)
    return where(x < 8, middle, far + tail)


@lowers_elementwise(aten.lgamma.default, to_float=True)
def _lgamma(x: Scalar) -> Scalar:
    """``log |Γ(x)|``: ∞ at 0, at negative integers and at ±∞.

    By reflection below 0.5: log(π / |sin πx|) − log Γ(1 − x).
    """
    below = x < 0.5
    above = _lgamma_positive if is_double(x) else _lgamma_positive_single
    positive = above(where(below, 1 - x, x))
    fraction = abs(x - apply("round", x))
    turned = math.log(math.pi) - apply("log", apply("sin", fraction * math.pi))
    # π times a subnormal number has few digits.
    turned = where(fraction < 1e-9, -apply("log", fraction), turned)
    value = where(below, turned - positive, positive)
    pole = (x <= 0) & apply("eq", fraction, 0)
    return where(pole | apply("isinf", x), math.inf, value)


# −Bₖ / k for k = 14, 12, …, 2, and a 0.
_BERNOULLI = (-1 / 12, 691 / 32760, -1 / 132, 1 / 240, -1 / 252, 1 / 120, -1 / 12, 0)


def _digamma_positive(x: Scalar) -> Scalar:
    """Steps of ψ(x) = ψ(x + 1) − 1/x, then the asymptotic series log y − 1/2y − Σ Bₖ / (k · yᵏ).

    Its first omitted term is 1e-10 at y = 6 with 4 terms, and 4e-17 at y = 10 with 7.
    """
    steps, terms = (10, 8) if is_double(x) else (6, 5)
    total: Scalar = const(0, x.dtype)
    for k in range(steps):
        total -= apply("reciprocal", x + k)
    y = x + steps
    tail = polynomial(apply("reciprocal", apply("square", y)), _BERNOULLI[-terms:])
    return total + (apply("log", y) - 0.5 / y + tail)


@lowers_elementwise(aten.digamma.default, to_float=True)
def _digamma(x: Scalar) -> Scalar:
    """The derivative of log Γ: NaN at negative integers, ∓∞ at ±0.

    By reflection at and below 0: ψ(1 − x) − π / tan(πx).
    """
    below = x <= 0
    positive = _digamma_positive(where(below, 1 - x, x))
    fraction = x - apply("round", x)
    reflected = positive - math.pi / apply("tan", fraction * math.pi)
    value = where(below, reflected, positive)
    value = where(below & apply("eq", fraction, 0), math.nan, value)
    pole = apply("copysign", math.inf, -x)
    return where(apply("eq", x, 0), pole, value)


@lowers(aten.frexp.Tensor)
def lower_frexp(builder: Builder, self: Value) -> tuple[Value, Value]:
    """(mantissa in ±[½, 1), exponent), from the bits; of 0, infinities and NaN (itself, 0)."""
    dtype = compute_dtype(self.dtype)
    bits, fraction, lift = (dtypes.int64, 52, 54) if dtype.itemsize == 8 else (dtypes.int32, 23, 24)
    field = (1 << (dtype.bits - 1 - fraction)) - 1
    x = cast(self.body, dtype)
    low = abs(x) < 2.0 ** (2 - (field + 1) // 2)
    word = apply("bitcast", where(low, x * 2.0**lift, x), dtype=bits)
    biased = (word >> fraction) & field
    half = field // 2 - 1  # the field of numbers in [½, 1)
    sized = word & ~(field << fraction)
    mantissa = apply("bitcast", sized | (half << fraction), dtype=dtype)
    lifted = where(low, const(half + lift, bits), half)
    exponent = cast(biased - lifted, dtypes.int32)
    whole = apply("eq", x, 0) | apply("isinf", x) | apply("isnan", x)
    mantissa = cast(where(whole, x, mantissa), self.dtype)
    exponent = where(whole, 0, exponent)
    return builder.pointwise(mantissa, self.sizes), builder.pointwise(exponent, self.sizes)


@lowers_elementwise(aten.angle.default, to_float=True)
def _angle(x: Scalar) -> Scalar:
    """The angle of a real number: π below 0, NaN of NaN."""
    angle = where(x < 0, const(math.pi, x.dtype), 0)
    return where(apply("isnan", x), x, angle)


# (1 + 2x) e^(x²) erfc(x) of (x - 3) / (x + 3) for x ≥ 0 (scripts/fit_math_f64.py).
_ERFCX_SINGLE = (
    -1.14821515e-05, 3.85827038e-06, 0.00011463134, -0.000104120006, -0.000773111323, 0.00188810082,
    0.00252711614, -0.0237703284, 0.0683083996, -0.119273693, 0.129645136, -0.0475622926,
    -0.135621106, 1.25300806,
)  # fmt: skip
_ERFCX_DOUBLE = (
    -2.493999547093731e-11, 8.374653503345704e-10, 1.1419253545149883e-09, -8.206102023071068e-09,
    -1.3740387201870881e-08, 4.103372590971679e-08, 1.0251513230276719e-07, -1.4043068818516823e-07,
    -6.17290882996402e-07, 3.557168384970679e-07, 3.4728389482316485e-06, -7.308002228029463e-07,
    -2.010075725952219e-05, 4.949184834887326e-06, 0.00012509940881189988, -0.00010515971629343544,
    -0.0007798322830265823, 0.0018886903444179975, 0.00252939181735896, -0.023770514917110776,
    0.06830802734389389, -0.11927366341538964, 0.12964515870276314, -0.04756229435344913,
    -0.1356211061245812, 1.2530080582697296,
)  # fmt: skip


def _exp_square(x: Scalar) -> Scalar:
    """e^(x²), accurate although x² has more digits than the dtype holds.

    x is split into a part whose square is exact and a rest; |x| counts as 40 beyond 40.
    """
    x = apply("minimum", abs(x), 40)  # an infinity has no rest
    bits, dropped = (dtypes.int64, 27) if is_double(x) else (dtypes.int32, 12)
    word = apply("bitcast", x, dtype=bits) & (-1 << dropped)
    high = apply("bitcast", word, dtype=x.dtype)
    rest = (x - high) * (x + high)
    return apply("exp", apply("square", high)) * apply("exp", rest)


@lowers_elementwise(aten.special_erfcx.default, to_float=True)
def _erfcx(x: Scalar) -> Scalar:
    """``e^(x²) · erfc(x)``; below 0 by 2 e^(x²) − erfcx(−x)."""
    a = abs(x)
    # Infinity is as good as 10^18 here, and 10^18 / 10^18 is not NaN.
    place = where(a >= 1e18, 1, (a - 3) / (a + 3))
    fit = polynomial(place, _ERFCX_DOUBLE if is_double(x) else _ERFCX_SINGLE)
    positive = fit / (1 + a * 2)
    return where(x < 0, _exp_square(x) * 2 - positive, positive)


@lowers_elementwise(aten.special_log_ndtr.default, to_float=True)
def _log_ndtr(x: Scalar) -> Scalar:
    """log of the normal distribution function, from the scaled tail below −1."""
    scaled = x * -math.sqrt(0.5)
    tail = apply("log", _erfcx(scaled) * 0.5) - apply("square", x) * 0.5
    body = where(x < -1, tail, apply("log1p", apply("erfc", -scaled) * -0.5))
    return where(apply("isinf", x) & (x < 0), x, body)


@lowers_elementwise(aten.special_ndtri.default, to_float=True)
def _ndtri(p: Scalar) -> Scalar:
    """The normal quantile of p: √2 erfinv(2p − 1) in the middle, where that keeps its digits.

    Else of q = min(p, 1 − p), by the rational approximation 26.2.23 of Abramowitz and Stegun (error
    4.5e-4) and Halley's method, whose error is that cubed: once for 24 bits, twice for 53.
    """
    lower = p <= 0.5
    q = where(lower, p, 1 - p)
    t = apply("sqrt", apply("log", q) * -2)
    numerator = polynomial(t, (0.010328, 0.802853, 2.515517))
    denominator = polynomial(t, (0.001308, 0.189269, 1.432788, 1))
    x = numerator / denominator - t
    for _ in range(2 if is_double(p) else 1):
        # (Φ(x) − q) / φ(x), with both divided by e^(−x²/2).
        root = apply("exp", apply("square", x) * 0.25)
        tail = _erfcx(x * -math.sqrt(0.5)) * 0.5
        wanted = q * root * root
        step = (tail - wanted) * math.sqrt(2 * math.pi)
        x -= step / (1 + x * step * 0.5)
    x = where(apply("eq", q, 0), -math.inf, x)
    outer = where(lower, x, -x)
    offset = p * 2 - 1
    central = abs(offset) < (0.5 if is_double(p) else 0.67)
    return where(central, erfinv(offset) * math.sqrt(2), outer)


# Coefficients grow as n!: those of derivative 20 still fit float32. Beyond, the zeta function.
_MOST = 20


def _bernoulli(count: int) -> list[Fraction]:
    """B₀, B₁, …: Σ over j ≤ k of C(k + 1, j) Bⱼ is 0."""
    found: list[Fraction] = []
    for k in range(count):
        total = sum((math.comb(k + 1, j) * found[j] for j in range(k)), Fraction(0))
        found.append(Fraction(1) if k == 0 else -total / (k + 1))
    return found


def _power(x: Scalar, n: int) -> Scalar:
    """x to the n ≥ 1, by multiplication."""
    if n == 1:
        return x
    half = _power(apply("square", x), n // 2)
    return half * x if n % 2 else half


def _hurwitz_zeta(x: Scalar, s: int) -> Scalar:
    """Σ over k ≥ 0 of 1 / (x + k)ˢ for x ≥ ½: some terms, then Euler's and Maclaurin's formula."""
    steps, terms = (12, 9) if is_double(x) else (8, 4)
    total = apply("reciprocal", _power(x + 0, s))
    for k in range(1, steps):
        total += apply("reciprocal", _power(x + k, s))
    y = x + steps
    # y^(1-s) · (1 / (s - 1) + (½ + rest) / y), where the rest is the sum over j of
    # B₂ⱼ / (2j)! · s (s + 1) … (s + 2j - 2) / y^(2j-1).
    bernoulli = _bernoulli(2 * terms + 1)
    factors = []
    for j in range(1, terms + 1):
        rising = math.prod(range(s, s + 2 * j - 1))
        factors.append(float(bernoulli[2 * j] * rising / math.factorial(2 * j)))
    inverse = apply("reciprocal", y)
    series = polynomial(apply("square", inverse), factors[::-1]) * inverse
    tail = (series + 0.5) * inverse + 1 / (s - 1)
    return total + tail * _power(inverse, s - 1)


def _cotangent_derivative(n: int) -> list[int]:
    """The nth derivative of cot as a polynomial in cot, lowest power first: P' · -(1 + c²)."""
    found = [0, 1]
    for _ in range(n):
        slope = [k * factor for k, factor in enumerate(found)][1:]
        found = [0] * (len(slope) + 2)
        for k, factor in enumerate(slope):
            found[k] -= factor
            found[k + 2] -= factor
    return found


def _cotangent_of_turns(fraction: Scalar) -> Scalar:
    """cot(π · fraction) from -½ to ½: tan(π · (½ - fraction)) beyond ¼, which is exact at ½."""
    size = abs(fraction)
    beyond = size > 0.25
    turns = where(beyond, 0.5 - size, size)
    tangent = apply("tan", turns * math.pi)
    cotangent = where(beyond, tangent, apply("reciprocal", tangent))
    return where(fraction < 0, -cotangent, cotangent)


def _polygamma(x: Scalar, n: int) -> Scalar:
    """(-1)ⁿ⁺¹ n! ζ(n + 1, x), or below ½ by reflection -πⁿ⁺¹ cot⁽ⁿ⁾(πx) - n! ζ(n + 1, 1 - x)."""
    below = x < 0.5
    at = where(below, 1 - x, x)
    sign = 1.0 if n % 2 else -1.0
    zeta = _hurwitz_zeta(at, n + 1) * float(math.factorial(n))
    fraction = x - apply("round", x)
    cotangent = _cotangent_of_turns(fraction)
    factors = [float(factor) * math.pi ** (n + 1) for factor in _cotangent_derivative(n)]
    reflected = -(polynomial(cotangent, factors[::-1]) + zeta)
    value = where(below, reflected, zeta * sign)
    whole = apply("eq", fraction, 0)
    if n > 1:  # to PyTorch, -∞ is one of the negative integers, and ∞ · 0 is in its sum for ∞
        value = where(apply("eq", x, math.inf), math.nan, value)
        whole |= apply("isinf", x)
    pole = whole & below
    return where(pole, sign * math.inf, value)


def _by_zeta(x: Scalar, n: int) -> Scalar:
    """±n! ζ(n + 1, x), infinite where the factorial is, as in ATen ``calc_polygamma``."""
    largest = 1.7976931348623157e308 if is_double(x) else 3.4028234663852886e38
    factorial = math.factorial(n) if n <= 170 else math.inf
    size = math.inf if factorial > largest else float(factorial)
    return apply("zeta", n + 1, x) * (size if n % 2 else -size)


@lowers(aten.polygamma.default)
def lower_polygamma(builder: Builder, n: IntLike, self: Value) -> Value:
    """The ``n``-th derivative of digamma; integers are computed in the default float dtype.

    Raises NotLowered: for an ``n`` that is a symbolic size.
    """
    if not isinstance(n, int):
        raise NotLowered(f"derivative {n} of the digamma function: n is not a number")

    def body(x: Scalar) -> Scalar:
        if n == 0:
            return _digamma(x)
        return _by_zeta(x, n) if n > _MOST else _polygamma(x, n)

    return elementwise(builder, body, self, dtype=float_dtype(self.dtype))


def _define(name: str, function: Callable[..., Any]) -> None:
    """On the host, a function that kernels loop for is PyTorch's own."""

    def on_host(*operands: Any) -> Any:
        with _disable_current_modes():  # tensors of a graph that is compiled are fake
            return function(*(torch.from_numpy(np.array(operand)) for operand in operands)).numpy()

    numeric.define(name, on_host)


def _register_polynomial(operator: str, name: str) -> None:
    _define(name, getattr(aten, f"special_{operator}"))
    register_binary(f"special_{operator}", name, "default x_scalar n_scalar", to_float=True)


for _kind in "tuvw":
    _register_polynomial(f"chebyshev_polynomial_{_kind}", f"chebyshev_{_kind}")
    _register_polynomial(f"shifted_chebyshev_polynomial_{_kind}", f"shifted_chebyshev_{_kind}")
_register_polynomial("hermite_polynomial_h", "hermite_h")
_register_polynomial("hermite_polynomial_he", "hermite_he")
_register_polynomial("laguerre_polynomial_l", "laguerre")
_register_polynomial("legendre_polynomial_p", "legendre")


_define("zeta", aten.special_zeta)
register_binary("special_zeta", "zeta", "default self_scalar other_scalar", to_float=True)


def _register_gamma(name: str) -> None:
    packet = getattr(aten, name)
    _define(name, packet)

    @lowers(packet.default)
    def lower(builder: Builder, self: Value, other: Value) -> Value:
        """An incomplete gamma function of parameter ``self`` at ``other``.

        Raises NotLowered: for float64, as its kernel has the digits of float32.
        """
        dtype = result_dtype((self, other))
        if dtype is dtypes.float64:
            raise NotLowered(f"{name} of float64: its kernel has the digits of float32")
        return elementwise(builder, lambda a, x: apply(name, a, x), self, other, dtype=dtype)


_register_gamma("igamma")
_register_gamma("igammac")


register_binary("gcd", "gcd", "default")


@lowers_elementwise(aten.lcm.default)
def _lcm(a: Scalar, b: Scalar) -> Scalar:
    """``|a / gcd · b|``, 0 where either is 0.

    Narrow integers are multiplied in 32 bits, as C++ promotes them.
    """
    wide = a.dtype if a.dtype.bits >= 32 else dtypes.int32
    a, b = cast(a, wide), cast(b, wide)
    return abs(apply("trunc_divide", a, apply("maximum", apply("gcd", a, b), 1)) * b)
