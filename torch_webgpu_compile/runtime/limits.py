"""What a GPU reaches at best, measured: the bandwidth of a copy, and f32 multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import float32
from ..plan.model import Binding, Dispatch, Kernel, KernelBinding, Plan, PlanBuffer
from ..sizes import ONE, ZERO, as_expr
from .device import Device
from .executor import BoundPlan, Executor
from .profiler import best_seconds

_SECONDS = 0.02  # a GPU that was idle raises its clocks meanwhile
_COPY_NBYTES, _SOFTWARE_COPY_NBYTES = 256 << 20, 32 << 20  # more than what caches hold
_THREADS, _STEPS, _CHAINS = 256, 64, 8
# Independent chains of multiply-adds on four lanes; the condition keeps their results in use.
_MULTIPLY_ADDS = f"""
@group(0) @binding(0) var<storage, read_write> result: array<vec4<f32>>;
@compute @workgroup_size({_THREADS})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  let scale = vec4<f32>(f32(id.x) * 1e-9 + 0.5f);
  {"".join(f"var v{k} = scale + {k}.0f;" for k in range(_CHAINS))}
  for (var step = 0; step < {_STEPS}; step++) {{
    {f"{chr(10)}    ".join(f"v{k} = fma(v{k}, scale, scale);" for k in range(_CHAINS)) * 8}
  }}
  let total = {" + ".join(f"v{k}" for k in range(_CHAINS))};
  if (total.x == 12345.0f) {{ result[0] = total; }}
}}
"""

# Drivers' own buffer copies may be slower than kernels: 0.8 of 4.2 TB/s on an H200.
_COPY = f"""
@group(0) @binding(0) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> result: array<vec4<f32>>;
@compute @workgroup_size({_THREADS})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {{
  let i = (group.y * groups.x + group.x) * {_THREADS}u + local;
  if (i < arrayLength(&result)) {{ result[i] = source[i]; }}
}}
"""


@dataclass(frozen=True)
class Limits:
    """Bytes (read and written) and f32 operations per second."""

    bytes_per_second: float
    flops_per_second: float


def measure(device: Device) -> Limits:
    """Takes some tens of milliseconds on a GPU. Raises DeviceError, OutOfMemoryError."""
    return Limits(_copy(device), _multiply_add(device))


def _copy(device: Device) -> float:
    target = device.target
    nbytes = _SOFTWARE_COPY_NBYTES if target.software else _COPY_NBYTES
    nbytes = min(nbytes, target.max_binding_nbytes)
    numel = nbytes // 4
    kernel = Kernel(
        "copy", "limits", _COPY, (KernelBinding(False), KernelBinding(True)), (_THREADS, 1, 1)
    )
    buffers = {
        name: PlanBuffer(
            name, "intermediate", float32, (as_expr(numel),), (ONE,), ZERO, as_expr(nbytes)
        )
        for name in ("source", "result")
    }
    workgroups = -(-numel // (4 * _THREADS))
    across = min(workgroups, target.max_grid)
    grid = (as_expr(across), as_expr(-(-workgroups // across)), ONE)
    bindings = (Binding("source"), Binding("result"))
    step = Dispatch(0, bindings, grid, (), ZERO, ZERO, ZERO)
    bound = Executor(Plan("limits", (kernel,), buffers, (step,), (), ()), device).bind()
    return 2 * nbytes / best_seconds(bound.replay, device, _SECONDS)


def _multiply_add(device: Device) -> float:
    kernel = Kernel(
        "multiply_adds",
        "limits",
        _MULTIPLY_ADDS,
        (KernelBinding(True),),
        (_THREADS, 1, 1),
    )
    buffer = PlanBuffer("result", "intermediate", float32, (as_expr(4),), (ONE,), ZERO, as_expr(16))

    def bound_plan(workgroups: int) -> BoundPlan:
        grid = (as_expr(workgroups), ONE, ONE)
        step = Dispatch(0, (Binding("result"),), grid, (), ZERO, ZERO, ZERO)
        plan = Plan("limits", (kernel,), {"result": buffer}, (step,), (), ())
        return Executor(plan, device).bind()

    flops = 2 * 4 * _CHAINS * 8 * _STEPS * _THREADS
    best, workgroups = 0.0, 4
    while True:  # until more workgroups do not help
        seconds = best_seconds(bound_plan(workgroups).replay, device, _SECONDS)
        found = flops * workgroups / seconds
        if found < 1.2 * best or workgroups >= device.target.max_grid // 8:
            return max(best, found)
        best, workgroups = found, workgroups * 8
