"""Small kernels side by side as one: a function for each, and a run of workgroups."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from ..ir.graph import Buffer, JointGroup, JointPart, MapGroup, RowGroup, SingleGroup
from ..ir.nodes import Scatter
from ..plan.model import KernelCall
from ..symbolic.sizes import as_expr
from ..target import Target
from .kernel import KernelBody, KernelBuilder, WorkgroupArray, fold_grid
from .pointwise import map_body
from .reduction import RowKernel
from .render import render_template
from .scatter import update_body


@dataclass(frozen=True)
class JointFunction:
    """A kernel of several, as the template prints it.

    Attributes:
        text: the function.
        first: its first workgroup.
    """

    text: str
    first: int


def workgroup_size(group: JointPart, buffers: dict[str, Buffer], target: Target) -> int:
    """Invocations of the workgroups that compute a group in a kernel of its own."""
    if isinstance(group, RowGroup):
        return RowKernel(group, KernelBuilder(target, buffers)).tiling.workgroup
    return target.workgroup_invocations


def generate_joint(
    group: JointGroup, buffers: dict[str, Buffer], target: Target
) -> KernelCall | None:
    """The kernel of groups of known sizes, of which none is empty.

    None if their workgroup memory, of which they have what has one type in common, does not fit.

    The parts with the longest workgroups come first: those that start last are the last to end.
    """
    builder = KernelBuilder(target, buffers)
    rows = [part for part in group.groups if isinstance(part, RowGroup)]
    # Without rows any size will do; with them, larger ones would repeat rows.
    workgroup = max(workgroup_size(part, buffers, target) for part in rows or group.groups)
    bodies = [_body(builder, part, workgroup) for part in group.groups]
    bodies.sort(key=lambda body: -int(body.flops) // int(body.workgroups))
    arrays: dict[str, WorkgroupArray] = {}
    parts, first = [], 0
    for number, body in enumerate(bodies):
        given = {"workgroup_size": workgroup, "number": number, "declared": []}
        inputs = {**body.inputs, **given, "scratch": _share(body.arrays, arrays)}
        parts.append(JointFunction(render_template(body.template, inputs), first))
        first += int(body.workgroups)
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes > target.max_workgroup_nbytes:
        return None
    declared = [array.declaration(name) for name, array in arrays.items()]
    return builder.finish(
        "joint",
        "joint.wgsl.jinja",
        {"workgroup_size": workgroup, "declared": declared, "parts": parts},
        workgroup_size=workgroup,
        grid=fold_grid(as_expr(first), target),
        origins=[origin for body in bodies for origin in body.origins],
        flops=as_expr(sum(int(body.flops) for body in bodies)),
        workgroup_nbytes=nbytes,
        iterations=as_expr(max(int(body.iterations) for body in bodies)),
    )


def _share(wanted: dict[str, WorkgroupArray], arrays: dict[str, WorkgroupArray]) -> dict[str, str]:
    """The array that a part uses for each that it wants: a workgroup computes only one part.

    ``arrays``: those of all parts; gets what is missing.
    """
    counts: Counter[str] = Counter()
    names = {}
    for key, array in wanted.items():
        name = f"scratch_{re.sub(r'[^a-z0-9]', '', array.type)}_{counts[array.type]}"
        counts[array.type] += 1
        if name not in arrays or arrays[name].length < array.length:
            arrays[name] = array
        names[key] = name
    return names


def _body(builder: KernelBuilder, group: JointPart, workgroup: int) -> KernelBody:
    match group:
        case MapGroup():
            return map_body(builder, group, workgroup)
        case RowGroup():
            return RowKernel(group, builder, workgroup).body()
        case SingleGroup(node):
            assert isinstance(node, Scatter)
            return update_body(builder, node, workgroup)
