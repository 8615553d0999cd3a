"""The programs in ``examples`` that train, as a user runs them, and the text of them in
``docs/training.md``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from examples import train_digits

ROOT = Path(__file__).parents[2]
# A run of 6 steps; the checkpoint that it leaves is that of the third.
STOPPED = """
import sys
from examples import train_text

save = train_text.Training.save
train_text.Training.save = lambda self, path: path.exists() or save(self, path)
print(repr(train_text.main(sys.argv[1:])))
"""


def test_the_page_has_the_text_of_the_program() -> None:
    page = (ROOT / "docs/training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = (ROOT / "examples/train_digits.py").read_text()
    assert blocks
    for block in blocks:
        assert block in program or textwrap.indent(block, "    ") in program


@pytest.mark.rotates(2)
@pytest.mark.parametrize("options", [[], ["--compile", "--dtype", "bfloat16"]])
def test_digits(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    losses, accuracy = train_digits.main(["--epochs", "1", *options])
    assert len(losses) == 1497 // 64
    assert losses[-1] < losses[0] / 2
    assert accuracy > 0.8
    printed = capsys.readouterr().out
    assert "23 steps" in printed
    assert f"{accuracy:.1%} of 299 images" in printed
    assert f"{losses.max().item():.3f} │" in printed


@pytest.mark.rotates(6)
@pytest.mark.parametrize(
    "options", [[], ["--compile"], ["--compile", "--dtype", "float16"]], ids=" ".join
)
def test_a_run_goes_on_in_another_process(options: list[str], tmp_path: Path) -> None:
    """Bit for bit: parameters, moments, the learning rate, the scale, dropout, the order of the
    data, and the characters that are drawn at the end.
    """
    options = [*options, "--steps", "6", "--every", "3", "--characters", "8"]
    options += ["--checkpoint", str(tmp_path / "run.pt")]

    def run(*more: str) -> list[str]:
        command = [sys.executable, "-c", STOPPED, *options, *more]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    expected, resumed = run(), run("--resume")
    assert resumed[0] == "going on after step 3"
    assert resumed[-1] == expected[-1]
    losses, written = ast.literal_eval(expected[-1])
    assert len(set(losses)) == 6
    assert len(written) == 9
