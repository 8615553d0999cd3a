"""Changes to PyTorch and to other libraries, of which any may fail: they have changed themselves.

``import torch`` runs `patches`, and so may the import of another library later. A change that fails
is left out, and one warning says which, and what no longer works; nothing else fails for it.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any


def warn(message: str) -> None:
    """Warns, unless the message is "". Where warnings are errors, it prints: no import of PyTorch
    or another library may fail for one.
    """
    if not message:
        return
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning as error:
        print(f"RuntimeWarning: {error}", file=sys.stderr)


def attempt(patch: str, function: Callable[[], object]) -> str:
    """Calls a function that is a part of a patch.

    Args:
        patch: the name of the patch's module.

    Returns:
        "", or what failed, and why the patch is needed, as its docstring says.
    """
    try:
        function()
    except Exception as error:
        return f"{patch.rpartition('.')[2]} ({type(error).__name__}: {error}): {_reason(patch)}"
    return ""


def describe(failures: Sequence[str]) -> str:
    """What to say of what `attempt` has found; "" where that is nothing."""
    found = [failure for failure in failures if failure]
    if not found:
        return ""
    return (
        "torch-webgpu-compile goes on without these changes to PyTorch and other libraries, which "
        "have other insides in this version; update torch-webgpu-compile, or report this:"
        + "".join(f"\n- {failure}" for failure in found)
    )


def _reason(patch: str) -> str:
    """The paragraph ``Why:`` of a patch, which says what happens without it."""
    try:
        loader: Any = find_spec(patch).loader  # type: ignore[union-attr]
        source = loader.get_source(patch)  # not `__doc__`, which there may not be
        paragraphs = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
    except Exception:
        return "without it something else may fail"
    whys = [" ".join(text.split()) for text in paragraphs if text.startswith("Why:")]
    return whys[0] if whys else paragraphs[0]
