"""Results as a table and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .cases import CASES
from .runner import SYSTEMS

RESULTS = Path(__file__).parent / "results"


def format_seconds(value: float | None) -> str:
    """With three digits and a unit."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.2g} µs"


def share_of_limit(case: str, result: dict[str, Any], limits: dict[str, float], small: bool) -> str:
    """The rate of a case against what the machine can do."""
    seconds = result.get("seconds")
    if not seconds:
        return ""
    for work, limit, scale, unit in (
        (CASES[case].nbytes(small), "copy_bytes_per_second", 1e9, "GB/s"),
        (CASES[case].flops(small), "matmul_flops_per_second", 1e12, "TFLOP/s"),
    ):
        if work:
            rate = work / seconds
            share = f", {rate / limits[limit]:.0%} of limit" if limit in limits else ""
            return f"{rate / scale:.4g} {unit}{share}"
    return ""


def table(results: dict[str, Any]) -> str:
    """Time per call of each system, then the details of this package."""
    limits, small = results["limits"], results["small"]
    systems = [name for name in SYSTEMS if any(name in case for case in results["cases"].values())]
    lines = [
        f"adapter {results['machine']['adapter']} · PyTorch {results['machine']['torch']} on "
        f"{results['machine']['torch_device']}",
        "limits  "
        + " · ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in limits.items()),
        "",
        f"{'time per call':20}" + "".join(f"{name:>20}" for name in systems) + "  webgpu's rate",
    ]
    for name, case in results["cases"].items():
        cells = [
            "failed"
            if "error" in case.get(system, {})
            else format_seconds(case.get(system, {}).get("seconds"))
            for system in systems
        ]
        rate = share_of_limit(name, case.get("webgpu", {}), limits, small)
        lines.append(f"{name:20}" + "".join(f"{cell:>20}" for cell in cells) + f"  {rate}")

    columns = ("GPU", "host", "per dispatch", "dispatches", "kernels", "GB moved", "call", "cold")
    lines += ["", f"{'webgpu':20}" + "".join(f"{c:>14}" for c in (*columns, "again", "diff"))]
    for name, case in results["cases"].items():
        lines.append(f"{name:20}" + "".join(f"{c:>14}" for c in details(case.get("webgpu", {}))))
        if "overhead_s" in case.get("webgpu", {}):
            ours = case["webgpu"]
            lines.append(
                f"{'':20}  of a call: Dynamo's floor {format_seconds(ours['floor_s'])}, transfers "
                f"and replay {format_seconds(ours['device_s'])}, the rest "
                f"{format_seconds(ours['overhead_s'])}"
            )
    errors = [
        f"{name} · {system}: {result['error']}"
        for name, case in results["cases"].items()
        for system, result in case.items()
        if "error" in result
    ]
    return "\n".join(lines + (["", *errors] if errors else []))


def details(ours: dict[str, Any]) -> list[str]:
    """The cells of this package's row."""
    if "seconds" not in ours:
        return ["–"] * 10
    moved = ours["bytes_read"] + ours["bytes_written"]
    return [
        format_seconds(ours["gpu_s"]),
        format_seconds(ours["host_replay_s"]),
        format_seconds(ours["host_s_per_dispatch"]),
        str(ours["dispatches"]),
        str(ours["kernels"]),
        f"{moved / 1e9:.3g}",
        format_seconds(ours["call_with_transfers_s"]),
        format_seconds(ours["compile_cold_s"]),
        format_seconds(ours["compile_again_s"]),
        f"{ours.get('relative_difference', 0):.1e}",
    ]


def save(results: dict[str, Any], path: Path | None) -> Path:
    """Writes the JSON; by default to ``results/<adapter>.json``."""
    if path is None:
        adapter = results["machine"]["adapter"].lower()
        name = re.sub(r"[^a-z0-9]+", "-", adapter.split("(")[0]).strip("-") or "unknown"
        path = RESULTS / f"{name}{'-small' if results['small'] else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
