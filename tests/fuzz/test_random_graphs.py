"""Random graphs: eager PyTorch, the interpreter and the kernels agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .calls import FAMILIES
from .pipelines import check_program
from .programs import DIMS, Drawing, Program

# Eager PyTorch warns about what random programs do on purpose (var of one element, …).
pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def programs(draw: Any) -> Program:
    """A program of up to eight calls over inputs that broadcast."""
    return draw_program(Drawing(draw))


def draw_program(drawing: Drawing) -> Program:
    """The same with given choices."""
    base = [drawing.choose(DIMS) for _ in range(drawing.integer(0, 4))]
    while _numel(base) > 3000:
        base.pop()
    for _ in range(drawing.integer(1, 3)):
        shape = [1 if drawing.integer(0, 4) == 4 else size for size in base]
        drawing.add_input(shape[drawing.integer(0, 1) :] if len(shape) > 1 else shape)
    for _ in range(drawing.integer(1, 8)):
        drawing.choose(FAMILIES)(drawing)
    if not drawing.program.steps:
        first = drawing.program.inputs[0]
        drawing.step(f"{first.name} == {first.name}", first, keeps_exact=True)
    return drawing.finish()


def _numel(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@given(programs())
def test_random_graph(program: Program) -> None:
    check_program(program)


@pytest.mark.parametrize("dynamic", [True])
@given(program=programs())
def test_random_graph_with_symbolic_sizes(program: Program, dynamic: bool) -> None:
    check_program(program, dynamic=dynamic)
