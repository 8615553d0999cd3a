"""Scatter: a copy of the initial contents, then one update per point of the iteration space."""

from __future__ import annotations

from ... import dtypes
from ...errors import UnsupportedOp
from ...ir.access import flat_environment
from ...ir.buffers import Buffer
from ...ir.folding import as_index
from ...ir.graph import MapGroup, Member
from ...ir.nodes import Scatter
from ...ir.scalar import Load, index
from ...ir.spaces import iteration_symbols, numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import ZERO, ceildiv, iteration, linearize, product
from ...target import Target
from ..values import Scope
from ..wgsl.casts import converted
from .builder import KernelBody, KernelBuilder
from .pointwise import generate_map

_ATOMIC = {
    "sum": frozenset({dtypes.float32, dtypes.int32, dtypes.uint32, dtypes.int64}),
    "maximum": frozenset({dtypes.uint32}),
}
_VERBS = {"": "store", "sum": "add", "maximum": "raise"}


def generate_scatter(node: Scatter, buffers: dict[str, Buffer], target: Target) -> list[KernelCall]:
    """The kernels of a scatter: one copies the initial contents, one makes the updates.

    There is no copy where the output shares the memory of the initial contents, and no update for
    empty ranges.

    Raises:
        UnsupportedOp: 32-bit atomics do not combine its dtype so.
    """
    output = buffers[node.output]
    if node.combines and output.dtype not in _ATOMIC[node.combines]:
        raise UnsupportedOp(
            node.origins[0].op if node.origins else "scatter",
            f"a {node.combines} in {output.dtype.name} has no atomic",
            "accumulate in float32 or int64 and convert",
        )
    if output.numel is ZERO:
        return []
    calls = [] if output.shares else [_copy(node, output, buffers, target)]
    if product(node.ranges) is not ZERO:
        builder = KernelBuilder(target, buffers)
        body = update_body(builder, node, target.workgroup_invocations)
        calls.append(builder.finish_body(body))
    return calls


def _copy(node: Scatter, output: Buffer, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    points = iteration_symbols("i", output.sizes)
    load = Load(node.initial, tuple(index(p) for p in points), output.dtype)
    copy = MapGroup(output.sizes, (Member(node.output, load, points, True, None, node.origins),))
    return generate_map(copy, buffers, target)


def update_body(builder: KernelBuilder, node: Scatter, workgroup: int) -> KernelBody:
    """The kernel body of at least one update to an output that holds its initial contents."""
    count = product(node.ranges)
    symbols = numbered("i", node.ranges)
    environment = flat_environment(symbols, iteration("q", count))
    scope = Scope()
    renderer = builder.renderer([environment], scope)
    output = builder.buffers[node.output]
    entries = list(map(as_index, node.index))
    affine = [ZERO if entry is None else entry for entry in entries]
    (address,) = renderer.per_lane(linearize(affine, output.strides) + output.offset)
    code = builder.index(address)
    inside = []
    for k, entry in enumerate(entries):
        if entry is None:
            position = renderer.position(node.index[k])
            at = position.code
            if position.dtype is not dtypes.int32:
                at = renderer.let(converted(at, position.dtype, dtypes.int32), 1, dtypes.int32).code
            code += f" + {at} * ({builder.index(output.strides[k])})"
            inside.append(f"{at} >= 0")
            if not renderer.is_below(node.index[k], output.sizes[k]):
                inside.append(f"{at} < {builder.index(output.sizes[k])}")
    value = renderer.render(node.body)
    verb = builder.bindings.function(node.output, _VERBS[node.combines])
    store = f"{verb}({code}, {value.code});"
    # Shaders run without bounds checks: a wrong index must not write foreign memory.
    scope.lines.append(f"if ({' && '.join(inside)}) {{ {store} }}" if inside else store)
    builder.bindings.touch(node.output, count)
    return KernelBody(
        "scatter",
        {"count": builder.index(count), "lines": scope.lines},
        workgroup,
        ceildiv(count, workgroup),
        node.origins,
        count,
        template="pointwise",
    )
