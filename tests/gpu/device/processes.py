"""Programs of their own: imports, forks, crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
START = """
import os, torch
from torch_webgpu_compile.device.autoload import register
register()
"""


def run(code: str, *paths: Path, timeout: float = 300, **environment: str) -> str:
    """The output of a program with the device registered.

    Args:
        paths: what else to import from; with any, nothing is registered.
        environment: more variables.

    Raises:
        AssertionError: it failed; with all that it printed.
    """
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [*map(str, paths), str(ROOT), given]))
    more = {"PYTHONPATH": path, "TORCH_WEBGPU_FALLBACK": "silent"} | environment
    return run_python(["-X", "faulthandler", "-c", code if paths else START + code], more, timeout)


def run_python(arguments: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """The output of Python with these arguments.

    Args:
        environment: more variables.

    Raises:
        AssertionError: it failed; with all that it printed.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return done.stdout
