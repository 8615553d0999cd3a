"""How Python kernels are given to PyTorch: libraries that stay, and functions Dynamo leaves alone.

PyTorch takes a library's kernels back in a finalizer that runs as an exit handler. Objects whose
``__del__`` uses the device, and exit handlers that were registered earlier, come after that: so
`new_library` takes its libraries out of that finalizer.

While a compiled function runs the parts that Dynamo left in Python, Dynamo looks at every frame
that starts, also at those of our kernels. Tracing them is slow and of no use: `untraced` says so.
`torch._dynamo` has a decorator for this, but importing it takes a second; this asks the C part,
which is always loaded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..torch_private import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_SKIP_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)


def untraced(function: F) -> F:
    """The function itself; neither it nor what it calls is traced from now on."""
    inner: Any = function
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
    if hasattr(inner, "__code__"):
        set_code_exec_strategy(inner.__code__, _SKIP)
    return function


def skip_frame(function: Any) -> None:
    """Has Dynamo leave a function's own frames alone, but not what it calls."""
    set_code_exec_strategy(function.__code__, _SKIP_ALONE)


_libraries: list[Any] = []


def new_library(namespace: str) -> Any:
    """A library of implementations, which stays until the process ends."""
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    registry: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        found = finalizer.peek()
        if found is not None and found[0] is library:
            finalizer.atexit = False
    _libraries.append(library)
    return library
