"""Triangular systems: one workgroup for a tile of right-hand sides of a matrix."""

from __future__ import annotations

from ...ir.buffers import Buffer
from ...ir.nodes import TriangularSolve
from ...ir.scalar import Scalar
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    Expr,
    Symbol,
    ceildiv,
    delinearize,
    iteration,
    power_of_two_at_least,
    product,
)
from ...target import Target
from .builder import Computed, KernelBuilder

_WIDEST = 16  # right-hand sides of a workgroup: invocations of a row that read 64 bytes together
_FEWEST = 32  # invocations of a workgroup: GPUs run so many at a time, whatever they are for


def generate_triangular_solve(
    node: TriangularSolve, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of one node, whose right-hand sides are updated in the output's memory."""
    rows, columns = node.sizes
    output = buffers[node.output]
    width = _WIDEST
    if columns.is_constant:
        while width >= 2 * columns.constant:
            width //= 2
    workgroup = target.workgroup_invocations
    if rows.is_constant:  # of more, some would only wait
        share = power_of_two_at_least(rows.constant) * width
        workgroup = min(workgroup, max(share, _FEWEST))
    builder = KernelBuilder(target, buffers)
    tiles = ceildiv(columns, width)
    total = product(node.batch) * tiles
    batch, row, step = (
        iteration(name, size)
        for name, size in (("batch", product(node.batch)), ("row", rows), ("step", rows))
    )
    column = iteration("column", columns)
    outer = numbered("b", node.batch)
    lead = delinearize(batch, node.batch)
    at_batch: dict[Symbol, Expr] = dict(zip(outer, lead, strict=True))
    (m,), (k,), (n,) = (numbered(p, (s,)) for p, s in (("m", rows), ("k", rows), ("n", columns)))

    def computed(body: Scalar, at: dict[Symbol, Expr]) -> Computed:
        return builder.compute(body, [at_batch | at])

    return builder.finish(
        "triangular_solve",
        {
            "width": width,
            "rows": builder.index(rows),
            "columns": builder.index(columns),
            "tiles": builder.index(tiles),
            "total": builder.index(total),
            "load": builder.bindings.function(node.output, "load"),
            "store": builder.bindings.function(node.output, "store"),
            "at_row": builder.address(node.output, [*lead, row, column]),
            "at_step": builder.address(node.output, [*lead, step, column]),
            "type": output.dtype.compute,
            "rhs": computed(node.rhs, {m: row, n: column}),
            "factor": computed(node.matrix, {m: row, k: step}),
            "diagonal": None if node.unit else computed(node.matrix, {m: step, k: step}),
        },
        workgroup_size=workgroup,
        workgroups=total,
        origins=node.origins,
        flops=product((*node.batch, rows, rows, columns)),
        iterations=loop_iterations(rows, workgroup // width),
    )


def loop_iterations(rows: Expr, lanes: int) -> Expr:
    """Loop iterations of one invocation, of ``lanes`` that share the rows below each step."""
    return ceildiv(rows, lanes) + (rows + 1) * 3 + ceildiv(rows * rows, 2 * lanes)
