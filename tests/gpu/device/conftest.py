"""Tests of ``torch.device("webgpu")``: two devices on one adapter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  (PyTorch first: the device is registered with it)

from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.tensors import devices

register()


@pytest.fixture(scope="session", autouse=True)
def two_devices() -> Iterator[None]:
    """``webgpu:0`` and ``webgpu:1`` on the adapter that is first otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        first = os.environ.get("TORCH_WEBGPU_ADAPTER", "").split(",")[0] or "0"
        patch.setenv("TORCH_WEBGPU_ADAPTER", f"{first},{first}")
        patch.setattr(devices, "_ordinals", None)
        assert devices.device_count() == 2
        yield


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs on the host is not the concern of these tests; each starts on ``webgpu:0``."""
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "silent")
    yield
    devices.set_current(0)
