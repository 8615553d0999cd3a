"""The wheel works on its own: another folder, nothing of the repository on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torch_webgpu_compile

pytestmark = pytest.mark.rotates(3)

ROOT = Path(__file__).parents[2]


def test_installed_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/smoke.py", tmp_path / "bundle"],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert f"{torch_webgpu_compile.__version__} on Python" in done.stdout
