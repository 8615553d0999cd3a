"""The texts in ``docs/architecture.md`` are what the compiler prints today.

The page's prose is written by hand. Between ``<!-- stage: NAME -->`` and ``<!-- end -->`` stands
the text of a stage, which ``pytest tests/golden --update-golden`` writes anew.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

from tests.compilations import compile_function
from tests.golden.test_golden import without_sources
from torch_webgpu_compile import debug
from torch_webgpu_compile.compiler import GRAPH, PLAN, SCHEDULES, TILED

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BLOCK = re.compile(r"(?<=<!-- stage: )(\w+)( -->\n\n)```(\w+)\n(.*?)```(?=\n\n<!-- end -->)", re.S)
LINK = re.compile(r"\]\(([^)#:]+)\)")
# Kernels with more lines are shown without their middle.
LONGEST, HEAD, TAIL = 150, 62, 12


def journey(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w + b, -1)


def stage_texts() -> dict[str, str]:
    """The text of every stage of `journey` in order, by its name in ``TORCH_WEBGPU_DEBUG``."""
    state = compile_function(journey, torch.ones(64, 32), torch.ones(32, 48), torch.ones(48))
    kernels = [shortened(debug.kernel_text(kernel)) for kernel in state.plan.kernels]
    texts = {
        "fx": state.captured.text,
        "ir": GRAPH.text(state.graph),
        "schedule": SCHEDULES.text(state.program),
        "choose_tilings": TILED.text(state.results["choose_tilings"]),
        "wgsl": "\n\n".join(kernels),
        "plan": PLAN.text(state.plan),
    }
    return {name: without_sources(text).strip() + "\n" for name, text in texts.items()}


def shortened(kernel: str) -> str:
    """A kernel's text; of a long one the first and the last lines."""
    lines = kernel.strip().splitlines()
    if len(lines) <= LONGEST:
        return "\n".join(lines)
    left_out = len(lines) - HEAD - TAIL
    return "\n".join([*lines[:HEAD], f"// […] {left_out} lines are left out here", *lines[-TAIL:]])


def test_texts_of_the_page(update_golden: bool) -> None:
    texts = stage_texts()
    page = PAGE.read_text(encoding="utf-8")
    shown = [match[1] for match in BLOCK.finditer(page)]
    assert shown, "no stage is shown"
    assert shown == [name for name in texts if name in shown], "not in their order"
    current = BLOCK.sub(lambda m: f"{m[1]}{m[2]}```{m[3]}\n{texts[m[1]]}```", page)
    if update_golden:
        PAGE.write_text(current, encoding="utf-8")
    else:
        assert current == page, "docs/architecture.md is stale: pytest tests/golden --update-golden"


def test_links_of_the_page() -> None:
    missing = [
        target
        for target in LINK.findall(PAGE.read_text(encoding="utf-8"))
        if not (PAGE.parent / target).exists()
    ]
    assert not missing


def test_layers_of_the_page() -> None:
    """Its table has the rows that import-linter holds imports to."""
    settings = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {each["id"]: each for each in settings["tool"]["importlinter"]["contracts"]}
    rows = [set(re.findall(r"\w+", row)) for row in contracts["layers"]["layers"]]
    section = PAGE.read_text(encoding="utf-8").partition("## 8. The layers")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    shown = [set(re.findall(r"`(\w+)(?:\.py)?`", cell)) for cell in cells]
    assert shown == [row - {"__main__"} for row in rows if row != {"__main__"}]
