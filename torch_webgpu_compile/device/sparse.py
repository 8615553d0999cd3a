"""Sparse tensors, of which there are none on the device: errors that say so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .libraries import new_library
from .untraced import untraced

_KEYS = ("SparsePrivateUse1", "SparseCsrPrivateUse1")


def refuse(op: torch._ops.OpOverload, *_: Any, **__: Any) -> NoReturn:
    """Raises NotImplementedError: the device has no sparse tensors."""
    raise NotImplementedError(
        f"{op}: webgpu tensors cannot be sparse; keep this one on the CPU, make it dense with "
        ".to_dense(), or use sparse=False (torch.nn.Embedding, EmbeddingBag)"
    )


def register() -> list[Any]:
    """Registers `refuse` for operators on sparse tensors; returns libraries to be kept alive."""
    libraries = []
    for key in _KEYS:
        library = new_library("_")
        library.fallback(untraced(refuse), key)
        libraries.append(library)
    return libraries
