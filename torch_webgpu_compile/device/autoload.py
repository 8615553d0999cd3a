"""Registers ``webgpu`` as PyTorch's PrivateUse1 device: the entry point in ``torch.backends``.

It runs at the end of ``import torch``: it imports neither a WebGPU implementation nor the compiler,
opens nothing, and never raises.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_libraries: list[Any] = []


def register() -> None:
    """Makes the device known to PyTorch; does nothing when it is known already."""
    if _libraries:
        return
    try:
        _register()
    except Exception as error:
        warnings.warn(
            f"the device 'webgpu' is not available: {error}; uninstall torch-webgpu-compile or "
            "report this with the versions of both packages",
            RuntimeWarning,
            stacklevel=2,
        )


def _register() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"PyTorch's place for a device is taken by {name!r}")
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from . import module

    _setup_privateuseone_for_python_backend("webgpu", backend_module=module)
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(lambda op, *a, **k: run(op, *a, **k), "PrivateUse1")
    _libraries.append(library)
    module.install()


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Every operator without a kernel of its own; at first every operator."""
    from . import kernels

    kernels.register()  # also puts the real fallback in the place of this function
    return op(*arguments, **keywords)
