"""Every family of calls, and the programs that are drawn from them."""

from __future__ import annotations

import math

from . import (
    calls,
    calls_indexing,
    calls_numeric,
    calls_ordering,
    calls_products,
    calls_special,
    calls_windows,
)
from .choosers import Chooser
from .programs import DIMS, Drawing, Program

# Half of all calls are of the general families, which make what the others read.
_GENERAL: tuple[calls.Call, ...] = calls.FAMILIES
_PARTICULAR: tuple[calls.Call, ...] = (
    *calls_special.FAMILIES,
    *calls_ordering.FAMILIES,
    *calls_indexing.FAMILIES,
    *calls_windows.FAMILIES,
    *calls_numeric.FAMILIES,
    *calls_products.FAMILIES,
)
FAMILIES = {call.__name__: call for call in (*_GENERAL, *_PARTICULAR)}


def draw_program(chooser: Chooser, only: str = "") -> Program:
    """A program of up to eight calls over inputs that broadcast.

    With ``only``, half of the calls are of that family.
    """
    drawing = Drawing(chooser)
    base = [drawing.choose(DIMS) for _ in range(drawing.integer(0, 4))]
    while math.prod(base) > 3000:
        base.pop()
    for _ in range(drawing.integer(1, 3)):
        shape = [1 if drawing.integer(0, 4) == 4 else size for size in base]
        shape = shape[drawing.integer(0, 1) :] if len(shape) > 1 else shape
        drawing.add_input(shape, extremes=drawing.integer(0, 4) == 4)
    particular = (FAMILIES[only],) if only else _PARTICULAR
    for _ in range(drawing.integer(1, 8)):
        drawing.choose(particular if drawing.flag() else _GENERAL)(drawing)
    if not drawing.program.steps:
        first = drawing.program.inputs[0]
        drawing.step(f"{first.name}.new_zeros(3)", first, keeps_exact=True)
    return drawing.finish()
