"""Registers ``webgpu`` as PyTorch's PrivateUse1 device: the entry point in ``torch.backends``.

It runs at the end of ``import torch``: it imports neither a WebGPU implementation nor the compiler,
opens nothing, and never raises. PyTorch may be half imported while this module is: only `register`
may touch it.
"""

from __future__ import annotations

import os
from typing import Any

_libraries: list[Any] = []


def load() -> None:
    """The entry point: `register`, but not where that would break another device.

    PyTorch takes a PrivateUse1 backend for the one accelerator as soon as there is one, and its
    autograd then refuses every backward on CUDA or XPU tensors (pytorch/pytorch#161129). Who wants
    the device all the same calls `register` or sets ``TORCH_WEBGPU_DEVICE=1``; 0 never registers.
    """
    asked = os.environ.get("TORCH_WEBGPU_DEVICE", "")
    if asked == "1" or (asked != "0" and not _has_streams_of_its_own()):
        register()


def _has_streams_of_its_own() -> bool:
    """Whether PyTorch can use a CUDA, ROCm or XPU device, found out without opening it."""
    import torch

    if getattr(torch, "xpu", None) is not None and torch.xpu._is_compiled():
        return bool(torch.xpu.is_available())
    if not torch.cuda._is_compiled():
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
    if _libraries:
        return
    try:
        _register()
    except Exception as error:
        import warnings

        warnings.warn(
            f"the device 'webgpu' is not available: {error}; uninstall torch-webgpu-compile or "
            "report this with the versions of both packages",
            RuntimeWarning,
            stacklevel=2,
        )


def _register() -> None:
    import torch
    from torch.utils import backend_registration

    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"PyTorch's place for a device is taken by {name!r}")
    from . import (
        accelerator,
        data_parallel,
        default_backend,
        guard,
        lightning,
        module,
        moving,
        pinning,
        process_groups,
        safetensors_files,
        storage_methods,
        trainers,
    )
    from .libraries import new_library
    from .untraced import untraced

    backend_registration._setup_privateuseone_for_python_backend(
        "webgpu", backend_module=module, device_guard=guard.DeviceGuard()
    )
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    library: Any = new_library("_")
    library.fallback(untraced(lambda op, *a, **k: run(op, *a, **k)), "PrivateUse1")
    host: Any = new_library("aten")
    for operator, kernel in pinning.KERNELS.items():
        host.impl(operator, untraced(kernel), "CPU")
    _libraries.extend((library, host))
    guard.install()
    accelerator.install()
    storage_methods.install()
    moving.install()
    process_groups.install()
    data_parallel.install()
    default_backend.install()
    safetensors_files.install()
    trainers.install()
    lightning.install()
    parameter: Any = torch.nn.parameter
    tensor: Any = torch.Tensor
    parameter.UninitializedTensorMixin._allowed_methods.append(tensor.webgpu)


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator call after registering the device's kernels.

    It is the fallback for every operator at first; the registration replaces it, so it runs once.
    """
    from . import kernels

    kernels.register()  # also puts the real fallback in the place of this function
    return op(*arguments, **keywords)
