"""The versions of PyTorch that this package is tried with, and what is said of others.

The only place with these numbers: the requirement in ``pyproject.toml`` and the pages are compared
with it by a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import PyTorchVersionError

TRIED = ((2, 11), (2, 13), (2, 14))
"""Versions on which tests run."""

OLDEST, NEWEST = TRIED[0], TRIED[-1]

_warned: set[str] = set()


def check(version: str, warn: Callable[[str], None]) -> None:
    """Warns of a version of PyTorch that is newer than all that were tried, once in a process.

    Raises PyTorchVersionError: it is older than all that this package is for.
    """
    oldest, newest = text(OLDEST), text(NEWEST)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise PyTorchVersionError(
            f"torch-webgpu-compile needs PyTorch {oldest} or newer, and this is {version}: install "
            f"PyTorch {newest}"
        )
    if numbers > NEWEST and version not in _warned:
        _warned.add(version)
        warn(
            f"PyTorch {version} is newer than {newest}, the newest that torch-webgpu-compile was "
            "tried with: if something fails, update torch-webgpu-compile, or install PyTorch "
            f"{newest}"
        )


def text(version: tuple[int, int]) -> str:
    """A version as it is written: ``2.14``."""
    return ".".join(map(str, version))
