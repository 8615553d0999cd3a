"""float64: nothing is computed in float32 on the way, and every helper that kernels call exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.compilations import compile_function
from tests.harness import TARGET, capture, check, lower_checked
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.codegen.hardening.spelling import fast_exp, suffix
from torch_webgpu_compile.codegen.wgsl.op_table import op_row
from torch_webgpu_compile.codegen.wgsl.render import _WORD, environment_of, library_of
from torch_webgpu_compile.dtypes import DType
from torch_webgpu_compile.ir.nodes import Contraction, HostCall, Scatter
from torch_webgpu_compile.ir.scalar import OPS

F = torch.nn.functional
FLOAT64 = replace(TARGET, features=TARGET.features | {"shader-f64"})
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def floats(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "affine": lambda x: x * 0.1 + 1 / 3,
    "digamma": lambda x: torch.digamma(x.abs() + 0.01),
    "erfinv": lambda x: torch.erfinv(x.tanh()),
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "variance": lambda x: x.var(-1),
    "norm": lambda x: x.norm(2.5),
    "matmul": lambda x: x @ x.mT,
    "conv": lambda x: F.conv1d(x, x[:, :, :2].contiguous()),
    "bilinear": lambda x: F.interpolate(x[None], size=(7, 5), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x[None], size=(7, 5), mode="bicubic"),
    "arange": lambda x: x[0, 0] + torch.arange(0.1, 1.3, 0.3, dtype=torch.float64),
    "linspace": lambda x: x[0, 0] + torch.linspace(0.1, 1.3, 4, dtype=torch.float64),
    "bucketize": lambda x: torch.bucketize(x, x.flatten().sort().values),
    "casts": lambda x: (x.float(), x.bfloat16(), x.long(), x.int(), x.bool(), x.long().double()),
    "index_add": lambda x: x.index_add(1, torch.tensor([2, 0, 2]), x / 3),
    "index_put": lambda x: x.index_put((torch.tensor([1, 1, -1]),), x[:1] / 3, accumulate=True),
    "scatter_add": lambda x: x.scatter_add(2, torch.tensor([[[3, 3], [0, 1]]]), x / 3),
    "put": lambda x: x.put(torch.tensor([1, -1, 1]), x[0, 0, :3] / 3, accumulate=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_precision(name: str) -> None:
    check(FUNCTIONS[name], floats(2, 3, 4), target=FLOAT64, **EXACT)


def test_numbers_computed_from_sizes_keep_their_digits() -> None:
    check(lambda x: x * (1 / x.shape[0]), floats(3, 4), dynamic=True, target=FLOAT64, **EXACT)
    check(lambda x: x * (1 / x.shape[0]), floats(3, 4).float(), dynamic=True, target=FLOAT64)
    graph = check(lambda x: x.float() + x.shape[0] ** 0.5, floats(3, 4), target=FLOAT64)
    assert not any(isinstance(node, HostCall) for node in graph.nodes)


def test_float32_kernels_do_not_compute_numbers_in_float64() -> None:
    x = floats(3, 4).float()
    state = compile_function(lambda x: x * (1 / x.shape[0]), x, dynamic=True, target=FLOAT64)
    (kernel,) = state.plan.kernels
    assert "f64" not in kernel.wgsl


def test_products_are_contractions() -> None:
    graph = lower_checked(capture(torch.mm, floats(4, 6), floats(6, 5)), target=FLOAT64)
    (node,) = graph.nodes
    assert isinstance(node, Contraction)
    assert node.lhs.dtype is dtypes.float64


def test_without_the_feature_everything_runs_on_the_host() -> None:
    check(lambda x: x.exp() + 1, floats(3, 4), allow_host=True)
    without_bits = replace(TARGET, features=frozenset({"shader-f64"}))
    assert not without_bits.supports(dtypes.float64)  # the functions need 64-bit integers


@pytest.mark.parametrize(
    "function",
    [torch.isinf, torch.isfinite, lambda x: x > 1e100, lambda x: (x * 1e-188).long()],
    ids=["isinf", "isfinite", "greater", "long"],
)
def test_without_the_feature_numbers_keep_their_range_and_digits(function: Any) -> None:
    check(function, torch.tensor(2.000000000001e200, dtype=torch.float64), allow_host=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_integers_accumulate(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (5, 3)).to(dtype)
    graph = check(lambda x: x.index_add(0, torch.tensor([4, 0, 4, 1, 4]), x * 3), x)
    assert any(isinstance(node, Scatter) for node in graph.nodes)


@pytest.mark.parametrize("keeps_nan", [False, True])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.int64_in_words])
def test_every_helper_exists(dtype: DType, keeps_nan: bool) -> None:
    target = replace(TARGET, exp_keeps_nan=keeps_nan)
    library = library_of(environment_of(target))
    for name, lanes in product(OPS, (1, 4)):
        row = op_row(name, dtype)
        if row is not None:
            v, exp = suffix(dtype, lanes), fast_exp(target, lanes)
            text = row.format(*"abc", T="T", s=dtype.compute, v=v, exp=exp)
            assert set(_WORD.findall(text)) <= set(library), text
    for name, definition in library.items():
        missing = set(_WORD.findall(definition)) - set(library)
        assert not missing, (name, missing)


def test_functions_that_spirv_lacks_are_our_own() -> None:
    for name in ("exp", "log", "sin", "tanh", "pow", "round", "trunc"):
        row = op_row(name, dtypes.float64)
        assert row is not None
        assert row.startswith("tw_")
