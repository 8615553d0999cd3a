"""A `Target` as a file, from the machine that has the GPU to the one that compiles for it.

It is JSON: ``format``, the version of this package, and the target's fields as `codec` writes them.
What is read may be anything: it is a target, or OptionError says why it is none.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..plan.cache_folder import read_regular
from ..plan.codec import codec_of
from ..target import Machine, Target

_FORMAT = "webgpu-target"
_MAX_NBYTES = 1 << 20
_AGAIN = (
    "run `python -m torch_webgpu_compile doctor --save-target FILE` on the machine with the GPU"
)


def package_version() -> str:
    """The version of this package, as it was installed."""
    try:
        return metadata.version("torch-webgpu-compile")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def save_target(target: Target, path: str | os.PathLike[str]) -> None:
    """Writes a target to a file, which is replaced. Raises OSError."""
    data = {
        "format": _FORMAT,
        "package": package_version(),
        "target": codec_of(Target).encode(target),
    }
    Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def load_target(path: str | os.PathLike[str]) -> Target:
    """The target that `save_target` wrote.

    Raises:
        OptionError: there is no such file, it is damaged, or another version of this package wrote
            it.
    """
    try:
        data = json.loads(read_regular(Path(path), _MAX_NBYTES))
    except OSError as error:
        raise _refused(path, f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it is no JSON, or damaged ({error})") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise _refused(path, "it is no file of a target")
    here = package_version()
    if data.get("package") != here:
        made = f"torch-webgpu-compile {data.get('package')}"
        raise _refused(path, f"it was written by {made}, and this is {here}")
    if data.keys() != {"format", "package", "target"}:
        raise _refused(path, "it has other entries than format, package and target")
    try:
        target: Target = codec_of(Target).decode(data["target"])
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it is damaged ({error})") from error
    wrong = [*_impossible(target, _MAY_BE_ZERO), *_impossible(target.machine, ())]
    if wrong:
        raise _refused(path, f"it is damaged ({wrong[0]} is not possible)")
    return target


_MAY_BE_ZERO = ("max_loop_iterations",)


def _impossible(value: Target | Machine, may_be_zero: tuple[str, ...]) -> list[str]:
    """The numbers among the fields that no GPU has."""

    def is_possible(name: str, number: Any) -> bool:
        if type(number) not in (int, float):
            return True
        return math.isfinite(number) and (number > 0 or (number == 0 and name in may_be_zero))

    names = [field.name for field in fields(value)]
    return [name for name in names if not is_possible(name, getattr(value, name))]


def _refused(path: str | os.PathLike[str], cause: str) -> OptionError:
    return OptionError(f"target={os.fspath(path)!r}: {cause}; {_AGAIN}")
