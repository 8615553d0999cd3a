"""Modified Bessel functions of the first kind, of orders 0 and 1.

Up to 8 their power series, whose terms are all positive; beyond, √x · e⁻ˣ times them is a
polynomial in 16 / x - 1 (scripts/fit_math_f64.py). Source of the operators: ATen ``Math.h``.
"""

from __future__ import annotations

import math

import torch

from ..ir.scalar import Scalar, apply
from .builder import Builder
from .pointwise import elementwise
from .promotion import float_dtype
from .registry import lowers
from .series import is_double, number, polynomial
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


def _bessel(x: Scalar, order: int, scaled: bool) -> Scalar:
    """I of |x|, times e^-|x| if ``scaled``; order 1 has the sign of x."""
    a = apply("abs", x)
    quarter = apply("mul", apply("square", a), number(0.25, a))
    terms = 27 if is_double(a) else 15
    factors = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(terms)]
    near = polynomial(quarter, factors[::-1])
    if order:
        near = apply("mul", near, apply("mul", a, number(0.5, a)))
    inverse = apply("sub", apply("div", number(16, a), a), number(1, a))
    far = polynomial(inverse, (_FAR_DOUBLE if is_double(a) else _FAR_SINGLE)[order])
    far = apply("div", far, apply("sqrt", a))
    if scaled:
        near = apply("mul", near, apply("exp", apply("neg", a)))
    else:
        far = apply("mul", far, apply("exp", a))
    total = apply("where", apply("le", a, number(8, a)), near, far)
    if not order:
        return total
    return apply("where", apply("lt", x, number(0, x)), apply("neg", total), total)


def _register(name: str, order: int, scaled: bool) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value) -> Value:
        dtype = float_dtype(self.dtype)
        return elementwise(builder, lambda x: _bessel(x, order, scaled), self, dtype=dtype)


_register("i0", 0, scaled=False)
_register("special_i0e", 0, scaled=True)
_register("special_i1", 1, scaled=False)
_register("special_i1e", 1, scaled=True)
_register("special_modified_bessel_i0", 0, scaled=False)
_register("special_modified_bessel_i1", 1, scaled=False)
