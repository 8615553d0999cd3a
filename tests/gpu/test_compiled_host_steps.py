"""Steps on the host inside of compiled graphs, and what they may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh")

SILENT = {"fallback": "silent"}
SYMMETRIC = [[2.0, 1.0, 0.0], [1.0, 4.0, 0.5], [0.0, 0.5, 3.0]]


def tensor(like: Tensor, value: Any) -> Tensor:
    return torch.tensor(value, device=like.device)


def used_by_a_kernel_too(x: Tensor) -> Tensor:
    right = tensor(x, [1.0, 2.0, 3.0])
    return torch.linalg.householder_product(x, right) + right * x


def returned_too(x: Tensor) -> tuple[Tensor, Tensor]:
    right = tensor(x, [1.0, 2.0, 3.0])
    return right, torch.linalg.householder_product(x, right)


def rotated(x: Tensor) -> Tensor:
    return torch.ormqr(tensor(x, SYMMETRIC), tensor(x, [0.5, 0.2, 0.1]), x)


def of_a_host_step(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(rotated(x) @ x)


def of_a_view(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(tensor(x, [SYMMETRIC, SYMMETRIC])[1, 1:, 1:].T) * x[0, 1:]


def largest_of_bags(x: Tensor) -> Tensor:
    rows, starts = tensor(x, [0, 1, 1]), tensor(x, [0, 1])
    return F.embedding_bag(rows, tensor(x, SYMMETRIC), starts, mode="max") * x[0]


def of_integers_and_bools(x: Tensor) -> Tensor:
    kinds = [tensor(x, [1, 2]), tensor(x, [True, False, True]), tensor(x, 3)]
    return sum((torch.linalg.vander(k.float().flatten(), N=3).sum() for k in kinds), x)


@pytest.mark.parametrize("place", ["cpu", "webgpu"])
@pytest.mark.parametrize(
    "function",
    [
        used_by_a_kernel_too,
        returned_too,
        of_a_host_step,
        of_a_view,
        largest_of_bags,
        of_integers_and_bools,
    ],
)
def test_a_host_step_takes_constants(function: Callable[[Tensor], Any], place: str):
    x = torch.tensor(SYMMETRIC) + torch.eye(3)
    call = compiled(function, options=SILENT)
    for _ in range(2):
        got = call(x.to(place))
        torch.testing.assert_close(
            torch.utils._pytree.tree_map(Tensor.cpu, got), function(x), atol=1e-4, rtol=1e-4
        )


def test_a_host_step_takes_constants_in_a_backward_graph():
    def loss(x: Tensor) -> Tensor:
        return of_a_host_step(x).pow(2).sum()

    x = (torch.tensor(SYMMETRIC) + torch.eye(3)).requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(compiled(loss, options=SILENT)(x), x)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
