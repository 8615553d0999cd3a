"""A share of PyTorch's operator samples (OpInfo) on the device, against the CPU.

``python -m tests.sweep_device`` runs all of them, ``python -m tests.coverage`` makes a page of it.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.coverage import DATA, KINDS, Coverage
from tests.device_dynamic import Recompiled
from tests.device_exceptions import IN_FLOAT64
from tests.device_kinds import Skip
from tests.device_samples import OPERATORS, checks
from tests.providers import has_float64
from tests.rotation import picked
from torch_webgpu_compile import counters
from torch_webgpu_compile.fallbacks import FallbackWarning

pytestmark = [
    pytest.mark.rotates(4),
    pytest.mark.filterwarnings("ignore"),  # of deprecated operators
]

# Kind, dtype, samples of each operator.
ALWAYS = [
    ("forward", torch.float32, 1),
    ("backward", torch.float32, 1),
    ("out", torch.float32, 1),
]
# Of these one in each run, for a sixth of the operators.
IN_TURN = [
    ("compiled", torch.float32, 1),
    ("inplace", torch.float32, 1),
    ("odd out", torch.float32, 1),
    ("errors", torch.float32, 2),
    ("dynamic", torch.float32, 1),
    ("forward", torch.int64, 1),
    ("forward", torch.bool, 1),
    ("forward", torch.float16, 1),
    ("forward", torch.bfloat16, 1),
]
# What an operator has besides `ALWAYS`, one of them in each run.
CHOICES = [*([one] for one in IN_TURN), *([] for _ in 5 * IN_TURN)]

PAGE = Coverage.load(DATA)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name, every_case):
    """Right in every way, and on the host only where docs/operators.md says so."""
    failures, ran = [], 0
    turn = IN_TURN if every_case else picked(name, CHOICES)
    for kind, dtype, limit in ALWAYS + turn:
        counters.reset()
        for check in checks(OPERATORS[name], kind, dtype, limit):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", ".*please report this", FallbackWarning)
                    check.run()
                ran += 1
            except (Skip, Recompiled):
                pass
            except Exception as error:
                failures.append(f"{kind} {dtype} {check.label}: {type(error).__name__}: {error}")
        if kind not in KINDS:  # the page does not say where they are computed
            continue
        if name in IN_FLOAT64 and not has_float64():
            continue
        if name not in PAGE.entries:  # an operator of a PyTorch newer than the page
            continue
        native = PAGE.is_native(name, str(dtype).removeprefix("torch."), kind)
        allowed = set() if native else set(PAGE.hosted.get(name, ()))
        if hosted := set(counters.fallbacks) - allowed:
            failures.append(f"{kind} {dtype}: on the host: {sorted(hosted)}")
    assert not failures, "\n\n".join(failures)
    if not ran:
        pytest.skip("no samples")
