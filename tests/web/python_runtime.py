"""Bundles in Python without PyTorch, on Dawn and SwiftShader, in a process that stays.

Each line of its standard input is a folder, a seed and calls, (entry, inputs by name), as JSON. Of
each call it prints a line with the results, or of all one with what went wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_SWIFTSHADER = [
    Path(sys.prefix) / "swiftshader" / "vk_swiftshader_icd.json",
    Path("/usr/lib/chromium/vk_swiftshader_icd.json"),
]
Results = list[dict[str, list[Any]]]


class PythonRuntime:
    """Runs bundles as a page does."""

    def __init__(self) -> None:
        driver = next((path for path in _SWIFTSHADER if path.exists()), None)
        if driver is None:
            pytest.skip("Python has no SwiftShader here")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "VK_DRIVER_FILES": str(driver)},
        )

    def run(self, folder: Path, calls: list[Any], seed: int = 0) -> Results:
        """The results of calls, each as flat lists."""
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None
        assert answers is not None
        print(json.dumps([str(folder), seed, calls]), file=given, flush=True)
        answer = json.loads(answers.readline() or '"the process has ended"')
        assert isinstance(answer, list), answer
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _array(value: Any, dtype: str) -> np.ndarray[Any, Any]:
    """An input. What has no dtype in numpy is given as floats."""
    return np.array(value, "float64" if "float" in dtype else dtype)


def _answer(folder: str, seed: int, calls: list[Any]) -> Results | str:
    from torch_webgpu_compile import load_bundle

    found = []
    try:
        bundle = load_bundle(folder, seed=seed, provider="wgpudawn")
        manifest = json.loads(Path(folder, "manifest.json").read_text())
        for entry, inputs in calls:
            wanted = manifest["variants"][0]["entries"][entry]["inputs"]
            given = {name: _array(value, wanted[name]["dtype"]) for name, value in inputs.items()}
            results = bundle.run(entry, given)
            found.append({name: value.ravel().tolist() for name, value in results.items()})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    for request in sys.stdin:
        print(json.dumps(_answer(*json.loads(request))), flush=True)
