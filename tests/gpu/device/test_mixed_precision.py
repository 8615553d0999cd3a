"""Training in mixed precision: ``GradScaler``, and autocast under ``torch.compile``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(9)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Small(nn.Module):
    """A convolution, a layer of a transformer, and a classifier: images of 8 x 8 in 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.gelu(self.patches(x)).flatten(2).transpose(1, 2)
        result: Tensor = self.head(self.layer(tokens).mean(1))
        return result


def train(model: Small, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("webgpu", enabled=dtype is F16)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        with torch.autocast("webgpu", dtype=dtype or F16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_training_converges_as_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Small().to("webgpu")
    x = torch.randn(16, 1, 8, 8).to("webgpu")
    y = torch.arange(16).remainder(4).to("webgpu")
    full = train(copy.deepcopy(model), x, y, None)
    mixed = train(model, x, y, dtype)
    assert full[-1] < 0.5 * full[0]
    assert mixed[0] == pytest.approx(full[0], rel=2e-2)
    assert mixed[-1] < 0.5 * mixed[0]
    assert all(weight.dtype is F32 for weight in model.parameters())


OPTIMIZERS = [
    (torch.optim.SGD, {"foreach": True}),
    (torch.optim.SGD, {"foreach": False}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_steps_with_infinite_gradients_are_skipped(
    kind: Any, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "warn")
    weight = nn.Parameter(torch.ones(4, device="webgpu"))
    optimizer = kind([weight], lr=0.1, **options)
    scaler = torch.amp.GradScaler("webgpu", init_scale=8.0, growth_interval=2)
    scales, steps = [], []
    for value in (1.0, 1.0, float("inf"), float("nan"), 1.0):
        optimizer.zero_grad()
        before = weight.detach().clone()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        steps.append(not torch.equal(weight.detach(), before))
    assert steps == [True, True, False, False, True]
    assert scales == [8.0, 16.0, 8.0, 4.0, 4.0]


def test_unscaled_gradients_can_be_clipped() -> None:
    weight = nn.Parameter(torch.ones(4, device="webgpu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("webgpu", init_scale=1024.0)
    scaler.scale((weight * 3).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weight.detach().cpu(), torch.full((4,), 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("options", "nbytes"), [({}, 4), ({"fused": True}, 0)])
def test_a_step_reads_one_number_of_the_device(options: dict[str, bool], nbytes: int) -> None:
    """Whether to skip it: once per optimizer, however many parameters there are."""
    weights = [nn.Parameter(torch.ones(3, device="webgpu")) for _ in range(20)]
    halves = weights[:10], weights[10:]
    optimizers = [torch.optim.AdamW(half, lr=0.1, **options) for half in halves]
    scaler = torch.amp.GradScaler("webgpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        before = [weight.detach().clone() for weight in weights]
        loss = sum(weight.sum() for weight in halves[0]) * factor
        loss = loss + sum(weight.sum() for weight in halves[1])
        scaler.scale(loss).backward()
        counters.reset()
        for optimizer, half in zip(optimizers, halves, strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(half, 1.0)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        assert counters.bytes_downloaded == nbytes * len(optimizers)
        assert not counters.fallbacks
        changed = [not torch.equal(a, b) for a, b in zip(before, weights, strict=True)]
        assert changed == [factor == 1.0] * 10 + [True] * 10
    assert scaler.get_scale() == 4.0


def test_a_scaler_that_is_off_does_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, device="webgpu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("webgpu", enabled=False)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3


# Dynamo asks for it where it goes on after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_whole_step_with_a_scaler_is_compiled() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("webgpu")
    x, y = torch.randn(6, 8).to("webgpu"), torch.arange(6).remainder(4).to("webgpu")

    def losses(is_compiled: bool) -> list[float]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("webgpu", init_scale=8.0)

        def step(factor: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("webgpu"):
                loss = F.cross_entropy(model(x), y) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        call = torch.compile(step, backend="webgpu") if is_compiled else step
        factors = torch.tensor([1.0, float("inf"), 1.0, 1.0], device="webgpu")
        found = [call(factor).item() for factor in factors]
        assert scaler.get_scale() == 4.0
        return found

    expected = losses(False)
    assert losses(True) == pytest.approx(expected, rel=2e-3)
    assert expected[0] > expected[2] > expected[3]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bfloat16_with_master_weights(is_compiled: bool) -> None:
    """Steps that are too small for bfloat16 add up in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("webgpu", BF16)
    x, y = torch.randn(6, 8, dtype=BF16).to("webgpu"), torch.arange(6).remainder(4).to("webgpu")
    first = [weight.detach().clone() for weight in model.parameters()]
    masters = [weight.float().requires_grad_() for weight in first]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    call: Any = torch.compile(model, backend="webgpu") if is_compiled else model
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(call(x).float(), y)
        loss.backward()
        for weight, master in zip(model.parameters(), masters, strict=True):
            assert weight.grad is not None
            assert weight.grad.dtype is BF16
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        losses.append(loss.detach())
    assert losses[-1] < losses[0] - 0.005
    for weight, master, before in zip(model.parameters(), masters, first, strict=True):
        assert torch.equal(weight, master.to(BF16))
        assert (weight != before).float().mean() > 0.9


def test_the_state_of_a_scaler_is_restored() -> None:
    weight = nn.Parameter(torch.ones(2, device="webgpu"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first = torch.amp.GradScaler("webgpu", init_scale=4.0, growth_interval=2)
    first.scale(weight.sum()).backward()
    first.step(optimizer)
    first.update()
    second = torch.amp.GradScaler("webgpu")
    second.load_state_dict(first.state_dict())
    second.scale(weight.sum()).backward()
    second.step(optimizer)
    second.update()
    assert second.get_scale() == 8.0


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_context_in_compiled_code(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    model.to("webgpu")
    x = torch.randn(3, 8).to("webgpu")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("webgpu", dtype=dtype):
            y = model(x)
            return y, y.softmax(-1)

    expected = run(x)
    results = torch.compile(run, backend="webgpu", fullgraph=True)(x)
    assert [result.dtype for result in results] == [dtype, F32]
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), other.cpu(), rtol=3e-2, atol=3e-2)
    results[1].square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.dtype is F32 for weight in model.parameters()
    )


def test_compiled_code_in_a_context() -> None:
    model = nn.Linear(4, 4).to("webgpu")
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    x = torch.randn(2, 4).to("webgpu")
    with torch.autocast("webgpu"):
        result = compiled(x)
        assert result.dtype is F16
        torch.testing.assert_close(result.cpu(), model(x).cpu(), rtol=1e-2, atol=1e-2)
    assert compiled(x).dtype is F32


def test_compiled_code_for_host_tensors_is_left_alone() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    with torch.autocast("webgpu"):
        result = compiled(x)
    assert result.dtype is F32
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
