"""Results of operators that only a backward pass reads: sizes of bags, positions, masks, gates, ….

Nothing shows that they are wrong but gradients: eager on the device, and compiled there and for
CPU tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from torch_webgpu_compile.callables import host_graph

Program = tuple[Callable[..., Any], tuple[Any, ...]]

ROWS = torch.tensor([0, 1, 2, 3, 3, 5])
ENDS = torch.tensor([0, 2, 2, 6])
MARGINS = torch.tensor([[3, 0, -1, 1], [0, -1, 2, 3], [-1, 0, 0, 0]])
TIES = torch.tensor([[1.0, 3, 3, 2, 3, 0, 1], [2, 2, 2, 2, 1, 1, 1]])
CLASSES = torch.tensor([[2, 0, -100], [1, 3, 0]])
MASK = torch.rand(2, 2, 3, 4, generator=torch.Generator().manual_seed(0)) > 0.3


def bags(mode: str, **options: Any) -> Program:
    def call(weight: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        return F.embedding_bag(rows, weight, ends, mode=mode, **options)

    return call, ((6, 4), ROWS, ENDS)


def by_rows(name: str, **options: Any) -> Program:
    return lambda x: getattr(torch, name)(x, dim=1, **options), (TIES,)


def loss(name: str, target: Tensor, *sizes: int, **options: Any) -> Program:
    return lambda x, y: getattr(F, name)(x, y, **options), (sizes, target)


def pool(name: str, *sizes: int, **options: Any) -> Program:
    return lambda x: getattr(F, name)(x, **options), (sizes,)


def positive_definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], device=x.device)


RANDOM = torch.full((2, 3, 2), 0.4)
CELLS = ((2, 3), (2, 4))
# A program, and its arguments: tensors, and sizes of floats that have gradients.
PROGRAMS: dict[str, Program] = {
    "bags-sum": bags("sum", include_last_offset=True),
    "bags-mean": bags("mean", include_last_offset=True),
    "bags-max": bags("max", include_last_offset=True, padding_idx=3),
    "bags-starts": bags("mean"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), ((3, 4, 5), (5,), (5,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), ((3, 5), (5,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 5), (4,), (4,))),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        ((3, 4, 5), (4,), (4,)),
    ),
    "max_pool2d": pool("max_pool2d", 2, 3, 7, 7, kernel_size=3, stride=2, return_indices=True),
    "max_pool3d": pool("max_pool3d", 1, 2, 5, 5, 5, kernel_size=2),
    "adaptive_max": pool("adaptive_max_pool2d", 2, 3, 7, 5, output_size=3),
    "fractional2d": (
        lambda x, r: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=r.detach()),
        ((2, 3, 7, 7), RANDOM),
    ),
    "fractional3d": (
        lambda x, r: F.fractional_max_pool3d(x, 2, output_size=3, _random_samples=r.detach()),
        ((2, 3, 5, 5, 5), torch.full((2, 3, 3), 0.4)),
    ),
    "nll_loss": loss("nll_loss", CLASSES, 2, 4, 3),
    "cross_entropy": loss("cross_entropy", CLASSES, 2, 4, 3, label_smoothing=0.1),
    "multilabel": loss("multilabel_margin_loss", MARGINS, 3, 4),
    "multi_margin": loss("multi_margin_loss", torch.tensor([0, 3, 1]), 3, 4, p=2),
    "logsigmoid": pool("logsigmoid", 3, 40),
    "prelu": (lambda x, w: F.prelu(x, w), ((3, 4, 5), (4,))),
    "attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        ((2, 2, 3, 8), (2, 2, 4, 8), (2, 2, 4, 8), MASK),
    ),
    "masked_softmax": (lambda x, m: torch._masked_softmax(x, m, 1, 2), ((2, 2, 3, 4), MASK)),
    "ctc_loss": (
        lambda x, t: F.ctc_loss(x.log_softmax(2), t, (8, 2, 6), (3, 3, 4), zero_infinity=True),
        ((8, 3, 5), MARGINS.clamp(min=0) + 1),
    ),
    "lstm_cell": (
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w),
        (*CELLS, (2, 4), (16, 3), (16, 4), (16,), (16,)),
    ),
    "lstm_cell-unbiased": (
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w),
        (*CELLS, (2, 4), (16, 3), (16, 4)),
    ),
    "gru_cell": (torch.gru_cell, (*CELLS, (12, 3), (12, 4), (12,), (12,))),
    "cummax": by_rows("cummax"),
    "cummin": by_rows("cummin"),
    "median": by_rows("median"),
    "mode": by_rows("mode"),
    "sort": by_rows("sort", descending=True, stable=True),
    "max": by_rows("max"),
    "aminmax": by_rows("aminmax"),
    "kthvalue": (lambda x: torch.kthvalue(x, 3, 1), ((3, 7),)),
    "topk": (lambda x: torch.topk(x, 3, 1), ((3, 7),)),
    "var_mean": by_rows("var_mean"),
    # Its check is an effect, whose token is before the results that are saved.
    "inv": (torch.linalg.inv, ((2, 4, 4),)),
    "cholesky": (lambda x: torch.linalg.cholesky(positive_definite(x)), ((2, 4, 4),)),
    "lu_factor": (lambda x: torch.linalg.lu_factor(x)[0], ((2, 4, 4),)),
    "slogdet": (torch.linalg.slogdet, ((2, 4, 4),)),
}


def results(function: Callable[..., Any], arguments: tuple[Any, ...], device: str) -> list[Tensor]:
    """The floats that a program gives, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(3)
    given = []
    for argument in arguments:
        made = torch.randn(argument, generator=generator) if type(argument) is tuple else argument
        made = made.to(device, copy=True)
        given.append(made.requires_grad_() if made.is_floating_point() else made)
    outputs = [out for out in tree_leaves(function(*given)) if out.is_floating_point()]
    weighted = [
        (out * torch.randn(out.shape, generator=generator).to(device)).sum()
        for out in outputs
        if out.requires_grad
    ]
    wanted = [x for x in given if x.requires_grad]
    total = torch.stack(weighted).sum()
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return [x.cpu() for x in (*outputs, *gradients) if x is not None]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str) -> None:
    function, arguments = PROGRAMS[name]
    if name == "aminmax" and torch.__version__ < (2, 12):
        pytest.skip("PyTorch has no derivative of it there")
    expected = results(function, arguments, "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no WebGPU kernel")
        found = results(function, arguments, "webgpu")
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
        for device in ("webgpu", "cpu"):
            torch._dynamo.reset()
            found = results(torch.compile(function, backend="webgpu"), arguments, device)
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_gradients_that_the_forward_graph_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward graph gives what was saved for it, whose contents are on the GPU until then."""

    def undefined(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype).fill_(7)

    monkeypatch.setattr(host_graph, "_empty_strided", undefined)
    x = torch.randn(4, 5, requires_grad=True)
    result = torch.compile(torch.angle, backend="webgpu")(x)
    for keeps in (True, False):
        (gradient,) = torch.autograd.grad(result, x, torch.ones(4, 5), retain_graph=keeps)
        assert torch.equal(gradient, torch.zeros(4, 5))
