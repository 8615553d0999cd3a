"""What a GPU can do, as plain data: the argument of every stage that depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType, float64

BINDING_ALIGNMENT = 256
"""Bytes: where the part of a buffer that is bound to a kernel may start, on every adapter.

The largest values that WebGPU allows for ``minStorageBufferOffsetAlignment`` and
``minUniformBufferOffsetAlignment``. A plan runs on adapters other than the one it was made for, so
an adapter that allows smaller ones gains nothing.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Limits, features and identity of an adapter.

    Attributes:
        name: the adapter's own description.
        vendor: lower-case vendor name, "" when unknown.
        software: whether it is a CPU.
        backend: ``Vulkan``, ``Metal``, ``D3D12`` or ``OpenGL``.
        features: WebGPU feature names that a device is created with.
        max_binding_nbytes: largest storage-buffer binding, bytes.
        max_buffer_nbytes: largest buffer, bytes.
        max_storage_buffers: storage-buffer bindings per kernel.
        max_workgroup_invocations: invocations per workgroup.
        max_workgroup_nbytes: workgroup memory, bytes.
        max_grid: workgroups per grid dimension.
        max_loop_iterations: iterations of all loops of one invocation together, after which the
            driver ends every loop without an error; 0 where there is no such limit.
        subgroup_sizes: smallest and largest subgroup size, (0, 0) without subgroups.
    """

    name: str = "default"
    vendor: str = ""
    software: bool = False
    backend: str = "Vulkan"
    features: frozenset[str] = frozenset({"shader-f16", "shader-int64"})
    max_binding_nbytes: int = 128 << 20
    max_buffer_nbytes: int = 256 << 20
    max_storage_buffers: int = 8
    max_workgroup_invocations: int = 256
    max_workgroup_nbytes: int = 16 << 10
    max_grid: int = 65535
    subgroup_sizes: tuple[int, int] = (0, 0)
    max_loop_iterations: int = 0

    @property
    def window_nbytes(self) -> int:
        """The part of a larger buffer that one binding reaches: it may start where another ends."""
        return self.max_binding_nbytes // BINDING_ALIGNMENT * BINDING_ALIGNMENT

    @property
    def subgroup_size(self) -> int:
        """Invocations of every subgroup; 0 where their number is not known, or not the same."""
        low, high = self.subgroup_sizes
        return low if low == high and low > 1 and "subgroup" in self.features else 0

    def supports(self, dtype: DType) -> bool:
        """Whether kernels can load, compute and store ``dtype``."""
        if dtype is float64 and "shader-int64" not in self.features:
            return False  # its functions work on the bits
        return not dtype.feature or dtype.feature in self.features
