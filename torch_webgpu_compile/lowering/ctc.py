"""``webgpu::ctc_paths`` as one kernel: a workgroup has a sample and goes through its steps."""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import index
from ..symbolic.sizes import ONE, as_expr, ceildiv
from ..torch_ops import ctc
from ..user_wgsl.modules import WgslKernel
from .builder import Builder
from .registry import NotLowered, lowers
from .value import Value

# Columns that an invocation takes at once: a software driver ends loops after so many iterations.
_WORKGROUP, _TOGETHER = 128, 8
_INPUTS = (("emissions", "f32"), *((name, "i32") for name in ("labels", "starts", "steps", "ends")))
_UNIFORMS = (("rows", "i32"), ("columns", "i32"), ("reverse", "i32"))
_BINDINGS = "\n".join(
    f"@group(0) @binding({k}) var<storage, read> {name}: array<{type}>;"
    for k, (name, type) in enumerate(_INPUTS)
)
_ELEMENTS = "\n".join(
    f"      element(s + {k * _WORKGROUP}, t, start, width, count, last, back);"
    for k in range(_TOGETHER)
)
_TEXT = f"""
struct Sizes {{ {", ".join(f"{name}: {type}" for name, type in _UNIFORMS)} }}
{_BINDINGS}
@group(0) @binding({len(_INPUTS)}) var<storage, read_write> paths: array<f32>;
@group(0) @binding({len(_INPUTS) + 1}) var<uniform> sizes: Sizes;
const NEVER = {ctc.NEVER};
fn element(s: i32, t: i32, start: i32, width: i32, count: i32, last: i32, back: bool) {{
  if (s >= width) {{ return; }}
  let one = select(1, -1, back);
  let row = select(t, count - 1 - t, back && t < count);
  let column = start + select(s, last - s, back && s <= last);
  let place = row * sizes.columns + column;
  var sum = select(NEVER, 0.0, s < 2);
  if (t > 0) {{
    let before = place - one * sizes.columns;
    let a = paths[before];
    var b = NEVER;
    var c = NEVER;
    if (s >= 1) {{ b = paths[before - one]; }}
    if (s >= 2 && labels[column] != labels[column - 2 * one]) {{ c = paths[before - 2 * one]; }}
    let most = max(a, max(b, c));
    let all = a + b + c;
    sum = most + log(exp(a - most) + exp(b - most) + exp(c - most));
    // Some drivers have another exponential of NaN.
    if ((bitcast<u32>(all) & 0x7fffffffu) > 0x7f800000u) {{ sum = all; }}
  }}
  paths[place] = select(NEVER, sum + emissions[place], t < count && s <= last);
}}
@compute @workgroup_size({_WORKGROUP})
fn walk(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
  let start = starts[group.x];
  let width = starts[group.x + 1u] - start;
  let count = clamp(steps[group.x], 0, sizes.rows);
  let last = clamp(ends[group.x], 0, width - 1);
  let back = sizes.reverse != 0;
  for (var t = 0; t < sizes.rows; t++) {{
    for (var s = i32(lane); s < width; s += {_WORKGROUP * _TOGETHER}) {{
{_ELEMENTS}
    }}
    storageBarrier();
    workgroupBarrier();
  }}
}}
"""
_KERNEL = WgslKernel(
    *("webgpu::ctc_paths", _TEXT, "walk", _INPUTS, (("paths", "f32"),), _UNIFORMS),
    (_WORKGROUP, 1, 1),
)


@lowers(torch.ops.webgpu.ctc_paths.default)
def lower_ctc_paths(
    builder: Builder,
    emissions: Value,
    labels: Value,
    starts: Value,
    steps: Value,
    ends: Value,
    reverse: bool,
) -> Value:
    """See ``torch_ops.ctc``. Raises NotLowered: for more than a buffer's binding or a grid hold."""
    target = builder.target
    rows, columns = emissions.sizes
    samples = steps.sizes[0]
    nbytes = rows * columns * dtypes.float32.itemsize
    if nbytes.is_constant and nbytes.constant > target.window_nbytes:
        raise NotLowered(f"{nbytes.constant:,} bytes of paths, more than a binding has")
    if samples.is_constant and samples.constant > target.max_grid:
        raise NotLowered(f"{samples.constant:,} samples, more than a grid has workgroups")
    # No sample has more columns than all of them together.
    iterations = rows * (ceildiv(columns, as_expr(_WORKGROUP * _TOGETHER)) + 1)
    limit = target.max_loop_iterations
    if limit and iterations.is_constant and iterations.constant > limit:
        raise NotLowered(f"{iterations.constant:,} iterations, more than this driver makes")
    numbers = (index(rows), index(columns), index(as_expr(int(reverse))))
    values = [emissions, labels, starts, steps, ends]
    (paths,) = builder.user_kernel(_KERNEL, values, numbers, (samples, ONE, ONE), iterations)
    return paths
