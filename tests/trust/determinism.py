"""Repeatable results, and loops that a driver ends."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .faults import Tally, fault

ROWS, COLUMNS = 50, 64
LIMIT = 300


def _gradient(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def of(start: Tensor, index: Tensor, values: Tensor) -> Tensor:
        leaf = start.detach().requires_grad_()
        return torch.autograd.grad(function(leaf, index, values).sum(), leaf)[0]

    return of


_SUMS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda x, i, v: x.index_add(0, i, v),
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    lambda x, i, v: x.index_put((i,), v),
    lambda x, i, v: x.scatter_add(0, i[:, None].expand(-1, COLUMNS), v),
    lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(-1, COLUMNS), v, "mean"),
    lambda x, i, v: x.put(i, v[:, 0].contiguous(), accumulate=True),
    lambda x, i, v: torch.bincount(i, weights=v[:, 1]),
    _gradient(lambda x, i, v: F.embedding(i, x) * v),
    _gradient(lambda x, i, v: F.interpolate(x[None, None], size=(70, 80), mode="bilinear")),
    _gradient(lambda x, i, v: F.pad(x[None], (9, 9, 9, 9), mode="reflect") ** 2),
)


@fault("sums at random places under use_deterministic_algorithms, on several driver threads")
def deterministic_sums(tally: Tally) -> None:
    os.environ["LP_NUM_THREADS"] = "4"
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, ROWS, (1200,), generator=generator)
    values = torch.randn(1200, COLUMNS, generator=generator)
    start = torch.randn(ROWS, COLUMNS, generator=generator)
    given = [tensor.to("webgpu") for tensor in (start, index, values)]
    for number, function in enumerate(_SUMS):
        first = function(*given).cpu()
        wanted = function(start, index, values)
        close = torch.allclose(first.double(), wanted.double(), rtol=1e-3, atol=1e-3)
        tally(close, f"sum {number} is wrong")
        for _ in range(5):
            tally(torch.equal(function(*given).cpu(), first), f"sum {number} differs")


@fault("two trainings with tied embeddings and dropout, compared bit by bit")
def deterministic_training(tally: Tally) -> None:
    os.environ["LP_NUM_THREADS"] = "4"
    from tests.compiling import native
    from tests.gpu.test_deterministic import train

    torch.use_deterministic_algorithms(True)
    ways: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("cpu", native),
        ("webgpu", native),
        ("webgpu", lambda model: model),
    )
    for place, wrap in ways:
        first, second = train(place, wrap), train(place, wrap)
        for a, b in zip(first, second, strict=True):
            tally(torch.equal(a, b), f"parameters on {place} differ")


_LONG: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.sum(0),
    lambda x: x.amax(1),
    lambda x: x.argmax(0),
    lambda x: x.t().argmin(1),
    lambda x: x.round().flatten().argmax(),
    lambda x: x.max(0),
    lambda x: x.softmax(0),
    lambda x: x.log_softmax(1),
    lambda x: x.var(0),
    lambda x: x.prod(),
    lambda x: x.t() @ x,
    lambda x: x.cumsum(0),
    lambda x: (x * 3).sort(0)[0],
    lambda x: F.layer_norm(x, x.shape[1:]),
)


@fault("long loops on a driver that ends them after 300 iterations")
def short_loops(tally: Tally) -> None:
    from torch_webgpu_compile.tensors import devices

    warnings.simplefilter("ignore")  # what cannot be divided runs on the host
    device = devices.get_device(0)
    chance = random.Random(0)
    device.target = replace(device.target, max_loop_iterations=LIMIT)
    for function in _LONG:
        for _ in range(3):
            rows, columns = chance.randint(LIMIT, 40 * LIMIT), chance.randint(1, 5)
            x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 4
            found = torch.utils._pytree.tree_leaves(function(x.to("webgpu")))
            wanted = torch.utils._pytree.tree_leaves(function(x))
            for a, b in zip(found, wanted, strict=True):
                close = torch.allclose(a.cpu().double(), b.double(), rtol=1e-3, atol=1e-3)
                tally(close, f"{rows} × {columns}, {tuple(b.shape)}")
