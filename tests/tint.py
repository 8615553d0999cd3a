"""What Tint, the compiler of Dawn and of Chrome, says of WGSL: without a GPU, for any feature.

Dawn has an adapter that runs nothing and offers everything, matrix units included.
"""

from __future__ import annotations

import re
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
        """What is wrong with a kernel, perhaps among warnings; "" if nothing is.

        Of those with matrix units also what Tint does not say, see `misplaced`.
        """
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
        return misplaced(wgsl) if report is None else report[1]


_VARIABLE = re.compile(r"^var<workgroup> (\w+): (.+);", re.MULTILINE)
_NBYTES = {"f16": 2, "f32": 4, "i32": 4, "u32": 4}
_LANES = re.compile(r"vec(\d)<(\w+)>")


def misplaced(wgsl: str) -> str:
    """The variables behind which a matrix might not begin at a multiple of 16 bytes; "" if none.

    Drivers put variables of a workgroup behind each other, and an H200 loads such a matrix wrong.
    """
    if "subgroupMatrixLoad" not in wgsl:
        return ""
    sizes = {name: _nbytes_of(type) for name, type in _VARIABLE.findall(wgsl)}
    wrong = [f"{name} has {size} bytes" for name, size in sizes.items() if size % 16]
    return ", ".join(wrong)


def _nbytes_of(type: str) -> int:
    if type.startswith("array<"):
        element, count = type.removeprefix("array<").removesuffix(">").rsplit(", ", 1)
        return int(count) * _nbytes_of(element)
    vector = _LANES.fullmatch(type)
    if vector:
        return int(vector[1]) * _NBYTES[vector[2]]
    return _NBYTES[type.removeprefix("atomic<").removesuffix(">")]


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
