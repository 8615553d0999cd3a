"""The text of every stage for small graphs; a change of any kernel shows up as a diff to review.

``pytest tests/golden --update-golden`` rewrites the files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compilations import compile_function
from tests.golden.graphs import GRAPHS
from torch_webgpu_compile.compiler import GRAPH, KERNELS, SCHEDULES
from torch_webgpu_compile.torch_ops import fft as fft_ops  # noqa: F401 (defines operators)

FOLDER = Path(__file__).parent


def stages(name: str) -> str:
    """IR, schedule and kernels as one text."""
    function, arguments, dynamic = GRAPHS[name]
    state = compile_function(function, *arguments, dynamic=True if dynamic else None)
    texts = {
        "ir": GRAPH.text(state.graph),
        "schedule": SCHEDULES.text(state.program),
        "wgsl": KERNELS.text(state.results["wgsl"]),
    }
    text = "\n\n".join(f"==== {stage}\n\n{shown.strip()}" for stage, shown in texts.items())
    return without_sources(text) + "\n"


def without_sources(text: str) -> str:
    """Without lines of code, and names that differ between runs: graphs and size symbols."""
    sources = ("// from ", "# File: ", "# No stacktrace ")
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(sources))
    text = re.sub(r' "[^"\n]*\.py:\d+(?:[^"\\\n]|\\.)*"', "", text)
    text = re.sub(r" '[^'\n]*\.py:\d+(?:[^'\\\n]|\\.)*'", " source", text)
    text = re.sub(r"\bgraph\d+_", "graph_", text)
    found = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    names = {old: f"s{k}" for k, old in enumerate(found)}
    return re.sub(r"\bs\d+\b", lambda match: names[match[0]], text)


@pytest.mark.parametrize("name", GRAPHS)
def test_stages(name: str, update_golden: bool) -> None:
    path = FOLDER / f"{name}.txt"
    actual = stages(name)
    if update_golden:
        path.write_text(actual, encoding="utf-8")
    assert path.exists(), f"{path.name} is missing: run pytest tests/golden --update-golden"
    assert actual == path.read_text(encoding="utf-8"), "review, then pytest --update-golden"
