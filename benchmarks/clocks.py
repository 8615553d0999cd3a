"""The clock of an NVIDIA GPU while something is measured: as high for everybody as for CUDA.

Without it a run that measures nothing of CUDA finds a GPU with a fifth of its clock, and one whose
cases take long to compile now and then (`torch_webgpu_compile.runtime.nvidia_clock`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = (
    "import sys\n"
    "from torch_webgpu_compile.runtime.nvidia_clock import open_contexts\n"
    "print(open_contexts(), flush=True)\n"
    "sys.stdin.read()"
)


@contextmanager
def high_clocks() -> Iterator[bool]:
    """Whether there are such GPUs, whose clocks are kept up until the end."""
    command = [sys.executable, "-c", _PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip() not in (b"", b"0")
        process.stdin.close()
