"""A PyTorch backend for every GPU that WebGPU reaches.

    model = torch.compile(model, backend="webgpu")

Nothing needs to be imported for that. This package offers a look inside:

- `explain`: what the compiler made of a function, as a `Report`;
- `counters`: what it has done so far;
- `wgsl_op`: a function or kernel in WGSL as an operator of PyTorch;
- `export`: a function and its state as a bundle of files for browsers, `EntryPoint` one of several;
- `export_pipeline`: a bundle of a model of transformers with its image processor or tokenizer;
- `load_bundle`: runs such a bundle with numpy in and out, as a `Bundle`;
- `profile`: the time of each kernel on the GPU, as a `Profile`;
- `invalidate`: parameters were changed behind PyTorch's back;
- `register_device`: the device ``"webgpu"`` beside CUDA, where PyTorch does not get it by itself;
- `CompileOptions`: settings; the module `options` lists the environment variables;
- exceptions, all of them `WebGPUCompileError`, and `FallbackWarning`.

Importing it neither opens a GPU nor imports a WebGPU implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .counters import counters
from .errors import (
    AdapterError,
    BundleError,
    DeviceError,
    DeviceLostError,
    IndexOutOfRangeError,
    InputError,
    OptionError,
    OutOfMemoryError,
    PyTorchVersionError,
    ShaderError,
    UnsupportedOp,
    VerificationError,
    WebGPUCompileError,
    WgslError,
)
from .fallbacks import FallbackWarning
from .options import CompileOptions

if TYPE_CHECKING:
    from .bundle.load import Bundle, load_bundle
    from .callables.static_copies import invalidate
    from .device.autoload import register as register_device
    from .exports.export import EntryPoint, export
    from .inspection.profiling import Profile, profile
    from .inspection.report import Report, explain
    from .pipelines.export import export_pipeline
    from .wgsl_operators.api import wgsl_op

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "Bundle",
    "BundleError",
    "CompileOptions",
    "DeviceError",
    "DeviceLostError",
    "EntryPoint",
    "FallbackWarning",
    "IndexOutOfRangeError",
    "InputError",
    "OptionError",
    "OutOfMemoryError",
    "Profile",
    "PyTorchVersionError",
    "Report",
    "ShaderError",
    "UnsupportedOp",
    "VerificationError",
    "WebGPUCompileError",
    "WgslError",
    "counters",
    "explain",
    "export",
    "export_pipeline",
    "invalidate",
    "load_bundle",
    "profile",
    "register_device",
    "wgsl_op",
]

_LAZY = {
    "Bundle": ("bundle.load", "Bundle"),
    "load_bundle": ("bundle.load", "load_bundle"),
    "EntryPoint": ("exports.export", "EntryPoint"),
    "export": ("exports.export", "export"),
    "export_pipeline": ("pipelines.export", "export_pipeline"),
    "explain": ("inspection.report", "explain"),
    "Report": ("inspection.report", "Report"),
    "invalidate": ("callables.static_copies", "invalidate"),
    "Profile": ("inspection.profiling", "Profile"),
    "profile": ("inspection.profiling", "profile"),
    "register_device": ("device.autoload", "register"),
    "wgsl_op": ("wgsl_operators.api", "wgsl_op"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    """The public names: tab completion need not offer the modules behind them."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def _register() -> None:
    """Makes ``backend="webgpu"`` known where the package is used without being installed."""
    from importlib.metadata import EntryPoint, PackageNotFoundError, distribution

    group = "torch_dynamo_backends"
    try:
        if distribution("torch-webgpu-compile").entry_points.select(group=group):
            return  # Dynamo will find it, and importing Dynamo takes a second
    except PackageNotFoundError:
        pass
    try:
        import torch  # noqa: F401
    except ImportError:
        return  # bundles run without PyTorch
    from .torch_private import _BACKENDS

    if _BACKENDS is not None and "webgpu" not in _BACKENDS:
        _BACKENDS["webgpu"] = EntryPoint("webgpu", "torch_webgpu_compile.backend:webgpu", group)


_register()
