"""Child processes: forked ones cannot use a GPU that the parent has looked for."""

from __future__ import annotations

import os

import pytest

from tests.gpu.device.processes import run

pytestmark = [pytest.mark.rotates(3), pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]

IN_CHILD = """
import warnings
warnings.simplefilter("ignore")  # that forking is dangerous
pid = os.fork()
if pid == 0:
    try:
        print(torch.ones(2, device="webgpu").sum().item(), flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    torch.manual_seed(0)  # as data loaders do
    print("in bad fork:", torch.webgpu._is_in_bad_fork(), flush=True)
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
"""
REFUSED = (
    "Cannot re-initialize WebGPU in forked subprocess. To use WebGPU with multiprocessing, you "
    "must use the 'spawn' start method\nin bad fork: True\n"
)


def test_fork_after_use() -> None:
    """Operators that the parent has compiled reach the GPU by themselves, to the same end."""
    many = "[torch.ones(2, device='webgpu') for _ in range(300)]"  # more than there is memory for
    in_child = IN_CHILD.replace('torch.ones(2, device="webgpu").sum().item()', many)
    output = run("torch.ones(2, device='webgpu').sum().item()" + in_child)
    assert "in a forked child process; start child processes with the 'spawn' method" in output
    assert output.endswith("in bad fork: True\n")
    other = "torch.ones(2, device='webgpu').sum().item()" + IN_CHILD.replace("ones(2", "ones(2, 2")
    assert run(other) == REFUSED


def test_fork_after_looking_for_devices() -> None:
    assert run("torch.webgpu.is_available()" + IN_CHILD) == REFUSED


def test_fork_before_use() -> None:
    assert run("torch.manual_seed(0)" + IN_CHILD) == "2.0\nin bad fork: False\n"


def test_forked_workers_of_a_data_loader() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
from torch.utils.data import DataLoader
torch.ones(2, device="webgpu").sum().item()
loader = DataLoader(torch.arange(8.), 4, num_workers=2, multiprocessing_context="fork")
print([batch.to("webgpu").sum().item() for batch in loader])
"""
    assert run(code) == "[6.0, 22.0]\n"


def test_spawn() -> None:
    code = """
import torch.multiprocessing as mp
if __name__ == "__main__":
    from tests.gpu.device.spawned import child
    torch.ones(2, device="webgpu").sum().item()
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""
    assert run(code) == "[2.0, 2.0]\n"
