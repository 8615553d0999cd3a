"""Adapters that need not be here, for what can be told without one."""

from __future__ import annotations

from dataclasses import replace

from torch_webgpu_compile.bundle.targets import BROWSER
from torch_webgpu_compile.target import Machine, Target

# Of adapters that Vulkan drivers offer, other than browsers.
NATIVE_FEATURES = frozenset(
    {"immediates", "shader-f16", "shader-f64", "shader-int64", "shader-float32-atomic"}
    | {"subgroup", "subgroup-barrier", "timestamp-query"}
)
H200 = Target(
    name="NVIDIA H200",
    vendor="nvidia",
    features=NATIVE_FEATURES,
    max_binding_nbytes=(2 << 30) - 4,
    max_buffer_nbytes=4 << 30,
    max_storage_buffers=32,
    max_workgroup_invocations=1024,
    max_workgroup_nbytes=48 << 10,
    subgroup_sizes=(32, 32),
)
# WGSL has no 64-bit numbers there, and there are matrix units.
H200_ON_DAWN = replace(
    H200,
    features=frozenset({"shader-f16", "subgroup", "subgroups", "timestamp-query"})
    | {"chromium-experimental-subgroup-matrix"},
    max_buffer_nbytes=1 << 40,
    max_storage_buffers=16,
    keeps_subnormal_halves=True,
    subgroup_matrix_configs=(
        ("f16", "f32", 16, 16, 16),
        ("u8", "u32", 16, 16, 32),
        ("i8", "i32", 16, 16, 32),
    ),
)
LAVAPIPE = Target(
    name="llvmpipe (LLVM 15.0.6, 256 bits)",
    vendor="mesa",
    software=True,
    features=NATIVE_FEATURES,
    max_buffer_nbytes=2147483632,
    max_storage_buffers=32,
    max_workgroup_invocations=1024,
    max_workgroup_nbytes=32 << 10,
    subgroup_sizes=(4, 128),
    max_loop_iterations=65535,
)
# Float16, small subgroups, the limits that every implementation has; as fast as a phone (Arm's
# Mali-G78, by its data sheet).
PHONE = Target(
    name="phone",
    vendor="arm",
    features=frozenset({"shader-f16", "subgroup", "subgroups"}),
    subgroup_sizes=(16, 16),
    waits_for_compiler=True,
    machine=Machine(
        bytes_per_second=40e9,
        flops_per_second=1e12,
        dispatch_seconds=2e-5,
        multiprocessors=14,
        workgroup_nbytes=32 << 10,
    ),
)
TARGETS = {
    "lavapipe": LAVAPIPE,
    "nvidia": H200,
    "dawn": H200_ON_DAWN,
    "phone": PHONE,
    "browser": BROWSER,
}
