"""Fourier transforms against the copy limit, and against ``torch.fft`` on CUDA where there is one.

``python -m benchmarks.fourier_transforms [--small]`` prints, for every case, dispatches,
milliseconds, the share of what a copy kernel moves per second that one pass over input and output
would be, cuFFT's milliseconds, and how many times as fast this is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from torch_webgpu_compile import counters
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.torch_ops import fft as fft_ops

from .limits import synchronize as synchronize_cuda
from .timing import seconds_per_call

assert fft_ops.fft is not None  # its import defines the operators

# form, rows (or leading sizes), length of the transformed dimensions
CASES = [
    ("c2c", (65536,), (1024,)),
    ("c2c", (64,), (1 << 20,)),
    ("c2c", (65536,), (1000,)),
    ("c2c", (1 << 20,), (64,)),
    ("c2c", (16384,), (4096,)),
    ("c2c", (16,), (1 << 22,)),
    ("c2c", (8192,), (1009,)),
    ("c2c", (64,), (1024, 1024)),
    ("r2c", (65536,), (1024,)),
    ("c2r", (65536,), (1024,)),
    ("r2c", (64,), (1024, 1024)),
    ("r2c", (32,), (1 << 20,)),
]


def sizes_of(form: str, lead: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of an input, pairs included."""
    if form == "r2c":
        return (*lead, *lengths)
    last = lengths[-1] // 2 + 1 if form == "c2r" else lengths[-1]
    return (*lead, *lengths[:-1], last, 2)


def transform(form: str, lengths: tuple[int, ...]) -> Callable[[Any], Any]:
    """The operator of a case."""
    dims = [k + 1 for k in range(len(lengths))]
    ops = torch.ops.webgpu
    return {
        "c2c": lambda x: ops.fft(x, dims, True, 1.0),
        "r2c": lambda x: ops.rfft(x, dims, 1.0),
        "c2r": lambda x: ops.irfft(x, dims, lengths[-1], 1.0),
    }[form]


def cuda_seconds(form: str, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> float:
    """What cuFFT takes."""
    dims = [k + 1 for k in range(len(lengths))]
    x = torch.randn(sizes, device="cuda")
    z = x if form == "r2c" else torch.view_as_complex(x)
    run = {
        "c2c": lambda: torch.fft.fftn(z, dim=dims),
        "r2c": lambda: torch.fft.rfftn(z, dim=dims),
        "c2r": lambda: torch.fft.irfftn(z, s=lengths, dim=dims, norm="forward"),
    }[form]
    return seconds_per_call(run, synchronize_cuda)


def copy_rate(numel: int) -> float:
    """Bytes per second, read and written, of a kernel that only copies."""
    x = torch.randn(numel).to("webgpu")
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 2.0, backend="webgpu", dynamic=False)
    wait = torch.webgpu.synchronize  # type: ignore[attr-defined]
    return 8 * numel / seconds_per_call(lambda: run(x), wait)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a few rows of every case")
    small = parser.parse_args().small
    register()
    rate = copy_rate(1 << (20 if small else 27))
    print(f"copy: {rate / 1e12:.2f} TB/s")
    wait = torch.webgpu.synchronize  # type: ignore[attr-defined]
    for form, lead, lengths in CASES:
        sizes = sizes_of(form, (1,) if small else lead, lengths)
        x = torch.randn(sizes).to("webgpu")
        torch._dynamo.reset()
        run = torch.compile(
            transform(form, lengths), backend="webgpu", fullgraph=True, dynamic=False
        )
        counters.reset()
        nbytes = 4 * (math.prod(sizes) + run(x).numel())
        dispatches = counters.dispatches
        seconds = seconds_per_call(lambda run=run, x=x: run(x), wait)
        line = f"{form} {'x'.join(map(str, (*sizes[:1], *lengths))):>18} {dispatches:2} dispatches"
        line += f" {seconds * 1e3:9.3f} ms {nbytes / seconds / rate:6.1%} of copying"
        if torch.cuda.is_available():
            peer = cuda_seconds(form, sizes, lengths)
            line += f"  cuFFT {peer * 1e3:9.3f} ms  {peer / seconds:5.2f}x"
        print(line, flush=True)


if __name__ == "__main__":
    main()
