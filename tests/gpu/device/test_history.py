"""A call gives the same bits whatever its process ran before: `tests.history_cases`.

``python -m tests.history`` compares PyTorch's operator samples in the same way.
"""

from __future__ import annotations

import os

import pytest

from tests.gpu.device.processes import run_python
from tests.history_cases import CASES
from torch_webgpu_compile.device import devices

REASON = (
    "once an operator has met several sizes, new ones get a kernel for any size, which adds in "
    "another order than one that knows its sizes"
)
DIFFERING = (
    *("sum", "row_sums", "softmax", "cumsum", "var", "layer_norm_gradient", "batch_norm"),
    *("depthwise_gradient", "row_product", "cross_entropy_gradient"),
    *("other_training", "resumed_training"),
)
COMPARE = "import sys; from tests.history import compare_case; print(compare_case(sys.argv[1]))"


class BitsDiffer(AssertionError):
    """What is expected of `DIFFERING`; no other failure is."""


def parameter(case: str) -> object:
    """A case, with what is known of it."""
    known = pytest.mark.xfail(raises=BitsDiffer, strict=True, reason=REASON)
    return pytest.param(case, marks=known if case in DIFFERING else ())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.rotates(12)
@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_the_same_bits_after_other_calls(case: str) -> None:
    if case in DIFFERING and "llvmpipe" not in devices.get_device(0).info.name:
        pytest.skip("on other adapters others differ")
    variables = {"TORCH_WEBGPU_DEVICE": "0", "LP_NUM_THREADS": "1"}
    printed = run_python(["-W", "ignore", "-c", COMPARE, case], variables, 200)
    found = printed.splitlines()[-1]
    if found == "differs":
        raise BitsDiffer(case)
    assert found == "same"
