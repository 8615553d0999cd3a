"""Functions compiled as users compile them, for the adapter of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """``torch.compile`` for WebGPU in which a graph break is an error."""
    return torch.compile(function, backend="webgpu", fullgraph=True, **keywords)


def native(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """The same, in which an operator that needs the host is an error, too."""
    return compiled(function, options={"fallback": "error"}, **keywords)
