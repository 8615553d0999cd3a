"""Bessel functions of orders 0 and 1, modified ones too, and Airy's function Ai.

J, Y and Ai are the rational approximations of the Cephes library (S. L. Moshier,
netlib.org/cephes: j0.c, j1.c and airy.c), with the leading 1 of their monic denominators, which
ATen ``Math.h`` leaves out: PyTorch is off by up to 1e-6 just past 5, and Ai by 3e-6 just below
-2.09. Special values are ATen's.

The modified I is its power series up to 8, whose terms are all positive; beyond, √x · e⁻ˣ I is a
polynomial in 16 / x - 1 (scripts/fit_math_f64.py). K is a Chebyshev series of Cephes (k0.c and
k1.c), in x² - 2 up to 2 and in 8 / x - 2 beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..ir.scalar import Scalar, apply, const, where
from .pointwise import lowers_elementwise
from .special import is_double, polynomial

aten = torch.ops.aten

# By order, in (5 / x)² for x > 5: the modulus of the cosine (P) and of the sine (Q).
_P_OVER = (
    (0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687,
     8.74716500199817, 5.303240382353949, 1.0),
    (0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076,
     8.424045901417724, 5.214515986823615, 1.0),
)  # fmt: skip
_P_UNDER = (
    (0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171,
     8.761908832370695, 5.306052882353947, 1.0),
    (0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015,
     8.399855543276042, 5.209828486823619, 1.0),
)  # fmt: skip
_Q_OVER = (
    (-0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683,
     -177.68116798048806, -147.07750515495118, -51.41053267665993, -6.050143506007285),
    (0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508,
     710.8563049989261, 597.4896124006136, 211.68875710057213, 25.207020585802372),
)  # fmt: skip
_Q_UNDER = (
    (1.0, 64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525,
     5930.727011873169, 2062.0933166032783, 242.0057402402914),
    (1.0, 74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562,
     7997.041604473507, 2826.1927851763908, 336.0936078106983),
)  # fmt: skip
# In x² for x ≤ 5: J over its factors, and Y without its logarithm.
_J_OVER = (
    (-4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0),
    (-899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0),
)  # fmt: skip
_J_UNDER = (
    (1.0, 499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683,
     2112775201154.892, 310518229857422.56, 3.1812195594320496e+16, 1.7108629408104315e+18),
    (1.0, 620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925,
     4749141220799.914, 784369607876235.9, 8.952223361846274e+16, 5.322786203326801e+18),
)  # fmt: skip
_Y_OVER = (
    (15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115,
     87590639439536.7, -3466283033847297.0, 4.4273326857256984e+16, -1.8495080043698668e+16),
    (1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0,
     2.024394757135949e+17, -7.788771962659501e+17),
)  # fmt: skip
_Y_UNDER = (
    (1.0, 1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935,
     20297961275010.555, 3171577528429750.5, 2.5059625617265306e+17),
    (1.0, 594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617,
     3882312774962.3857, 620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18),
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
    return polynomial(x, over) / polynomial(x, under)


def _near_first(x: Scalar, order: int) -> Scalar:
    """J of 0 ≤ x ≤ 5: a rational function times its first two factors."""
    square = apply("square", x)
    first, rest = _ZEROS[order][1 if is_double(x) else 0]
    factors = (x - first - rest) * (x + first) * (square - _SECOND[order])
    value = factors * _ratio(square, _J_OVER[order], _J_UNDER[order])
    if order:
        return value * x
    tiny = x < (1e-4 if is_double(x) else 1e-2)
    return where(tiny, polynomial(square, (-0.25, 1)), value)


def _far(x: Scalar, order: int, second: bool) -> Scalar:
    """J, or Y if ``second``, of x > 5: P and Q times the cosine and sine of x - (2n + 1) π / 4.

    The angle is not subtracted, which would round it: cos(x - π/4) is (cos x + sin x) / √2.
    """
    inverse = 5 / x
    square = apply("square", inverse)
    p = _ratio(square, _P_OVER[order], _P_UNDER[order])
    q = inverse * _ratio(square, _Q_OVER[order], _Q_UNDER[order])
    sine, cosine = apply("sin", x), apply("cos", x)
    total, difference = sine + cosine, sine - cosine
    turned = (total, difference) if order == 0 else (difference, -total)
    value = p * turned[1] + q * turned[0] if second else p * turned[0] - q * turned[1]
    return value * (1 / math.sqrt(math.pi)) / apply("sqrt", x)


def _bessel_j(x: Scalar, order: int) -> Scalar:
    a = abs(x)
    value = where(a <= 5, _near_first(a, order), _far(a, order, second=False))
    return where(x < 0, -value, value) if order else value


def _bessel_y(x: Scalar, order: int) -> Scalar:
    """-∞ at 0, NaN below it."""
    square = apply("square", x)
    regular = _ratio(square, _Y_OVER[order], _Y_UNDER[order])
    logarithm = apply("log", x) * _near_first(x, order)
    if order:
        regular *= x
        logarithm -= apply("reciprocal", x)
    near = regular + logarithm * (2 / math.pi)
    value = where(x < 0, math.nan, where(x <= 5, near, _far(x, order, second=True)))
    return where(apply("eq", x, 0), -math.inf, value)


@lowers_elementwise(aten.special_spherical_bessel_j0.default, to_float=True)
def _spherical(x: Scalar) -> Scalar:
    """``sin(x) / x``: 1 at 0, and 0 at the infinities."""
    factors = [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)]
    small = polynomial(apply("square", x), factors[::-1])
    value = where(abs(x) < 0.5, small, apply("sin", x) / x)
    return where(apply("isinf", x), 0, value)


def _airy_series(x: Scalar) -> Scalar:
    """c₁ f - c₂ g, two power series in x³."""
    terms = 16 if is_double(x) else 9
    f, g = [1.0], [1.0]
    for k in range(1, terms):
        f.append(f[-1] / ((3 * k - 1) * (3 * k)))
        g.append(g[-1] / ((3 * k) * (3 * k + 1)))
    cube = apply("square", x) * x
    even = polynomial(cube, [0.355028053887817239260 * c for c in f[::-1]])
    odd = polynomial(cube, [0.258819403792806798405 * c for c in g[::-1]])
    return even - x * odd


@lowers_elementwise(aten.special_airy_ai.default, to_float=True)
def _airy(x: Scalar) -> Scalar:
    """The Airy function Ai; NaN at both infinities, as ATen has it."""
    a = abs(x)
    root = apply("sqrt", a)
    zeta = a * root * (2 / 3)
    inverse = apply("reciprocal", zeta)
    scale = 1 / math.sqrt(math.pi) / apply("sqrt", root)
    above = _ratio(inverse, _AIRY_OVER, _AIRY_UNDER) * (scale * 0.5) * apply("exp", -zeta)
    square = apply("square", inverse)
    sine, cosine = apply("sin", zeta), apply("cos", zeta)
    p = square * _ratio(square, _AIRY_SINE_OVER, _AIRY_SINE_UNDER) + 1
    q = inverse * _ratio(square, _AIRY_COSINE_OVER, _AIRY_COSINE_UNDER)
    below = scale * math.sqrt(0.5) * (p * (sine + cosine) - q * (cosine - sine))
    value = where(x >= 2.09, above, where(x < -2.09, below, _airy_series(x)))
    value = where(x > 103.892, 0, value)
    return where(apply("isinf", x), math.nan, value)


# I beyond 8, to float32 and to float64, and the Chebyshev coefficients of K; by order.
_I_FAR_SINGLE = (
    (1.08299091e-07, 3.63170981e-07, 1.47679197e-06, 1.11115255e-05, 0.000136216843, 0.00336055585,
     0.402176509),
    (-1.22125106e-07, -4.21555383e-07, -1.82671435e-06, -1.50033231e-05, -0.000219236669,
     -0.00974958153, 0.389398459),
)  # fmt: skip
_I_FAR_DOUBLE = (
    (1.0882006374261023e-10, 3.525295387979033e-11, -7.473849738420546e-10, -2.748098722305407e-10,
     2.398193634948057e-09, 1.0924499403506e-09, -4.848251732075781e-09, -3.1185112076945132e-09,
     6.7897907263644855e-09, 7.3233082634290236e-09, -5.162517859966978e-09,
     -1.3319797444062164e-08, -6.805980151001781e-09, 7.532386084112072e-09, 2.1556811141452515e-08,
     3.9329265768996546e-08, 8.872154618349451e-08, 2.973595658097338e-07, 1.4838475863102162e-06,
     1.1143033802583924e-05, 0.0001362160743918719, 0.0033605519836677235, 0.4021765094450081),
    (-1.1328903469939156e-10, -3.2677377496300705e-11, 7.790679055154389e-10, 2.582155405302224e-10,
     -2.50621754710484e-09, -1.0476097520363946e-09, 5.094017609457508e-09, 3.0717359196809693e-09,
     -7.222524889964578e-09, -7.432532648648895e-09, 5.722677700253305e-09, 1.3952623854130251e-08,
     6.7950735043729375e-09, -8.407326477033504e-09, -2.3382691373001304e-08,
     -4.313231568690661e-08, -1.0001220638343219e-07, -3.4838530713107415e-07,
     -1.8349101539668907e-06, -1.5038547211274495e-05, -0.000219235763833829, -0.009749577193235609,
     0.38939845902587233),
)  # fmt: skip
_K_NEAR = (
    (1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
     2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615,
     0.3442898999246285, -0.5353273932339028),
    (-7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13,
     -1.4114883926335278e-10, -2.213387630734726e-08, -2.4334061415659684e-06,
     -0.0001730288957513052, -0.006975723859639864, -0.12261118082265715, -0.3531559607765449,
     1.5253002273389478),
)  # fmt: skip
_K_FAR = (
    (5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16,
     5.512055978524319e-16, -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14,
     8.032890775363575e-14, -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
     1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10, -1.69753450938906e-09,
     8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
     1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645,
     2.4403030820659555),
    (-5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16,
     -6.057047248373319e-16, 2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14,
     -8.976705182324994e-14, 3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
     -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10, 2.015049755197033e-09,
     -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07,
     2.406484947837217e-06, -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779,
     0.10392373657681724, 2.7206261904844427),
)  # fmt: skip


def _chebyshev_sum(y: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Clenshaw's rule for Σ cₖ Tₖ(y / 2), the highest first, of the last one half."""
    zero: Scalar = const(0, y.dtype)
    total: Scalar = const(coefficients[0], y.dtype)
    before, last = zero, zero
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = y * last - before + coefficient
    return (total - before) * 0.5


def _series(a: Scalar, order: int) -> Scalar:
    """I of 0 ≤ a ≤ 8."""
    quarter = apply("square", a) * 0.25
    terms = 27 if is_double(a) else 15
    factors = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(terms)]
    total = polynomial(quarter, factors[::-1])
    return total * (a * 0.5) if order else total


def _modified_i(x: Scalar, order: int, scaled: bool) -> Scalar:
    """I of |x|, times e^-|x| if ``scaled``; order 1 has the sign of x."""
    a = abs(x)
    near = _series(a, order)
    factors = (_I_FAR_DOUBLE if is_double(a) else _I_FAR_SINGLE)[order]
    far = polynomial(16 / a - 1, factors) / apply("sqrt", a)
    if scaled:
        near *= apply("exp", -a)
    else:  # by halves: eᵃ is infinite before √a makes it small enough
        half = apply("exp", a * 0.5)
        far = far * half * half
    total = where(a <= 8, near, far)
    return where(x < 0, -total, total) if order else total


def _modified_k(x: Scalar, order: int, scaled: bool) -> Scalar:
    """K of x, times eˣ if ``scaled``; ∞ at 0, NaN below it."""
    smallest = 0.0 if is_double(x) else 1e-10
    near_terms = [c for c in _K_NEAR[order] if abs(c) > smallest]
    far_terms = [c for c in _K_FAR[order] if abs(c) > smallest]
    near = _chebyshev_sum(apply("square", x) - 2, near_terms)
    logarithm = (apply("log", x) - math.log(2)) * _series(x, order)
    near = near / x + logarithm if order else near - logarithm
    far = _chebyshev_sum(8 / x - 2, far_terms) / apply("sqrt", x)
    if scaled:
        near *= apply("exp", x)
    else:
        far *= apply("exp", -x)
    total = where(x < 0, math.nan, where(x <= 2, near, far))
    return where(apply("eq", x, 0), math.inf, total)


def _register(name: str, function: Callable[..., Scalar], *options: int) -> None:
    @lowers_elementwise(getattr(aten, name).default, to_float=True)
    def body(x: Scalar) -> Scalar:
        """A Bessel function of one order, of the first or second kind, modified or not.

        Names in e and ``scaled`` ones are those multiplied by an exponential.
        """
        return function(x, *options)


_register("i0", _modified_i, 0, False)
_register("special_i0e", _modified_i, 0, True)
_register("special_i1", _modified_i, 1, False)
_register("special_i1e", _modified_i, 1, True)
for _order in (0, 1):
    _register(f"special_bessel_j{_order}", _bessel_j, _order)
    _register(f"special_bessel_y{_order}", _bessel_y, _order)
    _register(f"special_modified_bessel_i{_order}", _modified_i, _order, False)
    _register(f"special_modified_bessel_k{_order}", _modified_k, _order, False)
    _register(f"special_scaled_modified_bessel_k{_order}", _modified_k, _order, True)
