"""Eager operators in float64 on GPUs that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.providers import lose
from torch_webgpu_compile import counters
from torch_webgpu_compile.device.eager import dispatch

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")


@pytest.fixture(autouse=True)
def _without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dispatch.forget()  # what was compiled for the GPU as it is, and then what was not
    lose("shader-f64", monkeypatch)
    yield
    dispatch.forget()


def random(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


def trained(module: nn.Module, x: Tensor, device: str) -> list[Tensor]:
    """The results and gradients of a module."""
    module, x = module.to(device), x.detach().to(device).requires_grad_()
    results = [y for y in torch.utils._pytree.tree_leaves(module(x)) if isinstance(y, Tensor)]
    leaves = [x, *module.parameters()]
    gradients = torch.autograd.grad(sum(y.square().sum() for y in results), leaves)
    return [y.detach().cpu() for y in (*results, *gradients)]


RECURRENT: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], str]] = {
    "lstm": (nn.LSTM, (3, 2, 3), "aten._thnn_fused_lstm_cell_backward_impl.default"),
    "lstm cell": (nn.LSTMCell, (2, 3), "aten._thnn_fused_lstm_cell.default"),
    "gru": (nn.GRU, (3, 2, 3), "aten._thnn_fused_gru_cell_backward.default"),
    "gru cell": (nn.GRUCell, (2, 3), "aten._thnn_fused_gru_cell.default"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules(name: str, bias: bool) -> None:
    kind, sizes, op = RECURRENT[name]
    torch.manual_seed(0)
    module, x = kind(3, 4, bias=bias, dtype=torch.float64), random(*sizes)
    expected = trained(module, x, "cpu")
    counters.reset()
    torch.testing.assert_close(trained(module, x, "webgpu"), expected)
    assert op in counters.fallbacks


def test_self_attention() -> None:
    inputs = random(2, 3, 4), random(12, 4), random(12), random(4, 4), random(4)

    def attend(x: Tensor, *projections: Tensor) -> Any:
        return torch._native_multi_head_attention(x, x, x, 4, 2, *projections)

    found = attend(*(t.to("webgpu") for t in inputs))
    torch.testing.assert_close([t.cpu() for t in found], list(attend(*inputs)))


def test_normalization_over_several_devices() -> None:
    x, eps = random(8, 3), 1e-5
    mean, scale = aten.batch_norm_stats.default(x.to("webgpu"), eps)
    var, expected = torch.var_mean(x, 0, correction=0)
    torch.testing.assert_close([mean.cpu(), scale.cpu()], [expected, (var + eps).rsqrt()])


def test_without_a_host() -> None:
    """An operator that neither a kernel nor a decomposition computes is refused."""
    x = random(3).to("webgpu")
    with pytest.raises(RuntimeError, match=r"_masked_scale\.default: has no WebGPU kernel"):
        aten._masked_scale.default(x, x.to(torch.uint8), 2.0)
