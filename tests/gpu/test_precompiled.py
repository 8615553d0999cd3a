"""PyTorch's precompile cache: a program that is started again neither traces nor compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates(6)

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> list[int]:
    """Plans that the program compiled, call by call."""
    environment = os.environ | {
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCH_WEBGPU_CACHE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("precompiled_program.py")), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precompiled")
    assert set(run(folder, "save")) == {1}
    return folder


def test_nothing_is_compiled_again(saved: Path) -> None:
    assert set(run(saved)) == {0}


@pytest.mark.parametrize("other", ["other-version", "other-gpu"])
def test_what_does_not_fit_is_compiled(saved: Path, other: str) -> None:
    assert set(run(saved, other)) == {1}
