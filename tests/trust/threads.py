"""Threads that use the device at once, and processes that end while they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.errors import IndexOutOfRangeError

from .faults import Tally, fault

register()
ROOT = Path(__file__).parents[2]
SECONDS = 20.0

PROGRAMS = {
    "work in flight": "for _ in range(500): x = x @ w",
    "a daemon thread with operators": """
def work():
    a = x
    while True: a = (a @ w).tanh()
threading.Thread(target=work, daemon=True).start(); time.sleep(0.3)""",
    "a daemon thread with a compiled model": """
c = torch.compile(lambda t: (t @ t).tanh(), backend="webgpu"); y = torch.ones(64, 64); c(y)
def work():
    while True: c(y)
threading.Thread(target=work, daemon=True).start(); time.sleep(0.3)""",
    "a daemon thread that trains": """
m = torch.nn.Linear(64, 64).to("webgpu")
def work():
    while True: m(x).sum().backward()
threading.Thread(target=work, daemon=True).start(); time.sleep(0.5)""",
    "an exit handler from before": "",
    "objects whose __del__ computes": """
class Model:
    def __del__(self): (x + 1).cpu(), x.zero_(), torch.webgpu.synchronize()
a = Model(); a.itself = a; b = Model(); (x + 1).cpu(); x.clone().zero_()""",
    "a thread that exits": """
def work(): (x @ w).cpu(); sys.exit(3)
t = threading.Thread(target=work); t.start(); t.join()""",
}
START = """
import atexit, sys, threading, time, torch
atexit.register(lambda: torch.ones(3, device="webgpu").cpu())
from torch_webgpu_compile.device.autoload import register
register()
x = torch.ones(64, 64, device="webgpu"); w = x / 64; (x @ w).cpu()
"""


@fault("a process ends while the device is in use")
def ends_of_processes(tally: Tally) -> None:
    for name, code in PROGRAMS.items():
        done = subprocess.run(
            [sys.executable, "-c", START + code],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        printed = done.stdout + done.stderr
        tally(done.returncode == 0 and not printed, f"{name}: {done.returncode} {printed[-200:]}")


def _steps(seed: int, end: float) -> int:
    """Compiles, runs and frees until ``end``; the calls, or -1 after a wrong one."""
    generator, calls = torch.Generator().manual_seed(seed), 0
    while time.monotonic() < end:
        width = 8 + (seed * 7 + calls) % 24
        x = torch.randn(5, width, generator=generator)
        model = nn.Sequential(nn.Linear(width, 16), nn.Tanh()).eval()
        with torch.no_grad():
            wanted = model(x)
            placed, moved = model.to("webgpu"), x.to("webgpu")
            results = [placed(moved).cpu(), (moved * 2).cpu() / 2]
            if calls % 8 == seed % 8:  # Dynamo compiles for one thread at a time
                results.append(torch.compile(placed, backend="webgpu")(moved).cpu())
        right = torch.equal(results.pop(1), x)
        if not (right and all(torch.allclose(y, wanted, atol=1e-4) for y in results)):
            return -1
        calls += 1
    return calls


@fault("8 threads compile, run and free")
def eight_threads(tally: Tally) -> None:
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(8) as threads:
        for calls in threads.map(lambda seed: _steps(seed, end), range(8)):
            for _ in range(max(1, calls)):
                tally(calls > 0, "a wrong result")


@fault("wrong indices of one thread while others compute")
def errors_of_other_threads(tally: Tally) -> None:
    stop = threading.Event()
    raised = 0

    def faulty() -> None:
        nonlocal raised
        x, index = torch.ones(5, device="webgpu"), torch.tensor([9], device="webgpu")
        while not stop.is_set():
            y = x[index]
            try:
                y.cpu()
            except IndexOutOfRangeError:
                raised += 1

    thread = threading.Thread(target=faulty)
    thread.start()
    x = torch.arange(4.0, device="webgpu")
    for k in range(300):
        try:
            tally((x[x.long() // 2] + k).sum().item() == 2 + 4 * k, "a wrong result")
        except IndexOutOfRangeError as error:
            tally(False, str(error))
    stop.set()
    thread.join()
    tally(raised > 0, "the faulty thread was never told")
