"""A PyTorch backend for every GPU that WebGPU reaches.

    model = torch.compile(model, backend="webgpu")

Nothing needs to be imported for that. This package offers a look inside:

- `explain`: what the compiler made of a function;
- `counters`: what it has done so far;
- `profile`: the time of each kernel on the GPU;
- `invalidate`: parameters were changed behind PyTorch's back;
- `CompileOptions`: settings, see `options`;
- the exceptions of `errors`, and `FallbackWarning`.

Importing it neither opens a GPU nor imports a WebGPU implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .counters import counters
from .errors import (
    AdapterError,
    DeviceError,
    DeviceLostError,
    OptionError,
    OutOfMemoryError,
    ShaderError,
    UnsupportedOp,
    VerificationError,
    WebGPUCompileError,
)
from .fallbacks import FallbackWarning
from .options import CompileOptions

if TYPE_CHECKING:
    from .profiling import profile
    from .report import Report, explain
    from .static_buffers import invalidate

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "CompileOptions",
    "DeviceError",
    "DeviceLostError",
    "FallbackWarning",
    "OptionError",
    "OutOfMemoryError",
    "Report",
    "ShaderError",
    "UnsupportedOp",
    "VerificationError",
    "WebGPUCompileError",
    "counters",
    "explain",
    "invalidate",
    "profile",
]

_LAZY = {
    "explain": "report",
    "Report": "report",
    "invalidate": "static_buffers",
    "profile": "profiling",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def _register() -> None:
    """Makes ``backend="webgpu"`` known where the package is used without being installed."""
    from importlib.metadata import EntryPoint, PackageNotFoundError, distribution

    group = "torch_dynamo_backends"
    try:
        if distribution("torch-webgpu-compile").entry_points.select(group=group):
            return  # Dynamo will find it, and importing Dynamo takes a second
    except PackageNotFoundError:
        pass
    from torch._dynamo.backends import registry

    if "webgpu" not in registry._BACKENDS:
        registry._BACKENDS["webgpu"] = EntryPoint(
            "webgpu", "torch_webgpu_compile.backend:webgpu", group
        )


_register()
