"""Modified Bessel functions of both kinds, of orders 0 and 1.

Those of the first kind: up to 8 their power series, whose terms are all positive; beyond, √x · e⁻ˣ
times them is a polynomial in 16 / x - 1 (scripts/fit_math_f64.py). Those of the second kind:
Chebyshev series of the Cephes library (S. L. Moshier, netlib.org/cephes: k0.c and k1.c), in x² - 2
up to 2 and in 8 / x - 2 beyond. Source of the operators: ATen ``Math.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..ir.scalar import Scalar, apply
from .builder import Builder
from .pointwise import elementwise
from .promotion import float_dtype
from .registry import lowers
from .series import chebyshev_sum, is_double, number, polynomial
from .value import Value

aten = torch.ops.aten

_FAR_SINGLE = (
    (
        1.08299091e-07, 3.63170981e-07, 1.47679197e-06, 1.11115255e-05, 0.000136216843,
        0.00336055585, 0.402176509,
    ),
    (
        -1.22125106e-07, -4.21555383e-07, -1.82671435e-06, -1.50033231e-05, -0.000219236669,
        -0.00974958153, 0.389398459,
    ),
)  # fmt: skip
_FAR_DOUBLE = (
    (
        1.0882006374261023e-10, 3.525295387979033e-11, -7.473849738420546e-10,
        -2.748098722305407e-10, 2.398193634948057e-09, 1.0924499403506e-09, -4.848251732075781e-09,
        -3.1185112076945132e-09, 6.7897907263644855e-09, 7.3233082634290236e-09,
        -5.162517859966978e-09, -1.3319797444062164e-08, -6.805980151001781e-09,
        7.532386084112072e-09, 2.1556811141452515e-08, 3.9329265768996546e-08,
        8.872154618349451e-08, 2.973595658097338e-07, 1.4838475863102162e-06,
        1.1143033802583924e-05, 0.0001362160743918719, 0.0033605519836677235, 0.4021765094450081,
    ),
    (
        -1.1328903469939156e-10, -3.2677377496300705e-11, 7.790679055154389e-10,
        2.582155405302224e-10, -2.50621754710484e-09, -1.0476097520363946e-09,
        5.094017609457508e-09, 3.0717359196809693e-09, -7.222524889964578e-09,
        -7.432532648648895e-09, 5.722677700253305e-09, 1.3952623854130251e-08,
        6.7950735043729375e-09, -8.407326477033504e-09, -2.3382691373001304e-08,
        -4.313231568690661e-08, -1.0001220638343219e-07, -3.4838530713107415e-07,
        -1.8349101539668907e-06, -1.5038547211274495e-05, -0.000219235763833829,
        -0.009749577193235609, 0.38939845902587233,
    ),
)  # fmt: skip

_SECOND_NEAR = (
    (
        1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
        2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615,
        0.3442898999246285, -0.5353273932339028,
    ),
    (
        -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13,
        -1.4114883926335278e-10, -2.213387630734726e-08, -2.4334061415659684e-06,
        -0.0001730288957513052, -0.006975723859639864, -0.12261118082265715, -0.3531559607765449,
        1.5253002273389478,
    ),
)  # fmt: skip
_SECOND_FAR = (
    (
        5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17,
        -1.678231096805412e-16, 5.512055978524319e-16, -1.848593377343779e-15,
        6.3400764774050706e-15, -2.2275133269916698e-14, 8.032890775363575e-14,
        -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
        1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10,
        -1.69753450938906e-09, 8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07,
        -1.8317555227191195e-06, 1.39498137188765e-05, -0.00012849549581627802,
        0.0015698838857300533, -0.0314481013119645, 2.4403030820659555,
    ),
    (
        -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17,
        1.838093544366639e-16, -6.057047248373319e-16, 2.038703165624334e-15,
        -7.019837090418314e-15, 2.4771544244813043e-14, -8.976705182324994e-14,
        3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
        -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10,
        2.015049755197033e-09, -1.0345762465678097e-08, 5.7410841254500495e-08,
        -3.5019606030878126e-07, 2.406484947837217e-06, -1.936197974166083e-05,
        0.00019521551847135162, -0.002857816859622779, 0.10392373657681724, 2.7206261904844427,
    ),
)  # fmt: skip


def _series(a: Scalar, order: int) -> Scalar:
    """I of 0 ≤ a ≤ 8."""
    quarter = apply("mul", apply("square", a), number(0.25, a))
    terms = 27 if is_double(a) else 15
    factors = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(terms)]
    total = polynomial(quarter, factors[::-1])
    return apply("mul", total, apply("mul", a, number(0.5, a))) if order else total


def _first_kind(x: Scalar, order: int, scaled: bool) -> Scalar:
    """I of |x|, times e^-|x| if ``scaled``; order 1 has the sign of x."""
    a = apply("abs", x)
    near = _series(a, order)
    inverse = apply("sub", apply("div", number(16, a), a), number(1, a))
    far = polynomial(inverse, (_FAR_DOUBLE if is_double(a) else _FAR_SINGLE)[order])
    far = apply("div", far, apply("sqrt", a))
    if scaled:
        near = apply("mul", near, apply("exp", apply("neg", a)))
    else:  # by halves: eᵃ is infinite before √a makes it small enough
        half = apply("exp", apply("mul", a, number(0.5, a)))
        far = apply("mul", apply("mul", far, half), half)
    total = apply("where", apply("le", a, number(8, a)), near, far)
    if not order:
        return total
    return apply("where", apply("lt", x, number(0, x)), apply("neg", total), total)


def _second_kind(x: Scalar, order: int, scaled: bool) -> Scalar:
    """K of x, times eˣ if ``scaled``; ∞ at 0, NaN below it."""
    smallest = 0.0 if is_double(x) else 1e-10
    near_terms = [c for c in _SECOND_NEAR[order] if abs(c) > smallest]
    far_terms = [c for c in _SECOND_FAR[order] if abs(c) > smallest]
    near = chebyshev_sum(apply("sub", apply("square", x), number(2, x)), near_terms)
    logarithm = apply("sub", apply("log", x), number(math.log(2), x))
    logarithm = apply("mul", logarithm, _series(x, order))
    if order:
        near = apply("add", apply("div", near, x), logarithm)
    else:
        near = apply("sub", near, logarithm)
    place = apply("sub", apply("div", number(8, x), x), number(2, x))
    far = apply("div", chebyshev_sum(place, far_terms), apply("sqrt", x))
    if scaled:
        near = apply("mul", near, apply("exp", x))
    else:
        far = apply("mul", far, apply("exp", apply("neg", x)))
    total = apply("where", apply("le", x, number(2, x)), near, far)
    total = apply("where", apply("lt", x, number(0, x)), number(math.nan, x), total)
    return apply("where", apply("eq", x, number(0, x)), number(math.inf, x), total)


def _register(name: str, kind: Callable[[Scalar, int, bool], Scalar], order: int) -> None:
    scaled = name.endswith("e")

    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value) -> Value:
        """A modified Bessel function of one order; scaled by an exponential for names in e."""
        dtype = float_dtype(self.dtype)
        return elementwise(builder, lambda x: kind(x, order, scaled), self, dtype=dtype)


def _register_scaled(name: str, order: int) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, x: Value) -> Value:  # ATen's name of the argument
        """``exp(x)`` times the modified Bessel function of the second kind."""
        dtype = float_dtype(x.dtype)
        return elementwise(builder, lambda a: _second_kind(a, order, scaled=True), x, dtype=dtype)


_register("i0", _first_kind, 0)
_register("special_i0e", _first_kind, 0)
_register("special_i1", _first_kind, 1)
_register("special_i1e", _first_kind, 1)
for _order in (0, 1):
    _register(f"special_modified_bessel_i{_order}", _first_kind, _order)
    _register(f"special_modified_bessel_k{_order}", _second_kind, _order)
    _register_scaled(f"special_scaled_modified_bessel_k{_order}", _order)
