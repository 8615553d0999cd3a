"""Turning a provider's error reports into the exceptions of `errors`."""

from __future__ import annotations

import re

from ..errors import DeviceError, DeviceLostError, OutOfMemoryError, ShaderError
from ..plan.model import Kernel
from ..user_wgsl.source import located, original_names

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
    """The error about something that cannot be done because the device is lost."""
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
        written = _in_users_file(kernel, text, number, int(position.group(2)))
        if written is not None:
            return written
    ops = f" (of {', '.join(kernel.ops)})" if kernel.ops else ""
    return ShaderError(
        f"kernel {kernel.name}{ops} was rejected by the WGSL compiler: {text}{line}\n"
        "set TORCH_WEBGPU_DEBUG=wgsl to see the whole kernel, and report it"
    )


def _in_users_file(kernel: Kernel, text: str, line: int, column: int) -> ShaderError | None:
    """The error about WGSL that a user has written; None if the error is not there."""
    found = located(kernel.wgsl, line, column)
    if found is None:
        return None
    title, place = found
    code = original_names(kernel.wgsl.splitlines()[line - 1].strip())
    where = f"\n  at {place}" if place else ""
    return ShaderError(f"{title}: {original_names(_complaint(text))}{where}\n    {code}")


_DAWN_CAUSE = re.compile(r":\d+:\d+ error: ([^\n]*)")
_NAGA_START = re.compile(r"^Shader (?:'[^']*' )?(?:parsing|validation) error:\s*")
_NAGA_FRAME = re.compile(r"^\s*In wgpu|[┌│]")


def _complaint(text: str) -> str:
    """The message of a WGSL compiler, without the place and the kernel."""
    found = _DAWN_CAUSE.search(text)
    if found is not None:
        return found[1]
    lines = [line.strip() for line in text.splitlines() if not _NAGA_FRAME.search(line)]
    return "; ".join(dict.fromkeys(_NAGA_START.sub("", line).removeprefix("= ") for line in lines))
