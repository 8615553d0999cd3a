"""`Recording`: the text of every stage of a program, on several targets, and how it is stored."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.replay.sources import ROOT

# A graph's name has its number in the process; lines of the package move without meaning anything.
_NUMBER = re.compile(r"\b(graph|eager)\d+_")
_IN_PACKAGE = re.compile(r"[^\s\"'(]*/(torch_webgpu_compile/[\w/]+\.py):\d+")


def normalized(text: str) -> str:
    """A text without what differs between processes and between places of a tree."""
    text = _NUMBER.sub(r"\1_", text).replace(f"{ROOT}/", "")
    return _IN_PACKAGE.sub(r"\1", text)


@dataclass(frozen=True)
class Graph:
    """A graph that was compiled for one target.

    Attributes:
        stages: by name, in order, the numbers of the text's lines in the recording.
        counts: of the plan; empty where there is none.
    """

    stages: Mapping[str, list[int]]
    counts: Mapping[str, int]


@dataclass
class Recording:
    """What became of one program.

    Nearly all lines stand in the texts of many stages, and of all targets.

    Attributes:
        graphs: by target, in the order in which they were compiled.
        lines: every line that there is, once.
    """

    graphs: dict[str, list[Graph]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, target: str, stages: Mapping[str, str | None], counts: Mapping[str, int]) -> None:
        """Adds a graph; a stage without a text has that of the stage before it."""
        found: dict[str, list[int]] = {}
        numbers: list[int] = []
        for name, text in stages.items():
            if text is not None:
                lines = normalized(text).split("\n")
                numbers = [self.lines.setdefault(line, len(self.lines)) for line in lines]
            found[name] = numbers
        self.graphs.setdefault(target, []).append(Graph(found, dict(counts)))

    def texts(self, target: str) -> list[dict[str, list[str]]]:
        """Of each graph the lines of every stage."""
        lines = list(self.lines)
        return [
            {name: [lines[k] for k in numbers] for name, numbers in graph.stages.items()}
            for graph in self.graphs.get(target, ())
        ]

    def counts(self, target: str) -> dict[str, int]:
        """The counts of all graphs together."""
        graphs = self.graphs.get(target, ())
        errors = sum("error" in graph.stages for graph in graphs)
        total = {"graphs": len(graphs) - errors, "errors": errors}
        for graph in graphs:
            for name, count in graph.counts.items():
                total[name] = total.get(name, 0) + count
        return total

    def dumps(self) -> bytes:
        """As bytes, which are equal for equal recordings."""
        graphs = {
            target: [[dict(graph.stages), dict(graph.counts)] for graph in found]
            for target, found in self.graphs.items()
        }
        return zlib.compress(json.dumps([list(self.lines), graphs]).encode(), 1)

    @staticmethod
    def loads(content: bytes) -> Recording:
        """The recording that `dumps` was asked of. Raises ValueError for other bytes."""
        try:
            lines, graphs = json.loads(zlib.decompress(content))
        except zlib.error as error:
            raise ValueError("this is no recording") from error
        found = {target: [Graph(*graph) for graph in made] for target, made in graphs.items()}
        return Recording(found, {line: number for number, line in enumerate(lines)})
