"""Turning a provider's error reports into the exceptions of `errors`."""

from __future__ import annotations

import re

from ..errors import DeviceError, DeviceLostError, OutOfMemoryError, ShaderError
from ..plan.model import Kernel

_LOST = re.compile(r"device (is|was) lost|device lost|DEVICE_LOST", re.IGNORECASE)
_MEMORY = re.compile(r"out of memory|OutOfMemory|not enough memory", re.IGNORECASE)
_POSITION = re.compile(r":(\d+):(\d+)")


def tidy(message: str) -> str:
    """A provider's message without its frame."""
    lines = [line.rstrip() for line in message.strip().splitlines()]
    if lines and lines[0] == "Validation Error":
        lines = lines[1:]
    return "\n".join(line for line in lines if line.strip() not in ("", "Caused by:"))


def is_loss(message: str) -> bool:
    """Whether a provider's message says that the device is lost."""
    return _LOST.search(message) is not None


def cause_of(message: str) -> str:
    """The last line of a provider's message: the cause of what is above it."""
    return (tidy(message).splitlines() or [message])[-1].strip()


def lost_error(subject: str, cause: str) -> DeviceLostError:
    """The exception for what could not be done because the device is lost."""
    return DeviceLostError(
        f"{subject}: the GPU device was lost ({cause}); a driver reset, a crash or a timeout does "
        "this. What was on it is gone: call torch.webgpu.reset_device() and make it again (models "
        "and tensors on the CPU go on by themselves). If it happens again, set "
        "TORCH_WEBGPU_CHECKED=1 to find out-of-range accesses",
        cause,
    )


def device_error(kind: str, message: str, subject: str) -> DeviceError:
    """The exception for an error report.

    Args:
        kind: the provider's class of error: ``Validation``, ``OutOfMemory``, ``Internal``, ….
        message: the provider's text.
        subject: what was being done, with the kernel or plan that it was done for.
    """
    text = tidy(message)
    if is_loss(message):
        return lost_error(subject, cause_of(message))
    if kind == "OutOfMemory" or _MEMORY.search(message):
        return OutOfMemoryError(
            # " out of memory." is what tools that try a smaller batch next look for.
            f"{subject}: the GPU is out of memory. It says: {text}; free tensors, use a smaller "
            "batch, or call torch.webgpu.empty_cache()"
        )
    return DeviceError(
        f"{subject}: {text or kind}; this is a bug in the compiled plan: set "
        "TORCH_WEBGPU_DEBUG=plan to see it, and report it"
    )


def shader_error(kind: str, message: str, kernel: Kernel) -> DeviceError:
    """The exception for a kernel that the WGSL compiler or the driver rejected."""
    if is_loss(message) or kind == "OutOfMemory":
        return device_error(kind, message, f"compiling kernel {kernel.name}")
    text = tidy(message)
    line = ""
    position = _POSITION.search(text)
    if position is not None:
        number = int(position.group(1))
        lines = kernel.wgsl.splitlines()
        if 0 < number <= len(lines) and lines[number - 1].strip() not in text:
            line = f"\n  line {number}: {lines[number - 1].strip()}"
    ops = f" (of {', '.join(kernel.ops)})" if kernel.ops else ""
    return ShaderError(
        f"kernel {kernel.name}{ops} was rejected by the WGSL compiler: {text}{line}\n"
        "set TORCH_WEBGPU_DEBUG=wgsl to see the whole kernel, and report it"
    )
