"""Rules of this package for operators that PyTorch takes apart itself, in compiled graphs.

Patched: ``py_kernels`` of the operators of `OWN`: without the rule that PyTorch applies before
autograd, as long as a graph is captured.

Why: PyTorch's rule comes before any of a backend's. That of ``multilabel_margin_loss_forward`` adds
margins of class 0 for every missing label, so that its results would be wrong.

Until: a backend's decompositions go before these rules, or this one is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...patches import attempt
from ...torch_private import DispatchKey
from ..decompositions.table import OWN


@contextmanager
def install() -> Iterator[None]:
    """Takes the rules away as long as the context."""
    key = DispatchKey.Autograd
    taken: dict[Any, Any] = {}

    def take() -> None:
        for op in OWN:
            if key in op.py_kernels:
                taken[op] = op.py_kernels.pop(key)
                op._dispatch_cache.clear()

    attempt(__name__, take)
    try:
        yield
    finally:
        for op, kernel in taken.items():
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
