"""Registers ``webgpu`` as PyTorch's PrivateUse1 device: the entry point in ``torch.backends``.

It runs at the end of ``import torch``: it imports neither a WebGPU implementation nor the compiler,
opens nothing, and never raises. PyTorch may be half imported while this module is: only `register`
may touch it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .. import patches
from ..torch_private import versions

_registered = False
_run: Callable[..., Any] | None = None
_to_copy: Callable[..., Any] | None = None


def load() -> None:
    """The entry point: `register`, but not where that would break another device.

    PyTorch takes a PrivateUse1 backend for the one accelerator as soon as there is one, and its
    autograd then refuses every backward on CUDA or XPU tensors (pytorch/pytorch#161129). Who wants
    the device all the same calls `register` or sets ``TORCH_WEBGPU_DEVICE=1``; 0 never registers.
    """
    try:
        asked = os.environ.get("TORCH_WEBGPU_DEVICE", "")
        is_wanted = asked == "1" or (asked != "0" and not _has_streams_of_its_own())
    except Exception as error:
        _warn_unavailable(error)
        return
    if is_wanted:
        register()


def _has_streams_of_its_own() -> bool:
    """Whether PyTorch can use a CUDA, ROCm or XPU device, found out without opening it."""
    import torch

    from ..torch_private import cuda_is_compiled, xpu_is_compiled

    if (xpu_is_compiled is None or xpu_is_compiled()) and torch.xpu.is_available():
        return True
    if cuda_is_compiled is not None and not cuda_is_compiled():
        return False
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"  # else the check opens CUDA, and forked children cannot
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def register() -> None:
    """Makes the device known to PyTorch; does nothing when it is known already.

    Where another package has taken PyTorch's place for a device, it only warns.
    """
    global _registered
    if _registered:
        return
    try:
        _register()
        _registered = True
    except Exception as error:
        _warn_unavailable(error)


def _warn_unavailable(error: Exception) -> None:
    patches.warn(
        f"the device 'webgpu' is not available: {error}; uninstall torch-webgpu-compile or "
        "report this with the versions of both packages"
    )


def _register() -> None:
    """Registers the device.

    Raises:
        Exception: the device cannot be had, or not without a crash.
    """
    import torch
    from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

    from ..torch_private import (
        _get_privateuse1_backend_name,
        _setup_privateuseone_for_python_backend,
    )

    versions.check(torch.__version__, patches.warn)
    name = _get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"PyTorch's place for a device is taken by {name!r}")
    patches.install(patches.When.BEFORE_DEVICE)
    from .api import module
    from .patches.guard import DeviceGuard
    from .registration import new_library, untraced

    _setup_privateuseone_for_python_backend(
        "webgpu", backend_module=module, device_guard=DeviceGuard()
    )
    generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    module.add_submodules()
    new_library("_").fallback(untraced(run), "PrivateUse1")
    new_library("aten").impl("_to_copy", untraced(to_copy), "PrivateUse1")
    patches.install(patches.When.DEVICE)


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator that has no kernel of its own; registers those that have one before."""
    global _run
    if _run is None:
        from ..torch_private import _dispatch_has_kernel_for_dispatch_key as has_kernel
        from .eager import kernels  # the compiler, which takes a second

        _run = kernels.register()
        if has_kernel(op.name(), "PrivateUse1"):
            return op(*arguments, **keywords)
    return _run(op, *arguments, **keywords)


def to_copy(*arguments: Any, **keywords: Any) -> Any:
    """``aten::_to_copy``; registers the other kernels before.

    While a graph is traced, torch.tensor makes a real tensor all the same: it hides its operators
    from the mode. PyTorch asks modes for Python kernels then, which know those of an operator, but
    not the fallback. This one is the first of them in a process, and comes before `_lazy_init`.
    """
    global _to_copy
    if _to_copy is None:
        from .eager import copies, kernels

        kernels.register()
        _to_copy = copies.to_copy
    return _to_copy(*arguments, **keywords)
