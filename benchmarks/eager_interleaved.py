"""What the host spends in eager calls, here and on CUDA, in turn in one process.

    python -m benchmarks.eager_interleaved [row …] [--small] [--seconds 2]

A host that others share is now fast and now slow: `benchmarks.eager`, which gives each system a
process, then compares moments. Here bursts of calls alternate, and the least of each counts. Rows
with gradients cannot: PyTorch's autograd has one accelerator in a process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from .clocks import high_clocks
from .eager_cases import ROWS, Call
from .eager_worker import load_device
from .limits import use_full_f32, wait_of

_ROWS = (
    *("add", "add_", "view", "slice", "empty", "half", "contiguous", "sum", "softmax", "cat"),
    *("index", "item", "cpu", "upload", "layer_norm", "rms_norm", "gelu", "batch_norm", "randn"),
    *("row_product", "top_p", "compiled_mlp_waited", "clip_grad_norm", "sgd", "adamw"),
    *("t5_encoder", "convnext"),
)
_MOST_CALLS = 50  # in a burst


def measure(calls: dict[str, Call], seconds: float) -> dict[str, tuple[float, float]]:
    """By device: seconds of a call in a burst and its wait, and what the host spends in it."""
    waits = {device: wait_of(device) for device in calls}
    for device, call in calls.items():
        for _ in range(3):
            call()
        waits[device]()
    once = max(sum(_burst(calls[device], waits[device], 1)) for device in calls)
    count = max(1, min(_MOST_CALLS, int(seconds / 40 / once)))
    least = dict.fromkeys(calls, (float("inf"), float("inf")))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for device, call in calls.items():
            host, waited = _burst(call, waits[device], count)
            best = least[device]
            least[device] = min(best[0], (host + waited) / count), min(best[1], host / count)
    return least


def _burst(call: Call, wait: Callable[[], None], count: int) -> tuple[float, float]:
    """Seconds of so many calls, and of the wait that follows."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    called = time.perf_counter()
    wait()
    return called - start, time.perf_counter() - called


def main() -> None:
    """Prints each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=_ROWS, help="of `eager_cases`")
    parser.add_argument("--small", action="store_true", help="sizes for a software adapter")
    parser.add_argument("--seconds", type=float, default=2.0, help="for a row")
    arguments = parser.parse_args()
    load_device()
    use_full_f32()
    devices = ["webgpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with high_clocks():
        for name in arguments.rows:
            row = ROWS[name]
            sizes = row.small if arguments.small else row.sizes
            found = measure({d: row.make(d, *sizes) for d in devices}, arguments.seconds)
            texts = [f"{d} {a * 1e6:9.1f} µs, host {b * 1e6:9.1f}" for d, (a, b) in found.items()]
            if "cuda" in found:
                stream, host = (x / y for x, y in zip(*found.values(), strict=True))
                texts.append(f"{stream:.2f} ×, host {host:.2f} ×")
            print(f"{name:20}", "   ".join(texts), flush=True)


if __name__ == "__main__":
    main()
