"""When ``import torch`` makes the device known."""

from __future__ import annotations

import os

import pytest
import torch

import torch_webgpu_compile
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.errors import OptionError
from torch_webgpu_compile.options import from_environment


@pytest.fixture
def registered(monkeypatch):
    calls = []
    monkeypatch.setattr(autoload, "register", lambda: calls.append(True))
    monkeypatch.delenv("TORCH_WEBGPU_DEVICE", raising=False)
    return calls


def _pretend_cuda(monkeypatch, available):
    checks = []

    def is_available():
        checks.append(os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"])
        return available

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    return checks


def test_without_another_accelerator(registered, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: False)
    autoload.load()
    assert registered


@pytest.mark.parametrize("available", [True, False])
def test_beside_cuda(registered, monkeypatch, available):
    checks = _pretend_cuda(monkeypatch, available)
    autoload.load()
    assert bool(registered) == (not available)
    assert checks == ["1"]  # CUDA is not opened
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


@pytest.mark.parametrize("asked", ["0", "1"])
def test_the_environment_decides(registered, monkeypatch, asked):
    _pretend_cuda(monkeypatch, available=asked == "1")
    monkeypatch.setenv("TORCH_WEBGPU_DEVICE", asked)
    autoload.load()
    assert bool(registered) == (asked == "1")
    from_environment()
    monkeypatch.setenv("TORCH_WEBGPU_DEVICE", "maybe")
    with pytest.raises(OptionError, match="TORCH_WEBGPU_DEVICE"):
        from_environment()


def test_the_public_name(monkeypatch):
    assert torch_webgpu_compile.register_device is autoload.register
