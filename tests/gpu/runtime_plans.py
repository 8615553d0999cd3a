"""Hand-written plans for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_webgpu_compile import dtypes
from torch_webgpu_compile.plan.model import (
    Binding,
    Dispatch,
    Kernel,
    KernelBinding,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    Step,
)
from torch_webgpu_compile.runtime.buffers import AnyBuffer
from torch_webgpu_compile.runtime.device import Device, GpuBuffer
from torch_webgpu_compile.runtime.transfer import host_memory
from torch_webgpu_compile.symbolic.sizes import Expr, IntLike, as_expr, ceildiv

ADD = """
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&c)) { c[id.x] = a[id.x] + b[id.x]; }
}
"""

SCALE = """
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> c: array<f32>;
@group(0) @binding(2) var<uniform> p: array<vec4<i32>, 1>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (i32(id.x) < p[0].x) { c[id.x] = a[id.x] * f32(p[0].y); }
}
"""

_RNG = np.random.default_rng(0)


def floats(numel: int) -> np.ndarray:
    """Other numbers at every call, uniform in [0, 1)."""
    return _RNG.random(numel, dtype=np.float32)


def on_gpu(device: Device, array: np.ndarray) -> GpuBuffer:
    gpu = device.allocate(array.nbytes)
    device.upload(gpu, array)
    return gpu


def download(device: Device, gpu: AnyBuffer, array: Any, offset: int = 0) -> None:
    """Fills an array from memory on the GPU, from an offset in bytes on."""
    address, nbytes, _ = host_memory(array)
    device.download_many([(gpu, offset, nbytes, address)])


def read(device: Device, gpu: GpuBuffer, numel: int) -> np.ndarray:
    result = np.empty(numel, np.float32)
    download(device, gpu, result)
    return result


def kernel(name: str, wgsl: str, writable: Sequence[bool], parameters: int = 0) -> Kernel:
    bindings = tuple(KernelBinding(w) for w in writable)
    return Kernel(name, "test", wgsl, bindings, (64, 1, 1), parameters)


ADD_KERNEL = kernel("add_0", ADD, (False, False, True))
SCALE_KERNEL = kernel("scale_0", SCALE, (False, True), 2)


def buffer(name: str, role: str, numel: IntLike, slot: int | None = None) -> PlanBuffer:
    size = as_expr(numel)
    return PlanBuffer(
        name, role, dtypes.float32, (size,), (as_expr(1),), as_expr(0), size * 4, slot
    )


def dispatch(
    index: int,
    bindings: Sequence[str | Binding],
    numel: IntLike,
    parameters: Sequence[IntLike] = (),
) -> Dispatch:
    zero = as_expr(0)
    one = as_expr(1)
    return Dispatch(
        index,
        tuple(b if isinstance(b, Binding) else Binding(b) for b in bindings),
        (ceildiv(numel, 64), one, one),
        tuple(as_expr(p) for p in parameters),
        zero,
        zero,
        zero,
    )


def plan(
    kernels: Sequence[Kernel],
    buffers: Sequence[PlanBuffer],
    steps: Sequence[Step],
    constants: dict[str, bytes] | None = None,
) -> Plan:
    by_name = {b.name: b for b in buffers}
    inputs = tuple(PlanInput(b.name) for b in buffers if b.role == "input")
    outputs = tuple(
        PlanOutput(b.name, b.sizes, b.strides, b.offset) for b in buffers if b.role == "output"
    )
    return Plan("test", tuple(kernels), by_name, tuple(steps), inputs, outputs, constants or {})


def add_plan(numel: IntLike) -> Plan:
    """c = a + b"""
    buffers = [buffer("a", "input", numel), buffer("b", "input", numel)]
    buffers.append(buffer("c", "output", numel, slot=0))
    return plan([ADD_KERNEL], buffers, [dispatch(0, ["a", "b", "c"], numel)])


def chain_plan(numel: Expr | int, length: int) -> Plan:
    """x → (x + x) … ``length`` dispatches over two slots, with two alternating kernels."""
    buffers = [buffer("x", "input", numel)]
    steps: list[Any] = []
    previous = "x"
    for i in range(length):
        name = f"t{i}" if i < length - 1 else "y"
        role = "intermediate" if i < length - 1 else "output"
        buffers.append(buffer(name, role, numel, slot=i % 2))
        if i % 2:
            steps.append(dispatch(1, [previous, name], numel, [numel, 1]))
        else:
            steps.append(dispatch(0, [previous, previous, name], numel))
        previous = name
    return plan([ADD_KERNEL, SCALE_KERNEL], buffers, steps)
