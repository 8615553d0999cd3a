"""wgpu-native, as wgpu-py brings it: see `library.Library`.

It reports an error to a callback inside the failing call; wgpu-py's `ErrorHandler` collects it per
thread. A few calls end the process on an error instead (wgpu-native 29): see `native`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ..target import MatrixConfig
from .failures import cause_of, is_loss
from .interface import COPY_DST, Handle
from .library import AWAKE_SECONDS, Report
from .signals import Signal
from .type_strings import parse_only_needed

_MODULE = "wgpu.backends.wgpu_native"
_GUARD = "torch_webgpu_compile"
_PAUSE_SECONDS = 1e-3  # between two looks while the process exits


def bindings() -> tuple[Any, Any]:
    """(ffi, lib)."""
    module = import_module(f"{_MODULE}._ffi")
    parse_only_needed(module.ffi)
    return module.ffi, module.lib


def list_adapters() -> list[Any]:
    """All adapters, as objects of wgpu-py."""
    bindings()  # it makes the listing quicker
    found: list[Any] = import_module("wgpu").gpu.enumerate_adapters_sync()
    return found


def subgroup_matrix_configs(adapter: Any) -> tuple[MatrixConfig, ...]:
    """None: wgpu-native 29 has the feature, but refuses every device that asks for it."""
    return ()


def open_library(
    adapter: Any,
    features: Sequence[str],
    limits: Mapping[str, int],
    checked: bool,
    cache: str | None = None,
) -> WgpuNative:
    """A new device, see `adapters.open_library`; wgpu-native 29 keeps no compiled shaders."""
    return WgpuNative(
        adapter.request_device_sync(required_features=list(features), required_limits=dict(limits))
    )


class WgpuNative:
    """`library.Library` on a device of wgpu-py."""

    def __init__(self, device: Any) -> None:
        self.ffi, self.lib = bindings()
        errors = import_module(f"{_MODULE}._api").error_handler
        # Several times in every call: a partial costs less than a method.
        self.capture: Callable[[], None] = partial(errors.capture, _GUARD)
        self.release: Callable[[], Report | None] = partial(errors.release, _GUARD)
        self._owner = device  # keeps the handles below alive
        self.awake_seconds = AWAKE_SECONDS
        self._signals: list[Signal] = []  # C may call them
        self._free_signals: deque[Signal] = deque()
        self.device: Handle = device._internal
        self.queue: Handle = device.queue._internal
        self.submit = self.lib.wgpuQueueSubmitForIndex
        self.refuses_submits = False
        self.callback_mode: int = self.lib.WGPUCallbackMode_AllowProcessEvents
        desc = self.ffi.new("WGPUBufferDescriptor *")
        desc.size, desc.usage = 16, COPY_DST
        self._probe: Handle = self.lib.wgpuDeviceCreateBuffer(self.device, desc)

    def find_loss(self) -> str:
        """Asks by an upload of nothing: the cheapest call that reports a loss, and survives it."""
        report = None
        self.capture()
        try:
            self.lib.wgpuQueueWriteBuffer(self.queue, self._probe, 0, self.ffi.NULL, 0)
        finally:
            report = self.release()
        return cause_of(report[1]) if report is not None and is_loss(report[1]) else ""

    def mark(self, submission: int) -> Handle:
        """The submission's index."""
        return self.ffi.new("WGPUSubmissionIndex *", submission)

    def wait(self, mark: Handle | None) -> None:
        """Polls the device; for all of its work, staying awake at first."""
        if mark is not None or not self.awake_seconds:
            self.lib.wgpuDevicePoll(self.device, True, self.ffi.NULL if mark is None else mark)
            return
        done = self.signal_when_done()
        if not self._is_given_soon(done):
            self.lib.wgpuDevicePoll(self.device, True, self.ffi.NULL)
        if done.statuses:  # else C may still call it
            self._free_signals.append(done)

    def wait_at_most(self, seconds: float) -> bool:
        """Polls the device now and then."""
        done = self.signal_when_done()
        end = time.perf_counter() + seconds
        while not self._is_given_soon(done):
            if time.perf_counter() >= end:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def wait_for_map(self, future: Handle, mapped: Signal, submission: int | None) -> None:
        """Polls the device: that calls callbacks. Its futures cannot be waited for."""
        if submission is None:  # never used: there is nothing to wait for
            self.lib.wgpuDevicePoll(self.device, False, self.ffi.NULL)
        elif not (self.awake_seconds and self._is_given_soon(mapped)):
            self.lib.wgpuDevicePoll(self.device, True, self.mark(submission))

    def signal_when_done(self) -> Signal:
        """A signal that is given when the GPU has done all that was submitted."""
        try:
            done = self._free_signals.pop()
        except IndexError:
            done = Signal(self.ffi, "WGPUQueueWorkDoneCallback", self.callback_mode)
            self._signals.append(done)
        done.statuses.clear()
        self.lib.wgpuQueueOnSubmittedWorkDone(self.queue, done.info[0])
        return done

    def _is_given_soon(self, signal: Signal) -> bool:
        """Whether a signal is given while this thread stays awake.

        What `wgpuDevicePoll` returns says nothing: with wgpu-native 29 it is always true.
        """
        end = time.perf_counter() + self.awake_seconds
        while not signal.statuses:
            self.lib.wgpuDevicePoll(self.device, False, self.ffi.NULL)
            if time.perf_counter() >= end:
                break
        return bool(signal.statuses)

    def create_module(self, descriptor: Handle, checked: bool) -> Handle:
        """A shader module; ``wgpuDeviceCreateShaderModuleTrusted`` leaves checks out."""
        if checked:
            return self.lib.wgpuDeviceCreateShaderModule(self.device, descriptor)
        return self.lib.wgpuDeviceCreateShaderModuleTrusted(self.device, descriptor, 0)

    def prepare_wgsl(self, wgsl: str) -> str:
        """The text as it is."""
        return wgsl

    def tick_seconds(self) -> float:
        """Seconds of a tick of the timestamps, by the adapter."""
        return float(self.lib.wgpuQueueGetTimestampPeriod(self.queue)) * 1e-9
