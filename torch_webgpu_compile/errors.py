"""Every exception that this package raises on purpose.

    WebGPUCompileError
    ├── OptionError            a wrong option or environment value
    ├── WgslError              WGSL of the user's own that is no operator
    ├── PyTorchVersionError    this version of PyTorch is too old, or lacks a name that is needed
    ├── UnsupportedOp          an ATen operator (or a dtype of it) that cannot run on the GPU
    ├── VerificationError      a compiler stage produced an inconsistent state (a bug here)
    ├── AdapterError           no adapter, or one without a needed limit or feature
    ├── BundleError            a file of a bundle is damaged, missing or made for something else
    ├── InputError             a call of a bundle with something that its entry does not take
    └── DeviceError            raised while a plan runs
        ├── ShaderError        a kernel was rejected by the WGSL compiler
        ├── OutOfMemoryError   an allocation failed
        ├── SharedMemoryError  an argument that is changed in place shares memory with another one
        ├── IndexOutOfRangeError  a tensor of indices has one that there is no element for
        └── DeviceLostError    the GPU went away

A message names what failed, why, and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath


class WebGPUCompileError(RuntimeError):
    """Base of all errors of this package."""


class OptionError(WebGPUCompileError, ValueError):
    """An option or environment variable has an unknown name or value."""


class WgslError(WebGPUCompileError, ValueError):
    """The WGSL given to `wgsl_op` cannot be made an operator.

    Args:
        op: the operator, e.g. ``mylib::swish``.
        cause: what is wrong.
        place: where, in the user's own file: ``file:line:column``.
        next_step: what the user can do.
    """

    def __init__(self, op: str, cause: str, place: str, next_step: str = "") -> None:
        self.op = op
        self.cause = cause
        self.place = place
        self.next_step = next_step
        super().__init__(f"{op}: {cause}{'; ' if next_step else ''}{next_step}\n  at {place}")


class PyTorchVersionError(WebGPUCompileError, ImportError):
    """This version of PyTorch is too old, or so new that a private name is gone that is needed."""


class UnsupportedOp(WebGPUCompileError, NotImplementedError):
    """An operator cannot be compiled.

    Args:
        op: the ATen overload, e.g. ``aten.sort.stable``.
        cause: why, e.g. ``f64 has no WGSL type on this adapter``.
        next_step: what the user can do.
        source: the user's line of code, if known.
    """

    def __init__(self, op: str, cause: str, next_step: str, source: str = "") -> None:
        self.op = op
        self.cause = cause
        self.next_step = next_step
        self.source = source
        at = f"\n  at {source}" if source else ""
        super().__init__(f"{op}: {cause}; {next_step}{at}")


class VerificationError(WebGPUCompileError):
    """The state after a compiler pass breaks a rule of the IR: a bug in this package."""


class AdapterError(WebGPUCompileError):
    """No usable WebGPU adapter, or one that lacks a needed feature or limit."""


class BundleError(WebGPUCompileError, ValueError):
    """A bundle is not what `docs/bundle.md` says, or was changed since it was written.

    Args:
        file: the path of the file, or of the bundle.
        cause: what is wrong with it.
        next_step: what the user can do.
    """

    def __init__(
        self,
        file: str | PathLike[str],
        cause: str,
        next_step: str = "export the bundle again, or copy it again from where it is whole",
    ) -> None:
        self.file = fspath(file)
        self.cause = cause
        self.next_step = next_step
        super().__init__(f"{self.file}: {cause}; {next_step}")


class InputError(WebGPUCompileError, ValueError):
    """A bundle was given something that its entry, or its state, does not take."""


class DeviceError(WebGPUCompileError):
    """A failure while a plan was made ready or run on the GPU."""


class ShaderError(DeviceError):
    """The WGSL compiler rejected a kernel."""


class OutOfMemoryError(DeviceError):
    """The GPU could not allocate a buffer. A ``torch.OutOfMemoryError``, too."""

    def add_op(self, op: str) -> None:
        """Adds the operator to the message, unless it is named there."""
        if op not in str(self):
            self.args = (f"{op}: {self}",)


def join_pytorch(out_of_memory: type[RuntimeError]) -> None:
    """Makes `OutOfMemoryError` a subclass of PyTorch's, which this module does not import."""
    if not issubclass(OutOfMemoryError, out_of_memory):
        OutOfMemoryError.__bases__ = (DeviceError, out_of_memory)


class SharedMemoryError(DeviceError):
    """An argument that a plan changes in place shares its memory with another argument."""


class IndexOutOfRangeError(DeviceError, IndexError):
    """An index from data was out of range.

    Kernels read no element and write none for such an index, and go on. The error is raised when
    the host next waits for the GPU; work after it is not affected.

    Args:
        op: the ATen overload that the index is of.
        index: as given.
        size: of the dimension, or the number of elements where ``dim`` is None.
        dim: the dimension.
        source: the user's line of code, if known.
    """

    def __init__(self, op: str, index: int, size: int, dim: int | None, source: str = "") -> None:
        self.op = op
        self.index = index
        self.size = size
        self.dim = dim
        self.source = source
        what = f"dimension {dim} with size {size}"
        if dim is None:
            what = f"a tensor of {size} elements"
        at = f"\n  at {source}" if source else ""
        super().__init__(
            f"{op}: index {index} is out of bounds for {what}; correct the tensor of indices{at}"
        )


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """A check, which a kernel makes while it runs, of an index that comes from data.

    Attributes:
        op: the ATen overload, e.g. ``aten.gather.default``.
        source: the user's line of code, "" when unknown.
        dim: the dimension that the index is for; None for one into all elements.
    """

    op: str
    source: str = ""
    dim: int | None = None

    def error(self, index: int, size: int) -> IndexOutOfRangeError:
        """The exception for an index, as the user gave it, and the elements that there are."""
        return IndexOutOfRangeError(self.op, index, size, self.dim, self.source)


class DeviceLostError(DeviceError):
    """The GPU device was lost, with all that was on it.

    Models and tensors on the CPU go on by themselves; ``torch.webgpu.reset_device()`` makes the
    device usable for new tensors.

    Args:
        message: for the user.
        cause: what was reported of the loss.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        self.cause = cause
        super().__init__(message)


def too_large(op: str, nbytes: int, largest_nbytes: int, source: str = "") -> OutOfMemoryError:
    """The error for a result that no buffer of the GPU can hold, whatever is free.

    Args:
        op: what the result is of; "" where its caller says so.
        source: the user's line of code, if known.
    """
    return OutOfMemoryError(
        # " out of memory." is what tools that try a smaller batch next look for.
        f"{op}{': ' if op else ''}the GPU is out of memory. "
        f"A result of {nbytes:,} bytes is larger than this GPU allows "
        f"({largest_nbytes:,} bytes in a buffer); split the tensor"
        + (f"\n  at {source}" if source else "")
    )


def human_bytes(nbytes: int) -> str:
    """A size for people, e.g. ``1.5 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
