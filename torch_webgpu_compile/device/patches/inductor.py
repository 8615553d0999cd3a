"""Inductor, asked for by name to compile for the device, says what to use instead.

Patched: ``get_device_op_overrides`` of ``torch._inductor.codegen.common``, when that is imported.

Why: ``torch._inductor.aoti_compile_and_package``, ``aot_compile``, ``compile`` and
``standalone_compile`` end in ``KeyError: 'webgpu'``. (``torch.compile`` with Inductor takes this
package: see `default_backend`.)

Until: Inductor has kernels for the device, or says that it has none.
"""

from __future__ import annotations

import functools
from typing import Any

from ...errors import UnsupportedOp
from .. import devices
from ..import_hooks import after_import


def install() -> None:
    """Has Inductor refuse the device with a reason."""
    after_import("torch._inductor.codegen.common", _refuse)


def _refuse(module: Any) -> None:
    find = getattr(module, "get_device_op_overrides", None)
    if find is None:
        return

    @functools.wraps(find)
    def get_device_op_overrides(device: str) -> Any:
        if device == devices.NAME:
            raise UnsupportedOp(
                "torch._inductor",
                "Inductor and AOTInductor have no kernels for webgpu devices",
                'compile with torch.compile(model, backend="webgpu"), which keeps what it made in '
                "the folders of TORCH_WEBGPU_CACHE and TORCH_CACHING_PRECOMPILE=1, or make a "
                "bundle that runs without Python with torch_webgpu_compile.export",
            )
        return find(device)

    module.get_device_op_overrides = get_device_op_overrides
