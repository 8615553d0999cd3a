"""What the host waits: numbers and small tensors from and to the GPU, on both providers and CUDA.

python -m benchmarks.waits [--output FILE]

Microseconds per call. Each call that reads waits for the GPU by itself; those that write are timed
in a stream. "asleep" is a provider whose waits sleep at once, see `runtime.library.AWAKE_SECONDS`.
What ``add_, wait`` takes is what the GPU needs, and the least that a number of a result can take.
``auto`` may choose a provider with which no row is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

COLUMNS = ("cuda", "wgpu", "wgpu asleep", "wgpudawn", "wgpudawn asleep")
_SECONDS = 0.3  # per row
_STREAM = 32  # calls

Call = Callable[[], object]


def microseconds(call: Call, synchronize: Call, calls: int = 1) -> float:
    """Median per call of rounds of so many calls, which start on an idle GPU."""
    for _ in range(5 * calls):
        call()
    rounds = []
    end = time.perf_counter() + _SECONDS
    while len(rounds) < 5 or time.perf_counter() < end:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds) * 1e6


def tensor_calls(device: str, synchronize: Call) -> tuple[dict[str, Call], dict[str, Call]]:
    """(calls that wait, calls for a stream) of what users write."""
    number, few = torch.ones((), device=device), torch.ones(4, device=device)
    flag, rows = number > 0, torch.ones(64, 64, device=device)
    zero, host = torch.ones(()), torch.ones(64, 64)
    model: Any = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    x = torch.ones(64, 784, device=device)
    if device != "cuda":
        model = torch.compile(model, backend="webgpu")

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    waiting: dict[str, Call] = {
        "wait for nothing": synchronize,
        "add_, wait": lambda: (number.add_(1), synchronize()),
        "add_, item": lambda: number.add_(1).item(),
        "item": number.item,
        "bool": lambda: bool(flag),
        "tolist of 4": few.tolist,
        "cpu of 16 KiB": rows.cpu,
        "print of a number": lambda: repr(number),
        "MLP, wait": lambda: (forward(), synchronize()),
        "MLP, cpu": lambda: forward().cpu(),
        "long kernels, wait": lambda: ([rows.mm(rows) for _ in range(500)], synchronize()),
    }
    writing: dict[str, Call] = {
        "to of a number": lambda: zero.to(device),
        "to of 16 KiB": lambda: host.to(device),
        "tensor of a number": lambda: torch.tensor(3.0, device=device),
        "tensor of a list": lambda: torch.tensor([1.0, 2.0, 3.0], device=device),
        "copy_ of 16 KiB": lambda: rows.copy_(host),
        "add_ and copy_ of 16 KiB": lambda: (number.add_(1), rows.copy_(host)),
    }
    return waiting, writing


def provider_calls(device: Any) -> tuple[dict[str, Call], dict[str, Call]]:
    """The same of the parts of a transfer."""
    from torch_webgpu_compile.runtime.interface import COPY_DST, MAP_READ, Copy

    backend = device.backend
    source, data = device.allocate(16 << 10), bytes(16 << 10)
    staging = backend.create_buffer(16 << 10, MAP_READ | COPY_DST)
    copy = Copy(source.handle, 0, staging, 0, 16 << 10)

    def read() -> None:
        backend.map(staging, 16 << 10, backend.submit([copy], "a copy"))
        backend.unmap(staging)

    waiting: dict[str, Call] = {
        "part: submit a copy, wait": lambda: (backend.submit([copy], "a copy"), backend.wait()),
        "part: submit a copy, map": read,
        "part: map what is done": lambda: (
            backend.map(staging, 4, backend.submissions),
            backend.unmap(staging),
        ),
    }
    writing: dict[str, Call] = {
        f"part: write_buffer of {nbytes} B": lambda nbytes=nbytes: backend.write_buffer(
            source.handle, 0, data[:nbytes], nbytes
        )
        for nbytes in (4, 16 << 10)
    }
    return waiting, writing


def measure(column: str) -> dict[str, float]:
    """The rows of a column, in this process."""
    if column == "cuda":
        synchronize = torch.cuda.synchronize
        parts = [tensor_calls("cuda", synchronize)]
    else:
        from torch_webgpu_compile.device import autoload
        from torch_webgpu_compile.tensors import devices

        autoload.register()
        synchronize = torch.webgpu.synchronize
        device: Any = devices.get_device(0)
        if column.endswith("asleep"):
            device.backend.library.awake_seconds = 0.0
        parts = [tensor_calls("webgpu", synchronize), provider_calls(device)]
    found = {}
    for waiting, writing in parts:
        found |= {name: microseconds(call, synchronize) for name, call in waiting.items()}
        found |= {name: microseconds(call, synchronize, _STREAM) for name, call in writing.items()}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """For a person."""
    names = max(found.values(), key=len, default={})
    lines = ["µs".ljust(30) + "".join(f"{column:>17}" for column in found)]
    for name in names:
        cells = [f"{rows[name]:17.1f}" if name in rows else " " * 17 for rows in found.values()]
        lines.append(name.ljust(30) + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measures each column in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description=__doc__)
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--here", choices=COLUMNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.here)))
        return
    found: dict[str, dict[str, float]] = {}
    for column in COLUMNS:
        if column == "cuda" and not torch.cuda.is_available():
            continue
        command = [sys.executable, "-m", "benchmarks.waits", "--here", column]
        variables = {**os.environ, "TORCH_WEBGPU_PROVIDER": column.split()[0]}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
            print(f"{column}: {last}", file=sys.stderr)
        else:
            found[column] = json.loads(done.stdout.splitlines()[-1])
    print(table(found))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
