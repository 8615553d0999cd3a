"""What eager calls compile, dispatch and move: counted, not timed.

    python -m tests.eager_counts                    rows of `benchmarks.eager_cases`, of small sizes
    python -m tests.eager_counts add lengths:sum    these; kernels of calls of every length to 200

Each is counted in a process of its own, forked off this one, in which nothing was compiled before.
It prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_webgpu_compile
from benchmarks.eager_cases import OPERATORS, Row
from benchmarks.eager_worker import in_child, load_device
from torch_webgpu_compile import counters

PACKAGE = str(Path(torch_webgpu_compile.__file__).parent)
LENGTHS = range(1, 201)
_WARM, _STEADY = 4, 4

ROWS = {row.name: row for row in OPERATORS if not row.name.startswith("compiled")}


def _gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def of(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]

    return of


def _convolved(x: Tensor) -> Tensor:
    return F.conv1d(x[None, :4], torch.ones(3, 4, 3, device=x.device), padding=1)


OF_LENGTH: dict[str, Callable[[Tensor], Any]] = {
    "lengths:add": lambda x: x + x,
    "lengths:sum": lambda x: x.sum(),
    "lengths:row_sums": lambda x: x.sum(1),
    "lengths:column_sums": lambda x: x.sum(0),
    "lengths:softmax": lambda x: x.softmax(-1),
    "lengths:layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "lengths:softmax_gradient": _gradient(lambda x: x.softmax(-1)),
    "lengths:cumsum": lambda x: x.cumsum(1),
    "lengths:cat": lambda x: torch.cat((x, x), 1),
    "lengths:index": lambda x: x[:, torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)],
    "lengths:sort": lambda x: x.sort(1),
    "lengths:mm": lambda x: x @ x.t(),
    "lengths:conv1d": _convolved,
}
"""Functions of 8 rows of any length."""


def _open() -> Any:
    """PyTorch's module of the device, with the compiler loaded."""
    device: Any = torch.webgpu  # type: ignore[attr-defined]
    torch.ones(3).to("webgpu").neg()
    device.synchronize()
    return device


def _functions_entered(call: Callable[[], object]) -> int:
    """How many of this package's Python functions run in a call, in this thread."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def of_row(row: Row) -> dict[str, float]:
    """Of a first call ``kernels`` and ``plans``; of a steady one ``dispatches``, ``bytes`` that
    pass between host and GPU, and ``functions`` of the package that are entered; what steady calls
    compile, and what ran on the host."""
    device = _open()
    torch.manual_seed(0)
    call = row.make("webgpu", *row.small)
    device.synchronize()
    counters.reset()
    call()
    device.synchronize()
    found = {"kernels": counters.kernels_compiled, "plans": counters.plans_compiled}
    fallbacks = sum(counters.fallbacks.values())
    for _ in range(_WARM):
        call()
    device.synchronize()
    counters.reset()
    functions = _functions_entered(lambda: [call() for _ in range(_STEADY)])
    device.synchronize()
    return {
        **found,
        "dispatches": counters.dispatches / _STEADY,
        "bytes": (counters.bytes_uploaded + counters.bytes_downloaded) / _STEADY,
        "functions": functions / _STEADY,
        "compiled_later": counters.kernels_compiled + counters.plans_compiled,
        "fallbacks": fallbacks + sum(counters.fallbacks.values()),
    }


def of_lengths(function: Callable[[Tensor], Any]) -> dict[str, float]:
    """``kernels`` and ``plans`` of calls of every length."""
    device = _open()
    counters.reset()
    for length in LENGTHS:
        function(torch.ones(8, length).to("webgpu"))
    device.synchronize()
    return {"kernels": counters.kernels_compiled, "plans": counters.plans_compiled}


def counts(name: str) -> dict[str, float]:
    """Of a row, or of a function of any length, in this process."""
    return of_lengths(OF_LENGTH[name]) if name in OF_LENGTH else of_row(ROWS[name])


def main() -> None:
    """Prints the counts of those that are named, or all."""
    load_device()
    for name in sys.argv[1:] or (*ROWS, *OF_LENGTH):
        print(json.dumps({"name": name, **in_child(lambda name=name: counts(name))}), flush=True)


if __name__ == "__main__":
    main()
