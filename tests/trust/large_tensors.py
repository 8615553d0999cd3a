"""Tensors beyond what one binding reaches."""

from __future__ import annotations

from tests.gpu.small_bindings_program import run_cases

from .faults import Tally, fault


@fault("tensors beyond the binding limit, after small ones: operators, compiled graphs, training")
def small_bindings(tally: Tally) -> None:
    for name, error in run_cases()["wrong"].items():
        tally(not error, f"{name}: {error}")
