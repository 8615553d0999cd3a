"""The Python programs of pages that are whole run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(3)

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "## Your own model",
    "docs/compile.md": "# Compile a model",
    "docs/device.md": '# The device "webgpu"',
}


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_the_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, section = (ROOT / page).read_text(encoding="utf-8").partition(f"{PAGES[page]}\n")
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert program
    before = counters.dispatches
    names: dict[str, Any] = {}
    exec(program[1], names)
    assert counters.dispatches > before
    assert not counters.fallbacks
    result = names["y"] if "y" in names else names["step"](names["x"])
    assert result.shape == (64, 10)
    assert result.isfinite().all()
    capsys.readouterr()
