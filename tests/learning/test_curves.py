"""The first steps of every task; ``python -m tests.learning`` takes 300."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_webgpu_compile.device.autoload import register

from .curves import Run, excess, train
from .tasks import TASKS

register()

STEPS = 12


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test compiles from scratch; an operator that runs on the host is a failure."""
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "error")
    torch._dynamo.reset()


@pytest.mark.rotates(12)
@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("name", TASKS)
def test_a_curve_is_that_of_the_cpu(name: str, form: str) -> None:
    task = TASKS[name]
    reference = train(task, "cpu", STEPS)
    others = [train(task, "cpu", STEPS, order=order) for order in range(2)]
    run = train(task, "webgpu", STEPS, is_compiled=form == "compiled")
    assert reference.losses[-1] < reference.losses[0]
    assert excess(run, reference, others) <= 1
    away = max(abs(other.accuracy - reference.accuracy) for other in others)
    assert run.accuracy == pytest.approx(reference.accuracy, abs=away + 1e-6)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_mixed_precision_follows_the_curve(dtype: torch.dtype, form: str) -> None:
    """Each loss is within the precision of the dtype times the few layers it goes through."""
    reference = train(TASKS["transformer"], "cpu", 8)
    run = train(TASKS["transformer"], "webgpu", 8, is_compiled=form == "compiled", dtype=dtype)
    torch.testing.assert_close(
        run.losses, reference.losses, rtol=4 * torch.finfo(dtype).eps, atol=0
    )
    assert not torch.equal(run.losses, reference.losses)


@pytest.mark.parametrize("wrong", [1 + 1e-3, 1 - 1e-3])
def test_a_wrong_learning_rate_is_seen(wrong: float) -> None:
    """What is allowed is not so much that nothing would fail."""
    task = TASKS["transformer"]
    reference, other = (train(task, "cpu", STEPS, order=order) for order in (None, 0))
    another = train(dataclasses.replace(task, rate=task.rate * wrong), "cpu", STEPS)
    assert excess(another, reference, [other]) > 1
    assert excess(train(task, "cpu", STEPS, order=1), reference, [other]) <= 1
    assert excess(Run(torch.full((STEPS,), torch.nan), 0.0), reference, [other]) != 1
