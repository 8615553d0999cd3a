"""wgpu-native through cffi: what runs once per dispatch never touches wgpu-py's Python objects.

wgpu-native reports an error to a callback inside the failing call; wgpu-py's `ErrorHandler`
collects it per thread. A few calls abort the process on an error instead (wgpu-native 29):
`wgpuQueueSubmit` and `wgpuBufferGetMappedRange`. So nothing is submitted unless its encoder
finished without an error, buffers are released and never destroyed, and ranges are asked for only
after a successful mapping.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..errors import DeviceError
from ..plan.model import Kernel
from .failures import device_error, shader_error
from .interface import COPY_DST, COPY_SRC, MAP_READ, QUERY_RESOLVE, Command, DispatchRun, Handle

_MODULE = "wgpu.backends.wgpu_native"
_MAX_IN_FLIGHT = 64  # submissions; beyond it the host waits, so that queued work stays bounded
_MAX_QUERIES = 4096  # WebGPU spec, the largest query set

_exiting = False


@atexit.register
def _mark_exit() -> None:
    global _exiting
    _exiting = True


def _ffi() -> tuple[Any, Any, Any]:
    """(ffi, lib, wgpu-py's error handler)."""
    ffi_module = import_module(f"{_MODULE}._ffi")
    return ffi_module.ffi, ffi_module.lib, import_module(f"{_MODULE}._api").error_handler


def subgroup_sizes(adapter: Any) -> tuple[int, int]:
    """Smallest and largest subgroup size of a wgpu-py adapter."""
    ffi, lib, _ = _ffi()
    info = ffi.new("WGPUAdapterInfo *")
    lib.wgpuAdapterGetInfo(adapter._internal, info)
    sizes = int(info.subgroupMinSize), int(info.subgroupMaxSize)
    lib.wgpuAdapterInfoFreeMembers(info[0])
    return sizes


class NativeBackend:
    """`interface.Backend` on wgpu-native's handles."""

    def __init__(self, device: Any) -> None:
        self._ffi, self._lib, self._errors = _ffi()
        self._owner = device  # keeps the handles below alive
        self._device: Any = device._internal
        self._queue: Any = device.queue._internal
        self._lock = threading.Lock()
        self._layouts: dict[tuple[tuple[bool, ...], bool], tuple[Handle, Handle]] = {}
        self._layout_lock = threading.Lock()
        self._in_flight: deque[int] = deque()
        self._mappings: dict[int, _Mapping] = {}
        self._timestamps = "timestamp-query" in device.features
        self._encoder_desc = self._ffi.new("WGPUCommandEncoderDescriptor *")
        self._finish_desc = self._ffi.new("WGPUCommandBufferDescriptor *")
        self._pass_desc = self._ffi.new("WGPUComputePassDescriptor *")

    # ---- errors

    @contextmanager
    def _guard(self, make_error: Callable[[str, str], DeviceError]) -> Iterator[None]:
        """Raises ``make_error(kind, message)`` when a call inside reports an error."""
        self._errors.capture("torch_webgpu_compile")
        failure = None
        try:
            yield
        finally:
            failure = self._errors.release("torch_webgpu_compile")
        if failure is not None:
            raise make_error(*failure)

    def _string(self, text: str) -> tuple[Any, Any]:
        """(WGPUStringView, its memory, to be kept until the call returns)."""
        data = text.encode()
        memory = self._ffi.new("char []", data)
        view = self._ffi.new("WGPUStringView *")
        view.data = memory
        view.length = len(data)
        return view[0], memory

    # ---- buffers

    def create_buffer(self, nbytes: int, usage: int) -> Handle:
        desc = self._ffi.new("WGPUBufferDescriptor *")
        desc.size = nbytes
        desc.usage = usage
        handle = None
        try:
            with self._guard(
                lambda kind, text: device_error(kind, text, f"a buffer of {nbytes} bytes")
            ):
                handle = self._lib.wgpuDeviceCreateBuffer(self._device, desc)
        except DeviceError:
            if handle:
                self._lib.wgpuBufferRelease(handle)
            raise
        return handle

    def release_buffer(self, handle: Handle) -> None:
        self._mappings.pop(int(self._ffi.cast("intptr_t", handle)), None)
        if not _exiting:
            self._lib.wgpuBufferRelease(handle)

    def write_buffer(self, handle: Handle, offset: int, address: int, nbytes: int) -> None:
        source = self._ffi.cast("void *", address)
        with self._guard(lambda kind, text: device_error(kind, text, f"upload of {nbytes} bytes")):
            self._lib.wgpuQueueWriteBuffer(self._queue, handle, offset, source, nbytes)

    def map(self, handle: Handle, mode: int, nbytes: int) -> int:
        key = int(self._ffi.cast("intptr_t", handle))
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = _Mapping(self._ffi, self._lib)
        mapping.done.clear()
        with self._guard(lambda kind, text: device_error(kind, text, f"mapping {nbytes} bytes")):
            self._lib.wgpuBufferMapAsync(handle, mode, 0, nbytes, mapping.info[0])
        # Another thread that polls may run the callback, a moment after this thread's poll returns.
        while not mapping.done.is_set():
            self._lib.wgpuDevicePoll(self._device, True, self._ffi.NULL)
            mapping.done.wait(0.0005)
        if mapping.failure:
            raise device_error("Mapping", mapping.failure, f"mapping {nbytes} bytes")
        pointer = self._lib.wgpuBufferGetMappedRange(handle, 0, nbytes)
        return int(self._ffi.cast("intptr_t", pointer))

    def unmap(self, handle: Handle) -> None:
        self._lib.wgpuBufferUnmap(handle)

    # ---- pipelines

    def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[Handle, Handle]:
        ffi, lib = self._ffi, self._lib
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
            with self._guard(lambda kind, text: shader_error(kind, text, kernel)):
                module = self._create_module(kernel, label, checked)
            desc.compute.module = module
            with self._guard(lambda kind, text: shader_error(kind, text, kernel)):
                pipeline = lib.wgpuDeviceCreateComputePipeline(self._device, desc)
        except DeviceError:
            if pipeline:
                lib.wgpuComputePipelineRelease(pipeline)
            raise
        finally:
            if module:
                lib.wgpuShaderModuleRelease(module)
            del keep_label, keep_entry
        return pipeline, group_layout

    def _create_module(self, kernel: Kernel, label: Any, checked: bool) -> Handle:
        ffi, lib = self._ffi, self._lib
        code, keep_code = self._string(kernel.wgsl)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code = code
        desc = ffi.new("WGPUShaderModuleDescriptor *")
        desc.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        desc.label = label
        if checked:
            module = lib.wgpuDeviceCreateShaderModule(self._device, desc)
        else:
            module = lib.wgpuDeviceCreateShaderModuleTrusted(self._device, desc, 0)
        del keep_code
        return module

    def _layout(self, writable: tuple[bool, ...], uniform: bool) -> tuple[Handle, Handle]:
        """(bind group layout, pipeline layout), shared by all kernels with the same bindings."""
        with self._layout_lock:
            found = self._layouts.get((writable, uniform))
            if found is None:
                found = self._layouts[writable, uniform] = self._create_layout(writable, uniform)
            return found

    def _create_layout(self, writable: tuple[bool, ...], uniform: bool) -> tuple[Handle, Handle]:
        ffi, lib = self._ffi, self._lib
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
        with self._guard(lambda kind, text: device_error(kind, text, subject)):
            group = lib.wgpuDeviceCreateBindGroupLayout(self._device, desc)
        groups = ffi.new("WGPUBindGroupLayout []", [group])
        pipeline_desc = ffi.new("WGPUPipelineLayoutDescriptor *")
        pipeline_desc.bindGroupLayoutCount = 1
        pipeline_desc.bindGroupLayouts = groups
        with self._guard(lambda kind, text: device_error(kind, text, subject)):
            layout = lib.wgpuDeviceCreatePipelineLayout(self._device, pipeline_desc)
        return group, layout

    def create_bind_group(
        self, layout: Handle, entries: Sequence[tuple[Handle, int, int]], name: str
    ) -> Handle:
        ffi, lib = self._ffi, self._lib
        array = ffi.new("WGPUBindGroupEntry []", max(len(entries), 1))
        for i, (buffer, offset, nbytes) in enumerate(entries):
            entry = array[i]
            entry.binding = i
            entry.buffer = buffer
            entry.offset = offset
            entry.size = nbytes
        desc = ffi.new("WGPUBindGroupDescriptor *")
        desc.layout = layout
        desc.entryCount = len(entries)
        desc.entries = array
        group = None
        try:
            with self._guard(lambda kind, text: device_error(kind, text, f"binding {name}")):
                group = lib.wgpuDeviceCreateBindGroup(self._device, desc)
        except DeviceError:
            if group:
                lib.wgpuBindGroupRelease(group)
            raise
        return group

    def release_bind_group(self, handle: Handle) -> None:
        if not _exiting:
            self._lib.wgpuBindGroupRelease(handle)

    # ---- submitting

    def submit(self, commands: Sequence[Command], name: str) -> int:
        with self._lock:
            index = self._submit(self._encode(commands, name))
            self._in_flight.append(index)
            oldest = self._in_flight.popleft() if len(self._in_flight) > _MAX_IN_FLIGHT else None
        if oldest is not None:
            self.wait(oldest)
        return index

    def _submit(self, command_buffer: Handle) -> int:
        """Submits a command buffer that finished without an error, and releases it."""
        buffers = self._ffi.new("WGPUCommandBuffer []", [command_buffer])
        index = self._lib.wgpuQueueSubmitForIndex(self._queue, 1, buffers)
        self._lib.wgpuCommandBufferRelease(command_buffer)
        return int(index)

    def _encode(self, commands: Sequence[Command], name: str, queries: Any = None) -> Handle:
        """A finished command buffer. With ``queries``, every dispatch is a pass with two timestamps
        and (query set, buffer for their values) is resolved at the end."""
        lib = self._lib
        encoder = finished = None
        try:
            with self._guard(lambda kind, text: device_error(kind, text, f"running {name}")):
                encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, self._encoder_desc)
                for command in commands:
                    if not isinstance(command, DispatchRun):
                        lib.wgpuCommandEncoderCopyBufferToBuffer(
                            encoder,
                            command.source,
                            command.source_offset,
                            command.destination,
                            command.destination_offset,
                            command.nbytes,
                        )
                    elif queries is None:
                        self._encode_run(encoder, command, self._pass_desc)
                    else:
                        self._encode_timed(encoder, command, queries)
                finished = lib.wgpuCommandEncoderFinish(encoder, self._finish_desc)
        except BaseException:
            if finished:
                lib.wgpuCommandBufferRelease(finished)
            raise
        finally:
            if encoder:
                lib.wgpuCommandEncoderRelease(encoder)
        return finished

    def _encode_run(self, encoder: Handle, run: DispatchRun, pass_desc: Any) -> None:
        lib, null = self._lib, self._ffi.NULL
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        encoder_pass = lib.wgpuCommandEncoderBeginComputePass(encoder, pass_desc)
        try:
            for pipeline, group, x, y, z in run.items:
                if pipeline is not None:
                    set_pipeline(encoder_pass, pipeline)
                set_bind_group(encoder_pass, 0, group, 0, null)
                dispatch(encoder_pass, x, y, z)
        finally:
            lib.wgpuComputePassEncoderEnd(encoder_pass)
            lib.wgpuComputePassEncoderRelease(encoder_pass)

    def wait(self, submission: int | None = None) -> None:
        if submission is None:
            self._lib.wgpuDevicePoll(self._device, True, self._ffi.NULL)
            return
        index = self._ffi.new("WGPUSubmissionIndex *", submission)
        self._lib.wgpuDevicePoll(self._device, True, index)

    # ---- timing

    def submit_timed(self, run: DispatchRun, name: str) -> list[float] | None:
        if not self._timestamps:
            return None
        seconds: list[float] = []
        current: Handle | None = None
        for first in range(0, len(run.items), _MAX_QUERIES // 2):
            items = []
            for pipeline, *rest in run.items[first : first + _MAX_QUERIES // 2]:
                current = pipeline if pipeline is not None else current
                items.append((current, *rest))
            seconds += self._time(DispatchRun(items), name)
        return seconds

    def _time(self, run: DispatchRun, name: str) -> list[float]:
        ffi, lib = self._ffi, self._lib
        count = 2 * len(run.items)
        desc = ffi.new("WGPUQuerySetDescriptor *")
        desc.type = lib.WGPUQueryType_Timestamp
        desc.count = count
        with self._guard(lambda kind, text: device_error(kind, text, "timestamp queries")):
            query_set = lib.wgpuDeviceCreateQuerySet(self._device, desc)
        values = self.create_buffer(8 * count, QUERY_RESOLVE | COPY_SRC)
        staging = self.create_buffer(8 * count, MAP_READ | COPY_DST)
        try:
            with self._lock:
                self._submit(self._encode([run], name, (query_set, values, staging)))
            address = self.map(staging, MAP_READ, 8 * count)
            ticks = ffi.unpack(ffi.cast("uint64_t *", address), count)
            self.unmap(staging)
        finally:
            lib.wgpuQuerySetRelease(query_set)
            self.release_buffer(values)
            self.release_buffer(staging)
        period = lib.wgpuQueueGetTimestampPeriod(self._queue) * 1e-9
        return [max(0, ticks[i + 1] - ticks[i]) * period for i in range(0, count, 2)]

    def _encode_timed(self, encoder: Handle, run: DispatchRun, queries: Any) -> None:
        query_set, values, staging = queries
        writes = self._ffi.new("WGPUPassTimestampWrites *")
        writes.querySet = query_set
        desc = self._ffi.new("WGPUComputePassDescriptor *")
        desc.timestampWrites = writes
        for i, item in enumerate(run.items):
            writes.beginningOfPassWriteIndex = 2 * i
            writes.endOfPassWriteIndex = 2 * i + 1
            self._encode_run(encoder, DispatchRun([item]), desc)
        count = 2 * len(run.items)
        self._lib.wgpuCommandEncoderResolveQuerySet(encoder, query_set, 0, count, values, 0)
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, values, 0, staging, 0, 8 * count)

    def release(self) -> None:
        if _exiting or self._device is None:
            return
        self.wait()
        for group, layout in self._layouts.values():
            self._lib.wgpuBindGroupLayoutRelease(group)
            self._lib.wgpuPipelineLayoutRelease(layout)
        self._layouts.clear()
        self._owner = None


class _Mapping:
    """The callback of one staging buffer."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.done = threading.Event()
        self.failure = ""

        def mapped(status: int, message: Any, _userdata1: Any, _userdata2: Any) -> None:
            ok = status == lib.WGPUMapAsyncStatus_Success
            text = "" if ok or not message.data else ffi.string(message.data, message.length)
            self.failure = "" if ok else f"status {status} {text!r}"
            self.done.set()

        self._callback = ffi.callback(
            "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", mapped
        )
        self.info = ffi.new("WGPUBufferMapCallbackInfo *")
        self.info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        self.info.callback = self._callback
