"""``torch.distributed`` with device tensors: two processes on one adapter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.device.processes import run

pytestmark = [
    pytest.mark.rotates(9),  # each process imports torch, and compiles
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
