"""Keeps Dynamo out of Python functions that PyTorch's C++ code calls.

While a compiled function runs the parts that Dynamo left in Python, Dynamo looks at every frame
that starts, also at those of our kernels. Tracing them is slow and of no use. `torch._dynamo` has a
decorator for this, but importing it takes a second: this asks the C part, which is always loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch._C._dynamo.eval_frame as eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_frames: Any = eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: F) -> F:
    """The function itself; neither it nor what it calls is traced from now on."""
    inner: Any = function
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
    if hasattr(inner, "__code__"):
        _frames.set_code_exec_strategy(inner.__code__, _SKIP)
    return function
