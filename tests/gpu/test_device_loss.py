"""Life after the loss of the device. See also `tests.trust.device_loss`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.rotates(3)

PROGRAM = """
import io, logging, warnings
import torch
import torch_webgpu_compile as twc
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.runtime.device import opened_devices

register()
logging.disable()  # wgpu-py logs every loss


def destroy():
    for device in opened_devices():
        device.backend.lib.wgpuDeviceDestroy(device.backend.device)


def lost(call):
    try:
        call()
    except twc.DeviceLostError as error:
        assert "reset_device" in str(error), error
    else:
        raise AssertionError("no error")


def function(t):
    return (t @ t).sin() + 1


host = torch.eye(8)
expected = function(host)
x = host.to("webgpu")
on_device = torch.compile(function, backend="webgpu")
on_host = torch.compile(function, backend="webgpu")
assert torch.allclose(on_device(x).cpu(), expected)
assert torch.allclose(on_host(host), expected)
uses = [
    lambda: on_device(x), lambda: x + 1, lambda: x.add_(1), lambda: x.fill_(0), lambda: x.cpu(),
    lambda: str(x), lambda: x.tolist(), lambda: torch.save(x, io.BytesIO()),
    lambda: x.copy_(host),
]
pending = x + 1
destroy()
lost(pending.cpu)
for use in [*uses, lambda: torch.ones(2, device="webgpu"), torch.webgpu.synchronize]:
    lost(use)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert torch.allclose(on_host(host), expected)
assert len(caught) == 1 and "was lost" in str(caught[0].message), caught
torch.webgpu.reset_device()
torch.webgpu.reset_device()  # changes nothing
y = host.to("webgpu")
for use in [*uses, lambda: x + y, lambda: y.copy_(x)]:
    lost(use)
allocated = torch.webgpu.memory_allocated()
del x, pending
assert torch.webgpu.memory_allocated() == allocated
assert torch.allclose(on_device(y).cpu(), expected)
assert torch.equal((y + 1).cpu(), host + 1)
destroy()  # the process ends with dead tensors
"""


def test_work_goes_on_after_a_loss() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
