"""The versions of PyTorch that this package is tried with, and what is said of others.

The only place with these numbers: the requirement in ``pyproject.toml`` and the pages are compared
with it by a test.
"""

from __future__ import annotations

import re

TRIED = ((2, 11), (2, 13), (2, 14))
"""Versions on which tests run."""

OLDEST, NEWEST = TRIED[0], TRIED[-1]


def text(version: tuple[int, int]) -> str:
    """A version as it is written: ``2.14``."""
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def require_supported(version: str) -> None:
    """Raises RuntimeError: this version of PyTorch is older than all that the package is for."""
    if _numbers(version) < OLDEST:
        raise RuntimeError(
            f"torch-webgpu-compile needs PyTorch {text(OLDEST)} or newer, and this is {version}: "
            f"install PyTorch {text(NEWEST)}"
        )


def note(version: str) -> str:
    """The sentence about a version that is newer than all that were tried; "" of others."""
    if _numbers(version) <= NEWEST:
        return ""
    return (
        f"PyTorch {version} is newer than {text(NEWEST)}, the newest that torch-webgpu-compile was "
        "tried with: if something fails, update torch-webgpu-compile, or install PyTorch "
        f"{text(NEWEST)}"
    )
