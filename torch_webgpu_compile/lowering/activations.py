"""Activation functions and their gradients. Source: ATen's ``Activation.cpp`` kernels."""

from __future__ import annotations

import math

import torch

from ..ir.scalar import Scalar, apply, where
from ..symbolic.sizes import ONE
from .builder import Builder, operand
from .pointwise import elementwise
from .registry import lowers
from .value import Value, reshape

aten = torch.ops.aten


def _number(value: float | Value, like: Scalar) -> Scalar:
    """A number, perhaps one that is data of the graph."""
    return operand(value, (), like.dtype)


def _product(a: float | Value, b: float | Value, like: Scalar) -> Scalar:
    if isinstance(a, Value) or isinstance(b, Value):
        return _number(a, like) * _number(b, like)
    return _number(a * b, like)


def _mul(*factors: Scalar) -> Scalar:
    total = factors[0]
    for factor in factors[1:]:
        total *= factor
    return total


def _choose(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    return where(condition, yes, no)


def _above(x: Scalar, bound: float) -> Scalar:
    return x > _number(bound, x)


@lowers(aten.relu.default)
def lower_relu(builder: Builder, self: Value) -> Value:
    """``max(self, 0)``; NaN stays NaN."""
    return elementwise(builder, lambda x: apply("maximum", x, 0), self)


@lowers(aten.relu6.default)
def lower_relu6(builder: Builder, self: Value) -> Value:
    """``min(max(self, 0), 6)``; NaN stays NaN."""
    return lower_hardtanh(builder, self, 0.0, 6.0)


@lowers(aten.hardtanh.default)
def lower_hardtanh(
    builder: Builder, self: Value, min_val: float = -1.0, max_val: float = 1.0
) -> Value:
    """``min(max(self, min_val), max_val)``; NaN stays NaN."""

    def body(x: Scalar) -> Scalar:
        return apply("minimum", apply("maximum", x, _number(min_val, x)), _number(max_val, x))

    return elementwise(builder, body, self)


@lowers(aten.gelu.default)
def lower_gelu(builder: Builder, self: Value, *, approximate: str = "none") -> Value:
    """``x · Φ(x)`` with Φ by erf, or by its tanh approximation for ``approximate="tanh"``."""

    def body(x: Scalar) -> Scalar:
        if approximate == "tanh":
            inner = x + 0.044715 * x * apply("square", x)
            curve = apply("tanh", math.sqrt(2 / math.pi) * inner)
        else:
            curve = apply("erf", x * math.sqrt(0.5))
        return 0.5 * x * (1 + curve)

    return elementwise(builder, body, self)


@lowers(aten.gelu_backward.default)
def lower_gelu_backward(
    builder: Builder, grad_output: Value, self: Value, *, approximate: str = "none"
) -> Value:
    """``grad_output`` times the derivative of gelu (the exact or the tanh form) at ``self``."""

    def exact(grad: Scalar, x: Scalar) -> Scalar:
        erf = apply("erf", x * math.sqrt(0.5))
        cdf = 0.5 * (1 + erf)
        density = apply("fast_exp", -0.5 * apply("square", x))
        pdf = density * (1 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * pdf)

    def tanh(grad: Scalar, x: Scalar) -> Scalar:
        kappa = 0.044715
        square = apply("square", x)
        inner = math.sqrt(2 / math.pi) * (x + _number(kappa, x) * x * square)
        curve = apply("tanh", inner)
        left = 0.5 * (1 + curve)
        slope = 1 - apply("square", curve)
        grow = math.sqrt(2 / math.pi) * (1 + _number(3 * kappa, x) * square)
        return grad * (left + 0.5 * x * slope * grow)

    return elementwise(builder, tanh if approximate == "tanh" else exact, grad_output, self)


@lowers(aten.silu.default)
def lower_silu(builder: Builder, self: Value) -> Value:
    """``x · sigmoid(x)``."""
    return elementwise(builder, lambda x: x * apply("sigmoid", x), self)


@lowers(aten.silu_backward.default)
def lower_silu_backward(builder: Builder, grad_output: Value, self: Value) -> Value:
    """``grad_output · s · (1 + x · (1 − s))`` with s = sigmoid(x)."""

    def body(grad: Scalar, x: Scalar) -> Scalar:
        sigmoid = apply("sigmoid", x)
        slope = 1 + x * (1 - sigmoid)
        return grad * sigmoid * slope

    return elementwise(builder, body, grad_output, self)


@lowers(aten.elu.default)
def lower_elu(
    builder: Builder,
    self: Value,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> Value:
    """``scale · x`` where x > 0, else ``scale · alpha · expm1(input_scale · x)``."""

    def body(x: Scalar) -> Scalar:
        negative = apply("expm1", x * _number(input_scale, x))
        negative *= _product(alpha, scale, x)
        return where(x > 0, x * _number(scale, x), negative)

    return elementwise(builder, body, self)


@lowers(aten.leaky_relu.default)
def lower_leaky_relu(builder: Builder, self: Value, negative_slope: float = 0.01) -> Value:
    """``x`` where x > 0, else ``negative_slope · x``."""

    def body(x: Scalar) -> Scalar:
        return where(x > 0, x, x * _number(negative_slope, x))

    return elementwise(builder, body, self)


@lowers(aten.leaky_relu_backward.default)
def lower_leaky_relu_backward(
    builder: Builder,
    grad_output: Value,
    self: Value,
    negative_slope: float,
    self_is_result: bool,
) -> Value:
    """The gradient where ``self`` > 0, elsewhere multiplied by ``negative_slope``.

    ``self`` may be the input or the result (``self_is_result``): both have the same sign.
    """

    def body(grad: Scalar, x: Scalar) -> Scalar:
        return where(x > 0, grad, grad * _number(negative_slope, x))

    return elementwise(builder, body, grad_output, self)


@lowers(aten.softplus.default)
def lower_softplus(
    builder: Builder, self: Value, beta: float = 1.0, threshold: float = 20.0
) -> Value:
    """``log(1 + exp(beta · x)) / beta``, and x where beta · x > threshold."""

    def body(x: Scalar) -> Scalar:
        grown = x * _number(beta, x)
        soft = apply("log1p", apply("fast_exp", grown)) / _number(beta, x)
        return where(grown > _number(threshold, grown), x, soft)

    return elementwise(builder, body, self)


def _relu6_gate(x: Scalar) -> Scalar:
    shifted = apply("maximum", x + 3, 0)
    return apply("minimum", shifted, 6) / 6


@lowers(aten.hardsigmoid.default)
def lower_hardsigmoid(builder: Builder, self: Value) -> Value:
    """``min(max(x + 3, 0), 6) / 6``."""
    return elementwise(builder, _relu6_gate, self)


@lowers(aten.hardswish.default)
def lower_hardswish(builder: Builder, self: Value) -> Value:
    """``x · min(max(x + 3, 0), 6) / 6``."""
    return elementwise(builder, lambda x: x * _relu6_gate(x), self)


@lowers(aten.mish.default)
def lower_mish(builder: Builder, self: Value) -> Value:
    """``x · tanh(log(1 + exp(x)))``."""

    def body(x: Scalar) -> Scalar:
        return x * apply("tanh", apply("log1p", apply("exp", x)))

    return elementwise(builder, body, self)


@lowers(aten.threshold.default)
def lower_threshold(builder: Builder, self: Value, threshold: float, value: float) -> Value:
    """``value`` where x ≤ threshold, else x; NaN stays NaN."""

    def body(x: Scalar) -> Scalar:
        return where(x <= _number(threshold, x), _number(value, x), x)

    return elementwise(builder, body, self)


@lowers(aten.threshold_backward.default)
def lower_threshold_backward(
    builder: Builder, grad_output: Value, self: Value, threshold: float
) -> Value:
    """0 where ``self`` ≤ threshold, else the gradient (also where ``self`` is NaN)."""

    def body(grad: Scalar, x: Scalar) -> Scalar:
        return where(x <= _number(threshold, x), 0, grad)

    return elementwise(builder, body, grad_output, self)


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def lower_shrink_backward(builder: Builder, grad_out: Value, self: Value, lambd: float) -> Value:
    """The gradient where ``self`` lies outside of [-lambd, lambd], 0 inside."""

    def body(grad: Scalar, x: Scalar) -> Scalar:
        inside = abs(x) <= _number(lambd, x)
        return where(inside, 0, grad)

    return elementwise(builder, body, grad_out, self)


@lowers(aten.sigmoid_backward.default)
def lower_sigmoid_backward(builder: Builder, grad_output: Value, output: Value) -> Value:
    """``grad_output · y · (1 − y)``, where ``output`` y is the result of sigmoid."""

    def body(grad: Scalar, y: Scalar) -> Scalar:
        return grad * y * (1 - y)

    return elementwise(builder, body, grad_output, output)


@lowers(aten.tanh_backward.default)
def lower_tanh_backward(builder: Builder, grad_output: Value, output: Value) -> Value:
    """``grad_output · (1 − y²)``, where ``output`` y is the result of tanh."""

    def body(grad: Scalar, y: Scalar) -> Scalar:
        return grad * (1 - apply("square", y))

    return elementwise(builder, body, grad_output, output)


@lowers(aten.logit.default)
def lower_logit(builder: Builder, self: Value, eps: float | None = None) -> Value:
    """``log(x / (1 − x))``, of integers too; with ``eps``, x is clamped to [eps, 1 − eps].

    Without ``eps``, x outside of [0, 1] gives NaN.
    """

    def body(x: Scalar) -> Scalar:
        if eps is not None:
            x = apply("maximum", x, _number(eps, x))
            x = apply("minimum", x, _number(1 - eps, x))
        return apply("log", x / (1 - x))

    return elementwise(builder, body, self.cast(builder.out.dtype))


@lowers(aten.prelu.default, aten._prelu_kernel.default)
def lower_prelu(builder: Builder, self: Value, weight: Value) -> Value:
    """``x`` where x > 0, else ``weight · x``.

    A weight vector has one entry for each index of dimension 1; others broadcast.
    """
    if weight.rank == 1 and self.rank > 1:
        sizes = [weight.sizes[0] if k == 1 else ONE for k in range(self.rank)]
        weight = reshape(weight, sizes)

    def body(x: Scalar, w: Scalar) -> Scalar:
        return where(x > 0, x, x * w)

    return elementwise(builder, body, self, weight)
