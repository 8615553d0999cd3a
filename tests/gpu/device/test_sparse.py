"""Sparse tensors on the device: right, on the host, with one warning."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.fallbacks import FallbackWarning

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
X = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])
Y = torch.arange(6.0).reshape(3, 2)


def made_of_parts(place: str) -> Tensor:
    indices = torch.tensor([[0, 1, 1], [1, 0, 0]], device=place)
    return torch.sparse_coo_tensor(indices, torch.ones(3, device=place), (3, 3)).coalesce()


def gradients(place: str) -> list[Tensor]:
    x = X.to(place).to_sparse().requires_grad_()
    y = Y.clone().to(place).requires_grad_()
    torch.sparse.mm(x, y).pow(2).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    return [x.grad, y.grad]


def in_place(place: str) -> list[Tensor]:
    dense, x = torch.ones(3, 3, device=place), X.to(place).to_sparse()
    return [dense.add_(x), x.add_(x.t()), torch.zeros_like(x).copy_(x), x.clone().zero_()]


def by_rows(place: str) -> list[Tensor]:
    x = X.to(place).to_sparse_csr()
    return [x, x @ Y.to(place), x.to_sparse(), X.to_sparse_csr().to(place), x.values()]


def trained(place: str, kind: Callable[..., Any]) -> Tensor:
    torch.manual_seed(0)
    words = nn.Embedding(7, 3, sparse=True).to(place)
    optimizer = kind(words.parameters(), lr=0.1)
    for k in range(3):
        optimizer.zero_grad()
        words(torch.tensor([1, 2, 1, k], device=place)).pow(2).sum().backward()
        assert words.weight.grad.is_sparse
        assert words.weight.grad.device.type == place
        optimizer.step()
    return words.weight.detach()


CASES: dict[str, Callable[[str], Any]] = {
    "made": lambda place: X.to(place).to_sparse(),
    "moved": lambda place: X.to_sparse().to(place),
    "parts": made_of_parts,
    "products": lambda place: [X.to(place).to_sparse() @ t.to(place) for t in (Y, Y[:, 0])],
    "elements": lambda place: (X.to(place).to_sparse() * 2).sqrt().half(),
    "mask": lambda place: (X + 1).to(place).sparse_mask(X.to(place).to_sparse()),
    "gradients": gradients,
    "in place": in_place,
    "by rows": by_rows,
    "copies": lambda place: [
        copy.deepcopy(X.to(place).to_sparse()),
        pickle.loads(pickle.dumps(X.to(place).to_sparse())),
    ],
    "SparseAdam": lambda place: trained(place, torch.optim.SparseAdam),
    "SGD": lambda place: trained(place, torch.optim.SGD),
    "compiled": lambda place: torch.compile(lambda s, t: (s @ t) * 2, backend="webgpu")(
        X.to(place).to_sparse(), Y.to(place)
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_results(case: str) -> None:
    wanted = CASES[case]("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        got = CASES[case]("webgpu")
    assert sum(w.category is FallbackWarning for w in caught) <= 1
    pairs = zip(*(x if isinstance(x, list) else [x] for x in (got, wanted)), strict=True)
    for there, here in pairs:
        assert (there.device.type, there.layout) == ("webgpu", here.layout)
        assert_close(there.detach().cpu().to_dense(), here.detach().to_dense())
    assert "webgpu" in repr(got)


@pytest.mark.filterwarnings("error::torch_webgpu_compile.fallbacks.FallbackWarning")
def test_indices_are_checked() -> None:
    """By PyTorch, whose kernels for this are for the CPU and CUDA: no operator of the device."""
    indices = torch.tensor([[0, 1, 1], [1, 0, 2]], device="webgpu")
    values = torch.ones(3, device="webgpu", requires_grad=True)
    given: dict[str, Any] = {"size": (3, 3), "is_coalesced": True, "check_invariants": True}
    made = torch.sparse_coo_tensor(indices, values, **given)
    assert (made.device.type, made.is_coalesced(), made.requires_grad) == ("webgpu", True, True)
    with pytest.raises(RuntimeError, match="correspond to uncoalesced"):
        torch.sparse_coo_tensor(indices.flip(1), values, **given)
    by_rows = torch.tensor([0, 1, 3], device="webgpu"), torch.tensor([2, 0, 1], device="webgpu")
    torch.sparse_csr_tensor(*by_rows, values, (2, 3), check_invariants=True)
    with pytest.raises(RuntimeError, match="is not satisfied"):
        torch.sparse_csr_tensor(*by_rows[::-1], values, (2, 3), check_invariants=True)


def test_refused_without_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "error")
    with pytest.raises(UnsupportedOp, match=r"aten._to_sparse.default.*sparse"):
        X.to("webgpu").to_sparse()
