"""Measures every scalar function against float64 and writes docs/accuracy.md and .json.

    python -m tests.accuracy                    all functions, a quarter million arguments each
    python -m tests.accuracy --samples 20000 sin pow.Tensor_Tensor     these, printed only

The exit status is 1 when a function exceeds its limit (`tests/accuracy_table.py`).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.accuracy_table import BY_NAME, FUNCTIONS, Array, Function, samples

FOLDER = Path(__file__).parent.parent / "docs"
SMALLEST_NORMAL = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
ABSOLUTE, RELATIVE = 1e-5, 1.3e-6  # torch.testing.assert_close, float32


@dataclass(frozen=True)
class Worst:
    """The largest errors of one implementation; ``at`` is where its error in ULP is largest."""

    ulp: float
    relative: float
    tolerance: float
    at: list[float]
    got: float
    wanted: float


def errors(got: Array, wanted: Array) -> tuple[Array, Array]:
    """(|error|, error in ULP of the right result) of float32 results against float64.

    NaN for a number, or a number for NaN, is infinitely wrong. A subnormal result may be 0: WGSL
    lets adapters flush it. An infinity stands for the largest number where that is right.
    """
    got = got.astype(np.float64)
    rounded = wanted.astype(np.float32).astype(np.float64)
    same = (np.isnan(got) & np.isnan(wanted)) | (got == rounded) & np.isinf(rounded)
    clipped, right = np.clip(got, -LARGEST, LARGEST), np.clip(wanted, -LARGEST, LARGEST)
    error = np.abs(clipped - right)
    size = np.clip(np.abs(right), SMALLEST_NORMAL, 2.0**127)
    ulp = np.spacing(size.astype(np.float32)).astype(np.float64)
    flushed = (np.abs(wanted) < SMALLEST_NORMAL) & (got == 0)
    mixed = np.isnan(got) != np.isnan(wanted)
    mixed |= np.isinf(wanted) & ~np.isinf(got)
    # An infinity where the right result is well below the largest number.
    mixed |= np.isinf(got) & (np.abs(wanted) < LARGEST * (1 - 1e-5))
    error = np.where(same | flushed, 0.0, np.where(mixed, np.inf, error))
    return error, error / np.where(np.isnan(ulp), 1.0, ulp)


def worst(got: Array, references: list[Array], arguments: tuple[Array, ...]) -> Worst:
    """Against the nearest of several right results: subnormal arguments may be flushed."""
    error, ulps = errors(got, references[0])
    wanted = references[0]
    for other in references[1:]:
        again, again_ulps = errors(got, other)
        better = again_ulps < ulps
        error, ulps = np.where(better, again, error), np.where(better, again_ulps, ulps)
        wanted = np.where(better, other, wanted)
    place = int(np.argmax(ulps))
    size = np.abs(np.clip(wanted, -LARGEST, LARGEST))
    normal = (size >= SMALLEST_NORMAL) & np.isfinite(error)
    relative = np.where(normal, error / np.where(normal, size, 1.0), 0.0)
    allowed = ABSOLUTE + RELATIVE * np.where(np.isnan(size), 0.0, size)
    return Worst(
        float(ulps[place]),
        float(np.max(relative)),
        float(np.max(error / allowed)),
        [float(a[place]) for a in arguments],
        float(got[place]),
        float(wanted[place]),
    )


def flushed(array: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    small = np.abs(array) < SMALLEST_NORMAL
    return np.where(small, np.copysign(0, array), array).astype(array.dtype)


def reference(function: Function, arguments: tuple[Array, ...]) -> Array:
    """The right results, in float64."""
    wide = [a.astype(np.float64) for a in arguments]
    if function.reference is not None:
        return np.asarray(function.reference(*wide), np.float64)
    return function.call(*map(torch.from_numpy, wide)).numpy()


@np.errstate(all="ignore")  # of NaN and infinities
def measure(function: Function, count: int, device: str) -> dict[str, Any]:
    """The row of a function: its worst errors on ``device`` and on the CPU, and its limit."""
    arguments = samples(function, count)
    references = [reference(function, arguments)]
    references.append(reference(function, tuple(map(flushed, arguments))))
    tensors = [torch.from_numpy(a) for a in arguments]
    on_cpu = function.call(*tensors).numpy()
    on_device = function.call(*(t.to(device) for t in tensors)).cpu().numpy()
    mine = worst(on_device, references, arguments)
    return {
        "name": function.name,
        "limit_ulp": function.ulps,
        "samples": len(arguments[0]),
        "reference": function.source,
        "range": [
            [repr(float(a)), repr(float(b))]
            for a, b in zip(function.low, function.high, strict=True)
        ],
        "device": asdict(mine),
        "cpu": asdict(worst(on_cpu, references, arguments)),
        "exceeds": mine.ulp > function.ulps if function.ulps is not None else mine.tolerance > 1,
    }


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def _line(row: dict[str, Any]) -> list[str]:
    device, cpu = row["device"], row["cpu"]
    limit = "tolerance" if row["limit_ulp"] is None else f"{row['limit_ulp']:g} ULP"
    return [
        row["name"],
        _number(device["ulp"]),
        _number(device["relative"]),
        ", ".join(f"{x:.9g}" for x in device["at"]),
        _number(device["tolerance"]),
        limit,
        _number(cpu["ulp"]),
        _number(cpu["relative"]),
    ]


_HEADER = ["function", "worst ULP", "worst relative", "where", "of tolerance", "limit"]
_HEADER += ["CPU's worst ULP", "CPU's worst relative"]


def page(rows: list[dict[str, Any]], adapter: str, version: str) -> str:
    """The page in Markdown."""
    ranges = {
        row["name"]: ", ".join(f"[{a}, {b}]" for a, b in row["range"])
        for row in rows
        if any(end not in ("inf", "-inf") for pair in row["range"] for end in pair)
    }
    by_scipy = sorted(row["name"] for row in rows if row["reference"].startswith("scipy"))
    lines = [
        "# Accuracy of scalar functions",
        "",
        "For everyone who depends on the last digits: this page answers how large the error of",
        "each scalar function is, beside the CPU's.",
        "",
        "Written by `python -m tests.accuracy`; do not edit. Every function in float32 against",
        "float64, beside PyTorch's own float32 on the CPU.",
        "",
        f"- Adapter: {adapter}. PyTorch {version}.",
        f"- Arguments: {max(row['samples'] for row in rows):,} of each function: half of them bit",
        "  patterns spread over all of float32, the rest near zeros, poles, ends of domains and",
        "  multiples of π/2, with infinities, NaN, zeros of both signs and subnormal numbers.",
        "  Pairs of arguments are spread likewise.",
        "- ULP: |error| over the spacing of float32 at the right result. A subnormal argument or",
        "  result may count as 0, as WGSL lets adapters do.",
        "- Limit: the maximum ULP of the CUDA C++ Programming Guide where it lists the function;",
        "  2.5 ULP of WGSL for division, and about that for square roots; otherwise PyTorch's",
        f"  tolerance, {ABSOLUTE:g} + {RELATIVE:g} · |value|: “of tolerance” is the share of it",
        "  that the worst error takes.",
        f"- Reference: PyTorch in float64, and SciPy in float64 for {', '.join(by_scipy)}.",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + "---|" * len(_HEADER),
        *("| " + " | ".join(_line(row)) + " |" for row in rows),
        "",
        "Not over the whole of float32:",
        "",
        *(f"- `{name}`: arguments in {text}" for name, text in ranges.items()),
        "",
    ]
    return "\n".join(lines)


def adapter_name() -> str:
    """The adapter that results come from."""
    return str(torch.webgpu.get_device_name(0))  # type: ignore[attr-defined]


def main() -> None:
    from torch_webgpu_compile.device.autoload import register

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("functions", nargs="*", help="ATen names; all of them by default")
    parser.add_argument("--samples", type=int, default=1 << 18, help="arguments of each function")
    options = parser.parse_args()
    register()
    chosen = [BY_NAME[name] for name in options.functions] or list(FUNCTIONS)
    rows = []
    for function in chosen:
        row = measure(function, options.samples, "webgpu")
        rows.append(row)
        mark = "EXCEEDS" if row["exceeds"] else ""
        print(*_line(row), mark, sep="  ", flush=True)
    if not options.functions:
        FOLDER.mkdir(exist_ok=True)
        adapter, version = adapter_name(), torch.__version__.split("+")[0]
        (FOLDER / "accuracy.md").write_text(page(rows, adapter, version))
        text = json.dumps({"adapter": adapter, "torch": version, "functions": rows}, indent=1)
        (FOLDER / "accuracy.json").write_text(text + "\n")
    raise SystemExit(1 if any(row["exceeds"] for row in rows) else 0)


if __name__ == "__main__":
    main()
