"""The process that measures eager calls, on one device: see `worker` for what it is asked.

A ``fresh`` call has a process of its own, in which nothing but a negation has run: it is forked off
one that has imported everything and opened nothing.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .eager_cases import MODELS, ROWS, Call, Row
from .goals import OURS
from .limits import torch_device, use_full_f32, wait_of
from .runner import Settings
from .timing import host_seconds_per_call, seconds_per_call
from .worker import Measured, serve

FRESH = "fresh"
SYSTEMS = ("eager", FRESH, OURS)
"""CUDA's eager mode (or the CPU's), the device in a fresh process, and in a used one."""

_HOST_CALLS = 20  # in a row: few enough for no queue to be full


def prepare() -> None:
    """Loads what the first call would have to pay for; opens no GPU."""
    use_full_f32()
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2))


def load_device() -> None:
    """Registers the device, with its operators and the compiler; opens no GPU."""
    from torch_webgpu_compile.device.autoload import register

    register()
    from torch_webgpu_compile.device.eager import kernels

    kernels.register()


def run_case(name: str, systems: list[str], settings: Settings, measured: Measured) -> bool:
    """Measures a row by every system."""
    row = ROWS[name]
    if row in MODELS:
        import transformers  # noqa: F401  (before the process forks)
    for system in systems:
        if system != "eager":
            load_device()
        if not measured(system, partial(_measure_system, row, system, settings)):
            return False
    return True


def _measure_system(row: Row, system: str, settings: Settings) -> dict[str, Any]:
    if system == "eager":
        return measure(row, torch_device(), settings)
    if system == FRESH:
        return in_child(partial(measure, row, "webgpu", settings))
    return measure(row, "webgpu", settings, is_used=True)


def in_child(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it gives in a child of this process; in this process where there are no children."""
    if not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            try:
                answer = function()
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            with os.fdopen(writer, "w") as stream:
                json.dump(answer, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the process ended with {os.waitstatus_to_exitcode(status)}")
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def measure(row: Row, device: str, settings: Settings, *, is_used: bool = False) -> dict[str, Any]:
    """One system.

    ``first_s``: of the first call; ``seconds`` of a later one, in a stream of them; ``host_s`` that
    the host spends in it; ``bits`` and ``checks`` of the first result; on the device ``kernels``
    that the first call compiled and ``dispatches`` of a later one.

    Args:
        is_used: whether calls of other sizes come before.
    """
    wait = _open(device)
    with torch.set_grad_enabled(True):
        if is_used:
            for sizes in row.other_sizes(settings.small):
                _use(row.make(device, *sizes), wait)
        torch.manual_seed(0)
        call = row.make(device, *(row.small if settings.small else row.sizes))
        wait()
        torch.manual_seed(0)
        found = _first_call(call, device, wait)
        seconds = seconds_per_call(call, wait, settings.budget_s)
        calls = max(1, min(_HOST_CALLS, int(settings.budget_s / 5 / seconds)))
        found |= {"seconds": seconds, "host_s": host_seconds_per_call(call, wait, calls)}
        found |= _dispatches(call, device, wait)
    del call
    torch._dynamo.reset()
    gc.collect()
    if device != "cpu":
        getattr(torch, device).empty_cache()
    return found


def _open(device: str) -> Callable[[], None]:
    """Opens a device, with its libraries and compiler loaded; gives what waits for it."""
    use_full_f32()
    wait = wait_of(device)
    torch.ones(3).to(device).neg()
    if device == "cuda":
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    wait()
    return wait


def _use(call: Call, wait: Callable[[], None]) -> None:
    for _ in range(2):
        call()
    wait()


def _first_call(call: Call, device: str, wait: Callable[[], None]) -> dict[str, Any]:
    counters = _counters(device)
    start = time.perf_counter()
    result = call()
    wait()
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    if counters is not None:
        found["kernels"] = counters.kernels_compiled
    return found | fingerprint(result)


def _dispatches(call: Call, device: str, wait: Callable[[], None]) -> dict[str, int]:
    counters = _counters(device)
    if counters is None:
        return {}
    call()
    wait()
    return {"dispatches": counters.dispatches}


def _counters(device: str) -> Any:
    """Set to zero; None for another device than this package's."""
    if device != "webgpu":
        return None
    from torch_webgpu_compile import counters

    counters.reset()
    return counters


def fingerprint(result: Any) -> dict[str, Any]:
    """``bits``, a digest of a result; ``checks``, means that say whether another system computed
    the same: of each tensor's magnitudes, weighted by their places."""
    digest, checks = hashlib.sha256(), []
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            found = leaf.detach().cpu().contiguous()
            digest.update(found.view(-1).view(torch.uint8).numpy().tobytes())
            magnitudes = found.view(-1).double().abs()
            places = 1 + torch.arange(len(magnitudes), dtype=torch.float64) % 7
            checks.append(float((magnitudes * places).mean()))
        elif isinstance(leaf, (int, float)):
            digest.update(repr(leaf).encode())
            checks.append(abs(float(leaf)))
    return {"bits": digest.hexdigest()[:16], "checks": checks}


def main() -> None:
    """Serves the rows of `eager_cases`."""
    with suppress(KeyboardInterrupt):
        serve(run_case, prepare)


if __name__ == "__main__":
    main()
