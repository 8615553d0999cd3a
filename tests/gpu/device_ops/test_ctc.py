"""CTC loss against the CPU, with its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.device_checks import compare, numbers
from torch_webgpu_compile import counters

STEPS, SAMPLES, CLASSES, LONGEST = 20, 3, 6, 7
LENGTHS = [20, 11, 1], [7, 0, 2]


def loss(device, *, joined=False, tensors=True, dtype=torch.int64, blank=0, x=None, **keywords):
    x = numbers(STEPS, SAMPLES, CLASSES, device=device) if x is None else x
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, CLASSES, (SAMPLES, LONGEST), generator=generator)
    targets = torch.where(targets == blank, 0, targets).to(dtype)
    steps, lengths = LENGTHS
    if joined:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    if tensors:
        steps, lengths = torch.tensor(steps), torch.tensor(lengths)
    log_probs = x.log_softmax(-1)
    targets = targets.to(device)
    found = F.ctc_loss(log_probs, targets, steps, lengths, blank=blank, **keywords)
    weights = torch.arange(1.0, 1.0 + found.numel(), device=device).view_as(found)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    return found, gradient


@pytest.mark.parametrize(
    "keywords",
    [
        {"zero_infinity": True},
        {"reduction": "none"},  # a sample that is too short is infinite, its gradient NaN
        {"joined": True, "reduction": "sum", "zero_infinity": True},
        {"joined": True, "tensors": False, "reduction": "none", "dtype": torch.int32},
        {"blank": 4, "tensors": False, "zero_infinity": True},
    ],
    ids=str,
)
def test_loss_and_gradient(keywords):
    compare(lambda device: loss(device, **keywords), rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite():
    def f(device):
        x = torch.zeros(STEPS, SAMPLES, CLASSES)
        x[3, 0, 2], x[4, 1, 0] = -torch.inf, torch.nan
        return loss(device, x=x.to(device).requires_grad_(), reduction="none")

    compare(f, rtol=1e-4, atol=1e-5)


def test_without_labels_steps_or_a_batch():
    def f(device):
        x = numbers(STEPS, SAMPLES, CLASSES, device=device, grad=False).log_softmax(-1)
        nothing = torch.zeros(SAMPLES, 0, dtype=torch.int64, device=device)
        one = torch.ones(SAMPLES, 1, dtype=torch.int64, device=device)
        return (
            F.ctc_loss(x, nothing, [STEPS] * 3, [0] * 3, reduction="none"),
            F.ctc_loss(x, nothing[:, 0:].flatten(), [STEPS] * 3, [0] * 3, reduction="none"),
            F.ctc_loss(x, one, [0, 0, 3], [0, 1, 1], reduction="none"),
            F.ctc_loss(x[:, 0], one[0], torch.tensor(9), torch.tensor(1)),
        )

    compare(f, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "lengths", "changes"),
    [
        ([21, 20, 20], [1, 1, 1], {}),
        ([-1, 20, 20], [1, 1, 1], {}),
        ([20, 20], [1, 1, 1], {}),
        ([20, 20, 20], [1, 8, 1], {}),
        ([20, 20, 20], [1, 1, 1], {"blank": CLASSES}),
    ],
)
def test_what_is_refused(steps, lengths, changes):
    def f(device):
        x = numbers(STEPS, SAMPLES, CLASSES, device=device, grad=False)
        targets = torch.ones(SAMPLES, LONGEST, dtype=torch.int64, device=device)
        return F.ctc_loss(x, targets, steps, lengths, **changes)

    compare(f, host=None)


def test_autocast_computes_in_float32():
    x = numbers(STEPS, SAMPLES, CLASSES, device="webgpu")
    with torch.autocast("webgpu"):
        found, _ = loss("webgpu", x=x.half(), zero_infinity=True)
    wanted, _ = loss("cpu", x=x.detach().cpu().requires_grad_(), zero_infinity=True)
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=2e-3, atol=2e-3)


def test_new_lengths_compile_nothing():
    def f(lengths):
        x = numbers(STEPS, SAMPLES, CLASSES, device="webgpu", grad=False).log_softmax(-1)
        targets = torch.ones(SAMPLES, LONGEST, dtype=torch.int64, device="webgpu")
        return F.ctc_loss(x, targets, [20, 19, 18], lengths)

    f([1, 2, 3])
    counters.reset()
    f([3, 2, 7])
    assert counters.plans_compiled == 0


def test_more_steps_and_labels_than_a_driver_has_iterations():
    """llvmpipe ends all loops of an invocation after 65,535 iterations."""

    def f(device):
        x = numbers(2500, 1, 5, device=device, grad=False).log_softmax(-1)
        targets = 1 + torch.arange(2000, device=device).view(1, -1) % 4
        return F.ctc_loss(x, targets, [2500], [1100])

    compare(f, rtol=1e-4, atol=1e-5)
