"""Registers ``webgpu`` as PyTorch's PrivateUse1 device: the entry point in ``torch.backends``.

It runs at the end of ``import torch``: it imports neither a WebGPU implementation nor the compiler,
opens nothing, and never raises. PyTorch may be half imported while this module is: only `register`
may touch it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_registered = False
_run: Callable[..., Any] | None = None


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
    global _registered
    if _registered:
        return
    try:
        _register()
        _registered = True
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
    from .api import module
    from .patches import (
        accelerate,
        accelerator,
        associative_scan,
        compiled_optimizers,
        copies_between,
        data_parallel,
        default_backend,
        device_mesh,
        flex_attention,
        generation,
        generator_class,
        generic_streams,
        grad_scaler,
        guard,
        inductor,
        legacy_profiler,
        lightning,
        lstm_cells,
        nested_attention,
        pinning,
        precompiling,
        process_groups,
        random_states,
        safetensors,
        sending,
        several_devices,
        storage_methods,
        torchao,
        transformers,
        transformers_models,
        uninitialized_parameters,
    )
    from .registration import new_library, untraced

    backend_registration._setup_privateuseone_for_python_backend(
        "webgpu", backend_module=module, device_guard=guard.DeviceGuard()
    )
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    new_library("_").fallback(untraced(run), "PrivateUse1")
    for patch in (
        *(pinning, guard, accelerator, generic_streams, storage_methods, sending),
        *(process_groups, data_parallel, copies_between, default_backend, several_devices),
        *(uninitialized_parameters, safetensors, accelerate, transformers, transformers_models),
        *(generation, torchao, lightning, random_states, generator_class, precompiling),
        *(device_mesh, compiled_optimizers, flex_attention, grad_scaler, nested_attention),
        *(associative_scan, legacy_profiler, inductor, lstm_cells),
    ):
        patch.install()


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator that has no kernel of its own; registers those that have one before."""
    global _run
    if _run is None:
        from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel

        from .eager import kernels  # the compiler, which takes a second

        _run = kernels.register()
        if has_kernel(op.name(), "PrivateUse1"):
            return op(*arguments, **keywords)
    return _run(op, *arguments, **keywords)
