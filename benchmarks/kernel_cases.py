"""Single kernels: rows, columns, products and attention of the sizes that models have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .peer_variants import Variant, attention_backends

Build = Callable[[bool], tuple[Callable[..., Any], tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
        name: on the command line and in results.
        build: (small) → (function or module, CPU inputs).
        nbytes: (small) → bytes that any implementation must read and write; 0: not of interest.
        flops: (small) → floating-point operations; 0: not of interest.
        goal: what the project wants of it.
        extra: another measurement of this case, by name: see `webgpu.EXTRAS`.
        variants: (function, inputs) → other ways for eager PyTorch to do it; its fastest counts.
    """

    name: str
    build: Build
    nbytes: Callable[[bool], int] = lambda small: 0
    flops: Callable[[bool], int] = lambda small: 0
    goal: str = ""
    extra: str = ""
    variants: Callable[..., Iterator[Variant]] | None = None


def _shrunk(sizes: tuple[int, ...], small: bool) -> tuple[int, ...]:
    """A 64th of the first dimension (or of the last, where there is little of the first)."""
    if not small:
        return sizes
    at = 0 if sizes[0] >= 64 else len(sizes) - 1
    return tuple(max(1, n // 64) if k == at else n for k, n in enumerate(sizes))


def _moving(
    name: str, function: Callable[..., Any], sizes: tuple[int, ...], *, result: bool, goal: str
) -> Case:
    """A case on one tensor, which is read once, and written once if ``result``."""

    def build(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        return function, (torch.randn(_shrunk(sizes, small)),)

    def nbytes(small: bool) -> int:
        return (2 if result else 1) * 4 * math.prod(_shrunk(sizes, small))

    return Case(name, build, nbytes=nbytes, goal=goal)


def _chain(x: Tensor) -> Tensor:
    y = torch.relu(x * 1.5 + 0.25)
    return y * torch.sigmoid(y) - x.abs()


def _gelu_chain(x: Tensor) -> Tensor:
    return F.gelu(x * 1.5 + 0.25) * x


def _add(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    n = (1 << 22 if small else 1 << 30) // 4
    return torch.add, (torch.randn(n), torch.randn(n))


def _norm_and_softmax(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    weight, bias = torch.randn(1024), torch.randn(1024)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(F.layer_norm(x, (1024,), weight, bias), dim=-1)

    return function, (torch.randn(512 if small else 32768, 1024), weight, bias)


def _cross_entropy(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    rows = 64 if small else 8192
    return F.cross_entropy, (torch.randn(rows, 50257), torch.randint(0, 50257, (rows,)))


def _product(name: str, *sizes: int, goal: str = "≥ 80 % of cuBLAS, f32") -> Case:
    """``sizes``: batch (or none), rows, inner, columns; the right side as ``nn.Linear`` has it."""
    *batch, rows, inner, columns = sizes

    def build(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        m = max(1, rows // 8) if small else rows
        x, w = torch.randn(*batch, m, inner), torch.randn(*batch, columns, inner)
        return lambda x, w: x @ w.mT, (x, w)

    def flops(small: bool) -> int:
        m = max(1, rows // 8) if small else rows
        return 2 * math.prod(batch) * m * inner * columns

    return Case(name, build, flops=flops, goal=goal)


def _square(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    n = 512 if small else 4096
    return torch.matmul, (torch.randn(n, n), torch.randn(n, n))


def _square_f16(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    function, inputs = _square(small)
    return function, tuple(x.half() for x in inputs)


def _attention(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    heads, length = (2, 128) if small else (16, 1024)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(1 if small else 8, heads, length, 64) for _ in range(3))
    return function, (q, k, v)


# Functions of one tensor, by name, with its sizes: of all, values and positions.
_ORDERS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "topk_rows": (lambda x: x.topk(50), (1024, 50257)),
    "topk_vocabulary": (lambda x: x.topk(50), (1, 128_000)),
    "argsort": (torch.argsort, (1_000_000,)),
    "sort_rows": (torch.sort, (4096, 4096)),
    "median": (torch.median, (1_000_000,)),
}


def cases() -> Iterator[Case]:
    """In the order of measuring."""
    bound, beaten = "≥ 90 % of copy bandwidth", "≥ 1.1 × Inductor"
    yield Case(
        "add",
        _add,
        nbytes=lambda small: 3 << (22 if small else 30),
        goal="≥ 97 % of copy bandwidth",
    )
    yield _moving("pointwise_chain", _chain, (16384, 4096), result=True, goal=beaten)
    yield _moving("gelu_chain", _gelu_chain, (65536, 4096), result=True, goal=beaten)
    yield _moving("softmax", lambda x: x.softmax(-1), (65536, 4096), result=True, goal=beaten)
    yield _moving(
        "layer_norm", lambda x: F.layer_norm(x, (1024,)), (65536, 1024), result=True, goal=beaten
    )
    yield _moving(
        "rms_norm", lambda x: F.rms_norm(x, (1024,)), (65536, 1024), result=True, goal=beaten
    )
    yield Case(
        "layer_norm_softmax",
        _norm_and_softmax,
        nbytes=lambda small: 2 * 4 * 1024 * (512 if small else 32768),
        goal=beaten,
    )
    yield Case(
        "cross_entropy",
        _cross_entropy,
        nbytes=lambda small: 4 * 50257 * (64 if small else 8192),
        goal=beaten,
    )
    yield _moving("column_sum", lambda x: x.sum(0), (65536, 4096), result=False, goal=bound)
    yield _moving("full_sum", lambda x: x.sum(), (16384, 16384), result=False, goal=bound)
    yield _moving("few_rows", lambda x: x.sum(1), (8, 1 << 24), result=False, goal=bound)
    yield _moving(
        "transpose", lambda x: x.t().contiguous(), (8192, 8192), result=True, goal="≥ 60 % of copy"
    )
    yield _moving(
        "channels_last",
        lambda x: torch.relu(x).to(memory_format=torch.channels_last),
        (64, 256, 56, 56),
        result=True,
        goal="≥ 60 % of copy",
    )
    yield Case(
        "matmul",
        _square,
        flops=lambda small: 2 * (512 if small else 4096) ** 3,
        goal="≥ 80 % of cuBLAS, f32",
    )
    yield Case(
        "matmul_f16",
        _square_f16,
        flops=lambda small: 2 * (512 if small else 4096) ** 3,
        goal="≥ 40 TFLOP/s, f32 accumulators",
    )
    yield _product("linear_768_768", 512, 768, 768)
    yield _product("linear_768_3072", 512, 768, 3072)
    yield _product("linear_3072_768", 512, 3072, 768)
    yield _product("matrix_vector", 1, 4096, 4096)
    yield _product("linear_1024", 128, 1024, 1024)
    yield _product("batched", 96, 512, 64, 512)
    yield Case(
        "attention",
        _attention,
        flops=lambda small: 2 * 2 * 64 * (2 * 128**2 if small else 8 * 16 * 1024**2) // 2,
        goal="≥ 0.8 × PyTorch's best",
        variants=attention_backends,
    )
    for name, (function, sizes) in _ORDERS.items():
        yield _moving(name, function, sizes, result=False, goal="≥ 0.77 × eager")
