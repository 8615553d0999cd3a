"""Eager calls and whole models on ``device="webgpu"`` beside eager CUDA, which nothing compiles.

    python -m benchmarks.eager                        all rows of `eager_cases`
    python -m benchmarks.eager operators adamw t5_encoder      a group (or ``models``), and rows
      --small                                         sizes for a CPU or a software adapter
      --provider wgpu                                 or wgpudawn; else as ``TORCH_WEBGPU_PROVIDER``
      --systems webgpu,fresh                          without CUDA
      --output FILE                                   all figures as JSON, written after every row

Times are those of a stream of calls (host and GPU together: many calls, then a wait), what the host
spends in a call, and the first call's. ``webgpu`` is a process that has made calls of other sizes,
of this row and of all rows before it; ``fresh`` one that has made none; ``eager`` is CUDA (the CPU
where there is none). The first two have to be equally fast, and to compute the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from . import report
from .clocks import high_clocks
from .eager_cases import GROUPS, ROWS, Row
from .eager_worker import FRESH, SYSTEMS
from .generate import argument_parser, print_verdicts
from .goals import OURS, AsFast, AtMost, Faster, Goal, SameBits, Verdict, Work, judge_all
from .report import format_seconds
from .runner import Runner, Settings

_SPEED: tuple[Goal, ...] = (
    AsFast("eager", "eager CUDA", gpu=1.3, host=1.5),
    Faster("eager", 1 / 1.5, "eager CUDA's host", "host"),
)
_HISTORY: tuple[Goal, ...] = (
    Faster(FRESH, 1 / 1.1, "a fresh process", "stream", needs_cuda=False),
    SameBits(FRESH, "a fresh process"),
)
_FIRST_STEP = AtMost("first_s", 1, "s", "of the first step", FRESH)
_LEAST_S = 20.0  # of what is left, for a row to begin


def goals_of(row: Row) -> tuple[Goal, ...]:
    """What a row must reach."""
    first = (_FIRST_STEP,) if row.name in ("sgd", "adamw") else ()
    return (*_SPEED, *_HISTORY, *first)


def figures(row: Row, systems: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was measured, with how much our result differs from CUDA's."""
    ours, theirs = systems.get(OURS, {}), systems.get("eager", {})
    if row.is_random or "checks" not in ours or "checks" not in theirs:
        return dict(systems)
    pairs = zip(ours["checks"], theirs["checks"], strict=True)
    difference = max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=0.0)
    return {**systems, OURS: {**ours, "relative_difference": difference}}


def verdicts(
    row: Row, systems: Mapping[str, Mapping[str, Any]], *, has_cuda: bool, is_real: bool
) -> list[Verdict]:
    """A row's goals next to what was measured.

    Args:
        is_real: whether sizes and GPU are those that goals mean: else only bits are judged.
    """
    return judge_all(goals_of(row), systems, {}, Work(), has_cuda, is_real)


def line(row: Row, systems: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for a person."""
    parts = []
    for system, found in systems.items():
        if "error" in found:
            parts.append(f"{system} {found['error']}")
            continue
        text = f"{system} {format_seconds(found['seconds'])}"
        if row.tokens:
            text += f", {row.tokens / found['seconds']:.1f} tokens/s"
        text += f", host {format_seconds(found['host_s'])}"
        parts.append(f"{text}, first {format_seconds(found['first_s'])}")
    return f"{row.name:24} {'; '.join(parts)}"


def parse() -> argparse.Namespace:
    """The command line; ``cases`` are rows, in the order of the table."""
    parser = argument_parser(__doc__, (*GROUPS, *ROWS))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated")
    parser.add_argument("--provider", help="wgpu or wgpudawn")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each timing")
    parser.add_argument("--timeout", type=float, default=100, help="seconds for a row and system")
    parser.add_argument("--seconds", type=float, default=570, help="after which no row begins")
    arguments = parser.parse_args()
    arguments.systems = arguments.systems.split(",")
    unknown = set(arguments.systems).difference(SYSTEMS)
    unknown |= set(arguments.cases).difference(GROUPS, ROWS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    wanted = {row for name in arguments.cases or GROUPS for row in GROUPS.get(name, (name,))}
    arguments.cases = [name for name in ROWS if name in wanted]
    return arguments


@contextmanager
def runners(arguments: argparse.Namespace) -> Iterator[dict[str, Runner]]:
    """A process for each system, in the order of measuring."""
    settings = Settings(arguments.small, arguments.budget, thorough=False)
    # Our processes find no CUDA, and register the device when they measure: one that has looked
    # for GPUs has no children that may use them.
    ours = {"CUDA_VISIBLE_DEVICES": ""}
    if arguments.provider:
        ours["TORCH_WEBGPU_PROVIDER"] = arguments.provider
    with ExitStack() as stack:
        yield {
            system: stack.enter_context(
                Runner(
                    settings,
                    arguments.timeout,
                    fresh=system == FRESH and not hasattr(os, "fork"),
                    command=(sys.executable, "-m", "benchmarks.eager_worker"),
                    variables={"TORCH_WEBGPU_DEVICE": "0"} | (ours if system != "eager" else {}),
                )
            )
            for system in SYSTEMS
            if system in arguments.systems
        }


def main() -> int:
    """Prints every row; 1 if one of ours failed."""
    arguments = parse()
    start = time.perf_counter()
    cases: dict[str, Any] = {}
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "small": arguments.small}
    with high_clocks() as results["high_clocks"], runners(arguments) as running:
        machine: dict[str, Any] = {}
        for system, runner in running.items():
            if system != FRESH:  # which opens no GPU
                machine = runner.machine() | machine  # ours finds no CUDA, which comes first
        results |= {"machine": machine, "provider": arguments.provider, "cases": cases}
        for at, name in enumerate(arguments.cases):
            left = arguments.seconds - (time.perf_counter() - start)
            if left < _LEAST_S:
                print(f"no time for {', '.join(arguments.cases[at:])}")
                break
            row = ROWS[name]
            measured = {}
            for system, runner in running.items():
                runner.timeout_s = min(arguments.timeout, left)
                measured[system] = runner.measure(name, [system])[system]
            systems = figures(row, measured)
            has_cuda = machine.get("torch_device", "CPU") != "CPU"
            judged = verdicts(row, systems, has_cuda=has_cuda, is_real=not arguments.small)
            cases[name] = {**systems, "goals": [asdict(verdict) for verdict in judged]}
            print(line(row, systems), flush=True)
            print_verdicts(judged)
            if arguments.output is not None:
                report.save(results, arguments.output)
    return int(any("error" in case.get(OURS, {}) for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
