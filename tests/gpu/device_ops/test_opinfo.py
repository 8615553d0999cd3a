"""A share of PyTorch's operator samples (OpInfo) on the device, against the CPU.

``python -m tests.sweep_device`` runs all of them.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.device_hosted import HOSTED
from tests.device_samples import OPERATORS, Skip, checks
from torch_webgpu_compile import counters
from torch_webgpu_compile.fallbacks import FallbackWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators

# Kind, dtype, samples of each operator.
SHARE = [
    ("forward", torch.float32, 2),
    ("backward", torch.float32, 1),
    ("inplace", torch.float32, 1),
    ("out", torch.float32, 1),
    ("errors", torch.float32, 2),
    ("forward", torch.int64, 1),
    ("forward", torch.bool, 1),
    ("forward", torch.float16, 1),
    ("forward", torch.bfloat16, 1),
]


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name):
    failures, ran = [], 0
    counters.reset()
    for kind, dtype, limit in SHARE:
        for check in checks(OPERATORS[name], kind, dtype, limit):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", ".*please report this", FallbackWarning)
                    check.run()
                ran += 1
            except Skip:
                pass
            except Exception as error:
                failures.append(f"{kind} {dtype} {check.label}: {type(error).__name__}: {error}")
        if kind == "errors":  # what a CPU kernel refuses was asked of it
            counters.reset()
    assert not failures, "\n\n".join(failures)
    unexpected = set(counters.fallbacks) - HOSTED
    assert not unexpected, f"on the host: {sorted(unexpected)}"
    if not ran:
        pytest.skip("no samples")
