"""A call gives the same bits whatever its process ran before: `tests.history_cases`.

``python -m tests.history`` compares PyTorch's operator samples in the same way.
"""

from __future__ import annotations

import os

import pytest

from tests.gpu.device.processes import run_python
from tests.history_cases import CASES

COMPARE = "import sys; from tests.history import compare_case; print(compare_case(sys.argv[1]))"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.rotates(12)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_after_other_calls(case: str) -> None:
    variables = {"TORCH_WEBGPU_DEVICE": "0", "LP_NUM_THREADS": "1"}
    printed = run_python(["-W", "ignore", "-c", COMPARE, case], variables, 200)
    assert printed.splitlines()[-1] == "same"
