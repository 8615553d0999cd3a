"""Allocations fail, one after the other, and for good."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_webgpu_compile.errors import OutOfMemoryError
from torch_webgpu_compile.fallbacks import FallbackWarning
from torch_webgpu_compile.runtime.device import Device, opened_devices

from .faults import Tally, fault


class _Failing:
    """Replaces `NativeBackend.create_buffer`: fails from the n-th call on, ``times`` times."""

    def __init__(self, device: Device) -> None:
        self._backend: Any = device.backend
        self._create = device.backend.create_buffer
        self.calls = 0
        self._first, self._last = 1 << 60, 0

    def __call__(self, nbytes: int, usage: int) -> Any:
        self.calls += 1
        if self._first <= self.calls < self._last:
            raise OutOfMemoryError(f"a buffer of {nbytes} bytes: injected")
        return self._create(nbytes, usage)

    @contextmanager
    def at(self, call: int, times: int) -> Iterator[None]:
        self.calls, self._first, self._last = 0, call, call + times
        self._backend.create_buffer = self
        try:
            yield
        finally:
            del self._backend.create_buffer
            self._first = 1 << 60


def _device() -> Device:
    torch.ones(1, device="webgpu")
    return opened_devices()[0]


def _settled(device: Device) -> int:
    """Bytes in use when nothing runs and nothing is kept for the next call."""
    gc.collect()
    device.empty_cache()
    device.synchronize()
    return device.pool.stats()["allocated"]


def _inject(tally: Tally, name: str, call: Callable[[], Tensor], check: Callable[[], bool]) -> None:
    """Fails every allocation of a call: once, which it survives, and for good."""
    device = _device()
    failing = _Failing(device)
    call()  # it is compiled
    gc.collect()
    gc.freeze()  # what is there now: collecting it at every allocation takes most of the time
    baseline = _settled(device)
    with failing.at(1 << 59, 0):
        call()
    for position in range(1, failing.calls + 1):
        _settled(device)
        with failing.at(position, 1):
            try:
                call()
                found = ""
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        tally(not found, f"{name}: one failure, of allocation {position}: {found}")
        tally(check(), f"{name}: wrong after one failure, of allocation {position}")
        _settled(device)
        found = ""
        with failing.at(position, 1 << 58):
            try:
                call()
            except torch.OutOfMemoryError as error:
                found = "" if "in use" in str(error) else f"it does not say what is used: {error}"
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        tally(not found, f"{name}: allocation {position} fails: {found}")
        tally(check(), f"{name}: wrong after allocation {position} had failed")
        left = _settled(device)
        tally(left == baseline, f"{name}: {left - baseline} bytes leak at allocation {position}")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


def _calls(model: Any, x: Tensor, expected: Tensor, gradient: Tensor) -> Any:
    """(a forward pass, a training step's gradient, whether they are right)."""

    def forward() -> Tensor:
        with torch.no_grad():
            return model(x).cpu()

    def backward() -> Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        return next(iter(model.parameters())).grad.cpu()

    def is_right() -> bool:
        return torch.allclose(forward(), expected, atol=1e-4) and torch.allclose(
            backward(), gradient, atol=1e-3, rtol=1e-3
        )

    return forward, backward, is_right


def _expected() -> tuple[Tensor, Tensor, Tensor]:
    model = _model()
    x = torch.randn(16, 32)
    result = model(x)
    result.square().sum().backward()
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    return x, result.detach(), gradient


@fault("every allocation of compiled calls and training steps on CPU tensors fails")
def in_calls_of_cpu_models(tally: Tally) -> None:
    x, expected, gradient = _expected()
    model = torch.compile(_model(), backend="webgpu")
    forward, backward, is_right = _calls(model, x, expected, gradient)
    is_right()
    _inject(tally, "forward", forward, is_right)
    _inject(tally, "backward", backward, is_right)


@fault("every allocation of compiled calls and training steps on device tensors fails")
def in_calls_of_device_models(tally: Tally) -> None:
    x, expected, gradient = _expected()
    model = torch.compile(_model().to("webgpu"), backend="webgpu")
    forward, backward, is_right = _calls(model, x.to("webgpu"), expected, gradient)
    is_right()
    _inject(tally, "forward", forward, is_right)
    _inject(tally, "backward", backward, is_right)


@fault("every allocation of eager operators, uploads and downloads fails")
def in_eager_operators(tally: Tally) -> None:
    x, expected, gradient = _expected()
    model = _model().to("webgpu")
    forward, backward, is_right = _calls(model, x.to("webgpu"), expected, gradient)
    big = torch.randn(3 << 20)

    def transfer() -> Tensor:
        return big.to("webgpu").cpu()

    is_right()
    _inject(tally, "forward", forward, is_right)
    _inject(tally, "backward", backward, is_right)
    _inject(tally, "a transfer", transfer, lambda: torch.equal(transfer(), big))


@fault("every allocation of a compilation fails")
def in_compilations(tally: Tally) -> None:
    x, model = torch.randn(16, 32), nn.Linear(32, 8)
    expected = model(x) + torch.arange(8.0)
    device = _device()
    failing = _Failing(device)

    def compile_and_call(place: str) -> Tensor:
        torch._dynamo.reset()
        moved = copy.deepcopy(model).to(place)
        compiled = torch.compile(
            lambda t: moved(t) + torch.arange(4096.0, device=place)[:8], backend="webgpu"
        )
        with torch.no_grad():
            return compiled(x.to(place)).cpu()

    for place in ("cpu", "webgpu"):
        compile_and_call(place)
        _settled(device)
        with failing.at(1 << 59, 0):
            compile_and_call(place)
        for position in range(1, failing.calls + 1):
            _settled(device)
            found = "no error"
            with failing.at(position, 1 << 58):
                try:
                    compile_and_call(place)
                except torch.OutOfMemoryError:
                    found = ""
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
            tally(not found, f"on {place}, allocation {position} fails: {found}")
            right = torch.allclose(compile_and_call(place), expected, atol=1e-4)
            tally(right, f"on {place}, wrong after allocation {position} had failed")


@fault("64 MiB are all there is: what does not fit raises, what is smaller works")
def small_budget(tally: Tally) -> None:
    warnings.simplefilter("error", FallbackWarning)
    device = _device()
    baseline = _settled(device)
    device.pool.limit_nbytes = 64 << 20
    kept: list[Tensor] = []
    message = ""
    try:
        while True:
            kept.append(torch.full((1 << 20,), float(len(kept)), device="webgpu"))
    except torch.OutOfMemoryError as error:
        message = str(error)
    tally(14 <= len(kept) <= 16, f"{len(kept)} tensors of 4 MiB fit")
    tally("tensors and running calls" in message and "4.0 MiB" in message, message)
    right = all(bool((t == k).all()) for k, t in enumerate(kept[:8]))
    tally(right, "tensors that were there before are wrong")
    del kept[4:]
    tally(torch.equal((kept[3] + 1).cpu(), torch.full((1 << 20,), 4.0)), "the next call is wrong")
    freed = [torch.empty(k << 16, device="webgpu") for k in range(1, 16)]
    del freed  # it is in the cache of free buffers, in sizes that the next one cannot use
    tally(torch.ones(10 << 20, device="webgpu").sum().item() == 10 << 20, "the cache is kept")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    compiled = torch.compile(model, backend="webgpu", dynamic=True)
    for rows in (1 << 16, 64, 1 << 16, 256):
        x = torch.ones(rows, 512)
        found = "" if rows > 1024 else "wrong"
        try:
            with torch.no_grad():
                if torch.allclose(compiled(x), model(x), atol=1e-4):
                    found = "it fits?" if rows > 1024 else ""
        except torch.OutOfMemoryError as error:
            found = "" if rows > 1024 else str(error)
        tally(not found, f"{rows} rows: {found}")
    del compiled, model, kept
    torch._dynamo.reset()
    device.pool.limit_nbytes = None
    left = _settled(device)
    tally(left <= baseline + (4 << 20), f"{left - baseline} bytes are left")
