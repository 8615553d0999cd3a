"""The GPU device is destroyed: before a call, while it runs in another thread, and after it."""

from __future__ import annotations

import copy
import io
import logging
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_webgpu_compile as twc
from torch_webgpu_compile.plan.model import Kernel
from torch_webgpu_compile.runtime.device import opened_devices
from torch_webgpu_compile.runtime.native import NativeBackend

from .faults import Tally, fault

_ROUNDS = 4  # of each kind of call; each one has a new device, for which kernels are compiled


_compiling = threading.RLock()
_create_pipeline = NativeBackend.create_pipeline


def _create_apart(self: NativeBackend, kernel: Kernel, checked: bool) -> tuple[Any, Any]:
    with _compiling:
        return _create_pipeline(self, kernel, checked)


def destroy() -> None:
    """Destroys every device that works, between the submits and compilations of other threads.

    wgpu-native ends the process if it is told of a loss by a submit; see CONTRIBUTING.md. Dawn ends
    it if the device is destroyed while it compiles a pipeline. A GPU that is lost frees nothing of
    what Dawn has on the host; only a program that destroys the device does.
    """
    for device in opened_devices():
        backend: Any = device.backend
        with _compiling, backend._lock:
            backend.lib.wgpuDeviceDestroy(backend.device)


def _quiet() -> None:
    NativeBackend.create_pipeline = _create_apart  # type: ignore[method-assign]
    logging.disable()  # wgpu-py logs every loss
    warnings.simplefilter("ignore", RuntimeWarning)


class _Work:
    """Calls of each kind, on one set of device tensors, and what they should give."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.host = torch.randn(64, 64) / 8
        self.big = torch.randn(1 << 20)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.compiled = torch.compile(self._forward, backend="webgpu")
        self.calls: dict[str, Callable[[], Tensor]] = {
            "upload": lambda: self.big.to("webgpu"),
            "eager": self._eager,
            "compiled": lambda: self.compiled(self.x),
            "backward": self._backward,
            "download": lambda: self.large.cpu(),
        }
        self.renew()
        self.expected = {name: call().cpu() for name, call in self.calls.items()}

    def renew(self) -> None:
        """The tensors and the model, made again on the device."""
        self.x = self.host.to("webgpu")
        self.large = self.big.to("webgpu")
        self.on_device = copy.deepcopy(self.model).to("webgpu")

    def _forward(self, x: Tensor) -> Tensor:
        return (x @ x).tanh() + 1

    def _eager(self) -> Tensor:
        y = self.x
        for _ in range(20):
            y = (y @ self.x).tanh()
        return y

    def _backward(self) -> Tensor:
        self.on_device.zero_grad()
        self.on_device(self.x).square().sum().backward()
        gradient = self.on_device[0].weight.grad
        assert gradient is not None
        return gradient

    def is_right(self, name: str) -> bool:
        return torch.allclose(self.calls[name]().cpu(), self.expected[name], atol=1e-4, rtol=1e-4)


def _raises(call: Callable[[], Any]) -> str:
    """What is wrong with how a call on a lost device fails; "" if nothing."""
    try:
        call()
    except twc.DeviceLostError as error:
        return "" if "reset_device" in str(error) else f"no next step: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@fault("the device is destroyed before, during and after a call on its tensors")
def destroyed_around_calls(tally: Tally) -> None:
    _quiet()
    work = _Work()
    for name, call in work.calls.items():
        destroy()
        tally(not (found := _raises(lambda call=call: call().cpu())), f"before {name}: {found}")
        torch.webgpu.reset_device()
        old = work.x
        work.renew()
        tally(work.is_right(name), f"{name} is wrong on the new device")
        tally(not (found := _raises(lambda old=old: old + 1)), f"an old tensor: {found}")
        result = call()
        destroy()
        if result.device.type != "cpu":
            tally(not (found := _raises(result.cpu)), f"after {name}: {found}")
        torch.webgpu.reset_device()
        work.renew()
        tally(work.is_right(name), f"{name} is wrong on the newer device")


@fault("another thread destroys the device during calls on its tensors", seconds=240)
def destroyed_by_another_thread(tally: Tally) -> None:
    _quiet()
    work = _Work()
    delays = random.Random(0)
    for name, call in work.calls.items():
        for _ in range(_ROUNDS):
            killer = threading.Timer(delays.uniform(0.01, 0.1), destroy)
            killer.start()
            found = ""
            end = time.monotonic() + 20
            while not found and time.monotonic() < end:
                try:
                    call().cpu()
                except twc.DeviceLostError:
                    break
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
            killer.join()
            tally(not found, f"during {name}: {found}")
            torch.webgpu.reset_device()
            work.renew()
            tally(work.is_right(name), f"{name} is wrong on the new device")


@fault("the device is destroyed while four threads use it")
def destroyed_under_threads(tally: Tally) -> None:
    _quiet()
    work = _Work()
    for _ in range(_ROUNDS):
        ends: dict[str, str] = {}

        def use(name: str, ends: dict[str, str] = ends) -> None:
            try:
                while True:
                    work.calls[name]().cpu()
            except twc.DeviceLostError:
                ends[name] = ""
            except BaseException as error:
                ends[name] = f"{type(error).__name__}: {error}"

        names = ("upload", "eager", "compiled", "download")
        threads = [threading.Thread(target=use, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        destroy()
        for thread in threads:
            thread.join(20)
        for name in names:
            found = ends.get(name, "hangs")
            tally(not found, f"{name}: {found}")
        torch.webgpu.reset_device()
        work.renew()
        tally(all(map(work.is_right, names)), "wrong on the new device")


@fault("models on CPU tensors go on after a loss, before and during their calls")
def cpu_models_go_on(tally: Tally) -> None:
    _quiet()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="webgpu")
    x = torch.randn(32, 64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]

    def step(m: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(6):
        loss = step(compiled, optimizers[0])
        destroy()
        tally(torch.allclose(loss, step(reference, optimizers[1]), rtol=1e-3), "the loss is wrong")
    state, expected = model.state_dict(), reference.state_dict()
    tally(
        all(torch.allclose(state[k], expected[k], atol=1e-4) for k in state), "the state is wrong"
    )
    model.eval()
    reference.eval()
    with torch.no_grad():
        expected_result = reference(x)
        for _ in range(_ROUNDS):
            killer = threading.Timer(0.05, destroy)
            killer.start()
            while killer.is_alive():
                result = compiled(x)
            killer.join()
            result = compiled(x)
            tally(torch.allclose(result, expected_result, atol=1e-4), "the result is wrong")
    loss = compiled.train()(x).square().mean()
    destroy()
    tally(not (found := _raises_without_step(loss.backward)), f"a backward pass: {found}")
    before = step(compiled, optimizers[0])
    tally(bool(torch.isfinite(before)), "the step after it")


def _raises_without_step(call: Callable[[], Any]) -> str:
    try:
        call()
    except twc.DeviceLostError as error:
        return "" if "run the forward pass again" in str(error) else f"no next step: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@fault("what ordinary code does with tensors of a lost device, before and after reset_device()")
def old_tensors(tally: Tally) -> None:
    _quiet()
    held = [torch.randn(16, 16, device="webgpu")]
    uses: dict[str, Callable[[], Any]] = {
        "add": lambda: held[0] + 1,
        "in place": lambda: held[0].add_(1),
        "fill": lambda: held[0].fill_(0),
        "part": lambda: held[0][:, ::2].zero_(),
        "copy from the host": lambda: held[0].copy_(torch.ones(16, 16)),
        "print": lambda: str(held[0]),
        "save": lambda: torch.save(held[0], io.BytesIO()),
        "list": lambda: held[0].tolist(),
        "item": lambda: held[0][0, 0].item(),
        "clone": lambda: held[0].clone(),
        "host operator": lambda: torch.linalg.eigvals(held[0]),
        "deepcopy": lambda: copy.deepcopy(held[0]),
    }
    warnings.simplefilter("ignore", twc.FallbackWarning)
    for call in uses.values():
        call()
    destroy()
    torch.webgpu.reset_device()
    held[0] = torch.randn(16, 16, device="webgpu")
    for call in uses.values():  # compiled for the new device
        call()
    destroy()
    for name, call in uses.items():
        tally(not (found := _raises(call)), f"{name}, before the reset: {found}")
    torch.webgpu.reset_device()
    y = torch.ones(16, 16, device="webgpu")
    uses["with a new one"] = lambda: y + held[0]
    uses["into a new one"] = lambda: y.copy_(held[0])
    for name, call in uses.items():
        tally(not (found := _raises(call)), f"{name}, after the reset: {found}")
    allocated = torch.webgpu.memory_allocated()
    del held[:]
    tally(torch.webgpu.memory_allocated() == allocated, "dead tensors count as memory")
    tally(torch.equal((y + 1).cpu(), torch.full((16, 16), 2.0)), "new tensors are wrong")
    module = nn.Linear(16, 16).to("webgpu")
    state = {k: v.cpu() for k, v in module.state_dict().items()}
    compiled = torch.compile(module, backend="webgpu")
    with torch.no_grad():
        expected = compiled(y).cpu()
        destroy()
        torch.webgpu.reset_device()
        y = torch.ones(16, 16, device="webgpu")
        tally(not (found := _raises(lambda: compiled(y))), f"dead parameters: {found}")
        module.to_empty(device="webgpu").load_state_dict(state)
        tally(torch.allclose(compiled(y).cpu(), expected), "a model that was loaded again")
