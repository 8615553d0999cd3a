"""Loops whose every lane is by itself: one invocation has a lane and takes all its steps."""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.access import flat_environment
from ...ir.buffers import Buffer
from ...ir.nodes import Scan, carry_name
from ...ir.scalar import Load, Local, Masked, Scalar, cast, children, loads_of, walk
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import Expr, ceildiv, iteration, linearize, product
from ...target import Target
from ..values import Scope, Text
from ..wgsl.storage import check_index_range
from .builder import KernelBuilder, fold_grid

_WORKGROUP = 64  # few lanes are spread over many multiprocessors
# What a step loads does not depend on the steps before: that of several is asked for at once.
_TOGETHER, _LONG_BODY = 4, 120


def generate_scan(node: Scan, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of one node."""
    outputs = [buffers[name] for name in (*node.carried, *node.rows)]
    for output in outputs:
        check_index_range(output)
    builder = KernelBuilder(target, buffers)
    workgroup = min(_WORKGROUP, target.workgroup_invocations)
    lanes = product(node.ranges)
    symbols = numbered("i", node.ranges)
    place = flat_environment(symbols, iteration("q", lanes))
    (time,) = numbered("t", (node.length,))
    lane = [place[symbol] for symbol in symbols]

    def store(name: str, index: list[Expr], value: Text) -> str:
        buffer = buffers[name]
        address = builder.index(linearize(index, buffer.strides) + buffer.offset)
        return f"{builder.bindings.function(name, 'store')}({address}, {value.code});"

    first = Scope()
    renderer = builder.renderer([place], first)
    carries = [
        f"var {carry_name(k)}: {body.dtype.compute} = {renderer.render(body).code};"
        for k, body in enumerate(node.init)
    ]

    def steps(count: int) -> list[str]:
        """Statements that take so many steps."""
        loads: list[str] = []
        others: list[str] = []
        for k in range(count):
            now = iteration("step", node.length) + k
            scope = Scope()
            renderer = builder.renderer([{**place, time: now}], scope)
            for part in _beforehand((*node.row, *node.step)):
                renderer.render(part)
            loads += scope.lines
            scope.lines = []
            # A carry may become another one, which has changed by then.
            made = [
                renderer.let(body.name, 1, body.dtype)
                if isinstance(body, Local)
                else renderer.render(body)
                for body in node.step
            ]
            rows = zip(node.rows, node.row, strict=True)
            stores = [store(name, [now, *lane], renderer.render(body)) for name, body in rows]
            changes = [f"{carry_name(n)} = {value.code};" for n, value in enumerate(made)]
            others += [*scope.lines, *stores, *changes]
        return [*loads, *others]

    small = sum(1 for body in (*node.row, *node.step) for _ in walk(body)) <= _LONG_BODY
    counts = [_TOGETHER, 1] if small else [1]
    if small and node.length.is_constant and int(node.length) % _TOGETHER == 0:
        counts = [_TOGETHER]
    after = Scope()
    renderer = builder.renderer([place], after)
    lasts = [
        renderer.render(cast(Local(carry_name(k), node.init[k].dtype), buffers[name].dtype))
        for name, k in zip(node.carried, node.finals, strict=True)
    ]
    ends = [store(name, lane, last) for name, last in zip(node.carried, lasts, strict=True)]
    return builder.finish(
        "scan",
        "scan.wgsl.jinja",
        {
            "workgroup_size": workgroup,
            "lanes": builder.index(lanes),
            "length": builder.index(node.length),
            "init": [*first.lines, *carries],
            "loops": [(count, steps(count)) for count in counts],
            "ends": [*after.lines, *ends],
        },
        workgroup_size=workgroup,
        grid=fold_grid(ceildiv(lanes, workgroup), target),
        origins=node.origins,
        flops=lanes * node.length,
        iterations=node.length,
    )


def _beforehand(bodies: tuple[Scalar, ...]) -> Iterator[Scalar]:
    """The largest parts of bodies that load something and do not depend on a carry."""
    for body in bodies:
        if isinstance(body, Local):
            continue
        if not any(isinstance(part, Local) for part in walk(body)):
            if loads_of(body):
                yield body
        elif not isinstance(body, (Load, Masked)):  # what these load depends on a carry
            yield from _beforehand(children(body))
