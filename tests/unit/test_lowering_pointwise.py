"""Elementwise operators: values, promotion, special values, layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.harness import check

F = torch.nn.functional
SPECIAL = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -2.5, 3e38])

UNARY = [
    "abs",
    "neg",
    "exp",
    "expm1",
    "exp2",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "sigmoid",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "square",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "relu",
    "signbit",
    "frac",
    "positive",
]
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "add alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "atan2": torch.atan2,
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "eq": torch.eq,
    "lt": torch.lt,
    "ge": torch.ge,
    "logical_xor": torch.logical_xor,
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "hypot": torch.hypot,
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.1, 7.0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp tensor": lambda x: torch.clamp(x, max=x.flip(0)),
    "pow 2": lambda x: x**2,
    "pow -1": lambda x: x**-1,
    "pow 2.5": lambda x: x.abs() ** 2.5,
    "logit": lambda x: torch.logit(x.sigmoid(), eps=1e-3),
    "nan_to_num": torch.nan_to_num,
    "affine": lambda x: x * 1.7 + 0.3,
}


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unary_of_floats(name: str, dtype: torch.dtype) -> None:
    fn = getattr(torch, name)
    check(fn, floats(3, 5).abs().to(dtype) * 0.9)
    check(fn, SPECIAL.to(dtype))
    check(fn, torch.empty(0, 3, dtype=dtype))
    check(fn, torch.tensor(0.3, dtype=dtype))


@pytest.mark.parametrize("name", ["abs", "neg", "exp", "sqrt", "sin", "round", "sign", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_unary_of_integers(name: str, dtype: torch.dtype) -> None:
    check(getattr(torch, name), torch.tensor([0, 1, 5, 100]).to(dtype))


@pytest.mark.parametrize("name", BINARY)
def test_binary_of_floats(name: str) -> None:
    fn = BINARY[name]
    check(fn, floats(3, 5), floats(3, 5).flip(0))
    check(fn, floats(3, 1), floats(5))
    check(fn, floats(2, 3, 4).permute(2, 0, 1), floats(4, 1, 3))
    special = SPECIAL[:-1]  # without a number that overflows when doubled: eager uses fma
    check(fn, special[:, None], special[None])
    check(fn, floats(0, 3), floats(3))
    check(fn, floats(2, 3), floats(2, 3), dynamic=True)


@pytest.mark.parametrize("name", ["add", "mul", "div", "maximum", "fmod", "pow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_binary_of_16_bit_floats(name: str, dtype: torch.dtype) -> None:
    check(BINARY[name], floats(4, 5).to(dtype), floats(4, 5).flip(1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "div floor", "div trunc", "remainder", "fmod", "lt"]
)
def test_binary_of_integers(name: str, dtype: torch.dtype) -> None:
    a = torch.tensor([7, -7, 7, -7, 100, 0]).to(dtype)
    b = torch.tensor([3, 3, -3, -3, 100, 5]).to(dtype)
    check(BINARY[name], a, b)


@pytest.mark.parametrize(
    "fn",
    [
        lambda i, f: i + f,
        lambda i, f: i / 2,
        lambda i, f: i == 1.5,
        lambda i, f: i + 1.5,
        lambda i, f: i * True,
        lambda i, f: f + 1,
        lambda i, f: (i > 0) + (f > 0),
        lambda i, f: (i > 0) * i,
        lambda i, f: (i > 0) & (f > 0),
        lambda i, f: i.to(torch.bfloat16) + f,
        lambda i, f: f.to(torch.bfloat16) + f.to(torch.float16),
        lambda i, f: f.to(torch.bfloat16) + torch.tensor(0.1),
        lambda i, f: f.to(torch.bfloat16) == 0.1,
        lambda i, f: i**2,
        lambda i, f: 2 ** i.abs(),
        lambda i, f: f.to(torch.int64) << 1,
        lambda i, f: ~i,
        lambda i, f: torch.where(i > 0, 1.0, f),
        lambda i, f: f.double().float(),
        lambda i, f: torch.full((3,), 0.1, dtype=torch.bfloat16) + f,
    ],
)
def test_promotion(fn: Callable[..., torch.Tensor]) -> None:
    uses_double = "double" in fn.__code__.co_names
    check(fn, torch.tensor([1, -2, 3]), floats(3), allow_host=uses_double)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(name: str, dtype: torch.dtype) -> None:
    check(ACTIVATIONS[name], (floats(4, 7) * 4).to(dtype))


def test_float_to_integer_truncates() -> None:
    check(lambda x: x.to(torch.int32), torch.tensor([1.9, -1.9, 0.0, 1e6]))
    check(lambda x: x.to(torch.uint8), torch.tensor([1.9, 255.0, 7.5]))
    check(lambda x: x.to(torch.bool), SPECIAL)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32]
)
def test_float_to_integer_beyond_it(dtype: torch.dtype) -> None:
    """ATen's answers on x86: the least integer of 32 or 64 bits, and the last bits of it."""
    inf = float("inf")
    x = torch.tensor([inf, -inf, float("nan"), 1e20, -1e20, 2.0**31, 3e9, 70000.5, -3.7])
    if dtype == torch.uint32:
        # With 8 elements and more, ATen's answers are others.
        x = torch.tensor([inf, 2.0**31, 3e9, 70000.5, -3.7])
    check(lambda x: x.to(dtype), x)
    check(lambda x: torch.zeros(len(x), dtype=dtype).copy_(x), x)
    check(lambda x: x.clamp(-100, 100).round().to(dtype), x[3:])
    check(lambda x: x.to(dtype), x.to(torch.bfloat16))
    check(lambda x: x + torch.stack([torch.full((), inf).to(dtype)] * len(x)), torch.zeros_like(x))


def test_integers_wrap() -> None:
    check(lambda x: x + x, torch.tensor([127, -128, 100], dtype=torch.int8))
    check(lambda x: x * x, torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32))
