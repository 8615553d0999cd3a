"""What becomes of PyTorch's samples of higher-order operators: a section of docs/operators.md.

python -m tests.higher_order      runs them all; writes docs/higher_order.json and the page
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_leaves, tree_map

from torch_webgpu_compile import counters

DATA = Path(__file__).parent.parent / "docs" / "higher_order.json"

Function = Callable[..., Any]

_HOW = """\
`cond` of two cheap branches is both of them and a choice, `map` one call on all rows, a short
`scan` its steps, an associative scan rounds over all elements: parts of the plan around them.
Other branches and loops are steps of a composed plan, between plans of kernels, as is reading the
numbers of `.item()`, and the sizes of what `nonzero` and the like give. A mutating operator of
somebody else runs on the host, or as its implementation for the device says. Triton kernels are
refused: Triton has no WebGPU backend."""


def R(*sizes: int) -> Tensor:
    """Normally distributed numbers: the same for the same sizes."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def on(device: str, values: Any) -> Any:
    """The same tensors on a device, as leaves."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)

    return tree_map(moved, values)


def agree(function: Function, arguments: Any, device: str, **options: Any) -> None:
    """Compares results, changed arguments, and gradients if there are any, with eager PyTorch's."""
    own, given = on("cpu", arguments), on(device, arguments)
    wanted = function(*own)
    torch._dynamo.reset()
    got = torch.compile(function, backend="webgpu", fullgraph=True, **options)(*given)
    torch.testing.assert_close(on("cpu", got), on("cpu", wanted))
    assert all(tensor.device.type == device for tensor in tensors_in(got))
    if any(tensor.requires_grad for tensor in tensors_in(wanted)):
        for results in (wanted, got):
            leaves = [tensor for tensor in tensors_in(results) if tensor.requires_grad]
            torch.stack([leaf.square().sum() for leaf in leaves]).sum().backward()
        gradients = [[t.grad for t in tensors_in(a) if t.requires_grad] for a in (given, own)]
        torch.testing.assert_close(on("cpu", gradients[0]), gradients[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(on("cpu", tensors_in(given)), on("cpu", tensors_in(own)))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def refusal(function: Function, arguments: Any) -> str:
    """Why eager PyTorch refuses a call on the CPU, or Dynamo whatever the backend is."""
    torch._dynamo.reset()
    for run in (function, torch.compile(function, backend="eager", fullgraph=True)):
        try:
            run(*on("cpu", arguments))
        except Exception as error:
            return str(error).partition("\n")[0] or type(error).__name__
    return ""


def calls(info: Any) -> list[tuple[Function, tuple[Any, ...]]]:
    """The samples of an entry as functions with their arguments."""
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    return [
        (lambda *given, s=sample: info.op(*given, **s.kwargs), (sample.input, *sample.args))
        for sample in samples
    ]


def outcome(function: Function, arguments: Any) -> str:
    """What becomes of a call on the device."""
    reason = refusal(function, arguments)
    if reason:
        return f"PyTorch refuses it: {reason}"
    counters.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree(function, arguments, "webgpu")
    except Exception as error:
        return f"failed: {type(error).__name__}"
    return "on the host, in part" if counters.fallbacks else "native"


def section() -> list[str]:
    """The lines of the page, from the JSON file."""
    found = json.loads(DATA.read_text())
    rows = [f"| `{name}` | {sample} | {result} |" for name, sample, result in found["entries"]]
    return [
        "## Higher-order operators",
        "",
        "PyTorch's samples of them (`hop_db`) in `torch.compile(fullgraph=True)` on the device "
        f"`webgpu`, forward and backward, compared with the CPU; PyTorch {found['torch']}.",
        "Made by `python -m tests.higher_order`.",
        "",
        "| operator | sample | result |",
        "| --- | --- | --- |",
        *rows,
        "",
        *_HOW.splitlines(),
        "",
    ]


def main(entries: Sequence[Any] = tuple(hop_db)) -> None:
    """Runs all samples; writes the JSON file and the page."""
    from tests import coverage

    found = []
    for info in entries:
        for function, arguments in calls(info):
            result = outcome(function, arguments)
            found.append((info.name, info.variant_test_name, result))
            print(*found[-1], flush=True)
    torch_version = torch.__version__.partition("+")[0]
    DATA.write_text(json.dumps({"torch": torch_version, "entries": found}, indent=1) + "\n")
    coverage.PAGE.write_text(coverage.page())


if __name__ == "__main__":
    main()
