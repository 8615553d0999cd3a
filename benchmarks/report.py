"""Results as text, as JSON and as Markdown.

python -m benchmarks.report FILE…    the table of docs/performance.md from the JSON of runs
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .goals import AtMostShare, Verdict, Work, describe, is_count, judge
from .runner import SYSTEMS, WORK
from .suites import PROVIDERS, SUITES, Suite

RESULTS = Path(__file__).parent / "results"

_LABELS = {
    "webgpu": "this package",
    "autotuned": "max-autotune",
    "eager": "eager CUDA",
    "inductor": "Inductor",
    "cudagraphs": "CUDA graphs",
    "onnxruntime_webgpu": "ONNX Runtime WebGPU",
    "tinygrad_webgpu": "tinygrad WebGPU",
}


def format_seconds(value: float | None) -> str:
    """With three digits and a unit."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.2g} µs"


def has_cuda(results: dict[str, Any]) -> bool:
    return bool(results["machine"].get("torch_device", "CPU") != "CPU")


def verdicts(results: dict[str, Any]) -> Iterator[tuple[str, str, Verdict]]:
    """(suite, case, verdict) of every goal of the suites that ran."""
    for name in results.get("suites") or ():
        for row in SUITES[name].rows:
            case = results["cases"].get(row.case)
            if case is None:
                continue
            work = Work(**case.get(WORK, {}))
            for goal in row.goals:
                found = judge(goal, case, results["limits"], work, has_cuda(results))
                if results["small"] and found.share is not None and not is_count(goal):
                    found = replace(found, reached=None, note=found.note or "small sizes")
                yield name, row.case, found
        for goal in SUITES[name].medians:
            yield name, "median", _median(SUITES[name], goal, results)


def _median(suite: Suite, goal: AtMostShare, results: dict[str, Any]) -> Verdict:
    """A goal for the median over the suite's cases."""
    shares = []
    for row in suite.rows:
        found = judge(goal, results["cases"].get(row.case, {}), {}, Work(), has_cuda(results))
        if found.value is not None:
            shares.append(found.value)
    if len(shares) < len(suite.rows):
        note = f"of {len(suite.rows)} cases {len(shares)} were measured"
        return Verdict(describe(goal), note=note)
    typical = {goal.system: {goal.field: statistics.median(shares)}, "inductor": {goal.field: 1.0}}
    found = judge(goal, typical, {}, Work(), has_cuda(results))
    return replace(found, reached=None, note="small sizes") if results["small"] else found


def goals_text(results: dict[str, Any]) -> str:
    """Per goal: what was measured, what was wanted, and whether it is reached."""
    lines: list[str] = []
    last = ""
    for suite, case, verdict in verdicts(results):
        if suite != last:
            heads = f"{'measured':>16}  {'goal':46}{'reached':10}"
            lines += ["", f"{SUITES[suite].title:22}{heads}note"]
            last = suite
        answer = {True: "yes", False: "NO", None: "?"}[verdict.reached]
        cells = f"{verdict.measured:>16}  {verdict.goal:46}{answer:10}"
        lines.append(f"{case:22}{cells}{verdict.note}".rstrip())
    found = [verdict.reached for _, _, verdict in verdicts(results)]
    if found:
        lines += ["", f"reached {found.count(True)} of {len(found)}, open {found.count(None)}"]
    return "\n".join(lines)


def rate(case: dict[str, Any], limits: dict[str, float]) -> str:
    """Of this package against what the machine can do."""
    seconds = case.get("webgpu", {}).get("seconds")
    work = case.get(WORK, {})
    if not seconds:
        return ""
    for name, limit, scale, unit in (
        ("nbytes", "copy_bytes_per_second", 1e9, "GB/s"),
        ("flops", "matmul_flops_per_second", 1e12, "TFLOP/s"),
    ):
        if work.get(name):
            found = work[name] / seconds
            share = f", {found / limits[limit]:.0%} of limit" if limits.get(limit) else ""
            return f"{found / scale:.4g} {unit}{share}"
    return ""


def text(results: dict[str, Any]) -> str:
    """Time per call of each system, the details of this package, and the goals."""
    limits, machine = results["limits"], results["machine"]
    cases = results["cases"]
    systems = [
        name for name in SYSTEMS if any("seconds" in c.get(name, {}) for c in cases.values())
    ]
    lines = [
        f"adapter {machine.get('adapter')} · PyTorch {machine.get('torch')} on "
        f"{machine.get('torch_device')}",
        *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in limits.items()),
    ]
    if systems:
        heads = "".join(f"{name:>20}" for name in systems)
        lines += ["", f"{'time per call':20}{heads}  webgpu's rate"]
    for name, case in cases.items() if systems else ():
        cells = "".join(f"{_cell(case.get(system, {})):>20}" for system in systems)
        lines.append(f"{name:20}{cells}  {rate(case, limits)}".rstrip())
        if any("gpu_s" in case.get(system, {}) for system in systems):
            times = [case.get(system, {}).get("gpu_s") for system in systems]
            cells = "".join(f"{format_seconds(time) if time else '':>20}" for time in times)
            lines.append(f"{'  on the GPU':20}{cells}")
    lines += ["", *_details(cases), *_first_calls(cases)]
    errors = [
        f"{name} · {system}: {result['error']}"
        for name, case in cases.items()
        for system, result in case.items()
        if "error" in result
    ]
    return "\n".join(lines + (["", *errors] if errors else [])) + "\n" + goals_text(results)


def _cell(result: dict[str, Any]) -> str:
    if "error" in result:
        return "–" if result.get("missing") else "failed"
    return format_seconds(result.get("seconds"))


def _details(cases: dict[str, Any]) -> Iterator[str]:
    columns = ("host", "per dispatch", "dispatches", "kernels", "GB moved", "peak GB", "call")
    heads = (*columns, "first call", "again", "diff")
    if any("seconds" in case.get("webgpu", {}) for case in cases.values()):
        yield f"{'webgpu':20}" + "".join(f"{head:>14}" for head in heads)
    for name, case in cases.items():
        ours = case.get("webgpu", {})
        if "seconds" not in ours:
            continue
        cells = (
            format_seconds(ours["host_replay_s"]),
            format_seconds(ours["host_s_per_dispatch"]),
            str(ours["dispatches"]),
            str(ours["kernels"]),
            f"{(ours['bytes_read'] + ours['bytes_written']) / 1e9:.3g}",
            f"{ours['gpu_nbytes'] / 1e9:.3g}",
            format_seconds(ours.get("call_with_transfers_s")),
            format_seconds(ours.get("first_call_s")),
            format_seconds(ours.get("compile_again_s")),
            f"{ours.get('relative_difference', 0):.1e}",
        )
        yield f"{name:20}" + "".join(f"{cell:>14}" for cell in cells)
        if "overhead_s" in ours:
            yield (
                f"{'':20}  of a call: Dynamo's floor {format_seconds(ours['floor_s'])}, transfers "
                f"and replay {format_seconds(ours['device_s'])}, the rest "
                f"{format_seconds(ours['overhead_s'])}"
            )


_STARTED = {"inductor": "Inductor", **PROVIDERS}
_PARTS = ("pytorch_s", "compiler_s", "pipelines_s", "rest_s")
"""Of a first call, see `call_split`."""


def _started(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured of first calls in processes of their own, by system."""
    return {system: case[system] for system in _STARTED if "cold_s" in case.get(system, {})}


def _first_calls(cases: dict[str, Any]) -> Iterator[str]:
    heads = ("cold", "second", "PyTorch", "compiler", "pipelines", "rest")
    heads = (*heads, "in threads", "kernels", "kB of WGSL")
    if any(map(_started, cases.values())):
        yield f"{'first call, seconds':34}" + "".join(f"{head:>11}" for head in heads)
    for name, case in cases.items():
        for system, found in _started(case).items():
            for kind in ("cold", "second"):
                parts = found[kind]
                cells = [f"{found[f'{k}_s']:.2f}" if k == kind else "" for k in ("cold", "second")]
                if system in PROVIDERS:
                    seconds = (*_PARTS, "pipelines_in_threads_s")
                    cells += [f"{parts[part]:.2f}" for part in seconds]
                    cells += [str(parts["kernels"]), f"{parts['wgsl_nbytes'] / 1e3:.0f}"]
                label = f"{name}, {_STARTED[system]}" if kind == "cold" else ""
                yield f"{label:34}" + "".join(f"{cell:>11}" for cell in cells)


def _first_calls_table(cases: dict[str, Any]) -> Iterator[str]:
    """As Markdown: seconds cold and in the second process, and of the pipelines."""
    if not any(map(_started, cases.values())):
        return
    heads = [f"{label}, {kind}" for label in _STARTED.values() for kind in ("cold", "second")]
    yield ""
    yield from _row(["seconds", *heads, "kernels", "kB of WGSL", "pipelines, cold"])
    yield "|---" * (len(heads) + 4) + "|"
    for name, case in cases.items():
        started = _started(case)
        if not started:
            continue
        cells = [
            f"{started[system][f'{kind}_s']:.2f}" if system in started else ""
            for system in _STARTED
            for kind in ("cold", "second")
        ]
        colds = [started[system]["cold"] for system in PROVIDERS if system in started]
        for field, scale, digits in (
            ("kernels", 1, 0),
            ("wgsl_nbytes", 1e-3, 0),
            ("pipelines_s", 1, 2),
        ):
            figures = dict.fromkeys(f"{cold[field] * scale:.{digits}f}" for cold in colds)
            cells.append(" / ".join(figures))
        yield from _row([name, *cells])


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The table of docs/performance.md: times, then goals; later runs replace earlier figures."""
    machine = runs[-1]["machine"]
    cases: dict[str, Any] = {}
    for run in runs:
        for name, case in run["cases"].items():
            cases[name] = cases.get(name, {}) | case
    systems = [
        name for name in _LABELS if any("seconds" in c.get(name, {}) for c in cases.values())
    ]
    labels = [_LABELS[name] for name in systems]
    labels[1:1] = ["GPU time"]
    lines = [
        f"{machine.get('adapter')}, PyTorch {machine.get('torch')} on "
        f"{machine.get('torch_device')}, {runs[-1]['date']}",
    ]
    if systems:
        lines += ["", *_row(["", *labels]), "|---" * (len(labels) + 1) + "|"]
    for name, case in cases.items():
        if "seconds" in case.get("webgpu", {}):
            times = [case.get(system, {}).get("seconds") for system in systems]
            times[1:1] = [case["webgpu"].get("gpu_s")]
            lines += _row([name, *("" if t is None else format_seconds(t) for t in times)])
    lines += _first_calls_table(cases)
    judged = [found for run in runs for found in verdicts(run)]
    if judged:
        lines += ["", *_row(["", "measured", "goal", "reached"]), "|---|---|---|---|"]
    for _, case, verdict in judged:
        answer = {True: "yes", False: "no", None: verdict.note or "?"}[verdict.reached]
        lines += _row([case, verdict.measured, verdict.goal, answer])
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def place_of(results: dict[str, Any]) -> Path:
    """Where they belong: ``results/<adapter>.json``, with the suites in the name."""
    adapter = results["machine"].get("adapter", "").lower()
    name = re.sub(r"[^a-z0-9]+", "-", adapter.split("(")[0]).strip("-") or "unknown"
    suites = "".join(f"-{suite}" for suite in results.get("suites") or ())
    if len(results.get("suites") or ()) == len(SUITES):
        suites = "-suites"
    return RESULTS / f"{name}{suites}{'-small' if results['small'] else ''}.json"


def save(results: dict[str, Any], path: Path) -> Path:
    """Writes the JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


if __name__ == "__main__":
    print(markdown([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
