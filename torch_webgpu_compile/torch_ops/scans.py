"""``webgpu::scan``: a loop whose steps are elementwise, for capture to use and lowering to know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .elementwise import (
    Operand,
    Reference,
    Step,
    name_of,
    read,
    read_argument,
    run_steps,
    written,
    written_argument,
)


@dataclass(frozen=True, slots=True)
class ScanFunction:
    """One step of a scan: its carries and its results.

    Attributes:
        steps: of carries, of operands (the elements of ``xs`` at this step, then the constants) and
            of each other.
        carried: the next carry for each carry, of its dtype.
        rows: results of each step.
    """

    steps: tuple[Step, ...]
    carried: tuple[Operand, ...]
    rows: tuple[Operand, ...]

    @property
    def text(self) -> str:
        """The function as a string; see `parsed`."""
        results = [list(map(written_argument, found)) for found in (self.carried, self.rows)]
        return json.dumps([*results, *map(written, self.steps)])

    def row_dtypes(self, carries: Sequence[str], operands: Sequence[str]) -> list[str]:
        """The dtypes of the rows, given those of carries and operands: names in torch."""
        sources: Mapping[str, Sequence[str]] = {
            "carry": carries,
            "operand": operands,
            "step": [step.dtype for step in self.steps],
        }
        found = []
        for row in self.rows:
            assert isinstance(row, Reference), row
            found.append(sources[row.source][row.number])
        return found

    def of(
        self, carries: Sequence[Tensor], operands: Sequence[Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """The next carries, and the rows, for tensors that broadcast."""
        sources = {"carry": carries, "operand": operands}
        value = run_steps(self.steps, lambda found: sources[found.source][found.number])
        return list(map(value, self.carried)), list(map(value, self.rows))


def parsed(text: str) -> ScanFunction:
    """The function that `ScanFunction.text` wrote."""
    carried, rows, *steps = json.loads(text)
    return ScanFunction(
        tuple(map(read, steps)), tuple(map(read_argument, carried)), tuple(map(read_argument, rows))
    )


@torch.library.custom_op(
    "webgpu::scan",
    mutates_args=(),
    schema=(
        "(Tensor[] init, Tensor[] xs, Tensor[] constants, SymInt length, str step, int outer=0)"
        " -> Tensor[]"
    ),
)
def scan(
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    length: int,
    step: str,
    outer: int = 0,
) -> list[Tensor]:
    """Calls a `ScanFunction` ``length`` times, each time with the carries of the time before.

    Args:
        init: the first carries, all of the same sizes, those of the lanes.
        xs: of sizes (length, …), where … broadcasts to the lanes.
        constants: they broadcast to the lanes.
        step: the function's text.
        outer: how many of the lanes' dimensions are before that of steps in the memory of rows.

    Returns: the last carries, and the rows of all steps, of sizes (length, lanes).
    """
    function = parsed(step)
    results: list[Tensor] = _results(init, xs, constants, length, step, outer)
    carries = [carry.clone() for carry in init]
    rows = results[len(init) :]
    for t in range(length):
        carries, made = function.of(carries, [*(x[t] for x in xs), *constants])
        for row, value in zip(rows, made, strict=True):
            row[t] = value
    for result, carry in zip(results, carries, strict=False):
        result.copy_(carry)
    return results


@scan.register_fake
def _results(
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    length: int,
    step: str,
    outer: int = 0,
) -> list[Tensor]:
    """Memory for the results."""
    lanes, device = init[0].shape, init[0].device
    operands = [name_of(operand.dtype) for operand in (*xs, *constants)]
    dtypes = parsed(step).row_dtypes([name_of(carry.dtype) for carry in init], operands)
    sizes = (*lanes[:outer], length, *lanes[outer:])
    rows = [
        torch.empty(sizes, dtype=getattr(torch, dtype), device=device).movedim(outer, 0)
        for dtype in dtypes
    ]
    return [*(torch.empty(lanes, dtype=c.dtype, device=device) for c in init), *rows]
