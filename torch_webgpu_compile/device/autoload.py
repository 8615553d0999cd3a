"""Registers ``webgpu`` as PyTorch's PrivateUse1 device: the entry point in ``torch.backends``.

It runs at the end of ``import torch``: it imports neither a WebGPU implementation nor the compiler,
opens nothing, and never raises. PyTorch may be half imported while this module is: only `register`
may touch it.
"""

from __future__ import annotations

from typing import Any

_libraries: list[Any] = []


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
        guard,
        module,
        moving,
        pinning,
        process_groups,
        safetensors_files,
        storage_methods,
    )
    from .untraced import untraced

    backend_registration._setup_privateuseone_for_python_backend(
        "webgpu", backend_module=module, device_guard=guard.DeviceGuard()
    )
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(untraced(lambda op, *a, **k: run(op, *a, **k)), "PrivateUse1")
    host: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for operator, kernel in pinning.KERNELS.items():
        host.impl(operator, untraced(kernel), "CPU")
    _libraries.extend((library, host))
    guard.install()
    accelerator.install()
    storage_methods.install()
    moving.install()
    process_groups.install()
    data_parallel.install()
    safetensors_files.install()
    parameter: Any = torch.nn.parameter
    tensor: Any = torch.Tensor
    parameter.UninitializedTensorMixin._allowed_methods.append(tensor.webgpu)


def run(op: Any, *arguments: Any, **keywords: Any) -> Any:
    """Every operator without a kernel of its own; at first every operator."""
    from . import kernels

    kernels.register()  # also puts the real fallback in the place of this function
    return op(*arguments, **keywords)
