"""Where two recordings differ first, and how that is shown."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import ne

from tests.replay.recording import Recording

ERROR, PLAN = "error", "serialized"
LONGEST_LINE = 160


@dataclass(frozen=True)
class Difference:
    """The first stage in which a program differs on one target.

    Attributes:
        graph: which of the program's graphs.
        stage: the name of the stage; "" where only one of the trees has that graph.
        before, after: the stage's lines.
        plans: whether a plan of the program differs, too.
    """

    graph: int
    stage: str
    before: Sequence[str]
    after: Sequence[str]
    plans: bool = True

    @property
    def where(self) -> str:
        """For a person."""
        if not self.stage:
            return f"graph {self.graph} is {'new' if self.after else 'gone'}"
        same = "" if self.plans else "; all plans are the same"
        return f"graph {self.graph} differs first in {self.stage}{same}"

    def shown(self, most: int) -> Iterator[str]:
        """The unified difference, at most so many lines of it."""
        found = difflib.unified_diff(self.before, self.after, "before", "after", lineterm="", n=1)
        lines = list(found)[2:]
        for line in lines[:most]:
            yield line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"
        if len(lines) > most:
            yield f"… {len(lines) - most} more lines"


def first_difference(
    before: Recording, after: Recording, target: str, ignored: Collection[str] = ()
) -> Difference | None:
    """None where a program is the same on a target.

    A stage that one of the trees does not have is not compared.

    Args:
        ignored: stages that may differ.
    """
    old, new = before.texts(target), after.texts(target)
    for number, (theirs, mine) in enumerate(zip(old, new, strict=False)):
        if (ERROR in mine) != (ERROR in theirs):
            return Difference(number, ERROR, theirs.get(ERROR, ()), mine.get(ERROR, ()))
        for name, lines in mine.items():
            if name in theirs and name not in ignored and lines != theirs[name]:
                plans = ([graph.get(PLAN) for graph in graphs] for graphs in (old, new))
                return Difference(number, name, theirs[name], lines, ne(*plans))
    if len(old) == len(new):
        return None
    number = min(len(old), len(new))
    *_, last = max(old, new, key=len)[number].values()
    return Difference(number, "", *(((), last) if len(new) > len(old) else (last, ())))


def unshared_stages(before: Recording, after: Recording) -> tuple[set[str], set[str]]:
    """The names of stages that only one of two trees has."""
    old, new = (
        {name for graphs in r.graphs.values() for graph in graphs for name in graph.stages}
        for r in (before, after)
    )
    return old - new - {ERROR}, new - old - {ERROR}
