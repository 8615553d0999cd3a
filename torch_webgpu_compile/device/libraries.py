"""Libraries of kernels that stay until the interpreter is gone.

PyTorch takes a library's kernels back in a finalizer that runs as an exit handler. Objects whose
``__del__`` uses the device, and exit handlers that were registered earlier, come after that.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


def new_library(namespace: str) -> Any:
    """A library of implementations, which is not emptied at exit."""
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    registry: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        found = finalizer.peek()
        if found is not None and found[0] is library:
            finalizer.atexit = False
    return library
