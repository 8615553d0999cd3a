"""Copies within host memory by several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from torch_webgpu_compile.runtime import host_copy


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 12_289, 1_000_003])
def test_every_byte_is_copied_and_no_other(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ThreadPoolExecutor(2)
    monkeypatch.setattr(host_copy, "MAX_THREADS", 3)
    monkeypatch.setattr(host_copy, "_PART", 4096)
    monkeypatch.setattr(host_copy, "_threads", lambda: threads)
    source = np.random.default_rng(0).integers(0, 256, nbytes + 1, dtype=np.uint8)
    destination = np.zeros(nbytes + 2, np.uint8)
    host_copy.copy_memory(destination.ctypes.data + 1, source.ctypes.data + 1, nbytes)
    np.testing.assert_array_equal(destination[1:-1], source[1:])
    assert destination[0] == destination[-1] == 0
    threads.shutdown()
