"""The wheel works on its own: another folder, nothing of the repository on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates(3)

ROOT = Path(__file__).parents[2]

USE = """
import sys, torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="webgpu")(x), model(x))

import torch_webgpu_compile
assert torch_webgpu_compile.counters.dispatches > 0
print(torch_webgpu_compile.__file__)
"""


def test_installed_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", USE],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(site)
