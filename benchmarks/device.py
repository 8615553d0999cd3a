"""What ``device="webgpu"`` costs the host, moves and keeps: eager calls, transfers, GPT-2, memory.

python -m benchmarks.device [--quick] [--output FILE]

With a CUDA build of PyTorch the same calls are timed there, and pageable copies for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.tensors import devices

from .cases import CASES
from .timing import seconds_per_call

GOALS = {
    "add, cached": "≤ 25 µs",
    "view": "≤ 5 µs",
    "allocate": "≤ 5 µs",
    "upload 256 MB": "≥ 60 % of CUDA's pageable copy",
    "download 256 MB": "≥ 60 % of CUDA's pageable copy",
    "GPT-2, bytes moved per call": "0",
    "reserved bytes gained": "0",
}


def host_microseconds(call: Callable[[], object], device: str) -> float:
    """Median over rounds of the host's time per call; the device catches up between rounds."""
    synchronize = getattr(torch, device).synchronize
    for _ in range(20):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(20):
        call()
    synchronize()
    calls = max(20, min(1000, int(20 * 0.2 / (time.perf_counter() - start))))
    rounds = []
    for _ in range(7):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls)
    synchronize()
    return statistics.median(rounds) * 1e6


def eager_calls(device: str) -> dict[str, float]:
    """Host microseconds of single operators on small tensors."""
    x, y = torch.randn(16, 16, device=device), torch.randn(16, 16, device=device)
    calls: dict[str, Callable[[], object]] = {
        "add, cached": lambda: x + y,
        "add_, cached": lambda: x.add_(y),
        "matmul, cached": lambda: x @ y,
        "softmax, cached": lambda: x.softmax(1),
        "view": lambda: x.view(256),
        "transpose": lambda: x.t(),
        "empty": lambda: torch.empty(16, 16, device=device),
    }
    with torch.no_grad():
        return {name: host_microseconds(call, device) for name, call in calls.items()}


def allocation() -> float:
    """Microseconds of taking memory from the pool and giving it back."""
    device = devices.get_device(0)
    return host_microseconds(lambda: device.allocate(1 << 20), "webgpu")


def gigabytes_per_second(device: str, nbytes: int) -> tuple[float, float]:
    """Rates of a copy of pageable memory to the device and back; median of several."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    back = torch.empty_like(source)

    def rate(target: torch.Tensor, origin: torch.Tensor) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            target.copy_(origin)
            getattr(torch, device).synchronize()
            times.append(time.perf_counter() - start)
        return nbytes / statistics.median(times) / 1e9

    return rate(there, source), rate(back, there)


def gpt2(quick: bool, device: str, backend: str | None) -> dict[str, Any]:
    """A forward of GPT-2 on device tensors: milliseconds, and bytes that passed the host."""
    model, inputs = CASES["gpt2"].build(quick)
    assert isinstance(model, nn.Module)
    model, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    function = model if backend is None else torch.compile(model, backend=backend)
    synchronize = getattr(torch, device).synchronize
    with torch.no_grad():
        function(*inputs)
        synchronize()
        counters.reset()
        function(*inputs)
        moved = counters.bytes_uploaded + counters.bytes_downloaded
        time_s = seconds_per_call(lambda: function(*inputs), synchronize, 2.0)
    return {"ms": time_s * 1e3, "bytes_moved": moved}


def memory(steps: int) -> dict[str, int]:
    """Reserved bytes gained over training steps, after the first ones."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to("webgpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64, device="webgpu"), torch.randn(32, 8, device="webgpu")
    reserved = 0
    for step in range(steps + 20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 19:
            reserved = devices.get_device(0).pool.stats()["reserved"]
    gained = devices.get_device(0).pool.stats()["reserved"] - reserved
    for _ in range(10_000):
        torch.empty(1 << 16, device="webgpu")
    cycles = devices.get_device(0).pool.stats()["reserved"] - reserved - gained
    return {"training_steps": steps, "gained": gained, "gained_in_10000_cycles": cycles}


def measure(quick: bool) -> dict[str, Any]:
    """Everything; with CUDA's figures under ``cuda`` where there is one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    nbytes = (16 if quick else 256) << 20
    found: dict[str, Any] = {"torch": torch.__version__}
    systems = ["webgpu", "cuda"] if torch.cuda.is_available() else ["webgpu"]
    for device in systems:
        up, down = gigabytes_per_second(device, nbytes)
        found[device] = {
            "eager_us": eager_calls(device),
            "upload_gb_s": up,
            "download_gb_s": down,
            "gpt2_eager": gpt2(quick, device, None),
            "gpt2_compiled": gpt2(quick, device, "webgpu" if device == "webgpu" else "inductor"),
        }
    found["webgpu"]["adapter"] = devices.get_device(0).info.name
    found["webgpu"]["eager_us"]["allocate"] = allocation()
    found["webgpu"]["memory"] = memory(50 if quick else 1000)
    return found


def table(found: dict[str, Any]) -> str:
    """The figures for a person."""
    here, cuda = found["webgpu"], found.get("cuda")
    lines = [
        f"{here['adapter']}, torch {found['torch']}",
        f"{'':34}{'webgpu':>12}{'cuda':>12}  goal",
    ]

    def row(name: str, value: float, other: float | None, unit: str) -> None:
        shown = "" if other is None else f"{other:,.1f} {unit}"
        lines.append(f"{name:34}{f'{value:,.1f} {unit}':>12}{shown:>12}  {GOALS.get(name, '')}")

    for name, value in here["eager_us"].items():
        row(name, value, cuda and cuda["eager_us"].get(name), "µs")
    for name in ("upload", "download"):
        key = f"{name}_gb_s"
        row(f"{name} 256 MB", here[key], cuda and cuda[key], "GB/s")
    for name in ("gpt2_eager", "gpt2_compiled"):
        row(name.replace("_", ", "), here[name]["ms"], cuda and cuda[name]["ms"], "ms")
    row("GPT-2, bytes moved per call", here["gpt2_compiled"]["bytes_moved"], None, "B")
    row("reserved bytes gained", here["memory"]["gained"], None, "B")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--output", help="a JSON file for the figures")
    options = parser.parse_args()
    autoload.register()
    found = measure(options.quick)
    print(table(found))
    if options.output:
        with open(options.output, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
