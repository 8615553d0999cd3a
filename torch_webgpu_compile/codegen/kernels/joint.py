"""Small kernels side by side as one: a function for each, and a run of workgroups."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...ir.buffers import Buffer
from ...ir.graph import JointGroup, JointPart, MapGroup, RowGroup, SingleGroup
from ...ir.nodes import Scatter
from ...ir.renaming import twins_of
from ...ir.rows import choose_row_strategy, joint_workgroup
from ...ir.workgroup_memory import array_keys, shared_arrays
from ...plan.model import KernelCall
from ...symbolic.sizes import as_expr
from ...target import Target
from ..wgsl.render import render_template
from .builder import KernelBody, KernelBuilder, declaration
from .pointwise import map_body
from .reduction import RowKernel
from .scatter import update_body


@dataclass(frozen=True)
class JointFunction:
    """A function of the kernel, as the template prints it.

    Attributes:
        text: the function.
        first: its first workgroup.
        workgroups: how many each of its parts has.
        parts: how many parts it computes.
    """

    text: str
    first: int
    workgroups: int
    parts: int


def generate_joint(group: JointGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of groups of known sizes, of which none is empty.

    They share the workgroup memory of which they have what has one type in common. The parts with
    the longest workgroups come first: those that start last are the last to end.
    """
    builder = KernelBuilder(target, buffers)
    rows = [part for part in group.groups if isinstance(part, RowGroup)]
    workgroup = joint_workgroup([choose_row_strategy(r, buffers, target) for r in rows], target)
    parts, times = group.groups, 1
    if group.are_alike:
        twins = twins_of(parts, buffers)
        assert twins is not None, "verify_schedule has checked it"
        builder.bindings.twins = twins
        parts, times = parts[:1], len(parts)
    bodies = [_body(builder, part, workgroup) for part in parts]
    bodies.sort(key=lambda body: -int(body.flops) // int(body.workgroups))
    shared = shared_arrays([*body.arrays.values()] for body in bodies)
    functions, first = [], 0
    for number, body in enumerate(bodies):
        keys = array_keys([*body.arrays.values()])
        scratch = dict(zip(body.arrays, map(_array_name, keys), strict=True))
        given = {"workgroup_size": workgroup, "number": number, "declared": []}
        inputs = {**body.inputs, **given, "scratch": scratch}
        text = render_template(body.template or body.kind, inputs, target)
        functions.append(JointFunction(text, first, int(body.workgroups), times))
        first += int(body.workgroups) * times
    nbytes = sum(array.nbytes for array in shared.values())
    assert nbytes <= target.max_workgroup_nbytes, "verify_schedule has checked it"
    declared = [declaration(_array_name(key), array) for key, array in shared.items()]
    return builder.finish(
        "joint",
        {"declared": declared, "functions": functions},
        workgroup_size=workgroup,
        workgroups=as_expr(first),
        origins=[origin for body in bodies for origin in body.origins],
        flops=as_expr(sum(int(body.flops) for body in bodies) * times),
        workgroup_nbytes=nbytes,
        iterations=as_expr(max(int(body.iterations) for body in bodies)),
    )


def _array_name(key: tuple[str, int]) -> str:
    kind, number = key
    return f"scratch_{re.sub(r'[^a-z0-9]', '', kind)}_{number}"


def _body(builder: KernelBuilder, group: JointPart, workgroup: int) -> KernelBody:
    match group:
        case MapGroup():
            return map_body(builder, group, workgroup)
        case RowGroup():
            return RowKernel(group, builder, workgroup).body()
        case SingleGroup(node):
            assert isinstance(node, Scatter)
            return update_body(builder, node, workgroup)
