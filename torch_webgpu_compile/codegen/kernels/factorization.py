"""Triangular factors of matrices: one workgroup for a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.buffers import Buffer
from ...ir.nodes import Factorization
from ...ir.spaces import numbered
from ...ir.workgroup_memory import WorkgroupArray
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    Expr,
    ceildiv,
    delinearize,
    iteration,
    linearize,
    minimum,
    power_of_two_at_least,
    product,
)
from ...target import Target
from .builder import KernelBuilder, declaration

_SHARE = 4  # elements of an invocation, for which it waits for the others once in a step
_WIDEST = 16  # invocations that share a row
_SEARCHERS = 32  # at most; each searches a part of a column, and all invocations what they found

# By bytes of an element: the type of its bits, and the mask of all but the sign.
_BITS = {
    4: {"type": "u32", "magnitude": "0x7fffffffu"},
    8: {"type": "u64", "magnitude": "0x7ffffffffffffffflu"},
}


@dataclass(frozen=True, slots=True)
class FactorizationTiling:
    """How a workgroup shares a matrix.

    Attributes:
        workgroup: invocations, in lines of ``width`` that go through a row together.
        searchers: those that search a part of a column each, or 0.
        is_kept: whether the matrix is in workgroup memory until it is finished.
    """

    workgroup: int
    width: int
    searchers: int
    is_kept: bool

    @staticmethod
    def choose(node: Factorization, itemsize: int, target: Target) -> FactorizationTiling:
        """The tiling for a matrix of any size."""
        workgroup, width, searchers = target.workgroup_invocations, _WIDEST, _SEARCHERS
        rows, columns = node.sizes
        numel = rows * columns
        if numel.is_constant:
            share = power_of_two_at_least(-(-numel.constant // _SHARE))
            workgroup = min(workgroup, max(share, 2 * _WIDEST))
            width = min(width, power_of_two_at_least(columns.constant))
            root = power_of_two_at_least(rows.constant).bit_length() // 2
            searchers = min(searchers, 1 << root)
        if node.pivots is None:
            searchers = 0
        nbytes = searchers * (itemsize + 4)
        room = target.max_workgroup_nbytes - nbytes
        is_kept = numel.is_constant and numel.constant * itemsize <= room
        return FactorizationTiling(workgroup, width, searchers, is_kept)


def generate_factorization(
    node: Factorization, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of one node; a matrix that is not kept is computed in the output's memory."""
    rows, columns = node.sizes
    output = buffers[node.output]
    dtype = output.dtype
    tiling = FactorizationTiling.choose(node, dtype.itemsize, target)
    builder = KernelBuilder(target, buffers)
    total, steps = product(node.batch), minimum(rows, columns)
    lead = delinearize(iteration("batch", total), node.batch)
    row, column, step = (
        iteration(name, size)
        for name, size in (("row", rows), ("column", columns), ("step", steps))
    )
    if node.pivots is None:  # what is above the diagonal is that below
        row, column = iteration("larger", rows), iteration("smaller", columns)
    symbols = (*numbered("b", node.batch), *numbered("m", (rows,)), *numbered("n", (columns,)))
    place = dict(zip(symbols, (*lead, row, column), strict=True))
    element = builder.compute(node.matrix, [place])

    bits = _BITS[dtype.itemsize]
    arrays = {
        "found_size": WorkgroupArray(bits["type"], tiling.searchers, dtype.itemsize),
        "found_row": WorkgroupArray("i32", tiling.searchers, 4),
    }
    if tiling.is_kept:
        numel = (rows * columns).constant
        arrays["kept"] = WorkgroupArray(dtype.compute, numel, dtype.itemsize)
    used = {name: array for name, array in arrays.items() if array.length}
    first = linearize(lead, output.strides[:-2]) + output.offset
    return builder.finish(
        "factorization",
        {
            "tiling": tiling,
            "declared": [declaration(name, array) for name, array in used.items()],
            "rows": builder.index(rows),
            "columns": builder.index(columns),
            "steps": builder.index(steps),
            "total": builder.index(total),
            "load": None if tiling.is_kept else builder.bindings.function(node.output, "load"),
            "store": builder.bindings.function(node.output, "store"),
            "first": builder.index(first),
            "strides": [builder.index(stride) for stride in output.strides[-2:]],
            "type": dtype.compute,
            "bits": bits,
            "element": element,
            "pivots": node.pivots
            and builder.store_element(node.pivots, [*lead, step], "other + 1"),
            "info": builder.store_element(node.info, lead, "info"),
        },
        workgroup_size=tiling.workgroup,
        workgroups=total,
        origins=node.origins,
        flops=product((*node.batch, rows, columns, steps)),
        workgroup_nbytes=sum(array.nbytes for array in used.values()),
        iterations=_iterations(tiling, rows, columns, steps),
    )


def _iterations(tiling: FactorizationTiling, rows: Expr, columns: Expr, steps: Expr) -> Expr:
    """At most: of the loops of one invocation."""
    width, lines = tiling.width, tiling.workgroup // tiling.width
    lines_of_rows, runs = ceildiv(rows, lines), ceildiv(columns, width)
    search = ceildiv(rows, tiling.searchers) + tiling.searchers if tiling.searchers else 0
    swap = ceildiv(columns, tiling.workgroup)
    # Rows may all be left to the end; columns shrink from all to none. Ends of loops count, too.
    update = ceildiv(lines_of_rows * (runs + 5), 2) + runs + 1
    return steps * (search + swap + update + 2) + 3 * (lines_of_rows * (runs + 1) + 1)
