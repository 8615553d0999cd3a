"""Tensors beyond the binding limit, after small ones: `small_bindings_program`, on a small device.

An eighth of the cases in each run; `python -m tests.trust --only small_bindings` runs all.
"""

from __future__ import annotations

import pytest

from tests.gpu.small_bindings_program import cases, run_cases
from tests.providers import has_float64, require_bindings
from tests.rotation import picked

pytestmark = pytest.mark.rotates(3)

# Compiling these takes most of the time of all.
SLOW = frozenset(
    {"topk", "unique", "training, cpu", "gradient of softmax", "gradient of layer norm"}
)


@pytest.fixture(scope="module")
def outcome(every_case: bool) -> dict[str, dict[str, str]]:
    names = [name for name, _ in cases()]
    resting = [] if every_case else [name for name in names if picked(name, range(8))]
    return run_cases(SLOW.union(resting))


def test_every_case(outcome: dict[str, dict[str, str]], every_case: bool) -> None:
    wrong = {name: error for name, error in outcome["wrong"].items() if error}
    assert not wrong
    assert len(outcome["wrong"]) > (80 if every_case else 5)


def test_nothing_but_what_is_said_runs_on_the_host(
    outcome: dict[str, dict[str, str]], every_case: bool
) -> None:
    require_bindings(24)  # six windows of each of three tensors, and more
    said = {"aten._linalg_eigh.default"}
    if not has_float64():
        said |= {"aten.copy_.default", "aten.complex.out"}
    assert set(outcome["host"]) == said if every_case else set(outcome["host"]) <= said
