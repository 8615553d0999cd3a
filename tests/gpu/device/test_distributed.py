"""``torch.distributed`` with device tensors: several processes on one adapter."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.device.processes import ROOT, run, run_python

pytestmark = [
    pytest.mark.rotates(14),  # each process imports torch, and compiles
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="this PyTorch has no gloo",
    ),
]


def test_two_processes(tmp_path: Path) -> None:
    """Collectives, and training by ``DistributedDataParallel``."""
    code = "from tests.gpu.device import distributed_programs\ndistributed_programs.main()"

    def start(rank: int) -> str:
        meeting = str(tmp_path / "meeting")
        return run(code, timeout=200, RANK=str(rank), MEETING=meeting, OMP_NUM_THREADS="1")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, range(2)))


def torchrun(count: int, *arguments: object, options: tuple[str, ...] = ()) -> str:
    """What ``count`` processes of `distributed_training` print, on the first adapter.

    Raises:
        AssertionError: one failed, or ran an operator on the CPU; with all that they printed.
    """
    adapter = os.environ.get("TORCH_WEBGPU_ADAPTER", "").split(",")[0]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TORCH_WEBGPU_ADAPTER": adapter,
        "TORCH_WEBGPU_FALLBACK": "error",
        "OMP_NUM_THREADS": "1",
        # Else processes that begin again read the addresses of those before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    program = "-m", "tests.gpu.device.distributed_training"
    run = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *options
    return run_python([*run, *program, *map(str, arguments)], environment, 400)


@pytest.mark.rotates(1)
def test_two_processes_with_half_the_weights_each(tmp_path: Path) -> None:
    torchrun(2, "compiled_collectives", "sharded", tmp_path)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("program", ["fully_sharded", "synchronized_norm", "tensor_parallel"])
def test_training(program: str, count: int, tmp_path: Path) -> None:
    torchrun(count, program, tmp_path)


def test_a_checkpoint_of_four_processes(tmp_path: Path) -> None:
    torchrun(4, "saved", tmp_path)
    torchrun(2, "loaded", "loaded_on_cpu", tmp_path)
    torchrun(1, "loaded", tmp_path)


def test_training_goes_on_after_a_process_was_killed(tmp_path: Path) -> None:
    """The other one gets an error, and both begin again with the last checkpoint."""
    torchrun(2, "killed", tmp_path, options=("--max-restarts=1",))
    assert "allreduce_" in (tmp_path / "error").read_text()
    (tmp_path / "checkpoint").unlink()
    torchrun(1, "killed", tmp_path)
    (first, found), (_, expected) = (torch.load(tmp_path / f"result{n}") for n in (2, 1))
    assert first == 2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
