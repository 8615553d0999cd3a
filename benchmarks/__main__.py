"""``python -m benchmarks``: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import report, runner
from .cases import CASES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--small", action="store_true", help="sizes for a software adapter")
    parser.add_argument("--systems", help=f"comma-separated: {', '.join(runner.SYSTEMS)}")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each timing")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each case")
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/…)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    systems = tuple((arguments.systems or ",".join(runner.available_systems())).split(","))
    unknown = [name for name in systems if name not in runner.SYSTEMS]
    unknown += [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; see --list and --help")

    if arguments.list:
        for case in CASES.values():
            print(f"{case.name:20} {case.goal}")
        return 0
    if arguments.child:
        settings = arguments.small, arguments.budget
        runner.child(arguments.child, systems, *settings, output=arguments.output)
        return 0

    results = {
        "date": time.strftime("%Y-%m-%d"),
        "small": arguments.small,
        "machine": runner.machine(),
        "limits": {},
        "cases": {},
    }
    settings = arguments.small, arguments.budget, arguments.timeout
    limits = runner.run_in_child(runner.LIMITS, (), *settings)
    results["limits"] = limits.get(runner.LIMITS, {})
    for name in arguments.cases or CASES:
        start = time.perf_counter()
        results["cases"][name] = runner.run_in_child(name, systems, *settings)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        report.save(results, arguments.output)
    print(report.table(results))
    print(f"\nwritten to {report.save(results, arguments.output)}")
    failed = any("error" in r.get("webgpu", {}) for r in results["cases"].values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
