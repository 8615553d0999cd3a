"""Tensors beyond the binding limit, after small ones: `small_bindings_program`, on a small device.

`python -m tests.trust --only small_bindings` runs all of its cases.
"""

from __future__ import annotations

import pytest

from tests.gpu.small_bindings_program import run_cases

# Compiling these takes most of the time of all.
SLOW = frozenset(
    {"topk", "unique", "training, cpu", "gradient of softmax", "gradient of layer norm"}
)


@pytest.fixture(scope="module")
def outcome() -> dict[str, dict[str, str]]:
    return run_cases(SLOW)


def test_every_case(outcome: dict[str, dict[str, str]]) -> None:
    wrong = {name: error for name, error in outcome["wrong"].items() if error}
    assert not wrong
    assert len(outcome["wrong"]) > 80


def test_nothing_but_what_is_said_runs_on_the_host(outcome: dict[str, dict[str, str]]) -> None:
    assert outcome["host"] == ["aten._linalg_eigh.default"]
