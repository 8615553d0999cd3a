"""Compute pipelines on wgpu-native."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError
from ..plan.model import Kernel
from .failures import device_error, shader_error
from .interface import Handle

if TYPE_CHECKING:
    from .native import NativeBackend


class NativePipelines:
    """Creates the pipelines of one device. Safe to call from several threads."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._layouts: dict[tuple[tuple[bool, ...], bool], tuple[Handle, Handle]] = {}
        self._lock = threading.Lock()

    def create(self, kernel: Kernel, checked: bool) -> tuple[Handle, Handle]:
        """(pipeline, bind group layout). Raises ShaderError."""
        ffi, lib = self._backend.ffi, self._backend.lib
        writable = tuple(binding.writable for binding in kernel.bindings)
        group_layout, pipeline_layout = self._layout(writable, kernel.parameter_count > 0)
        label, keep_label = self._string(kernel.name)
        entry_point, keep_entry = self._string("main")
        desc = ffi.new("WGPUComputePipelineDescriptor *")
        desc.label = label
        desc.layout = pipeline_layout
        desc.compute.entryPoint = entry_point
        module = pipeline = None
        try:
            with self._backend.guard(lambda kind, text: shader_error(kind, text, kernel)):
                module = self._create_module(kernel, label, checked)
            desc.compute.module = module
            with self._backend.guard(lambda kind, text: shader_error(kind, text, kernel)):
                pipeline = lib.wgpuDeviceCreateComputePipeline(self._backend.device, desc)
        except DeviceError:
            if pipeline:
                lib.wgpuComputePipelineRelease(pipeline)
            raise
        finally:
            if module:
                lib.wgpuShaderModuleRelease(module)
            del keep_label, keep_entry
        return self._backend.own_pipeline(pipeline), group_layout

    def _create_module(self, kernel: Kernel, label: Any, checked: bool) -> Handle:
        ffi, lib = self._backend.ffi, self._backend.lib
        code, keep_code = self._string(kernel.wgsl)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code = code
        desc = ffi.new("WGPUShaderModuleDescriptor *")
        desc.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        desc.label = label
        if checked:
            module = lib.wgpuDeviceCreateShaderModule(self._backend.device, desc)
        else:
            module = lib.wgpuDeviceCreateShaderModuleTrusted(self._backend.device, desc, 0)
        del keep_code
        return module

    def _layout(self, writable: tuple[bool, ...], uniform: bool) -> tuple[Handle, Handle]:
        """(bind group layout, pipeline layout), shared by all kernels with the same bindings."""
        with self._lock:
            found = self._layouts.get((writable, uniform))
            if found is None:
                found = self._layouts[writable, uniform] = self._create_layout(writable, uniform)
            return found

    def _create_layout(self, writable: tuple[bool, ...], uniform: bool) -> tuple[Handle, Handle]:
        ffi, lib = self._backend.ffi, self._backend.lib
        types = [
            lib.WGPUBufferBindingType_Storage if w else lib.WGPUBufferBindingType_ReadOnlyStorage
            for w in writable
        ]
        if uniform:
            types.append(lib.WGPUBufferBindingType_Uniform)
        entries = ffi.new("WGPUBindGroupLayoutEntry []", max(len(types), 1))
        for i, binding_type in enumerate(types):
            entries[i].binding = i
            entries[i].visibility = lib.WGPUShaderStage_Compute
            entries[i].buffer.type = binding_type
        desc = ffi.new("WGPUBindGroupLayoutDescriptor *")
        desc.entryCount = len(types)
        desc.entries = entries
        subject = f"a kernel with {len(types)} buffer bindings"
        with self._backend.guard(lambda kind, text: device_error(kind, text, subject)):
            group = lib.wgpuDeviceCreateBindGroupLayout(self._backend.device, desc)
        groups = ffi.new("WGPUBindGroupLayout []", [group])
        pipeline_desc = ffi.new("WGPUPipelineLayoutDescriptor *")
        pipeline_desc.bindGroupLayoutCount = 1
        pipeline_desc.bindGroupLayouts = groups
        with self._backend.guard(lambda kind, text: device_error(kind, text, subject)):
            layout = lib.wgpuDeviceCreatePipelineLayout(self._backend.device, pipeline_desc)
        return group, layout

    def _string(self, text: str) -> tuple[Any, Any]:
        """(WGPUStringView, its memory, to be kept until the call returns)."""
        data = text.encode()
        memory = self._backend.ffi.new("char []", data)
        view = self._backend.ffi.new("WGPUStringView *")
        view.data = memory
        view.length = len(data)
        return view[0], memory
