"""Keeps the clock of NVIDIA GPUs up between calls, as every program that uses CUDA does.

NVIDIA's driver lets the clock of a GPU on which no process has opened CUDA fall to its lowest, when
the GPU has been mostly idle for a second or two, and takes 0.15 to 0.35 s of full work to raise it
again: on an H200 from 345 to 1980 MHz. A stream of small calls keeps it down, so that each kernel
takes four to five times as long. A context of CUDA that does nothing keeps it up, in any process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from functools import cache

_BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC: threads that wait, sleep


def open_contexts(name: str = "") -> int:
    """Opens CUDA on the GPUs of a name (every GPU without one), until the process ends.

    Takes 0.3 s and, on an H200, 520 MiB of each GPU's memory. Needs the driver alone.

    Returns:
        How many GPUs there were.

    Raises:
        OSError: no driver of NVIDIA, or it gives no context.
    """
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def call(function: str, *arguments: object) -> None:
        if error := getattr(driver, function)(*arguments):
            raise OSError(f"{function} of NVIDIA's driver fails with {error}")

    call("cuInit", 0)
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGetCount", ctypes.byref(count))
    opened = 0
    for index in range(count.value):
        call("cuDeviceGet", ctypes.byref(device), index)
        text = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", text, len(text), device)
        if name in ("", text.value.decode()):
            call("cuDevicePrimaryCtxSetFlags_v2", device, _BLOCKING_SYNC)
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            opened += 1
    return opened


@cache
def keep_high(name: str) -> None:
    """Does it in a thread, once for a name, and warns where it cannot be done."""

    def run() -> None:
        try:
            reason = "" if open_contexts(name) else f"CUDA finds no {name}"
        except OSError as error:
            reason = str(error)
        if reason:
            warnings.warn(
                f"TORCH_WEBGPU_HOLD_CLOCK=1 has no effect: {reason}", RuntimeWarning, stacklevel=1
            )

    threading.Thread(target=run, name="hold the GPU's clock", daemon=True).start()
