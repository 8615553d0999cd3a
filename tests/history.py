"""Whether the bits of a call depend on what its process ran before.

    python -m tests.history                       PyTorch's operator samples whose turn it is
    python -m tests.history --every-case          all of them: an hour
    python -m tests.history --seconds 900         as many as that leaves time for
    python -m tests.history softmax nn.functional.conv2d mm    these
    python -m tests.history --case sum            a call of `tests.history_cases`

Each call, with its gradients, runs in a process that has run nothing before, and in one that has
run the same operators at other sizes; both are forked off this one. Calls that give other bits when
they are repeated at once are left out of the comparison. The exit status is 1 if bits differ.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.eager_worker import fingerprint, in_child, load_device
from tests import rotation
from tests.history_cases import CASES

SHARES = 50
_SAMPLES = 20  # of an operator, of which the largest is taken
_MOST_ELEMENTS = 1 << 20
_TIMES = 6  # the sizes of what is measured: few samples have enough elements to be divided
_OTHERS: tuple[Callable[[int], int], ...] = (
    lambda n: n + 1,
    lambda n: 2 * n + 1,
    lambda n: 3 * n,
    lambda n: n + 2,
)


def resized(value: Any, size: Callable[[int], int]) -> Any:
    """Tensors with other sizes, of which equal ones stay equal, made of the same elements."""

    def of(tensor: Tensor) -> Tensor:
        found = tensor.detach()
        for dim, old in enumerate(tensor.shape):
            if old > 1:
                found = found.index_select(dim, torch.arange(size(old)) % old)
        return found.contiguous().requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, of, value)


def _run(info: Any, arguments: Any) -> list[Tensor]:
    """The results of a sample on the device, and its gradients."""
    moved = tree_map_only(
        Tensor, lambda t: t.detach().to("webgpu").requires_grad_(t.requires_grad), arguments
    )
    value, others, keywords = moved
    torch.manual_seed(0)
    results = info.op(value, *others, **keywords)
    found = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    leaves = [t for t in tree_leaves(moved) if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in found if t.requires_grad]
    if leaves and outputs:
        given = [torch.ones_like(t) for t in outputs]
        gradients = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
        found += [gradient for gradient in gradients if gradient is not None]
    return found


def _elements(arguments: Any) -> int:
    return sum(t.numel() for t in tree_leaves(arguments) if isinstance(t, Tensor))


def sample_of(info: Any) -> Any:
    """Arguments of an operator: the largest of its first samples, larger still where that is
    accepted. None without one that runs on the CPU."""
    torch.manual_seed(0)
    made = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    samples = [(s.input, s.args, s.kwargs) for s in itertools.islice(made, _SAMPLES)]
    if not samples:
        return None
    found = max(samples, key=_elements)
    for size in (lambda n: _TIMES * n, lambda n: n):
        arguments = resized(found, size)
        if _elements(arguments) < _MOST_ELEMENTS and _is_accepted(info, arguments):
            return arguments
    return None


def _is_accepted(info: Any, arguments: Any) -> bool:
    try:
        info.op(arguments[0], *arguments[1], **arguments[2])
    except Exception:
        return False
    return True


def _bits(info: Any, arguments: Any) -> str:
    digest: str = fingerprint([t.resolve_conj().resolve_neg() for t in _run(info, arguments)])[
        "bits"
    ]
    return digest


def _fresh(info: Any) -> dict[str, Any]:
    arguments = sample_of(info)
    if arguments is None:
        return {}
    return {"bits": _bits(info, arguments), "again": _bits(info, arguments)}


def _used(info: Any) -> dict[str, Any]:
    arguments = sample_of(info)
    ran = 0
    for size in _OTHERS:
        other = resized(arguments, size)
        if _elements(other) < 8 * _MOST_ELEMENTS and _is_accepted(info, other):
            _run(info, other)
            ran += 1
    return {"bits": _bits(info, arguments), "others": ran}


def compare_operator(info: Any) -> str:
    """ "same", "differs", or why there is no answer."""
    fresh = in_child(lambda: _fresh(info))
    if "bits" not in fresh:
        return fresh.get("error", "no sample")
    if fresh["bits"] != fresh["again"]:
        return "not repeatable"
    used = in_child(lambda: _used(info))
    if "bits" not in used:
        return used.get("error", "no answer")
    if used["bits"] != fresh["bits"]:
        return "differs"
    return "same" if used["others"] else "no other sizes"


def compare_case(name: str) -> str:
    """The same of a case of `tests.history_cases`."""
    load_device()
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        found = [
            in_child(lambda run=run: fingerprint(run(Path(folder))))
            for run in (case.first, case.second)
        ]
    for result in found:
        if "bits" not in result:
            return str(result.get("error"))
    return "same" if found[0]["bits"] == found[1]["bits"] else "differs"


def _chosen(names: Iterable[str], arguments: argparse.Namespace) -> list[str]:
    """In an order that does not put relatives side by side: there may be no time for all."""
    wanted = arguments.names
    if not wanted:
        shares = 1 if arguments.every_case else SHARES
        turn = rotation.turn()
        wanted = [name for name in names if rotation.share_of(name, turn, shares) == 0]
    return sorted(wanted, key=rotation.mixed)


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.history", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="operators, as in docs/operators.md")
    parser.add_argument("--every-case", action="store_true", help="all operators")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which none begins"
    )
    parser.add_argument("--case", choices=CASES, help="instead, a call that a test is about")
    arguments = parser.parse_args()
    if os.environ.get("TORCH_WEBGPU_DEVICE") != "0":
        # PyTorch's samples look for GPUs while they are imported; what has done so has no children
        # that may use them. So the device is registered after that.
        environment = {**os.environ, "TORCH_WEBGPU_DEVICE": "0"}
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.history", *sys.argv[1:]], environment
        )
    warnings.simplefilter("ignore")
    if arguments.case:
        found = compare_case(arguments.case)
        print(found)
        return int(found != "same")
    from tests.eager_samples import OPERATORS

    load_device()
    start, results = time.monotonic(), dict[str, list[str]]()
    for name in _chosen(OPERATORS, arguments):
        if time.monotonic() - start > arguments.seconds:
            break
        found = compare_operator(OPERATORS[name])
        results.setdefault(found, []).append(name)
        print(f"{name:40} {found}", flush=True)
    for found, names in sorted(results.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4} {found}")
    return int("differs" in results)


if __name__ == "__main__":
    sys.exit(main())
