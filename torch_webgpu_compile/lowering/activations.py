"""Activation functions and their gradients. Source: ATen's ``Activation.cpp`` kernels."""

from __future__ import annotations

import math

import torch

from ..ir.scalar import Scalar, apply, where
from .pointwise import Number, lowers_elementwise

aten = torch.ops.aten


@lowers_elementwise(aten.relu.default)
def relu(x: Scalar) -> Scalar:
    """``max(x, 0)``; NaN stays NaN."""
    return apply("maximum", x, 0)


@lowers_elementwise(aten.hardtanh.default)
def hardtanh(x: Scalar, min_val: Number = -1.0, max_val: Number = 1.0) -> Scalar:
    """``min(max(x, min_val), max_val)``; NaN stays NaN."""
    return apply("minimum", apply("maximum", x, min_val), max_val)


@lowers_elementwise(aten.gelu.default)
def gelu(x: Scalar, *, approximate: str = "none") -> Scalar:
    """``x · Φ(x)`` with Φ by erf, or by its tanh approximation for ``approximate="tanh"``."""
    if approximate == "tanh":
        inner = x + 0.044715 * x * apply("square", x)
        curve = apply("tanh", math.sqrt(2 / math.pi) * inner)
    else:
        curve = apply("erf", x * math.sqrt(0.5))
    return 0.5 * x * (1 + curve)


@lowers_elementwise(aten.gelu_backward.default)
def gelu_backward(grad: Scalar, x: Scalar, *, approximate: str = "none") -> Scalar:
    """``grad`` times the derivative of gelu (the exact or the tanh form) at x."""
    square = apply("square", x)
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        curve = apply("tanh", beta * (x + kappa * x * square))
        slope = 1 - apply("square", curve)
        grow = beta * (1 + 3 * kappa * square)
        return grad * (0.5 * (1 + curve) + 0.5 * x * slope * grow)
    cdf = 0.5 * (1 + apply("erf", x * math.sqrt(0.5)))
    pdf = apply("fast_exp", -0.5 * square) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * pdf)


@lowers_elementwise(aten.silu.default)
def silu(x: Scalar) -> Scalar:
    """``x · sigmoid(x)``."""
    return x * apply("sigmoid", x)


@lowers_elementwise(aten.silu_backward.default)
def silu_backward(grad: Scalar, x: Scalar) -> Scalar:
    """``grad · s · (1 + x · (1 − s))`` with s = sigmoid(x)."""
    sigmoid = apply("sigmoid", x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@lowers_elementwise(aten.elu.default)
def elu(x: Scalar, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0) -> Scalar:
    """``scale · x`` where x > 0, else ``scale · alpha · expm1(input_scale · x)``."""
    negative = apply("expm1", x * input_scale) * (alpha * scale)
    return where(x > 0, x * scale, negative)


@lowers_elementwise(aten.leaky_relu.default)
def leaky_relu(x: Scalar, negative_slope: Number = 0.01) -> Scalar:
    """``x`` where x > 0, else ``negative_slope · x``."""
    return where(x > 0, x, x * negative_slope)


@lowers_elementwise(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad: Scalar, x: Scalar, negative_slope: Number, self_is_result: bool
) -> Scalar:
    """The gradient where x > 0, elsewhere multiplied by ``negative_slope``.

    x may be the input or the result (``self_is_result``): both have the same sign.
    """
    return where(x > 0, grad, grad * negative_slope)


@lowers_elementwise(aten.softplus.default)
def softplus(x: Scalar, beta: Number = 1.0, threshold: Number = 20.0) -> Scalar:
    """``log(1 + exp(beta · x)) / beta``, and x where beta · x > threshold."""
    grown = x * beta
    soft = apply("log1p", apply("fast_exp", grown)) / beta
    return where(grown > threshold, x, soft)


@lowers_elementwise(aten.hardsigmoid.default)
def hardsigmoid(x: Scalar) -> Scalar:
    """``min(max(x + 3, 0), 6) / 6``."""
    return hardtanh(x + 3, 0.0, 6.0) / 6


@lowers_elementwise(aten.hardswish.default)
def hardswish(x: Scalar) -> Scalar:
    """``x · min(max(x + 3, 0), 6) / 6``."""
    return x * hardsigmoid(x)


@lowers_elementwise(aten.mish.default)
def mish(x: Scalar) -> Scalar:
    """``x · tanh(log(1 + exp(x)))``."""
    return x * apply("tanh", apply("log1p", apply("exp", x)))


@lowers_elementwise(aten.threshold.default)
def threshold(x: Scalar, threshold: Number, value: Number) -> Scalar:
    """``value`` where x ≤ threshold, else x; NaN stays NaN."""
    return where(x <= threshold, value, x)


@lowers_elementwise(aten.threshold_backward.default)
def threshold_backward(grad: Scalar, x: Scalar, threshold: Number) -> Scalar:
    """0 where x ≤ threshold, else the gradient (also where x is NaN)."""
    return where(x <= threshold, 0, grad)


@lowers_elementwise(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(grad: Scalar, x: Scalar, lambd: Number) -> Scalar:
    """The gradient where x lies outside of [-lambd, lambd], 0 inside."""
    return where(abs(x) <= lambd, 0, grad)


@lowers_elementwise(aten.sigmoid_backward.default)
def sigmoid_backward(grad: Scalar, y: Scalar) -> Scalar:
    """``grad · y · (1 − y)``, where y is the result of sigmoid."""
    return grad * y * (1 - y)


@lowers_elementwise(aten.tanh_backward.default)
def tanh_backward(grad: Scalar, y: Scalar) -> Scalar:
    """``grad · (1 − y²)``, where y is the result of tanh."""
    return grad * (1 - apply("square", y))


@lowers_elementwise(aten.logit.default, to_float=True)
def logit(x: Scalar, eps: Number | None = None) -> Scalar:
    """``log(x / (1 − x))``; with ``eps``, x is clamped to [eps, 1 − eps].

    Without ``eps``, x outside of [0, 1] gives NaN.
    """
    if eps is not None:
        x = apply("minimum", apply("maximum", x, eps), 1 - eps)
    return apply("log", x / (1 - x))
