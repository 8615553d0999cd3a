"""What Tint, the compiler of Dawn and of Chrome, says of WGSL: without a GPU, for any feature.

Dawn has an adapter that runs nothing and offers everything, matrix units included.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.providers import has_provider
from torch_webgpu_compile.runtime import dawn

_FEATURES = ("ShaderF16", "Subgroups", "ChromiumExperimentalSubgroupMatrix")


class Tint:
    """Dawn's null device."""

    def __init__(self) -> None:
        # Opens Dawn's instance with the toggles that this needs, and the driver of other tests.
        has_provider("wgpudawn")
        self.ffi, self.lib = dawn._bindings()
        self._messages: list[str] = []
        made: list[Any] = []

        @self.ffi.callback("WGPURequestAdapterCallback")  # type: ignore[untyped-decorator]
        def on_adapter(_status: int, adapter: Any, *_: Any) -> None:
            made.append(adapter)

        def on_error(_device: Any, _kind: int, message: Any, *_: Any) -> None:
            self._messages.append(dawn._text(self.ffi, message))

        new, lib = self.ffi.new, self.lib
        options = new("WGPURequestAdapterOptions *")
        options.backendType = lib.WGPUBackendType_Null
        info = new("WGPURequestAdapterCallbackInfo *")
        info.mode = lib.WGPUCallbackMode_AllowSpontaneous
        info.callback = on_adapter
        lib.wgpuInstanceRequestAdapter(dawn._instance(), options, info[0])
        desc = new("WGPUDeviceDescriptor *")
        names = new("WGPUFeatureName []", [getattr(lib, f"WGPUFeatureName_{f}") for f in _FEATURES])
        desc.requiredFeatureCount, desc.requiredFeatures = len(_FEATURES), names
        limits = new("WGPULimits *")
        lib.wgpuAdapterGetLimits(made[0], limits)
        desc.requiredLimits = limits
        toggles, _texts = dawn._toggles(self.ffi, lib, False)
        desc.nextInChain = self.ffi.cast("WGPUChainedStruct *", toggles)
        self._kept = on_adapter, self.ffi.callback("WGPUUncapturedErrorCallback", on_error)
        desc.uncapturedErrorCallbackInfo.callback = self._kept[1]
        adapter = type("Adapter", (), {"_internal": made[0]})
        self._device = dawn._request_device(self.ffi, lib, adapter, desc)

    def errors(self, wgsl: str) -> list[str]:
        """What is wrong with a kernel: messages, each perhaps with warnings."""
        self._messages.clear()
        code = self.ffi.new("char []", dawn.with_extensions(wgsl).encode())
        source = self.ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = self.lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = code, len(code) - 1
        desc = self.ffi.new("WGPUShaderModuleDescriptor *")
        desc.nextInChain = self.ffi.cast("WGPUChainedStruct *", source)
        module = self.lib.wgpuDeviceCreateShaderModule(self._device, desc)
        self.lib.wgpuShaderModuleRelease(module)
        return list(self._messages)


@cache
def _tint() -> Tint:
    return Tint()


def tint() -> Tint:
    """The compiler; skips the test where Dawn is not installed."""
    if find_spec("wgpudawn") is None:
        pytest.skip("wgpudawn is not installed")
    return _tint()
