"""Loops whose every lane is by itself: one invocation has a lane and takes all its steps."""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.access import flat_environment
from ...ir.buffers import Buffer
from ...ir.nodes import Scan, carry_name
from ...ir.scalar import Load, Local, Masked, Scalar, cast, children, loads_of, walk
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import ceildiv, iteration, product
from ...target import Target
from ..values import Scope
from .builder import KernelBuilder

_WORKGROUP = 64  # few lanes are spread over many multiprocessors
# What a step loads does not depend on the steps before: so many loads are asked for at once, of at
# most so many steps, whose expressions have so many nodes together.
_LOADS, _MOST_STEPS, _MOST_NODES = 32, 16, 600


def generate_scan(node: Scan, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    workgroup = min(_WORKGROUP, target.workgroup_invocations)
    lanes = product(node.ranges)
    symbols = numbered("i", node.ranges)
    place = flat_environment(symbols, iteration("q", lanes))
    (time,) = numbered("t", (node.length,))
    lane = [place[symbol] for symbol in symbols]

    first = Scope()
    renderer = builder.renderer([place], first)
    carries = [
        f"var {carry_name(k)}: {target.in_wgsl(body.dtype).compute} = {renderer.render(body).code};"
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
                renderer.let(body.name, 1, target.in_wgsl(body.dtype))
                if isinstance(body, Local)
                else renderer.render(body)
                for body in node.step
            ]
            rows = zip(node.rows, node.row, strict=True)
            stores = [
                builder.store_element(name, [now, *lane], renderer.render(body).code)
                for name, body in rows
            ]
            changes = [f"{carry_name(n)} = {value.code};" for n, value in enumerate(made)]
            others += [*scope.lines, *stores, *changes]
        return [*loads, *others]

    together = _steps_together((*node.row, *node.step))
    counts = [together] if together == 1 else [together, 1]
    if node.length.is_constant and int(node.length) % together == 0:
        counts = [together]
    after = Scope()
    renderer = builder.renderer([place], after)
    ends = []
    for name, k in zip(node.carried, node.finals, strict=True):
        last = cast(Local(carry_name(k), node.init[k].dtype), buffers[name].dtype)
        ends.append(builder.store_element(name, lane, renderer.render(last).code))
    return builder.finish(
        "scan",
        {
            "lanes": builder.index(lanes),
            "length": builder.index(node.length),
            "init": [*first.lines, *carries],
            "loops": [(count, steps(count)) for count in counts],
            "ends": [*after.lines, *ends],
        },
        workgroup_size=workgroup,
        workgroups=ceildiv(lanes, workgroup),
        origins=node.origins,
        flops=lanes * node.length,
        iterations=node.length,
    )


def _steps_together(bodies: tuple[Scalar, ...]) -> int:
    """How many steps an invocation takes at once: a power of two."""
    parts = {part for body in bodies for part in walk(body)}
    loads = max(1, sum(isinstance(part, Load) for part in parts))
    most = min(_MOST_STEPS, _LOADS // loads, _MOST_NODES // len(parts))
    return 1 << max(most.bit_length() - 1, 0)


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
