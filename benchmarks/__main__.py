"""``python -m benchmarks``: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import report
from .clocks import high_clocks
from .goals import OWN, describe, needs_limits
from .runner import SYSTEMS, Runner, Settings
from .suites import SUITES, WORKER, rows_of, suite_of

_DEFAULT = ("webgpu", "eager", "inductor", "cudagraphs", "onnxruntime_webgpu")


def main() -> int:
    arguments = parse()
    if arguments.list:
        show_list()
        return 0
    todo = plan(arguments)
    is_suite = bool(arguments.suite)
    settings = Settings(
        arguments.small, arguments.budget or (0.3 if is_suite else 0.5), not is_suite
    )
    # A tuned tiling is used by every later case of its process.
    is_fresh = not is_suite or any("autotuned" in systems for systems in todo.values())
    start = time.perf_counter()
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "small": arguments.small,
        "suites": arguments.suite,
        "limits": {},
        "cases": {},
    }
    with high_clocks() as results["high_clocks"], ExitStack() as stack:
        runners: dict[str, Runner] = {}

        def runner_of(case: str) -> Runner:
            suite = suite_of(case, arguments.suite) if is_suite else None
            worker = suite.worker if suite else WORKER
            if worker not in runners:
                fresh = is_fresh or worker != WORKER
                command = (sys.executable, "-m", worker)
                new = Runner(settings, 0.0, fresh, arguments.inductor_cache, command)
                runners[worker] = stack.enter_context(new)
            runners[worker].timeout_s = arguments.timeout or (suite.timeout_s if suite else 180.0)
            return runners[worker]

        results["machine"] = runner_of(next(iter(todo))).machine()
        log("started", start)
        if "error" in results["machine"]:
            print(f"nothing can be measured: {results['machine']['error']}", file=sys.stderr)
            return 2
        path = arguments.output or report.place_of(results)
        if arguments.resume and path.exists():
            todo = resume(results, json.loads(path.read_text()), todo, arguments.cases)
        if not results["limits"] and (not is_suite or needs_copy_bandwidth(arguments.suite)):
            results["limits"] = runner_of(next(iter(todo))).limits()
        longest = 0.0
        for at, (name, systems) in enumerate(todo.items()):
            begun = time.perf_counter()
            if begun + longest > start + arguments.stop_after:
                print(f"no time for {', '.join(list(todo)[at:])}: --resume measures the rest")
                break
            wanted = [system for system in SYSTEMS if system in systems]
            found = runner_of(name).measure(name, wanted)
            results["cases"].setdefault(name, {}).update(found, machine=results["machine"])
            longest = max(longest, time.perf_counter() - begun)
            log(name, begun)
            report.save(results, path)
    log("all", start)
    print(report.text(results))
    print(f"\nwritten to {path}")
    if arguments.plot:
        from .plot import draw

        try:
            print("\n".join(f"drawn to {drawn}" for drawn in draw(results, path.parent)))
        except ImportError as error:  # the figures can be drawn elsewhere, from the JSON
            print(f"no figures: {error}")
    ours = [case.get(system, {}) for case in results["cases"].values() for system in OWN]
    return int(any("error" in found and not found.get("missing") for found in ours))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    parser.add_argument("--suite", help=f"comma-separated, or all: {', '.join(SUITES)}")
    parser.add_argument("--list", action="store_true", help="list suites, cases and goals")
    parser.add_argument("--small", action="store_true", help="sizes for a software adapter")
    parser.add_argument("--systems", help=f"comma-separated: {', '.join(SYSTEMS)}")
    parser.add_argument("--budget", type=float, help="seconds for each timing (0.5; suites: 0.3)")
    parser.add_argument("--timeout", type=float, help="seconds for each case (180; compile: 500)")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        metavar="S",
        help="begins no case that would end later than so many seconds, as the longest took",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keeps what the file of results has, and measures what it lacks and the named cases",
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/…)")
    parser.add_argument("--plot", action="store_true", help="a figure per suite next to it")
    parser.add_argument(
        "--inductor-cache",
        type=Path,
        help="folder that keeps Inductor's kernels between runs; changes its compile times only",
    )
    arguments = parser.parse_args()
    if arguments.suite:
        names = list(SUITES) if arguments.suite == "all" else arguments.suite.split(",")
        check(parser, names, SUITES)
        arguments.suite = names
    if arguments.systems:
        arguments.systems = arguments.systems.split(",")
        check(parser, arguments.systems, SYSTEMS)
    if arguments.cases and arguments.suite:
        check(parser, arguments.cases, rows_of(arguments.suite))
    elif arguments.cases:
        from .cases import CASES

        check(parser, arguments.cases, CASES)
    return arguments


def check(parser: argparse.ArgumentParser, names: list[str], known: Any) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; see --list and --help")


def plan(arguments: argparse.Namespace) -> dict[str, frozenset[str]]:
    """The systems to measure, by case."""
    asked = frozenset(arguments.systems or ())
    if arguments.suite:
        rows = rows_of(arguments.suite)
        wanted = arguments.cases or rows
        return {case: asked or systems for case, systems in rows.items() if case in wanted}
    from .cases import CASES

    return {case: asked or frozenset(_DEFAULT) for case in arguments.cases or CASES}


def resume(
    results: dict[str, Any],
    earlier: dict[str, Any],
    todo: dict[str, frozenset[str]],
    named: list[str],
) -> dict[str, frozenset[str]]:
    """Puts the results of an earlier run into those of this one; what is still to be measured.

    A case that was measured in part is measured again on another machine: its figures are compared
    with each other.
    """
    for what in ("small", "suites"):
        if earlier[what] != results[what]:
            sys.exit(f"the file of results has other {what}: --output names another file")
    results |= {"limits": earlier["limits"], "cases": earlier["cases"]}
    left: dict[str, frozenset[str]] = {}
    for name, systems in todo.items():
        case = earlier["cases"].get(name, {})
        lacking = frozenset(s for s in systems if "error" in case.get(s, {"error": ""}))
        if lacking and case.get("machine") != results["machine"]:
            lacking = systems
        if name in named:
            lacking = systems
        if lacking:
            left[name] = lacking
    return left


def needs_copy_bandwidth(names: list[str]) -> bool:
    return any(
        needs_limits(goal) for name in names for row in SUITES[name].rows for goal in row.goals
    )


def show_list() -> None:
    """Suites with their goals, then the cases that are in none."""
    from .cases import CASES

    for suite in SUITES.values():
        print(f"{suite.name}: {suite.title}")
        for row in suite.rows:
            print(f"  {row.case:20} {'; '.join(map(describe, row.goals))}")
    print("in no suite")
    covered = rows_of(SUITES)
    for case in CASES.values():
        if case.name not in covered:
            print(f"  {case.name:20} {case.goal}")


def log(what: str, since: float) -> None:
    print(f"{what}: {time.perf_counter() - since:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
