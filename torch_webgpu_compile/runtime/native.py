"""``webgpu.h`` through cffi: no Python objects of a provider in work done once per dispatch.

The same code runs on wgpu-native and on Dawn; what differs is a `library.Library`. Both report an
error inside the failing call. In wgpu-native 29 a few calls end the process on an error instead:
`wgpuQueueSubmit`, `wgpuBufferGetMappedRange` and `wgpuDevicePoll`. So nothing is submitted unless
its encoder finished without an error, buffers are released and never destroyed, ranges are asked
for only after a successful mapping, and before each of those calls another one, which does report
errors, asks whether the device still works (`NativeBackend.check`). What is left is a driver that
reports a loss for the first time to one of those calls.

Ctrl-C may raise after any call that Python makes, also before its result is stored. So what must be
released is collected by ``results.extend(map(function, …))``, which is one call, or belongs to a
cffi object from the start; and what C calls (callbacks, destructors) is C code, ``append`` of a
list: in Python code the interrupt would be swallowed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from ..errors import DeviceError, DeviceLostError
from ..plan.model import Kernel
from .failures import device_error, lost_error, shader_error
from .host_copy import copy_memory
from .interface import (
    COPY_DST,
    COPY_SRC,
    MAP_READ,
    MAP_WRITE,
    QUERY_RESOLVE,
    BindGroupMaker,
    Command,
    DispatchItem,
    DispatchRun,
    Handle,
    Span,
)
from .library import Library
from .process_life import finish, process, refuse, use
from .signals import Signal

_MAX_QUERIES = 4096  # WebGPU spec, the largest query set
_THROTTLE = 64  # submissions after which the host waits for those before them: bounds queued work


class NativeBackend:
    """A device of a library. All failures are raised as exceptions of `errors`.

    Safe to call from several threads: `submit` orders itself by a lock.

    Attributes:
        lost_cause: what was reported when the device was found lost; "" while it works.
        submissions: submits made so far.
    """

    def __init__(self, library: Library) -> None:
        use(self)
        self.library = library
        self.ffi, self.lib = library.ffi, library.lib
        self.device: Handle = library.device
        self.queue: Handle = library.queue
        self._lock = threading.Lock()
        self._pipelines = _Pipelines(self)
        self._upload_guard = self.guard("an upload")
        self._map_guard = self.guard("a mapping")
        self._submit_guard: AbstractContextManager[None] = nullcontext()
        if library.refuses_submits:
            self._submit_guard = self.guard("submitting commands")
        self._unmap_guard = self.guard("the end of a mapping")
        self.submissions = 0
        self._throttled: Handle | None = None
        self._mappings: dict[int, Signal] = {}
        self._abandoned: list[Signal] = []  # C may still call them
        self._dropped_buffers: deque[Handle] = deque()
        self.dropped_pipelines: deque[Handle] = deque()
        self._dropped_groups: deque[Handle] = deque()
        self._timestamps = bool(
            self.lib.wgpuDeviceHasFeature(self.device, self.lib.WGPUFeatureName_TimestampQuery)
        )
        self.lost_cause = ""
        self._encoder_desc = self.ffi.new("WGPUCommandEncoderDescriptor *")
        self._finish_desc = self.ffi.new("WGPUCommandBufferDescriptor *")
        self._pass_desc = self.ffi.new("WGPUComputePassDescriptor *")

    # ---- errors

    def guard(self, subject: str) -> Guard:
        """Raises a DeviceError when a call inside reports an error; ``subject``: what is done."""
        return Guard(self, partial(device_error, subject=subject))

    def find_loss(self) -> bool:
        """Whether the device is lost; asks the library."""
        if not self.lost_cause and not process.forked:
            self.lost_cause = self.library.find_loss()
        return self.lost_cause != ""

    def check(self, subject: str) -> None:
        """Raises DeviceLostError if the device is lost; ``subject``: what was being done."""
        if self.find_loss():
            raise lost_error(subject, self.lost_cause)

    def error(
        self, make_error: Callable[[str, str], DeviceError], kind: str, message: str
    ) -> DeviceError:
        """``make_error(kind, message)``, or the loss of the device that the message came of."""
        error = make_error(kind, message)
        if isinstance(error, DeviceLostError):
            self.lost_cause = self.lost_cause or error.cause
        elif self.find_loss():
            error = make_error(kind, self.lost_cause)
        return error

    # ---- buffers

    def create_buffer(self, nbytes: int, usage: int) -> Handle:
        """A buffer of ``nbytes`` whose handle releases it when it is dropped.

        Raises OutOfMemoryError, or another DeviceError.
        """
        desc = self.ffi.new("WGPUBufferDescriptor *")
        desc.size = nbytes
        desc.usage = usage
        made: list[Handle] = []
        try:
            with self.guard(f"a buffer of {nbytes} bytes"):
                made.extend(map(self.lib.wgpuDeviceCreateBuffer, (self.device,), (desc,)))
            handle = self.ffi.gc(made[0], self._dropped_buffers.append)
            del made[0]
            return handle
        finally:
            for failed in made:
                if failed:
                    self.lib.wgpuBufferRelease(failed)

    def release_buffer(self, handle: Handle) -> None:
        """Releases a buffer now; the library keeps its memory while the GPU uses it."""
        self.ffi.gc(handle, None)
        self._dropped_buffers.append(handle)
        self._release_dropped()

    def destroy_buffer(self, handle: Handle) -> None:
        """Releases a buffer of which bind groups are kept: these would keep its memory.

        They may be in submitted commands, but not in pending ones.
        """
        if not process.forked:
            self.lib.wgpuBufferDestroy(handle)
        self.release_buffer(handle)

    def _release_dropped(self) -> None:
        """Releases handles whose owners are gone."""
        if process.forked:
            return
        lib = self.lib
        for dropped, release in (
            (self._dropped_groups, lib.wgpuBindGroupRelease),
            (self.dropped_pipelines, lib.wgpuComputePipelineRelease),
            (self._dropped_buffers, self._release_buffer),
        ):
            while dropped:
                try:
                    handle = dropped.pop()
                except IndexError:  # another thread was faster
                    break
                if handle:
                    release(handle)

    def _release_buffer(self, handle: Handle) -> None:
        mapping = self._mappings.pop(int(self.ffi.cast("intptr_t", handle)), None)
        if mapping is not None and not mapping.statuses:
            self._abandoned.append(mapping)
        self.lib.wgpuBufferRelease(handle)

    def __del__(self) -> None:
        self._release_dropped()

    def write_buffer(self, handle: Handle, offset: int, source: int | bytes, nbytes: int) -> None:
        """Copies host memory, bytes or from an address on, into a buffer before the next submit.

        ``offset`` and ``nbytes`` are multiples of 4 bytes.
        """
        if isinstance(source, int):
            source = self.ffi.cast("void *", source)
        with self._upload_guard:
            self.lib.wgpuQueueWriteBuffer(self.queue, handle, offset, source, nbytes)

    def fill_staging(
        self, handle: Handle, address: int, nbytes: int, submission: int | None
    ) -> None:
        """Copies host memory into a MAP_WRITE buffer.

        Args:
            submission: the one that last read it, to be waited for; None if there was none.
        """
        copy_memory(self._map(handle, MAP_WRITE, nbytes, submission), address, nbytes)
        self.unmap(handle)

    def map(self, handle: Handle, nbytes: int, submission: int | None) -> int:
        """The host address of the first ``nbytes`` of a MAP_READ buffer, after ``submission``.

        Raises DeviceLostError, or another DeviceError if it cannot be mapped.
        """
        return self._map(handle, MAP_READ, nbytes, submission)

    def _map(self, handle: Handle, mode: int, nbytes: int, submission: int | None) -> int:
        key = int(self.ffi.cast("intptr_t", handle))
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = Signal(
                self.ffi, "WGPUBufferMapCallback", self.library.callback_mode
            )
        mapping.statuses.clear()
        with self._map_guard:
            future = self.lib.wgpuBufferMapAsync(handle, mode, 0, nbytes, mapping.info[0])
        # That has told if the device is lost.
        self.library.wait_for_map(future, mapping, submission)
        # Another thread that polls may run the callback, a moment after this thread's poll returns.
        while not mapping.statuses:
            time.sleep(0.0005)
            self.wait()
        with self._lock:  # no submit of another thread takes the buffer away after the check
            self.check("a mapping")
            if mapping.statuses[0] != self.lib.WGPUMapAsyncStatus_Success:
                raise device_error(
                    "Mapping", f"status {mapping.statuses[0]}", f"mapping {nbytes} bytes"
                )
            if mode == MAP_READ:  # Dawn gives no other range of what is mapped for reading
                pointer = self.lib.wgpuBufferGetConstMappedRange(handle, 0, nbytes)
            else:
                pointer = self.lib.wgpuBufferGetMappedRange(handle, 0, nbytes)
        if not pointer:
            raise device_error("Mapping", "no memory", f"mapping {nbytes} bytes")
        return int(self.ffi.cast("intptr_t", pointer))

    def unmap(self, handle: Handle) -> None:
        """Ends the mapping; a device that is lost by then is reported by the next call."""
        # What was mapped has been read or written: if the device is lost, the next call says so.
        with suppress(DeviceLostError), self._unmap_guard:
            self.lib.wgpuBufferUnmap(handle)

    # ---- pipelines

    def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[Handle, Handle]:
        """(pipeline, bind group layout) of a kernel. Raises ShaderError."""
        return self._pipelines.create(kernel, checked)

    def bind_group_maker(
        self, layout: Handle, ranges: Sequence[tuple[int, int]], name: str
    ) -> BindGroupMaker:
        """A function that makes bind groups of one kernel.

        It takes a handle per binding and perhaps an offset for each, in bytes, which is added to
        that of ``ranges``. Groups are released when they are dropped. Not safe to call from two
        threads at once.

        Args:
            ranges: (offset in bytes, nbytes) of each binding.
            name: the kernel's, for errors.
        """
        # An eager operator makes a bind group per call: everything but the buffers is prepared.
        ffi, gc, device = self.ffi, self.ffi.gc, self.device
        create, release = self.lib.wgpuDeviceCreateBindGroup, self._dropped_groups.append
        array = ffi.new("WGPUBindGroupEntry []", max(len(ranges), 1))
        for i, (offset, nbytes) in enumerate(ranges):
            array[i].binding = i
            array[i].offset = offset
            array[i].size = nbytes
        desc = ffi.new("WGPUBindGroupDescriptor *")
        desc.layout = layout
        desc.entryCount = len(ranges)
        desc.entries = array
        entries = [array[i] for i in range(len(ranges))]  # they do not keep the array
        guard = self.guard(f"binding {name}")

        def make(
            buffers: Sequence[Handle], starts: Sequence[int] = (), _keep: Any = array
        ) -> Handle:
            for entry, buffer in zip(entries, buffers, strict=True):
                entry.buffer = buffer
            for entry, (offset, _), start in zip(entries, ranges, starts, strict=False):
                entry.offset = offset + start
            try:
                with guard:
                    return gc(create(device, desc), release)
            finally:
                if starts:
                    for entry, (offset, _) in zip(entries, ranges, strict=True):
                        entry.offset = offset

        return make

    # ---- submitting

    def submit(self, commands: Sequence[Command], name: str) -> int:
        """Encodes commands in order and submits them, without waiting; a number for `map`.

        Adjacent dispatches share a compute pass. Nothing is submitted when an error is raised.
        """
        return self.submit_encoded(lambda encoder: self._encode(encoder, commands), name)

    def _encode(self, encoder: Handle, commands: Sequence[Command]) -> None:
        items: list[DispatchItem] = []
        for command in commands:
            if isinstance(command, DispatchRun):
                items += command.items
                continue
            if items:
                self.encode_pass(encoder, items, self._pass_desc)
                items = []
            self.lib.wgpuCommandEncoderCopyBufferToBuffer(
                encoder,
                command.source,
                command.source_offset,
                command.destination,
                command.destination_offset,
                command.nbytes,
            )
        if items:
            self.encode_pass(encoder, items, self._pass_desc)

    def _submit(self, command_buffer: Handle) -> int:
        """Submits a command buffer that finished without an error, and releases it."""
        buffers = self.ffi.new("WGPUCommandBuffer []", [command_buffer])
        indices: list[Any] = []
        try:
            with self._submit_guard:
                indices.extend(map(self.library.submit, (self.queue,), (1,), (buffers,)))
            return self.submissions + 1 if indices[0] is None else int(indices[0])
        finally:  # also after Ctrl-C the count is right, by which the queue knows what has run
            if indices:
                self.submissions += 1
            self.lib.wgpuCommandBufferRelease(command_buffer)

    def submit_encoded(self, encode: Callable[[Handle], None], name: str) -> int:
        """Submits what ``encode`` records into a command encoder. Raises DeviceError."""
        with self._lock:
            self._release_dropped()
            command_buffer = self._record(encode, name)
            if self.find_loss():
                self.lib.wgpuCommandBufferRelease(command_buffer)
                raise lost_error(f"running {name}", self.lost_cause)
            index = self._submit(command_buffer)
            must_finish = None
            if self.submissions % _THROTTLE == 0:
                must_finish, self._throttled = self._throttled, self.library.mark(index)
        if must_finish is not None:
            self.check("waiting for the GPU")
            self.library.wait(must_finish)
        if process.exiting:
            finish(self)
        return index

    def _record(self, encode: Callable[[Handle], None], name: str) -> Handle:
        """A command buffer that finished without an error."""
        lib = self.lib
        made: list[Handle] = []  # the encoder, and its command buffer
        try:
            with self.guard(f"running {name}"):
                made.extend(
                    map(lib.wgpuDeviceCreateCommandEncoder, (self.device,), (self._encoder_desc,))
                )
                encode(made[0])
                made.extend(map(lib.wgpuCommandEncoderFinish, made, (self._finish_desc,)))
        except BaseException:
            for finished in made[1:]:
                if finished:
                    lib.wgpuCommandBufferRelease(finished)
            raise
        finally:
            for encoder in made[:1]:
                if encoder:
                    lib.wgpuCommandEncoderRelease(encoder)
        return made[1]

    def encode_pass(self, encoder: Handle, items: Sequence[DispatchItem], pass_desc: Any) -> None:
        """Records a compute pass."""
        lib, null = self.lib, self.ffi.NULL
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        begun: list[Handle] = []
        current = None
        try:
            begun.extend(map(lib.wgpuCommandEncoderBeginComputePass, (encoder,), (pass_desc,)))
            encoder_pass = begun[0]
            for pipeline, group, x, y, z in items:
                if pipeline is not None and pipeline is not current:
                    set_pipeline(encoder_pass, pipeline)
                    current = pipeline
                set_bind_group(encoder_pass, 0, group, 0, null)
                dispatch(encoder_pass, x, y, z)
        finally:
            for encoder_pass in begun:
                lib.wgpuComputePassEncoderEnd(encoder_pass)
                lib.wgpuComputePassEncoderRelease(encoder_pass)

    def wait(self) -> None:
        """Waits until all submissions are done. Raises DeviceLostError."""
        self.check("waiting for the GPU")
        self.library.wait(None)

    def wait_at_most(self, seconds: float) -> bool:
        """`wait`, but no longer than this; whether all submissions are done."""
        self.check("waiting for the GPU")
        return self.library.wait_at_most(seconds)

    def submit_timed(self, run: DispatchRun, name: str) -> list[Span] | None:
        """Runs dispatches one by one and waits; None, and nothing run, without timestamps."""
        if not self._timestamps:
            return None
        spans: list[Span] = []
        current: Handle | None = None
        for first in range(0, len(run.items), _MAX_QUERIES // 2):
            items = []
            for pipeline, *rest in run.items[first : first + _MAX_QUERIES // 2]:
                current = pipeline if pipeline is not None else current
                items.append((current, *rest))
            spans += self._time(items, name)
        return spans

    def _time(self, items: Sequence[DispatchItem], name: str) -> list[Span]:
        """Runs dispatches, each in a pass of its own, and waits. Raises DeviceError."""
        ffi, lib = self.ffi, self.lib
        count = 2 * len(items)
        desc = ffi.new("WGPUQuerySetDescriptor *")
        desc.type = lib.WGPUQueryType_Timestamp
        desc.count = count
        with self.guard("timestamp queries"):
            query_set = lib.wgpuDeviceCreateQuerySet(self.device, desc)
        values = self.create_buffer(8 * count, QUERY_RESOLVE | COPY_SRC)
        staging = self.create_buffer(8 * count, MAP_READ | COPY_DST)

        def encode(encoder: Handle) -> None:
            writes = ffi.new("WGPUPassTimestampWrites *")
            writes.querySet = query_set
            pass_desc = ffi.new("WGPUComputePassDescriptor *")
            pass_desc.timestampWrites = writes
            for i, item in enumerate(items):
                writes.beginningOfPassWriteIndex = 2 * i
                writes.endOfPassWriteIndex = 2 * i + 1
                self.encode_pass(encoder, [item], pass_desc)
            lib.wgpuCommandEncoderResolveQuerySet(encoder, query_set, 0, count, values, 0)
            lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, values, 0, staging, 0, 8 * count)

        try:
            submission = self.submit_encoded(encode, name)
            address = self.map(staging, 8 * count, submission)
            ticks = ffi.unpack(ffi.cast("uint64_t *", address), count)
            self.unmap(staging)
        finally:
            lib.wgpuQuerySetRelease(query_set)
            self.release_buffer(values)
            self.release_buffer(staging)
        period = self.library.tick_seconds()
        return [
            (ticks[i] * period, max(ticks[i], ticks[i + 1]) * period) for i in range(0, count, 2)
        ]


class Guard:
    """See `NativeBackend.guard`. A class, as a generator's context manager costs 1 µs more."""

    __slots__ = ("_backend", "_capture", "_make_error", "_release")

    def __init__(
        self, backend: NativeBackend, make_error: Callable[[str, str], DeviceError]
    ) -> None:
        self._backend = backend
        self._make_error = make_error
        self._capture, self._release = backend.library.capture, backend.library.release

    def __enter__(self) -> None:
        if process.restricted:
            refuse()
        self._capture()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failure = self._release()
        if failure is not None and kind is None:
            raise self._backend.error(self._make_error, *failure)


class _Pipelines:
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
        guard = Guard(self._backend, partial(shader_error, kernel=kernel))
        try:
            with guard:
                module = self._create_module(kernel, label, checked)
            desc.compute.module = module
            with guard:
                pipeline = lib.wgpuDeviceCreateComputePipeline(self._backend.device, desc)
        except BaseException:
            if pipeline:
                lib.wgpuComputePipelineRelease(pipeline)
            raise
        finally:
            if module:
                lib.wgpuShaderModuleRelease(module)
            del keep_label, keep_entry
        return ffi.gc(pipeline, self._backend.dropped_pipelines.append), group_layout

    def _create_module(self, kernel: Kernel, label: Any, checked: bool) -> Handle:
        ffi, lib = self._backend.ffi, self._backend.lib
        library = self._backend.library
        code, keep_code = self._string(library.prepare_wgsl(kernel.wgsl))
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code = code
        desc = ffi.new("WGPUShaderModuleDescriptor *")
        desc.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        desc.label = label
        module = library.create_module(desc, checked)
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
        with self._backend.guard(subject):
            group = lib.wgpuDeviceCreateBindGroupLayout(self._backend.device, desc)
        groups = ffi.new("WGPUBindGroupLayout []", [group])
        pipeline_desc = ffi.new("WGPUPipelineLayoutDescriptor *")
        pipeline_desc.bindGroupLayoutCount = 1
        pipeline_desc.bindGroupLayouts = groups
        with self._backend.guard(subject):
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
