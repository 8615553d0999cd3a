"""Ctrl-C, in the main thread: at every place where Python looks for it, and at random times."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.interrupts import count_places, interrupt
from torch_webgpu_compile.device.autoload import register

from .faults import Tally, fault

register()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()


def compiled_on_the_host() -> Callable[[], torch.Tensor]:
    compiled, x = torch.compile(_model(), backend="webgpu"), torch.randn(16, 32)
    return lambda: compiled(x)


def compiled_on_the_device() -> Callable[[], torch.Tensor]:
    model = _model().to("webgpu")
    compiled, x = torch.compile(model, backend="webgpu"), torch.randn(16, 32).to("webgpu")
    return lambda: compiled(x).cpu()


def eager_operators() -> Callable[[], torch.Tensor]:
    x, w = torch.randn(16, 32).to("webgpu"), torch.randn(32, 32).to("webgpu") * 0.2

    def work() -> torch.Tensor:
        a = (x @ w).tanh()
        a += 1
        return a.cpu()

    return work


def uploads_and_indices() -> Callable[[], torch.Tensor]:
    x, index = torch.randn(16, 32), torch.tensor([3, 1]).to("webgpu")
    return lambda: (x.to("webgpu")[index] * 2).cpu()


WORK: tuple[Callable[[], Callable[[], torch.Tensor]], ...] = (
    compiled_on_the_host,
    compiled_on_the_device,
    eager_operators,
    uploads_and_indices,
)


def check_places(
    tally: Tally, make: Callable[[], Callable[[], Any]], step: int, first: int
) -> None:
    """Interrupts a call at every ``step``-th of its places; the next one must be right."""
    with torch.no_grad():
        work = make()
        wanted = work()
        for _ in range(3):
            work()
        allocated = torch.webgpu.memory_allocated()
        for at in range(first, count_places(work) + 1, step):
            try:
                place = interrupt(work, at)
                right = torch.equal(work(), wanted)
            except Exception as error:
                tally(False, f"{make.__name__}: {error}")
                continue
            now = torch.webgpu.memory_allocated()
            tally(right and now == allocated, f"{make.__name__}: {place}: {now - allocated} bytes")
            allocated = now


@fault("Ctrl-C at each place where Python looks for it, in compiled calls")
def interrupted_compiled_calls(tally: Tally) -> None:
    check_places(tally, compiled_on_the_host, 1, 1)
    check_places(tally, compiled_on_the_device, 1, 1)


@fault("Ctrl-C at each place where Python looks for it, in eager operators and transfers")
def interrupted_operators(tally: Tally) -> None:
    check_places(tally, eager_operators, 1, 1)
    check_places(tally, uploads_and_indices, 1, 1)


def _interrupt_at_random(tally: Tally, work: Callable[[], Any], tries: int) -> None:
    """Real signals, while the work is repeated; each must end it once, and soon.

    But for one that comes while Dynamo runs a guard that is written in Python: whatever the
    backend, it takes the exception for a guard that does not hold (PyTorch 2.11 to 2.13).
    """
    in_guard = False

    def raise_interrupt(_signal: int, frame: types.FrameType | None) -> None:
        nonlocal in_guard
        while frame is not None and not in_guard:
            in_guard = frame.f_globals["__name__"] == "torch._dynamo.guards"
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, raise_interrupt)
    rng = random.Random(0)
    wanted = work()
    for _ in range(tries):
        delay, in_guard = rng.random() * 0.03, False
        shot = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        end = time.monotonic() + delay + 5
        try:
            shot.start()
            while time.monotonic() < end:
                work()
            interrupted = in_guard
        except KeyboardInterrupt:
            interrupted = True
        try:
            right = torch.equal(work(), wanted)
        except Exception as error:
            tally(False, f"after Ctrl-C: {type(error).__name__}: {error}")
            continue
        tally(interrupted and right, f"wrong after Ctrl-C, or not interrupted ({interrupted})")


@fault("Ctrl-C at random times in steady work")
def random_interrupts(tally: Tally) -> None:
    with torch.no_grad():
        for make in WORK:
            _interrupt_at_random(tally, make(), 75)


@fault("Ctrl-C at random times while a model is compiled")
def interrupted_compilations(tally: Tally) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(0)
    model, x = _model(), torch.randn(16, 32)
    with torch.no_grad():
        wanted = model(x)
        for k in range(12):
            torch._dynamo.reset()
            compiled = torch.compile(
                nn.Sequential(*model, nn.Hardtanh(-9.0 - k, 9.0)), backend="webgpu"
            )
            threading.Timer(rng.random(), os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                compiled(x)
                time.sleep(1)  # until it comes
            except KeyboardInterrupt:
                pass
            try:
                right = torch.allclose(compiled(x), wanted, atol=1e-4, rtol=1e-4)
            except Exception as error:
                tally(False, f"{type(error).__name__}: {error}")
                continue
            tally(right, "wrong after an interrupted compilation")
