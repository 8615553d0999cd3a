"""CUDA is opened on the GPUs that are asked for, or a warning says why not."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from torch_webgpu_compile.runtime import nvidia_clock


class Driver:
    """NVIDIA's, with GPUs of these names."""

    def __init__(self, *names: str, error: int = 0) -> None:
        self.names = names
        self.error = error
        self.opened: list[int] = []
        self.cuInit = self.cuDevicePrimaryCtxSetFlags_v2 = lambda *arguments: 0
        self.cuDeviceGetCount = lambda count: self._set(count, len(self.names))
        self.cuDeviceGet = self._set
        self.cuDeviceGetName = self._name
        self.cuDevicePrimaryCtxRetain = self._open

    def _set(self, pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    def _name(self, text: Any, size: int, device: ctypes.c_int) -> int:
        text.value = self.names[device.value].encode()
        return 0

    def _open(self, context: Any, device: ctypes.c_int) -> int:
        self.opened.append(device.value)
        return self.error


def install(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    def load(name: str) -> Any:
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_gpus_of_a_name_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("NVIDIA A", "NVIDIA B", "NVIDIA A")
    install(monkeypatch, driver)
    assert nvidia_clock.open_contexts("NVIDIA A") == 2
    assert driver.opened == [0, 2]
    assert nvidia_clock.open_contexts() == 3


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (OSError("libcuda.so.1: not found"), "not found"),
        (Driver("NVIDIA A", error=2), "cuDevicePrimaryCtxRetain .* fails with 2"),
        (Driver("NVIDIA B"), "CUDA finds no NVIDIA A"),
    ],
)
def test_a_warning_says_why_not(monkeypatch: pytest.MonkeyPatch, driver: Any, reason: str) -> None:
    install(monkeypatch, driver)
    monkeypatch.setattr(nvidia_clock.threading.Thread, "start", lambda thread: thread.run())
    nvidia_clock.keep_high.cache_clear()
    with pytest.warns(RuntimeWarning, match=rf"HOLD_CLOCK=1 has no effect: .*{reason}"):
        nvidia_clock.keep_high("NVIDIA A")
    nvidia_clock.keep_high.cache_clear()
