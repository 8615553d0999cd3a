"""Selection: the digits of an element by its number, and the elements up to it."""

from __future__ import annotations

from ...ir.buffers import Buffer
from ...ir.sorting_nodes import BINS, Compact, PickDigit
from ...plan.model import KernelCall
from ...symbolic.sizes import ONE, ZERO, ceildiv, iteration, product
from ...target import Target
from .builder import KernelBuilder
from .sorting import WORKGROUP, RowRenderer, Sums, taken_together

_PARTS_TOGETHER = 8


def generate_pick_digit(node: PickDigit, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel that picks a digit of the k-th element."""
    builder = KernelBuilder(target, buffers)
    rows = RowRenderer(builder, node.ranges, node.parts)
    total = product(node.ranges)
    bin = iteration("bin", BINS)
    parts = [iteration(f"part{k}", node.parts) for k in range(_PARTS_TOGETHER)]
    given = (node.wanted, node.above, node.shift)
    wanted, above, shift = (rows.outer.render(body).code for body in given)
    return builder.finish(
        "pick_digit",
        {
            "sums": Sums(),
            "rows": builder.index(total),
            "parts": builder.index(node.parts),
            "together": _PARTS_TOGETHER,
            "counts": [rows.load(node.counts, part, bin) for part in parts],
            "given": rows.outside.lines,
            "wanted": wanted,
            "above": above,
            "shift": shift,
            "stores": [
                rows.store(node.prefix, "prefix"),
                rows.store(node.rest, "rest"),
            ],
        },
        workgroup_size=WORKGROUP,
        workgroups=total,
        origins=node.origins,
        flops=product(node.extents),
        workgroup_nbytes=Sums().nbytes,
        iterations=ceildiv(node.parts, _PARTS_TOGETHER) + 1,
    )


def generate_compact(node: Compact, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    rows = RowRenderer(builder, node.ranges, node.length)
    total = product(node.ranges) * node.parts
    names = [f"place{k}" for k in range(taken_together(node.kind))]
    kinds, values = rows.at(names, [node.kind])
    other = iteration("other", node.parts)
    return builder.finish(
        "compact",
        {
            "sums": Sums(),
            "total": builder.index(total),
            "parts": builder.index(node.parts),
            "part_length": builder.index(node.part),
            "length": builder.index(node.length),
            "taken": builder.index(node.count),
            "first_count": rows.load(node.counts, other, ZERO),
            "second_count": rows.load(node.counts, other, ONE),
            "outside": rows.outside.lines,
            "names": names,
            "kinds": kinds,
            "values": values,
            "store": builder.bindings.function(node.output, "store"),
            "address": rows.address(node.output, iteration("number", node.count)),
        },
        workgroup_size=WORKGROUP,
        workgroups=total,
        origins=node.origins,
        flops=product(node.ranges) * node.length,
        workgroup_nbytes=Sums().nbytes,
        iterations=ceildiv(node.part, WORKGROUP * len(names)) + ceildiv(node.parts, WORKGROUP) + 2,
    )
