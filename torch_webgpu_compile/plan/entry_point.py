"""The entry point of rendered kernels: the one text by which their renderer and a runtime know it.

Every template begins its ``main`` with `entry_point`. So a runtime that runs a part of a kernel's
grid exchanges this text, and that of the uniform parameters, for one that is told where the part
is, and need know nothing else of the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from .model import Kernel

LOCAL_NAMES = ("local", "local_index")
"""What templates name the number of an invocation in its workgroup."""

_LOCAL = "@builtin(local_invocation_index)"
_SLICE_ROWS = 2  # vec4s behind the parameters: the first workgroup, the whole grid


def entry_point(local: str) -> str:
    """The start of ``main``, with the variables ``group`` and ``groups``: see WebGPU's builtins.

    Args:
        local: one of `LOCAL_NAMES`.
    """
    assert local in LOCAL_NAMES, local
    return (
        "fn main(@builtin(workgroup_id) group: vec3<u32>, "
        "@builtin(num_workgroups) groups: vec3<u32>,\n"
        f"        {_LOCAL} {local}: u32) {{\n"
    )


def parameters_declaration(binding: int, rows: int) -> str:
    """The declaration of so many vec4s of uniform parameters, see `Kernel`."""
    return f"@group(0) @binding({binding}) var<uniform> parameters: array<vec4<i32>, {rows}>;"


def sliced_kernel(kernel: Kernel) -> Kernel | None:
    """The kernel for a part of its grid, which follows its parameters, padded to vec4s.

    That is the number of the first workgroup in each dimension, and the whole grid: a vec4 each.
    None for a kernel that is not rendered from a template: a user's own may use its grid as it
    likes.
    """
    rows = -(-kernel.parameter_count // 4)
    binding = len(kernel.bindings)
    first, grid = (f"bitcast<vec4<u32>>(parameters[{rows + k}]).xyz" for k in range(_SLICE_ROWS))
    declared = parameters_declaration(binding, rows)
    larger = parameters_declaration(binding, rows + _SLICE_ROWS)
    for local in LOCAL_NAMES:
        whole = entry_point(local)
        if kernel.wgsl.count(whole) == 1 and (not rows or kernel.wgsl.count(declared) == 1):
            part = (
                f"fn main(@builtin(workgroup_id) tw_group: vec3<u32>, {_LOCAL} {local}: u32) {{\n"
                f"  let group = tw_group + {first};\n  let groups = {grid};\n"
            )
            wgsl = kernel.wgsl.replace(whole, part)
            wgsl = wgsl.replace(declared, larger) if rows else f"{wgsl}{larger}\n"
            return replace(kernel, wgsl=wgsl, parameter_count=4 * (rows + _SLICE_ROWS))
    return None
