"""Compiles many programs with this tree and with another commit, and says what differs.

    scripts/replay                      the working tree, with HEAD if the package was changed, else
                                        with the commit before
    scripts/replay main                 with another commit
    scripts/replay main --only golden   programs whose names contain this, or one of several
    scripts/replay --target dawn        for one adapter, or several
    scripts/replay --share 1            all of PyTorch's operator samples

No GPU is needed: programs are compiled for adapters that are not there. They are the golden cases,
the models of `tests.zoo`, and a share of PyTorch's operator samples, compiled and as eager calls.
Of each graph the texts of all passes and the serialized plan are compared, but for what the package
calls its graphs. The exit status is 1 where something differs, and 2 where nothing can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.replay.compare import Difference, first_difference, unshared_stages
from tests.replay.recording import Recording
from tests.replay.sources import (
    ReplayError,
    Tree,
    cache_folder,
    default_commit,
    file_name,
    folder_of,
    programs_of_now,
    tree_of,
    working_tree,
)
from tests.replay.workers import record

SHARE = 8


def fields_of(target: Any) -> dict[str, Any]:
    """What of a target is not as by default, as JSON."""
    found: dict[str, Any] = {}
    for f in fields(target):
        value = getattr(target, f.name)
        if f.default is MISSING or value != f.default:
            if is_dataclass(value):
                value = fields_of(value)
            found[f.name] = sorted(value) if isinstance(value, frozenset) else value
    return found


class _Progress:
    """One line on a terminal, which each program replaces."""

    def __init__(self, label: str, count: int) -> None:
        self._label, self._count, self._done = label, count, 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            self._done += 1
            if sys.stderr.isatty():
                text = f"{self._done}/{self._count} {self._label[:40]}: {name}"
                print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
                if self._done == self._count:
                    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Comparison:
    """What two trees make of programs."""

    def __init__(self, targets: Sequence[str], ignored: Collection[str] = ()) -> None:
        self.targets, self.ignored = targets, ignored
        self.compared = self.differing = self.other_plans = 0
        self.totals: dict[str, tuple[Counter[str], Counter[str]]] = {
            target: (Counter(), Counter()) for target in targets
        }
        self.gone: set[str] = set()
        self.new: set[str] = set()

    def add(self, before: Recording, after: Recording) -> Collection[tuple[Difference, list[str]]]:
        """A program's differences, each with the targets that have it first."""
        found: dict[tuple[int, str, bool], tuple[Difference, list[str]]] = {}
        for target in self.targets:
            for total, recording in zip(self.totals[target], (before, after), strict=True):
                total.update(recording.counts(target))
            difference = first_difference(before, after, target, self.ignored)
            self.compared += 1
            if difference is not None:
                self.differing += 1
                self.other_plans += difference.plans
                key = difference.graph, difference.stage, difference.plans
                found.setdefault(key, (difference, []))[1].append(target)
        gone, new = unshared_stages(before, after)
        self.gone |= gone
        self.new |= new
        return found.values()

    def summary(self) -> list[str]:
        """Totals by target, and the last line."""
        names = list(
            dict.fromkeys(name for pair in self.totals.values() for c in pair for name in c)
        )
        rows = [["", *names]]
        for target, (before, after) in self.totals.items():
            rows.append([target, *(_change(before[name], after[name]) for name in names)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        for stages, whose in ((self.gone, "the other tree"), (self.new, "this tree")):
            if stages:
                lines.append(f"not compared, only in {whose}: {', '.join(sorted(stages))}")
        of = f"{self.compared} (programs on targets)"
        if not self.differing:
            return [*lines, f"identical: {of}"]
        return [*lines, f"{self.differing} of {of} differ, {self.other_plans} in their plans"]


def _change(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{before:,} → {after:,}"


def recorded(
    tree: Tree, names: Sequence[str], targets: str, options: Any
) -> tuple[Path, list[str]]:
    """The folder of a tree's recordings, which are made where they are missing.

    And the programs whose recordings should not be kept: what ended a process may not end another.
    """
    folder = tree.root / "recordings" if options.fresh else folder_of(tree, targets)
    folder.mkdir(exist_ok=True)
    missing = [name for name in names if not (folder / file_name(name)).exists()]
    start = time.perf_counter()
    progress = _Progress(tree.label, len(missing))
    ended = record(tree, missing, folder, targets, options.processes, progress)
    seconds, known = time.perf_counter() - start, len(names) - len(missing)
    print(f"{tree.label}: {len(missing)} programs recorded in {seconds:.0f} s, {known} known")
    return folder, ended


def _compare(
    names: Sequence[str], folders: Sequence[Path], comparison: Comparison, options: Any
) -> None:
    """Prints where programs differ."""
    shown = 0
    for name in names:
        contents = [(folder / file_name(name)).read_bytes() for folder in folders]
        before, after = map(Recording.loads, contents)
        for difference, where in comparison.add(before, after):
            print(f"\n{name} on {', '.join(where)}: {difference.where}")
            if shown < options.shown:
                print("\n".join(difference.shown(options.lines)))
            shown += 1


def replay(options: Any) -> int:
    """The exit status."""
    from benchmarks.targets import TARGETS
    from tests.replay import cases

    chosen = {name: TARGETS[name] for name in options.target or TARGETS}
    targets = json.dumps({name: fields_of(target) for name, target in chosen.items()})
    wanted = options.only or [""]
    names = [
        name
        for name in cases.names()
        if cases.is_chosen(name, options.share) and any(part in name for part in wanted)
    ]
    if not names:
        raise ReplayError(f"no program has {' or '.join(wanted)} in its name; --list shows them")
    if options.list:
        print("\n".join(names))
        return 0
    commit = options.commit or default_commit()
    with (
        programs_of_now() as root,
        tree_of(commit, root) as old,
        working_tree(root) as new,
    ):
        made = [recorded(tree, names, targets, options) for tree in (old, new)]
        folders = [folder for folder, _ in made]
        comparison = Comparison(list(chosen), options.ignore)
        _compare(names, folders, comparison, options)
        for folder, ended in made:
            for name in ended:
                (folder / file_name(name)).unlink(missing_ok=True)
    print()
    print("\n".join(comparison.summary()))
    return 1 if comparison.differing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    from benchmarks.targets import TARGETS

    parser = argparse.ArgumentParser(
        prog="scripts/replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of programs' names")
    parser.add_argument("--target", nargs="+", choices=TARGETS, help="adapters; by default all")
    parser.add_argument(
        "--share",
        type=int,
        default=SHARE,
        metavar="N",
        help="one of N of PyTorch's operators (%(default)s)",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--lines", type=int, default=24, help="of a difference (%(default)s)")
    parser.add_argument("--shown", type=int, default=12, help="differences (%(default)s)")
    parser.add_argument(
        "--ignore", nargs="+", default=(), metavar="STAGE", help="may differ: fx, ir, wgsl, …"
    )
    parser.add_argument("--list", action="store_true", help="the programs' names")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help=f"record anew what is in {cache_folder()}",
    )
    try:
        return replay(parser.parse_args(arguments))
    except ReplayError as error:
        print(f"scripts/replay: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
