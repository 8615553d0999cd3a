"""When ``import torch`` makes the device known."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

import torch_webgpu_compile
from torch_webgpu_compile import patches, torch_private
from torch_webgpu_compile.device import autoload, import_hooks
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
    monkeypatch.setattr(torch_private, "cuda_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    return checks


def test_without_another_accelerator(registered, monkeypatch):
    monkeypatch.setattr(torch_private, "cuda_is_compiled", lambda: False)
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


# What `import torch` does, but later: PyTorch has changed meanwhile.
_CHANGED = """
import sys, torch
del torch.amp.GradScaler.unscale_
del torch.nn.parameter.UninitializedTensorMixin._allowed_methods
torch.__version__ = "2.99.0"
from torch_webgpu_compile.device import autoload, import_hooks
autoload.load()
assert torch.get_device_module("webgpu") is torch.webgpu
assert type(torch.Generator).__name__ == "_Kind"  # a patch after those that fail
import_hooks.after_import("colorsys", lambda module: module.is_not_there)
import colorsys
"""


def test_a_patch_that_fails_is_left_out():
    """Also where warnings are errors: neither PyTorch's import fails nor a library's."""
    run = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", _CHANGED],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_WEBGPU_DEVICE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    said = run.stderr
    assert said.count("RuntimeWarning") == 4
    assert "PyTorch 2.99.0 is newer than 2.14, the newest that torch-webgpu-compile was" in said
    for patch, error, why in (
        ("uninitialized_parameters", "AttributeError: ", "Why: a parameter without sizes"),
        ("grad_scaler", "AttributeError: ", "Why: it computes"),
        ("__main__", "AttributeError: .*module 'colorsys' has no", "Without it something else"),
    ):
        assert f"goes on without its patch {patch!r}, as what it patches" in said
        assert re.search(rf"{patch}'[^\n]*\({error}[^\n]*{why}", said)


def test_who_asks_for_a_module_has_not_imported_it(tmp_path, monkeypatch):
    (tmp_path / "asked_for.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    changed = []
    import_hooks.after_import("asked_for", changed.append)
    assert importlib.util.find_spec("asked_for") is not None  # "is it installed?"
    assert changed == []
    module = importlib.import_module("asked_for")
    assert changed == [module]


@pytest.mark.parametrize("name", [row.name for row in patches.TABLE if row.critical])
def test_without_what_is_essential_there_is_no_device(name):
    code = f"""
import sys, torch
sys.modules["torch_webgpu_compile.device.patches.{name}"] = None
from torch_webgpu_compile.device import autoload
autoload.load()
assert not hasattr(torch, "webgpu")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_WEBGPU_DEVICE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    said = (
        f"the device 'webgpu' is not available: its patch {name!r} of PyTorch cannot be installed"
    )
    assert said in run.stderr
    assert run.stderr.count("RuntimeWarning") == 1


def test_a_version_that_is_too_old_has_no_device():
    code = """
import torch
torch.__version__ = "2.10.0"
from torch_webgpu_compile.device import autoload
autoload.load()
assert not hasattr(torch, "webgpu")
try:
    torch.compile(lambda x: x + 1, backend="webgpu")(torch.ones(3))
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_WEBGPU_DEVICE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    said = "torch-webgpu-compile needs PyTorch 2.11 or newer, and this is 2.10.0"
    assert f"the device 'webgpu' is not available: {said}" in run.stderr
    assert said in run.stdout
