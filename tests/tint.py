"""What Tint, the compiler of Dawn and of Chrome, says of WGSL: without a GPU, for any feature.

Dawn has an adapter that runs nothing and offers everything, matrix units included.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tests.providers import has_provider
from torch_webgpu_compile.runtime import dawn

_FEATURES = ("shader-f16", "subgroups", "chromium-experimental-subgroup-matrix")


class Tint:
    """Dawn's null device."""

    def __init__(self) -> None:
        # Opens Dawn's instance with the toggles that this needs, and the driver of other tests.
        has_provider("wgpudawn")
        adapter = SimpleNamespace(_internal=_null_adapter(), info={})
        self._library = dawn.open_library(adapter, _FEATURES, {}, checked=False)

    def error(self, wgsl: str) -> str:
        """What is wrong with a kernel, perhaps among warnings; "" if nothing is."""
        library = self._library
        ffi, lib = library.ffi, library.lib
        code = ffi.new("char []", library.prepare_wgsl(wgsl).encode())
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = code, len(code) - 1
        desc = ffi.new("WGPUShaderModuleDescriptor *")
        desc.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        library.capture()
        lib.wgpuShaderModuleRelease(library.create_module(desc, checked=False))
        report = library.release()
        return "" if report is None else report[1]


def _null_adapter() -> Any:
    ffi, lib = dawn.bindings()
    made: list[Any] = []

    @ffi.callback("WGPURequestAdapterCallback")  # type: ignore[untyped-decorator]
    def on_adapter(_status: int, adapter: Any, *_: Any) -> None:
        made.append(adapter)

    options = ffi.new("WGPURequestAdapterOptions *")
    options.backendType = lib.WGPUBackendType_Null
    info = ffi.new("WGPURequestAdapterCallbackInfo *")
    info.mode = lib.WGPUCallbackMode_AllowSpontaneous  # it calls back at once
    info.callback = on_adapter
    lib.wgpuInstanceRequestAdapter(dawn._instance(), options, info[0])
    return made[0]


@cache
def _tint() -> Tint:
    return Tint()


def tint() -> Tint:
    """The compiler; skips the test where Dawn is not installed."""
    if find_spec("wgpudawn") is None:
        pytest.skip("wgpudawn is not installed")
    return _tint()
