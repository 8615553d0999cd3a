"""Processes that a program starts after it has used the device."""

from __future__ import annotations

import sys

import pytest

from tests.gpu.device.processes import run

pytestmark = pytest.mark.rotates(6)

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")

FORK = """
x = torch.ones(4, device="webgpu")
assert x.sum().item() == 4
child = os.fork()
if child == 0:
    assert torch.ones(4).sum().item() == 4
    assert torch.webgpu._is_in_bad_fork()
    for use in (
        lambda: torch.ones(2, device="webgpu"),
        lambda: torch.ones(2).to("webgpu"),
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: torch.webgpu.init(),
    ):
        try:
            use()
        except RuntimeError as error:
            assert "Cannot re-initialize WebGPU in forked subprocess" in str(error), error
        else:
            os._exit(1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert (x + 1).sum().item() == 8
"""

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
import multiprocessing
if __name__ == "__main__":
    x = torch.ones(4, device="webgpu") * 2
    assert x.sum().item() == 8
    data = TensorDataset(torch.arange(12.0).reshape(6, 2))
    loader = DataLoader(data, 2, num_workers=1, multiprocessing_context=METHOD, timeout=60)
    for _ in range(2):
        batches = [batch.to("webgpu") + x[0] for batch, in loader]
        assert torch.cat(batches).cpu().tolist() == [[i + 2.0, i + 3.0] for i in range(0, 12, 2)]
"""


@needs_fork
def test_a_forked_child_is_told_to_spawn() -> None:
    run(FORK, timeout=100)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=needs_fork), "spawn"])
def test_workers_of_a_data_loader(method: str) -> None:
    run(f"METHOD = {method!r}" + LOADER, timeout=150)


SENDING = """
import multiprocessing
from torch.utils.data import DataLoader, TensorDataset
x = torch.ones(8, 3, device="webgpu")
x.cpu()
loader = DataLoader(TensorDataset(x), 2, num_workers=1, multiprocessing_context="fork",
                    timeout=60, collate_fn=list)
try:
    list(loader)
except RuntimeError as error:
    assert "cannot be sent to another process" in str(error), error
else:
    raise AssertionError
"""


@needs_fork
def test_a_worker_that_returns_device_tensors_fails_at_once() -> None:
    run(SENDING, timeout=50)
