"""Bessel functions of both kinds, of orders 0 and 1, and Airy's function Ai.

Rational approximations of the Cephes library (S. L. Moshier, netlib.org/cephes: j0.c, j1.c and
airy.c), with the leading 1 of their monic denominators, which ATen ``Math.h`` leaves out: PyTorch
is off by up to 1e-6 just past 5, and Ai by 3e-6 just below -2.09. Special values are ATen's.
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
from .series import is_double, number, polynomial
from .value import Value

aten = torch.ops.aten

# By order, in (5 / x)² for x > 5: the modulus of the cosine (P) and of the sine (Q).
_P_OVER = (
    (
        0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687,
        8.74716500199817, 5.303240382353949, 1.0,
    ),
    (
        0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076,
        8.424045901417724, 5.214515986823615, 1.0,
    ),
)  # fmt: skip
_P_UNDER = (
    (
        0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171,
        8.761908832370695, 5.306052882353947, 1.0,
    ),
    (
        0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015,
        8.399855543276042, 5.209828486823619, 1.0,
    ),
)  # fmt: skip
_Q_OVER = (
    (
        -0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683,
        -177.68116798048806, -147.07750515495118, -51.41053267665993, -6.050143506007285,
    ),
    (
        0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508,
        710.8563049989261, 597.4896124006136, 211.68875710057213, 25.207020585802372,
    ),
)  # fmt: skip
_Q_UNDER = (
    (
        1.0, 64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525,
        5930.727011873169, 2062.0933166032783, 242.0057402402914,
    ),
    (
        1.0, 74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562,
        7997.041604473507, 2826.1927851763908, 336.0936078106983,
    ),
)  # fmt: skip
# In x² for x ≤ 5: J over its factors, and Y without its logarithm.
_J_OVER = (
    (
        -4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0,
    ),
    (
        -899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0,
    ),
)  # fmt: skip
_J_UNDER = (
    (
        1.0, 499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683,
        2112775201154.892, 310518229857422.56, 3.1812195594320496e+16, 1.7108629408104315e+18,
    ),
    (
        1.0, 620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925,
        4749141220799.914, 784369607876235.9, 8.952223361846274e+16, 5.322786203326801e+18,
    ),
)  # fmt: skip
_Y_OVER = (
    (
        15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115,
        87590639439536.7, -3466283033847297.0, 4.4273326857256984e+16, -1.8495080043698668e+16,
    ),
    (
        1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0,
        2.024394757135949e+17, -7.788771962659501e+17,
    ),
)  # fmt: skip
_Y_UNDER = (
    (
        1.0, 1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935,
        20297961275010.555, 3171577528429750.5, 2.5059625617265306e+17,
    ),
    (
        1.0, 594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617,
        3882312774962.3857, 620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18,
    ),
)  # fmt: skip
# In 1 / ζ with ζ = ⅔ |x|^1.5: Ai from 2.09, and in its square the two parts of Ai below -2.09.
_AIRY_OVER = (
    0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058,
    159.75639135016442, 70.53609068404442, 14.026469116338967, 1.0,
)  # fmt: skip
_AIRY_UNDER = (
    0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297,
    71.47784008255756, 14.095913560783403, 1.0,
)  # fmt: skip
_AIRY_SINE_OVER = (
    -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191,
    -0.04919001326095003, -0.004062659235948854, -0.0001592764962392621, -2.776491081552329e-06,
    -1.6778769848911465e-08,
)  # fmt: skip
_AIRY_SINE_UNDER = (
    1.0, 13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596,
    1.4752914677166642, 0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05,
    4.5185009297058035e-07,
)  # fmt: skip
_AIRY_COSINE_OVER = (
    0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502,
    0.35146565610554764, 0.06338889196289255, 0.005858041130483885, 0.000282851600836737,
    6.98793669997261e-06, 8.117892395543892e-08, 3.415517847659236e-10,
)  # fmt: skip
_AIRY_COSINE_UNDER = (
    1.0, 9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755,
    0.9542936116189619, 0.08645808263523921, 0.004126565238242226, 0.00010125908511650914,
    1.1716673321441352e-06, 4.9183457006293e-09,
)  # fmt: skip
# The first zero of J by order, in two parts, to float32 and to float64; the square of the second.
_ZEROS = (
    ((2.404825448989868, 1.0870590460455913e-07), (2.404825557695773, -1.176691651530894e-16)),
    ((3.8317060470581055, -7.685059315313556e-08), (3.8317059702075125, -1.5269184090088067e-16)),
)
_SECOND = (30.471262343662087, 49.2184563216946)


def _ratio(x: Scalar, over: tuple[float, ...], under: tuple[float, ...]) -> Scalar:
    return apply("div", polynomial(x, over), polynomial(x, under))


def _times(x: Scalar, factor: float) -> Scalar:
    return apply("mul", x, number(factor, x))


def _near_first(x: Scalar, order: int) -> Scalar:
    """J of 0 ≤ x ≤ 5: a rational function times its first two factors."""
    square = apply("square", x)
    first, rest = _ZEROS[order][1 if is_double(x) else 0]
    below = apply("sub", apply("sub", x, number(first, x)), number(rest, x))
    factors = apply("mul", below, apply("add", x, number(first, x)))
    factors = apply("mul", factors, apply("sub", square, number(_SECOND[order], x)))
    value = apply("mul", factors, _ratio(square, _J_OVER[order], _J_UNDER[order]))
    if order:
        return apply("mul", value, x)
    tiny = apply("lt", x, number(1e-4 if is_double(x) else 1e-2, x))
    return apply("where", tiny, polynomial(square, (-0.25, 1)), value)


def _far(x: Scalar, order: int, second: bool) -> Scalar:
    """J, or Y if ``second``, of x > 5: P and Q times the cosine and sine of x - (2n + 1) π / 4.

    The angle is not subtracted, which would round it: cos(x - π/4) is (cos x + sin x) / √2.
    """
    inverse = apply("div", number(5, x), x)
    square = apply("square", inverse)
    p = _ratio(square, _P_OVER[order], _P_UNDER[order])
    q = apply("mul", inverse, _ratio(square, _Q_OVER[order], _Q_UNDER[order]))
    sine, cosine = apply("sin", x), apply("cos", x)
    total, difference = apply("add", sine, cosine), apply("sub", sine, cosine)
    turned = (total, difference) if order == 0 else (difference, apply("neg", total))
    if second:
        value = apply("add", apply("mul", p, turned[1]), apply("mul", q, turned[0]))
    else:
        value = apply("sub", apply("mul", p, turned[0]), apply("mul", q, turned[1]))
    return apply("div", _times(value, 1 / math.sqrt(math.pi)), apply("sqrt", x))


def _first_kind(x: Scalar, order: int) -> Scalar:
    a = apply("abs", x)
    near = apply("le", a, number(5, a))
    value = apply("where", near, _near_first(a, order), _far(a, order, second=False))
    if not order:
        return value
    return apply("where", apply("lt", x, number(0, x)), apply("neg", value), value)


def _second_kind(x: Scalar, order: int) -> Scalar:
    """-∞ at 0, NaN below it."""
    square = apply("square", x)
    regular = _ratio(square, _Y_OVER[order], _Y_UNDER[order])
    logarithm = apply("mul", apply("log", x), _near_first(x, order))
    if order:
        regular = apply("mul", regular, x)
        logarithm = apply("sub", logarithm, apply("reciprocal", x))
    near = apply("add", regular, _times(logarithm, 2 / math.pi))
    value = apply("where", apply("le", x, number(5, x)), near, _far(x, order, second=True))
    value = apply("where", apply("lt", x, number(0, x)), number(math.nan, x), value)
    return apply("where", apply("eq", x, number(0, x)), number(-math.inf, x), value)


def _spherical(x: Scalar) -> Scalar:
    """sin x / x; 0 at the infinities."""
    factors = [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)]
    small = polynomial(apply("square", x), factors[::-1])
    value = apply("div", apply("sin", x), x)
    value = apply("where", apply("lt", apply("abs", x), number(0.5, x)), small, value)
    return apply("where", apply("isinf", x), number(0, x), value)


def _airy_series(x: Scalar) -> Scalar:
    """c₁ f - c₂ g, two power series in x³."""
    terms = 16 if is_double(x) else 9
    f, g = [1.0], [1.0]
    for k in range(1, terms):
        f.append(f[-1] / ((3 * k - 1) * (3 * k)))
        g.append(g[-1] / ((3 * k) * (3 * k + 1)))
    cube = apply("mul", apply("square", x), x)
    even = polynomial(cube, [0.355028053887817239260 * c for c in f[::-1]])
    odd = polynomial(cube, [0.258819403792806798405 * c for c in g[::-1]])
    return apply("sub", even, apply("mul", x, odd))


def _airy(x: Scalar) -> Scalar:
    """NaN at both infinities, as ATen has it."""
    a = apply("abs", x)
    root = apply("sqrt", a)
    zeta = _times(apply("mul", a, root), 2 / 3)
    inverse = apply("reciprocal", zeta)
    scale = apply("div", number(1 / math.sqrt(math.pi), x), apply("sqrt", root))
    above = apply("mul", _ratio(inverse, _AIRY_OVER, _AIRY_UNDER), _times(scale, 0.5))
    above = apply("mul", above, apply("exp", apply("neg", zeta)))
    square = apply("square", inverse)
    sine, cosine = apply("sin", zeta), apply("cos", zeta)
    p = apply("mul", square, _ratio(square, _AIRY_SINE_OVER, _AIRY_SINE_UNDER))
    p = apply("add", p, number(1, x))
    q = apply("mul", inverse, _ratio(square, _AIRY_COSINE_OVER, _AIRY_COSINE_UNDER))
    waves = apply("mul", p, apply("add", sine, cosine))
    waves = apply("sub", waves, apply("mul", q, apply("sub", cosine, sine)))
    below = apply("mul", _times(scale, math.sqrt(0.5)), waves)
    value = apply("where", apply("lt", x, number(-2.09, x)), below, _airy_series(x))
    value = apply("where", apply("ge", x, number(2.09, x)), above, value)
    value = apply("where", apply("gt", x, number(103.892, x)), number(0, x), value)
    return apply("where", apply("isinf", x), number(math.nan, x), value)


def _register(name: str, body: Callable[[Scalar, int], Scalar], order: int) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value) -> Value:
        """A Bessel function of one order; integers are computed in the default float dtype."""
        dtype = float_dtype(self.dtype)
        return elementwise(builder, lambda x: body(x, order), self, dtype=dtype)


for _order in (0, 1):
    _register(f"special_bessel_j{_order}", _first_kind, _order)
    _register(f"special_bessel_y{_order}", _second_kind, _order)


@lowers(aten.special_spherical_bessel_j0.default)
def lower_spherical_bessel_j0(builder: Builder, x: Value) -> Value:
    """``sin(x) / x``, and 1 at 0; integers are computed in the default float dtype."""
    return elementwise(builder, _spherical, x, dtype=float_dtype(x.dtype))


@lowers(aten.special_airy_ai.default)
def lower_airy_ai(builder: Builder, x: Value) -> Value:
    """The Airy function Ai; NaN for infinite x. Integers are computed in the default float."""
    return elementwise(builder, _airy, x, dtype=float_dtype(x.dtype))
