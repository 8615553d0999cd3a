"""Tensors that no buffer of a GPU can hold: sparse ones, and dtypes without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_webgpu_compile
from torch_webgpu_compile import FallbackWarning, counters, fallbacks
from torch_webgpu_compile.device.autoload import register

register()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fallbacks.reset_warnings()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="webgpu", options=options)


class Words(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words = kind(10, 4, sparse=True)
        self.classes = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, index: Tensor) -> Tensor:
        self.calls += 1
        return torch.nn.functional.dropout(self.classes(self.words(index)).tanh(), 0.0)


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.FallbackWarning")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_train(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    ours, theirs = Words(kind), Words(kind)
    theirs.load_state_dict(ours.state_dict())
    index = torch.tensor([[1, 2, 1], [7, 0, 2]])
    for model, call in ((theirs, theirs), (ours, compiled(ours))):
        sparse = torch.optim.SparseAdam([model.words.weight], lr=0.1)
        dense = torch.optim.SGD(model.classes.parameters(), lr=0.1)
        for _ in range(3):
            sparse.zero_grad()
            dense.zero_grad()
            call(index).square().sum().backward()
            assert model.words.weight.grad.is_sparse
            sparse.step()
            dense.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def hashed(x: Tensor) -> Tensor:
    return (x.to(torch.uint64) ^ 12345).view(torch.int64) % 1000


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dtype_without_kernels(dynamic: bool) -> None:
    call = torch.compile(hashed, backend="webgpu", dynamic=dynamic)
    before = counters.fallbacks.total()
    with pytest.warns(FallbackWarning, match=r"_to_copy.*uint64.*cannot be stored.*test_unstor"):
        result = call(torch.arange(6))
    assert torch.equal(result, hashed(torch.arange(6)))
    assert counters.fallbacks.total() > before
    assert torch.equal(call(torch.arange(9)), hashed(torch.arange(9)))


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.FallbackWarning")
def test_a_dtype_without_kernels_on_the_device() -> None:
    x = torch.arange(6)
    result = compiled(hashed)(x.to("webgpu"))
    assert result.device.type == "webgpu"
    assert torch.equal(result.cpu(), hashed(x))


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.FallbackWarning")
def test_arguments_that_change() -> None:
    def step(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x.view(-1), torch.relu(x).to(torch.uint64)

    x, ours, theirs = torch.randn(2, 3), torch.zeros(2), torch.zeros(2)
    got, wanted = compiled(step)(x, ours), step(x, theirs)
    torch.testing.assert_close((got, ours), (wanted, theirs))
    assert got[0].data_ptr() == x.data_ptr()


def test_the_policy() -> None:
    with pytest.raises(Exception, match=r"_to_copy.*cannot be stored.*TORCH_WEBGPU_FALLBACK=warn"):
        compiled(hashed, fallback="error")(torch.arange(6))


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.FallbackWarning")
def test_a_report_names_the_operator() -> None:
    report = torch_webgpu_compile.explain(hashed, torch.arange(6))
    assert report.fallbacks == ("aten._to_copy.default",)
    assert "on the host: aten._to_copy.default" in str(report)
