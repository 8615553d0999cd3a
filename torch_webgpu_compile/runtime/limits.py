"""Measures the limits of a GPU: a copy's bandwidth, f32 multiply-adds, and dispatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from ..dtypes import float32
from ..plan.model import Binding, Dispatch, Kernel, KernelBinding, Plan, PlanBuffer
from ..symbolic.sizes import ONE, ZERO, Expr, as_expr
from ..target import Machine
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


# A dispatch that has next to nothing to do, and needs the one before it.
_STEP = """
@group(0) @binding(0) var<storage, read_write> result: array<vec4<f32>>;
@compute @workgroup_size(1)
fn main() { result[0] += vec4<f32>(1.0f); }
"""
_STEPS_OF_A_CALL = 256
_MACHINE_ROUNDS = 5  # of what is stored for good: other programs may use the GPU meanwhile


@dataclass(frozen=True)
class Limits:
    """Bytes (read and written) and f32 operations per second."""

    bytes_per_second: float
    flops_per_second: float


def measure(device: Device, rounds: int = 1) -> Limits:
    """The best of so many rounds, each some tens of milliseconds on a GPU.

    Raises DeviceError, OutOfMemoryError.
    """
    return Limits(_copy(device, rounds), _multiply_add(device, rounds))


_copy_rates: WeakKeyDictionary[Device, float] = WeakKeyDictionary()


def copy_bytes_per_second(device: Device) -> float:
    """Bytes read and written per second by a copy, measured once for a device.

    Raises DeviceError, OutOfMemoryError.
    """
    if device not in _copy_rates:
        _copy_rates[device] = _copy(device, 1)
    return _copy_rates[device]


def measure_machine(device: Device) -> Machine:
    """A GPU's rates and the cost of a dispatch; the rest stays as it is in `Machine`.

    WebGPU does not say how many multiprocessors there are: they are guessed to be as many as those
    of the default machine that together reach the same rate of multiply-adds.

    Raises DeviceError, OutOfMemoryError.
    """
    default, found = Machine(), measure(device, _MACHINE_ROUNDS)
    each = default.flops_per_second / default.multiprocessors
    return replace(
        default,
        bytes_per_second=found.bytes_per_second,
        flops_per_second=found.flops_per_second,
        dispatch_seconds=_dispatch_seconds(device),
        multiprocessors=max(1, round(found.flops_per_second / each)),
    )


def _dispatch_seconds(device: Device) -> float:
    """Seconds of each dispatch of a pass, without those of the submission."""
    kernel = Kernel("step", "limits", _STEP, (KernelBinding(True),), (1, 1, 1))
    plans = (_replay(device, kernel, (ONE, ONE, ONE), n) for n in (1, _STEPS_OF_A_CALL + 1))
    one, all_steps = (best_seconds(p.replay, device, _SECONDS, _MACHINE_ROUNDS) for p in plans)
    return max(1e-9, (all_steps - one) / _STEPS_OF_A_CALL)


def _replay(
    device: Device,
    kernel: Kernel,
    grid: tuple[Expr, Expr, Expr],
    count: int = 1,
    numel: int = 4,
) -> BoundPlan:
    """So many dispatches of a kernel on vectors of ``numel`` f32, one for each of its bindings."""
    buffers = {
        name: PlanBuffer(
            name, "intermediate", float32, (as_expr(numel),), (ONE,), ZERO, as_expr(4 * numel)
        )
        for name in (f"vector{k}" for k in range(len(kernel.bindings)))
    }
    step = Dispatch(0, tuple(map(Binding, buffers)), grid, (), ZERO, ZERO, ZERO)
    plan = Plan("limits", (kernel,), buffers, (step,) * count, (), ())
    return Executor(plan, device).bind()


def _copy(device: Device, rounds: int) -> float:
    target = device.target
    nbytes = _SOFTWARE_COPY_NBYTES if target.software else _COPY_NBYTES
    nbytes = min(nbytes, target.max_binding_nbytes)
    numel = nbytes // 4
    kernel = Kernel(
        "copy", "limits", _COPY, (KernelBinding(False), KernelBinding(True)), (_THREADS, 1, 1)
    )
    workgroups = -(-numel // (4 * _THREADS))
    across = min(workgroups, target.max_grid)
    grid = (as_expr(across), as_expr(-(-workgroups // across)), ONE)
    bound = _replay(device, kernel, grid, numel=numel)
    return 2 * nbytes / best_seconds(bound.replay, device, _SECONDS, rounds)


def _multiply_add(device: Device, rounds: int) -> float:
    kernel = Kernel(
        "multiply_adds",
        "limits",
        _MULTIPLY_ADDS,
        (KernelBinding(True),),
        (_THREADS, 1, 1),
    )
    flops = 2 * 4 * _CHAINS * 8 * _STEPS * _THREADS
    best, workgroups = 0.0, 4
    while True:  # until more workgroups do not help
        bound = _replay(device, kernel, (as_expr(workgroups), ONE, ONE))
        seconds = best_seconds(bound.replay, device, _SECONDS, rounds)
        found = flops * workgroups / seconds
        if found < 1.2 * best or workgroups >= device.target.max_grid // 8:
            return max(best, found)
        best, workgroups = found, workgroups * 8
