"""Reductions, softmax and normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import capture, check, lower_checked
from torch_webgpu_compile.ir.nodes import Pointwise, Reduction

F, aten = torch.nn.functional, torch.ops.aten
REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum dim": lambda x: x.sum(1),
    "sum dims keepdim": lambda x: x.sum((0, -1), keepdim=True),
    "sum of none": lambda x: x.sum(()),
    "mean": lambda x: x.mean((1, 2)),
    "amax": lambda x: x.amax((0, 2)),
    "amin keepdim": lambda x: x.amin(-1, keepdim=True),
    "max": lambda x: x.max(),
    "max dim": lambda x: x.max(1),
    "min dim keepdim": lambda x: x.min(2, keepdim=True),
    "argmax": lambda x: x.argmax(),
    "argmin dim": lambda x: x.argmin(0, keepdim=True),
    "prod": lambda x: x.prod(1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x > -9).all(),
    "var": lambda x: x.var((0, 1)),
    "var population": lambda x: x.var(2, correction=0),
    "std": lambda x: x.std(1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, (1, 2)),
    "logsumexp": lambda x: x.logsumexp((0, 2)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "softmax": lambda x: x.softmax(-1),
    "softmax dim 0": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0, 1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], x.shape[2]).long()),
    "mse": lambda x: F.mse_loss(x, x.flip(0)),
}


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats(name: str, dtype: torch.dtype) -> None:
    check(REDUCTIONS[name], floats(3, 4, 5).to(dtype))
    check(REDUCTIONS[name], floats(5, 3, 4).to(dtype).permute(1, 2, 0))


@pytest.mark.parametrize("name", [n for n in REDUCTIONS if n not in ("layer_norm", "rms_norm")])
def test_dynamic_sizes(name: str) -> None:
    if name == "cross entropy":
        pytest.skip("its target has a static shape")
    check(REDUCTIONS[name], floats(3, 4, 5), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ["sum", "sum dim", "amax", "max dim", "argmax", "prod", "any"])
def test_integers(name: str, dtype: torch.dtype) -> None:
    if name == "argmax" and dtype is torch.bool:
        pytest.skip("PyTorch has no argmax of bool")
    check(REDUCTIONS[name], (floats(3, 4, 5) * 4).abs().to(dtype))


@pytest.mark.parametrize("name", ["sum", "amax", "argmax", "max dim", "softmax", "logsumexp"])
def test_special_values(name: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1, nan, 2], [inf, -inf, 3], [-inf, -inf, -inf]])[:, :, None]
    check(REDUCTIONS[name], x)


@pytest.mark.parametrize("dim", [0, -1])
def test_gradients_of_softmax(dim: int) -> None:
    def gradients(gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result, logarithm = x.softmax(dim), x.log_softmax(dim)
        return (
            aten._softmax_backward_data(gradient, result, dim, x.dtype),
            aten._log_softmax_backward_data(gradient, logarithm, dim, x.dtype),
        )

    check(gradients, floats(3, 4, 5), floats(3, 4, 5).flip(1))


def test_empty() -> None:
    check(lambda x: (x.sum(1), x.prod(1), x.any(1), x.mean(1)), torch.empty(3, 0))
    check(lambda x: (x.sum(1), x.amax(1), x.softmax(-1)), torch.empty(0, 3))
    check(lambda x: (x.sum(), x.mean(), x.argmax(), x.softmax(0)), torch.tensor(2.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalisation_layers(dtype: torch.dtype) -> None:
    x, w = floats(2, 6, 4, 5).to(dtype), floats(6).to(dtype)
    check(lambda x, w: F.group_norm(x, 3, w, w), x, w)
    check(lambda x, w: F.layer_norm(x, (6,), w, w), x.movedim(1, -1), w)
    check(lambda x, w: F.batch_norm(x, w, w.abs(), w, w), x, w)
    # PyTorch rounds the statistics of 16-bit inputs in between.
    check(F.instance_norm, x, **({"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {}))


def test_batch_norm_in_training() -> None:
    norm = torch.nn.BatchNorm2d(3)
    for parameter in norm.parameters():
        parameter.requires_grad_(False)

    def run(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        return torch.ops.aten._native_batch_norm_legit_functional(
            x, norm.weight, norm.bias, mean, var, True, 0.1, 1e-5
        )

    check(run, floats(4, 3, 5, 5), floats(3), floats(3).abs())


def kinds(fn: Callable[..., Any], *args: Any) -> list[str]:
    nodes = lower_checked(capture(fn, *args)).nodes
    return [n.kind if isinstance(n, Reduction) else type(n).__name__ for n in nodes]


def test_node_counts() -> None:
    x = floats(4, 8)
    softmax = ["maximum", "Pointwise", "sum", "Pointwise"]
    assert kinds(lambda x: x.softmax(-1), x) == softmax
    layer_norm = ["sum", "Pointwise", "sum", "Pointwise", "Pointwise", "Pointwise"]
    assert kinds(lambda x: F.layer_norm(x, (8,)), x) == layer_norm
    norm = kinds(lambda x, w: F.batch_norm(x, w, w, w, w, eps=0.1), floats(2, 3, 4), floats(3))
    assert norm == [Pointwise.__name__]
    assert kinds(lambda x: x.max(1)[0], x) == ["maximum"]
    assert kinds(lambda x: x.max(1)[1], x) == ["argmax"]
