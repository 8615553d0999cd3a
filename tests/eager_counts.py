"""What eager calls compile, dispatch and move: counted, not timed.

    python -m tests.eager_counts                    rows of `benchmarks.eager_cases`, of small sizes
    python -m tests.eager_counts add lengths:sum    these; kernels of calls of every length to 200

Each is counted in a process of its own, forked off this one, in which nothing was compiled before.
It prints JSON.
"""

from __future__ import annotations

import gc
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


def _attention(x: Tensor) -> Tensor:
    tokens = x.t()[None]
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def _convolution(x: Tensor) -> Tensor:
    weight = torch.ones(3, 4, 3, 3, device=x.device)
    return F.conv2d(x[None, :4, :, None].expand(1, 4, -1, 8), weight, padding=1)


def _depthwise(x: Tensor) -> Tensor:
    return F.conv1d(x[None], torch.ones(8, 1, 7, device=x.device), padding=3, groups=8)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(8, x.shape[1], dtype=torch.int64, device=x.device)


OF_LENGTH: dict[str, Callable[[Tensor], Any]] = {
    "lengths:add": lambda x: x + x,
    "lengths:sum": lambda x: x.sum(),
    "lengths:var": lambda x: x.var(1),
    "lengths:softmax": lambda x: x.softmax(-1),
    "lengths:softmax_gradient": _gradient(lambda x: x.softmax(-1)),
    "lengths:layer_norm_gradient": _gradient(lambda x: F.layer_norm(x, x.shape[1:])),
    "lengths:cumsum": lambda x: x.cumsum(1),
    "lengths:cat": lambda x: torch.cat((x, x), 1),
    "lengths:gather": lambda x: x.gather(1, _zeros(x)),
    "lengths:nonzero": lambda x: x.nonzero(),
    "lengths:sort": lambda x: x.sort(1),
    "lengths:topk": lambda x: x.topk(1, 1),
    "lengths:randperm": lambda x: torch.randperm(x.shape[1], device=x.device),
    "lengths:mm": lambda x: x @ x.t(),
    "lengths:convolution_gradient": _gradient(_convolution),
    "lengths:depthwise_gradient": _gradient(_depthwise),
    "lengths:attention": _attention,
    "lengths:attention_gradient": _gradient(_attention),
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

    gc.collect()
    gc.disable()  # or finalizers of something else are counted
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
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
