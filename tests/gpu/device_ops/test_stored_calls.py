"""Calls that another process has compiled: found without being traced, used only where right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.device_checks import DEVICE
from torch_webgpu_compile import counters, wgsl_op
from torch_webgpu_compile.device.eager import compiled_lists, compiled_op, dispatch, lists
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan.demands import Demands


def forget() -> None:
    """As in a process that begins: what was compiled is in the folder alone."""
    dispatch.forget()
    compiled_lists._forms.clear()
    lists._roots.clear()
    plan_cache.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path / "plans"))
    compiled_op.eager_options.cache_clear()
    forget()
    yield tmp_path / "plans"
    monkeypatch.undo()
    compiled_op.eager_options.cache_clear()
    forget()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that are traced, one name for each attempt."""
    found: list[str] = []

    def noting(capture: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            found.append(str(arguments[0]))
            return capture(*arguments, **keywords)

        return noted

    for module, name in ((compiled_op, "capture_call"), (compiled_lists, "capture_lane")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    return found


def train(device: str) -> list[Tensor]:
    """A loop with a schedule, clipping and an optimizer on lists."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.GELU(), torch.nn.Linear(20, 5))
    inputs, labels = torch.randn(9, 12).to(device), torch.randint(0, 5, (9,)).to(device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_training_loop_is_traced_once(folder: Path, traced: list[str]) -> None:
    expected = train("cpu")
    torch.testing.assert_close(train(DEVICE), expected)
    assert "aten.nll_loss_forward.default" in traced
    traced.clear()
    forget()
    before = counters.plan_cache_hits
    torch.testing.assert_close(train(DEVICE), expected)
    assert not traced
    assert counters.plan_cache_hits > before


def several(x: Tensor) -> list[Tensor]:
    """Results, views of them, lists, numbers, changes in place and ``out=``."""
    y = x.clone()
    y.add_(x, alpha=0.25).mul_(-1.5)
    y[1:] = x[:-1] * 2
    out = x.new_empty(0)
    torch.exp(x, out=out)
    values, places = x.sort(1, descending=True)
    split = torch.stack([values, y]).chunk(2, 1)
    mean, spread = torch.var_mean(x, 1)
    where = torch.where(x > 0.5, x, -0.0)
    return [y, out, values, places, *split, mean, spread, x.T @ x, where, x.cumsum(1), x.sum()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_sizes_are_served_by_the_same_guards(
    folder: Path, traced: list[str], dtype: torch.dtype
) -> None:
    def numbers(*sizes: int) -> Tensor:
        return torch.arange(sizes[0] * sizes[1]).reshape(sizes).fmod(7).sub(3).to(dtype)

    first, second = numbers(9, 15), numbers(10, 11)
    several(first.to(DEVICE))
    several(second.to(DEVICE))
    compiled = len(traced)
    forget()
    traced.clear()
    assert compiled
    for x in (first, second):
        torch.testing.assert_close([y.cpu() for y in several(x.to(DEVICE))], several(x))
    assert not traced


def test_a_plan_for_sizes_is_made_where_only_its_interface_was_stored(
    folder: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(40, 30)
    torch.testing.assert_close(x.to(DEVICE).softmax(0).cpu(), x.softmax(0))
    forget()
    traced.clear()
    monkeypatch.setattr(Demands, "are_met", lambda demands, target: False)
    torch.testing.assert_close(x.to(DEVICE).softmax(0).cpu(), x.softmax(0))
    assert traced


def test_random_numbers_are_those_of_the_seed(folder: Path, traced: list[str]) -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.ones(50, device=DEVICE)
        own = torch.Generator()
        own.manual_seed(4)
        return [F.dropout(x, 0.3).cpu(), torch.rand_like(x).cpu(), x.normal_(1, 2).cpu()]

    first = drawn()
    forget()
    traced.clear()
    torch.testing.assert_close(drawn(), first, rtol=0, atol=0)
    assert not traced


@pytest.mark.parametrize("damage", [b"", b"no pickle", b"\x80\x04N."])
def test_what_cannot_be_read_is_traced_again(
    folder: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    x = torch.rand(7)
    x.to(DEVICE).log1p()
    forget()
    traced.clear()
    load = plan_cache.load_way

    def damaged(key: str, kind: str, folder: str) -> bytes | None:
        return damage if kind == "call" else load(key, kind, folder)

    monkeypatch.setattr(plan_cache, "load_way", damaged)
    torch.testing.assert_close(x.to(DEVICE).log1p().cpu(), x.log1p())
    assert traced


def test_entries_are_told_apart_by_all_that_decides(folder: Path, traced: list[str]) -> None:
    x = torch.linspace(-2, 2, 24)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.clamp(-1.0, 1.0),
        lambda x: x.clamp(-1.0, 0.0),
        lambda x: x.clamp(-1.0, -0.0),
        lambda x: x[1:].clamp(-1.0, 0.5),
        lambda x: x.view(4, 6).t().clamp(-1.0, 0.5),
        lambda x: x.add(1),
        lambda x: x.add(1.5),
        lambda x: x.add(True),
        lambda x: x.clone().add_(1),
        lambda x: torch.full_like(x, 2, dtype=torch.int32) / 3,
    ]
    for _ in range(2):
        for call in calls:
            expected, found = call(x), call(x.to(DEVICE)).cpu()
            torch.testing.assert_close(found, expected)
            assert torch.equal(found.signbit(), expected.signbit())
        forget()
    torch.set_default_dtype(torch.float16)
    try:
        assert (torch.full((3,), 2, dtype=torch.int32, device=DEVICE) / 3).dtype is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("namespace", ["stored_calls", "webgpu"])
def test_operators_of_a_program_are_traced_each_time(
    folder: Path, traced: list[str], namespace: str
) -> None:
    x = torch.rand(5)
    for factor in (2, 3):
        body = f"fn scaled(x: f32) -> f32 {{ return x * {factor}.0; }}"
        scaled = wgsl_op(f"{namespace}::scaled", body)
        torch.testing.assert_close(scaled(x.to(DEVICE)).cpu(), x * factor)
        forget()


def test_lists_with_other_numbers_are_other_code(folder: Path, traced: list[str]) -> None:
    """Numbers that a kernel reads may be any; those that are part of it have to be the same."""
    for power in (2.0, 3.0, 2.0):
        for scale in (0.5, 0.25):
            found = []
            for device in ("cpu", DEVICE):
                tensors = [torch.arange(1.0, 5.0).to(device), torch.ones(2, 3).to(device)]
                made = torch._foreach_mul(torch._foreach_pow(tensors, power), scale)
                found.append([x.cpu() for x in made])
            torch.testing.assert_close(found[1], found[0])
            forget()
