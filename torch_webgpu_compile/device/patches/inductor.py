"""Inductor, asked for by name to compile for the device, says what to use instead.

Patched: ``get_device_op_overrides`` of ``torch._inductor.codegen.common``, when that is imported.

Why: ``torch._inductor.aoti_compile_and_package``, ``aot_compile``, ``compile`` and
``standalone_compile`` end in ``KeyError: 'webgpu'``. (``torch.compile`` with Inductor takes this
package: see `default_backend`.)

Until: Inductor has kernels for the device, or says that it has none.
"""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedOp
from ...tensors import devices
from ..import_hooks import around


@around("torch._inductor.codegen.common:get_device_op_overrides")
def get_device_op_overrides(find: Any, device: str) -> Any:
    if device == devices.NAME:
        raise UnsupportedOp(
            "torch._inductor",
            "Inductor and AOTInductor have no kernels for webgpu devices",
            'compile with torch.compile(model, backend="webgpu"), which keeps what it made in '
            "the folders of TORCH_WEBGPU_CACHE and TORCH_CACHING_PRECOMPILE=1, or make a "
            "bundle that runs without Python with torch_webgpu_compile.export",
        )
    return find(device)
