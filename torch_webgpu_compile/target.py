"""The features, limits and rates of a GPU as data: the argument of every stage that needs them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .dtypes import DType, float64, int64, int64_in_words

BINDING_ALIGNMENT = 256
"""Bytes: where the part of a buffer that is bound to a kernel may start, on every adapter.

The largest values that WebGPU allows for ``minStorageBufferOffsetAlignment`` and
``minUniformBufferOffsetAlignment``. A plan runs on adapters other than the one it was made for, so
an adapter that allows smaller ones gains nothing.
"""


MatrixConfig = tuple[str, str, int, int, int]
"""A subgroup matrix: the type of the factors, that of the sum, M, N and K of one product.

The types are ``f32``, ``f16``, ``u32``, ``i32``, ``u8`` or ``i8``.
"""

_HALVES: MatrixConfig = ("f16", "f32", 16, 16, 16)

MATRIX_KERNELS: Mapping[str, frozenset[MatrixConfig]] = {
    "product": frozenset({_HALVES, ("i8", "i32", 16, 16, 32)}),
    "bfloat16 product": frozenset({_HALVES}),
    "attention": frozenset({_HALVES}),
}
"""Of each kind of kernel the configurations in which a GPU has shown it to be right, and fast.

They make a provider that has one worth having.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a buffer that one binding reaches; ``nbytes`` None means to the end."""

    offset_nbytes: int = 0
    nbytes: int | None = None


_WHOLE = (Window(),)


def binding_start(offset_nbytes: int) -> int:
    """The offset, in bytes, of a binding that reaches data at this offset."""
    return offset_nbytes // BINDING_ALIGNMENT * BINDING_ALIGNMENT


_MEASURED_MULTIPROCESSORS = 132  # of the H200 on which decisions were measured


@dataclass(frozen=True, slots=True)
class Machine:
    """The rates and the size of a GPU: decisions of profit depend on them.

    The defaults are those of an NVIDIA H200, on which this package's decisions were measured. Every
    adapter gets them, whatever it is: no adapter is given guesses by its name or its type. Only
    what was measured on an adapter itself, by ``doctor --measure``, takes their place.

    Attributes:
        bytes_per_second: of a copy in memory, read and written.
        flops_per_second: f32 operations of independent multiply-adds, two each.
        dispatch_seconds: what a dispatch costs in a pass, besides its traffic and arithmetic.
        multiprocessors: that run workgroups side by side.
        registers: 32-bit registers of each of them.
        workgroup_nbytes: workgroup memory that the workgroups of one of them share. An H100 has
            228 KiB, but kernels with much of it take as long as if this were all: three workgroups
            of 16 KiB at a time, one of 26 KiB.
        workgroup_invocations: of a kernel whose work says nothing about it; a power of two.
        prepared_divisor: what is computed once for many calls, and kept, may take the memory that a
            call holds divided by this. Measured peaks are up to 0.98 of eager PyTorch's
            (ResNet-50), so that a twelfth more is 1.06.
        small_nbytes: buffers up to this size do not count where memory is weighed.
    """

    bytes_per_second: float = 4_194_304e6
    flops_per_second: float = 67_108_864e6
    dispatch_seconds: float = 2e-6
    multiprocessors: int = 132
    registers: int = 1 << 16
    workgroup_nbytes: int = 48 << 10
    workgroup_invocations: int = 256
    prepared_divisor: float = 12.0
    small_nbytes: int = 1 << 16

    def scaled(self, count: int) -> int:
        """A number of workgroups, rows or threads to fill an H200 with, for this GPU.

        What was measured there goes with the number of multiprocessors.
        """
        return -(-count * self.multiprocessors // _MEASURED_MULTIPROCESSORS)

    @property
    def dispatch_nbytes(self) -> int:
        """Bytes that pass through memory while a dispatch costs its time."""
        return round(self.dispatch_seconds * self.bytes_per_second)

    @property
    def dispatch_operations(self) -> int:
        """Scalar operations, and loads from a cache, that are done in the time of a dispatch.

        Few invocations do them, one after the other, at a small part of the rate of independent
        multiply-adds.
        """
        return round(self.dispatch_seconds * self.flops_per_second / 128)

    @property
    def flops_per_byte(self) -> float:
        """Multiply-adds' operations for each byte that passes through memory meanwhile."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Target:
    """Limits, features, speed and identity of an adapter.

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
        exp_keeps_nan: whether WGSL's ``exp`` of NaN is NaN.
        keeps_subnormal_halves: whether subnormal numbers of f16 are converted and multiplied as
            they are, which WGSL leaves open.
        waits_for_compiler: whether kernels are compiled where somebody waits for it, as in a page:
            those with less code are preferred.
        subgroup_sizes: smallest and largest subgroup size, (0, 0) without subgroups.
        subgroup_matrix_configs: of the matrix units, () where none are offered.
        machine: how fast it is.
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
    exp_keeps_nan: bool = True
    keeps_subnormal_halves: bool = False
    waits_for_compiler: bool = False
    subgroup_matrix_configs: tuple[MatrixConfig, ...] = ()
    machine: Machine = Machine()

    @property
    def prefers_less_code(self) -> bool:
        """Whether a kernel that loops is better than one that has many loads in flight: on a CPU
        they are not, and LLVM takes three times as long for attention's without loops."""
        return self.waits_for_compiler or self.software

    @property
    def window_nbytes(self) -> int:
        """The part of a larger buffer that one binding reaches: it may start where another ends."""
        return binding_start(self.max_binding_nbytes)

    def windows(self, nbytes: int) -> tuple[Window, ...]:
        """The bindings through which a kernel reaches all of a buffer of so many bytes.

        Together they end with a multiple of 16 bytes, to which buffers are padded.
        """
        step = self.window_nbytes
        if nbytes <= step:
            return _WHOLE
        end = -(-nbytes // 16) * 16
        return tuple(Window(start, min(step, end - start)) for start in range(0, nbytes, step))

    @property
    def identity(self) -> str:
        """The key of measurements on this adapter."""
        return hashlib.sha256(f"{self.name} {self.backend}".encode()).hexdigest()

    @property
    def text(self) -> str:
        """The target as text, features sorted: equal for targets for which plans are equal."""
        return f"{replace(self, features=frozenset())!r} {','.join(sorted(self.features))}"

    @property
    def file_name(self) -> str:
        """The same as a file name that a person can read; may be that of another adapter too."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.name} {self.backend}".lower())
        return f"{words.strip('-')}.json"

    @property
    def workgroup_invocations(self) -> int:
        """Invocations of a workgroup whose work says nothing about it."""
        return min(self.machine.workgroup_invocations, self.max_workgroup_invocations)

    @property
    def subgroup_size(self) -> int:
        """Invocations of every subgroup; 0 where their number is not known, or not the same."""
        low, high = self.subgroup_sizes
        return low if low == high and low > 1 and "subgroup" in self.features else 0

    def matrix_config(
        self, factor: str, total: str, kernel: str = "product"
    ) -> MatrixConfig | None:
        """The largest configuration of the matrix units for these types, of those of `kernel`.

        Args:
            factor, total: what is multiplied, and summed up.
            kernel: of `MATRIX_KERNELS`.
        """
        if not self.subgroup_size:
            return None
        usable = [
            config
            for config in self.subgroup_matrix_configs
            if config in MATRIX_KERNELS[kernel] and config[:2] == (factor, total)
        ]
        return max(usable, key=lambda config: config[2] * config[3] * config[4], default=None)

    @property
    def has_float16(self) -> bool:
        """Whether WGSL has `f16`; else float16 is stored in words of two elements."""
        return "shader-f16" in self.features

    @property
    def has_int64(self) -> bool:
        """Whether WGSL has 64-bit integers; else kernels compute them in pairs of words."""
        return "shader-int64" in self.features

    def in_wgsl(self, dtype: DType) -> DType:
        """The dtype as kernels have it: without 64-bit integers in WGSL, int64 is two words."""
        return int64_in_words if dtype is int64 and not self.has_int64 else dtype

    def supports(self, dtype: DType) -> bool:
        """Whether kernels can load, compute and store ``dtype``."""
        if dtype is float64 and not self.has_int64:
            return False  # its functions work on the bits
        return not dtype.feature or dtype.feature in self.features
