"""Adapters that need not be here, for what can be told without one."""

from __future__ import annotations

from torch_webgpu_compile.target import Target

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
