"""The normal distribution's tails and quantiles. Source of the operators: ATen ``Math.h``."""

from __future__ import annotations

import math

import torch

from .. import dtypes
from ..ir.scalar import Scalar, apply, const
from .builder import Builder
from .pointwise import Body, elementwise
from .promotion import float_dtype
from .registry import lowers
from .series import is_double, number, polynomial
from .special import erfinv
from .value import Value

aten = torch.ops.aten

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


def exp_square(x: Scalar) -> Scalar:
    """e^(x²), accurate although x² has more digits than the dtype holds.

    x is split into a part whose square is exact and a rest; |x| counts as 40 beyond 40.
    """
    x = apply("minimum", apply("abs", x), number(40, x))  # an infinity has no rest
    double = is_double(x)
    bits = dtypes.int64 if double else dtypes.int32
    kept = const(-1 << (27 if double else 12), bits)
    word = apply("bitwise_and", apply("bitcast", x, dtype=bits), kept)
    high = apply("bitcast", word, dtype=x.dtype)
    rest = apply("mul", apply("sub", x, high), apply("add", x, high))
    return apply("mul", apply("exp", apply("square", high)), apply("exp", rest))


def _erfcx(x: Scalar) -> Scalar:
    """e^(x²) · erfc(x); below 0 by 2 e^(x²) − erfcx(−x)."""
    a = apply("abs", x)
    three = number(3, x)
    place = apply("div", apply("sub", a, three), apply("add", a, three))
    # Infinity is as good as 10^18 here, and 10^18 / 10^18 is not NaN.
    end = apply("ge", a, number(1e18, a))
    place = apply("where", end, number(1, x), place)
    fit = polynomial(place, _ERFCX_DOUBLE if is_double(x) else _ERFCX_SINGLE)
    half = apply("add", number(1, x), apply("mul", a, number(2, x)))
    positive = apply("div", fit, half)
    twice = apply("mul", exp_square(x), number(2, x))
    below = apply("lt", x, number(0, x))
    return apply("where", below, apply("sub", twice, positive), positive)


def _log_ndtr(x: Scalar) -> Scalar:
    """log of the distribution function, from the scaled tail below −1."""
    scaled = apply("mul", x, number(-math.sqrt(0.5), x))
    tail = apply("log", apply("mul", _erfcx(scaled), number(0.5, x)))
    tail = apply("sub", tail, apply("mul", apply("square", x), number(0.5, x)))
    rest = apply("mul", apply("erfc", apply("neg", scaled)), number(-0.5, x))
    body = apply("where", apply("lt", x, number(-1, x)), tail, apply("log1p", rest))
    endless = apply("bitwise_and", apply("isinf", x), apply("lt", x, number(0, x)))
    return apply("where", endless, x, body)


def _ndtri(p: Scalar) -> Scalar:
    """The quantile of p: √2 erfinv(2p − 1) in the middle, where that keeps its digits.

    Else of q = min(p, 1 − p), by the rational approximation 26.2.23 of Abramowitz and Stegun (error
    4.5e-4) and Halley's method, whose error is that cubed: once for 24 bits, twice for 53.
    """
    one, half = number(1, p), number(0.5, p)
    lower = apply("le", p, half)
    q = apply("where", lower, p, apply("sub", one, p))
    t = apply("sqrt", apply("mul", apply("log", q), number(-2, p)))
    numerator = polynomial(t, (0.010328, 0.802853, 2.515517))
    denominator = polynomial(t, (0.001308, 0.189269, 1.432788, 1))
    x = apply("sub", apply("div", numerator, denominator), t)
    for _ in range(2 if is_double(p) else 1):
        # (Φ(x) − q) / φ(x), with both divided by e^(−x²/2).
        root = apply("exp", apply("mul", apply("square", x), number(0.25, p)))
        tail = apply("mul", _erfcx(apply("mul", x, number(-math.sqrt(0.5), p))), half)
        wanted = apply("mul", apply("mul", q, root), root)
        step = apply("mul", apply("sub", tail, wanted), number(math.sqrt(2 * math.pi), p))
        bend = apply("add", one, apply("mul", apply("mul", x, step), half))
        x = apply("sub", x, apply("div", step, bend))
    x = apply("where", apply("eq", q, number(0, p)), number(-math.inf, p), x)
    outer = apply("where", lower, x, apply("neg", x))
    offset = apply("sub", apply("mul", p, number(2, p)), one)
    inner = apply("mul", erfinv(offset), number(math.sqrt(2), p))
    central = apply("lt", apply("abs", offset), half if is_double(p) else number(0.67, p))
    return apply("where", central, inner, outer)


def _register(name: str, body: Body) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value) -> Value:
        """A function of each element; integers are computed in the default float dtype."""
        return elementwise(builder, body, self, dtype=float_dtype(self.dtype))


_register("special_erfcx", _erfcx)
_register("special_log_ndtr", _log_ndtr)
_register("special_ndtri", _ndtri)
