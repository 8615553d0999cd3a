"""``python -m tests.trust``: tries every fault, each in its own process, and prints a table.

    python -m tests.trust                     all of them, a few minutes
    python -m tests.trust --only destroyed    those whose names contain this
    python -m tests.trust --list

The exit status is 1 if a try was not survived.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from .faults import Fault, Tally, load

_MARK = "trust: "


def _run_here(fault: Fault) -> None:
    tally = Tally()
    fault.run(tally)
    result = {"tried": tally.tried, "survived": tally.survived, "details": tally.details}
    print(_MARK + json.dumps(result), flush=True)


def _run(fault: Fault) -> Tally:
    """Tries a fault in a process of its own."""
    command = [sys.executable, "-m", "tests.trust", "--here", fault.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=fault.seconds)
    except subprocess.TimeoutExpired:
        return Tally(1, 0, [f"not done after {fault.seconds:.0f} s"])
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return Tally(1, 0, [f"the process ended with {done.returncode}: {last}"])
    tally = Tally(**json.loads(lines[-1].removeprefix(_MARK)))
    if done.returncode or not tally.tried:
        tally(False, f"the process ended with {done.returncode} after {tally.tried} tries")
    return tally


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of what to try")
    parser.add_argument("--list", action="store_true", help="the names and what they do")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    table = load()
    if arguments.here:
        _run_here(table[arguments.here])
        return 0
    chosen = [fault for name, fault in table.items() if arguments.only in name]
    if not chosen:
        parser.error(f"no fault's name contains {arguments.only!r}: see --list")
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:36s} {fault.text}")
        return 0
    width = max((len(fault.text) for fault in chosen), default=0)
    failed = False
    for fault in chosen:
        start = time.monotonic()
        tally = _run(fault)
        failed |= tally.survived < tally.tried
        seconds = time.monotonic() - start
        print(f"{fault.text:{width}s}  {tally.survived:6d} of {tally.tried:6d}  {seconds:5.0f} s")
        for detail in tally.details:
            print(f"    {detail}")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
