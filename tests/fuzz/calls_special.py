"""Special functions, activations and losses, on arguments where they are well conditioned."""

from __future__ import annotations

import torch

from .calls import Call, broadcasts
from .programs import Drawing, Value

# Poles, zeros of high slope and the far tails amplify rounding: arguments keep away from them.
_SPECIAL = (
    "torch.erf({0})",
    "torch.erfc(torch.clamp({0}, -3, 2))",
    "torch.erfinv(torch.tanh({0}) * 0.9)",
    "torch.lgamma({0}.abs() + 0.5)",
    "torch.digamma({0}.abs() + 0.5)",
    "torch.polygamma(1, {0}.abs() + 0.5)",
    "torch.polygamma(3, {0}.abs() + 1)",
    "torch.special.multigammaln({0}.abs() + 2, 2)",
    "torch.special.i0(torch.clamp({0}, -4, 4))",
    "torch.special.i0e({0})",
    "torch.special.i1(torch.clamp({0}, -4, 4))",
    "torch.special.i1e({0})",
    "torch.special.ndtr({0})",
    "torch.special.log_ndtr(torch.clamp({0}, -4, 2))",
    "torch.special.ndtri(torch.sigmoid({0}).clamp(0.001, 0.999))",
    "torch.special.bessel_j0({0})",
    "torch.special.bessel_j1({0})",
    "torch.special.bessel_y0({0}.abs() + 0.5)",
    "torch.special.bessel_y1({0}.abs() + 0.5)",
    "torch.special.modified_bessel_i0(torch.clamp({0}, -4, 4))",
    "torch.special.modified_bessel_i1(torch.clamp({0}, -4, 4))",
    "torch.special.modified_bessel_k0({0}.abs() + 0.5)",
    "torch.special.modified_bessel_k1({0}.abs() + 0.5)",
    "torch.special.scaled_modified_bessel_k0({0}.abs() + 0.5)",
    "torch.special.scaled_modified_bessel_k1({0}.abs() + 0.5)",
    "torch.special.spherical_bessel_j0({0})",
    "torch.special.airy_ai(torch.clamp({0}, -4, 3))",
    "torch.special.entr({0}.abs())",
    "torch.special.erfcx({0}.abs())",
    "torch.sinc({0})",
    "torch.logit(torch.sigmoid({0}) * 0.9 + 0.05)",
    "torch.exp2(torch.clamp({0}, max=4))",
    "torch.log2({0}.abs() + 1)",
    "torch.log10({0}.abs() + 1)",
    "torch.asin(torch.tanh({0}) * 0.9)",
    "torch.acos(torch.tanh({0}) * 0.9)",
    "torch.asinh({0})",
    "torch.acosh({0}.abs() + 1.5)",
    "torch.atanh(torch.tanh({0}) * 0.9)",
    "torch.sinh(torch.clamp({0}, -4, 4))",
    "torch.cosh(torch.clamp({0}, -4, 4))",
    "torch.tan(torch.clamp({0}, -1, 1))",
    "torch.frac({0}) + torch.nan_to_num({0})",
)
_SPECIAL_PAIRS = (
    "torch.special.zeta({0}.abs() + 1.5, {1}.abs() + 0.5)",
    "torch.special.gammainc({0}.abs() + 0.5, {1}.abs() + 0.5)",
    "torch.special.gammaincc({0}.abs() + 0.5, torch.clamp({1}.abs(), max=4) + 0.5)",
    "torch.xlogy({0}, {1}.abs() + 0.5)",
    "torch.special.xlog1py({0}, {1}.abs())",
    "torch.logaddexp({0}, {1})",
    "torch.logaddexp2({0}, {1})",
    "torch.hypot({0}, {1})",
    "torch.copysign({0}, torch.exp(torch.clamp({1}, max=3)).nan_to_num())",
    "torch.fmin({0}, {1})",
    "torch.fmax({0}, {1})",
    # Of NaN, PyTorch returns for polynomials what was in memory.
    "torch.special.chebyshev_polynomial_t(torch.tanh({0}).nan_to_num(), 4)",
    "torch.special.chebyshev_polynomial_u(torch.tanh({0}).nan_to_num(), 3)",
    "torch.special.hermite_polynomial_h(torch.tanh({0}).nan_to_num(), 4)",
    "torch.special.hermite_polynomial_he(torch.tanh({0}).nan_to_num(), 3)",
    "torch.special.laguerre_polynomial_l(torch.tanh({0}).nan_to_num(), 4)",
    "torch.special.legendre_polynomial_p(torch.tanh({0}).nan_to_num(), 5)",
)
_ACTIVATIONS = (
    "F.elu({0})",
    "F.celu({0}, 0.5)",
    "F.selu({0})",
    "F.mish({0})",
    "F.hardtanh({0}, -0.5, 2)",
    "F.hardsigmoid({0})",
    "F.hardswish({0})",
    "F.relu6({0})",
    "F.leaky_relu({0}, 0.125)",
    "F.logsigmoid({0})",
    "F.softsign({0})",
    "F.softshrink({0}, 0.25)",
    "F.tanhshrink({0})",
    "F.softplus({0}, 2, 5)",
    "F.silu({0}) * F.relu({0})",
)
_STEPPED_ACTIVATIONS = ("F.hardshrink({0}, 0.5)", "F.threshold({0}, 0.25, -1)")
_LOSSES = (
    "F.mse_loss({0}, {1}{2})",
    "F.l1_loss({0}, {1}{2})",
    "F.smooth_l1_loss({0}, {1}{2})",
    "F.huber_loss({0}, {1}, delta=0.5{2})",
    "F.soft_margin_loss(torch.tanh({0}), {1}.sign(){2})",
    "F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1}){2})",
    "F.binary_cross_entropy(torch.sigmoid({0}) * 0.9 + 0.05, torch.sigmoid({1}){2})",
    # Terms of both signs, whose sum may be what 16 bits round; of one value it would always be.
    "F.kl_div(F.logsigmoid({0}.to(torch.float32)), torch.sigmoid({1}.to(torch.float32)) * 0.5{2})",
    "F.poisson_nll_loss(torch.tanh({0}.to(torch.float32)), {1}.to(torch.float32).abs(){2})",
)


def _small(value: Value) -> bool:
    return value.is_float and value.magnitude <= 64


def special(d: Drawing) -> object:
    """A special function of one value."""
    value = d.value(_small)
    return value and d.step(d.choose(_SPECIAL).format(value.name), value)


def special_pair(d: Drawing) -> object:
    """A special function of two values that broadcast."""
    left = d.value(_small)
    right = left and d.value(lambda v: _small(v) and broadcasts(v, left))
    if left is None or right is None:
        return None
    return d.step(d.choose(_SPECIAL_PAIRS).format(left.name, right.name), left, right)


def activation(d: Drawing) -> object:
    """An activation; those with a jump on exact values only."""
    value = d.value(_small)
    if value is None:
        return None
    x = value.name
    if value.exact and d.integer(0, 4) == 4:
        return d.step(d.choose(_STEPPED_ACTIVATIONS).format(x), value, keeps_exact=True)
    if value.rank >= 1 and d.integer(0, 4) == 4:
        dim = d.dim(value)
        return d.step(d.choose((f"F.glu({x}, {dim})", f"F.softmin({x}, {dim})")), value)
    if value.rank >= 2 and value.shape[1] and d.integer(0, 4) == 4:
        weight = d.add_input((d.choose((1, value.shape[1])),), value.dtype)
        return d.step(f"F.prelu({x}, {weight.name})", value, weight)
    return d.step(d.choose(_ACTIVATIONS).format(x), value)


def loss(d: Drawing) -> object:
    """A loss between two values of one shape, or of logits and classes."""
    value = d.value(lambda v: v.is_float and v.magnitude <= 16)
    if value is None:
        return None
    kind = d.choose(("", ", reduction='sum'", ", reduction='none'"))
    if value.rank == 2 and value.tensor.numel() and d.flag():
        rows, classes = value.shape
        target = d.add_input((rows,), torch.int64)
        where = f"{target.name} % {classes}"
        options = d.choose((kind, kind + ", ignore_index=0", kind + ", label_smoothing=0.25"))
        code = f"F.cross_entropy({value.name}, {where}{options})"
        if "label" not in options and d.flag():
            code = f"F.nll_loss(F.log_softmax({value.name}, 1), {where}{options})"
        return d.step(code, value, target)
    other = d.value(lambda v: v.shape == value.shape and v.dtype is value.dtype and _small(v))
    if other is None:
        return None
    codes = _LOSSES if other.exact else [c for c in _LOSSES if "sign()" not in c]
    return d.step(d.choose(codes).format(value.name, other.name, kind), value, other)


FAMILIES: tuple[Call, ...] = (special, special, special_pair, activation, loss)
