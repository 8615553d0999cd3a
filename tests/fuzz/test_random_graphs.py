"""Random graphs: eager PyTorch, the interpreter and the kernels agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .families import draw_program
from .pipelines import check_program
from .programs import Program

# Eager PyTorch warns about what random programs do on purpose (var of one element, …).
pytestmark = pytest.mark.filterwarnings("ignore")


class HypothesisChooser:
    """Choices that Hypothesis draws, and shrinks when a program fails."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def choose(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(list(options)))

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def flag(self) -> bool:
        return bool(self._draw(st.booleans()))

    def permutation(self, rank: int) -> list[int]:
        return list(self._draw(st.permutations(range(rank))))


@st.composite
def programs(draw: Any) -> Program:
    """A program of up to eight calls over inputs that broadcast."""
    return draw_program(HypothesisChooser(draw))


@given(programs())
def test_random_graph(program: Program) -> None:
    check_program(program)


@pytest.mark.parametrize("dynamic", [True])
@given(program=programs())
def test_random_graph_with_symbolic_sizes(program: Program, dynamic: bool) -> None:
    check_program(program, dynamic=dynamic)
