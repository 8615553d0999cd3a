"""Captures and lowers every ATen call of PyTorch's operator samples; prints what fails, by cause.

python -m tests.capture_sweep                     every operator, 4 samples each
python -m tests.capture_sweep --samples 20 linalg operators whose name contains "linalg"
python -m tests.capture_sweep --dynamic           with symbolic sizes and numbers
python -m tests.capture_sweep --host              also calls that lowering gives to the host
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from tests.eager_calls import describe
from tests.eager_samples import OPERATORS, Call, calls_of, variants_of
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import native_operators
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.lowering.graph import lower
from torch_webgpu_compile.target import Target


@dataclass
class Report:
    """What happened to each kind of call."""

    done: int = 0
    seconds: float = 0.0
    failures: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    def fail(self, cause: str, op: str) -> None:
        found = self.failures[cause]
        found[op] = found.get(op, 0) + 1

    def print(self) -> None:
        failed = sum(sum(ops.values()) for ops in self.failures.values())
        milliseconds = self.seconds / max(self.done + failed, 1) * 1e3
        print(f"{self.done} calls captured and lowered, {failed} not; {milliseconds:.1f} ms each")
        for cause, ops in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            print(f"\n{cause}: {len(ops)} operators")
            print("   ", ", ".join(f"{op} ({count})" for op, count in sorted(ops.items())))


def sweep_call(call: Call, report: Report, symbols: dict[str, bool], *, host: bool) -> None:
    """Captures and lowers one call."""
    hosted: list[str] = []
    start = time.perf_counter()
    try:
        described = describe((call.args, call.kwargs))
        found = capture_call(call.op, *described, native_operators(), **symbols)
    except UnsupportedOp as error:
        report.fail(f"UnsupportedOp: {_cause(error)}", str(call.op))
        return
    except Exception as error:
        report.fail(f"{type(error).__name__}: {str(error).splitlines()[:1]}", str(call.op))
        return
    finally:
        report.seconds += time.perf_counter() - start
    if not found.accepts(tree_leaves(described)):
        report.fail("the guards reject the call itself", str(call.op))
    try:
        lower(found.captured, Target(), lambda op, *rest: hosted.append(f"{op}: {rest[-1]}"))
    except Exception as error:
        text = str(error).splitlines()[:1]
        report.fail(f"lowering: {type(error).__name__}: {text}", str(call.op))
        return
    report.done += 1
    if hosted and host:
        report.fail("on the host", f"{call.op} by {hosted[0]}")


def _cause(error: UnsupportedOp) -> str:
    return error.cause.split(" of sizes")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    symbols = {"dynamic": options.dynamic, "numbers": options.dynamic or options.numbers}
    report, seen = Report(), set[str]()
    dtype = getattr(torch, options.dtype)
    for name, info in OPERATORS.items():
        if options.name not in name or dtype not in info.supported_dtypes("cpu"):
            continue
        for call in calls_of(info, dtype, options.samples, backward=True):
            for variant in (call, *variants_of(call)):
                if variant.key not in seen:
                    seen.add(variant.key)
                    sweep_call(variant, report, symbols, host=options.host)
    report.print()


if __name__ == "__main__":
    main()
