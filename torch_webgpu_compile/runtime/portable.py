"""`interface.Backend` through wgpu-py's public API: slower, for any provider that has this API."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import DeviceError, DeviceLostError
from ..plan.model import Kernel
from .failures import device_error, shader_error
from .interface import (
    COPY_DST,
    COPY_SRC,
    MAP_READ,
    MAP_WRITE,
    BindGroupMaker,
    Command,
    DispatchRun,
    Handle,
    Span,
)

_COMPUTE = 0x4  # WebGPU spec, GPUShaderStage


def _with_extensions(wgsl: str) -> str:
    """Declares the extensions that Tint wants declared and naga does not know by name."""
    return f"enable subgroups;\n{wgsl}" if "subgroupShuffle" in wgsl else wgsl


class PortableBackend:
    """A device of any provider with wgpu-py's API."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self.submissions = 0
        self._fence: Any = None
        self.lost_cause = ""

    @contextmanager
    def _guard(self, make_error: Callable[[str, str], DeviceError]) -> Iterator[None]:
        """wgpu-py raises GPUValidationError, GPUOutOfMemoryError, … or RuntimeError."""
        try:
            yield
        except DeviceError:
            raise
        except Exception as error:
            kind = type(error).__name__.removeprefix("GPU").removesuffix("Error")
            made = make_error(kind, str(error))
            if isinstance(made, DeviceLostError):
                self.lost_cause = self.lost_cause or made.cause
            raise made from error

    def find_loss(self) -> bool:
        """Whether a call has reported that the device is lost."""
        return self.lost_cause != ""

    def create_buffer(self, nbytes: int, usage: int) -> Handle:
        """A buffer of ``nbytes``. Raises OutOfMemoryError, or another DeviceError."""
        with self._guard(
            lambda kind, text: device_error(kind, text, f"a buffer of {nbytes} bytes")
        ):
            return self._device.create_buffer(size=nbytes, usage=usage)

    def release_buffer(self, handle: Handle) -> None:
        """Does nothing: the memory is freed when the buffer object is dropped."""

    def write_buffer(self, handle: Handle, offset: int, address: int, nbytes: int) -> None:
        """Copies ``nbytes`` from host ``address`` into the buffer, before the next submit."""
        source = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
        with self._guard(lambda kind, text: device_error(kind, text, f"upload of {nbytes} bytes")):
            self._device.queue.write_buffer(handle, offset, source)

    def write_bytes(self, handle: Handle, data: bytes) -> None:
        """`write_buffer` of a few bytes to the start of a buffer; a multiple of 4 bytes."""
        with self._guard(lambda kind, text: device_error(kind, text, "a small upload")):
            self._device.queue.write_buffer(handle, 0, data)

    def fill_staging(
        self, handle: Handle, address: int, nbytes: int, submission: int | None
    ) -> None:
        """Maps a MAP_WRITE buffer, copies host memory into it and unmaps it."""
        source = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
        with self._guard(lambda kind, text: device_error(kind, text, f"mapping {nbytes} bytes")):
            handle.map_sync(MAP_WRITE, 0, nbytes)
            handle.write_mapped(source)
            handle.unmap()

    def map(self, handle: Handle, nbytes: int, submission: int | None) -> int:
        """The host address of the first ``nbytes`` of a MAP_READ buffer; waits for the queue."""
        with self._guard(lambda kind, text: device_error(kind, text, f"mapping {nbytes} bytes")):
            handle.map_sync(MAP_READ, 0, nbytes)
            view = handle.read_mapped(0, nbytes, copy=False)
            return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])

    def unmap(self, handle: Handle) -> None:
        """Ends the mapping."""
        handle.unmap()

    def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[Handle, Handle]:
        """(pipeline, bind group layout) of a kernel, compiled anew. Raises ShaderError."""
        types = ["storage" if b.writable else "read-only-storage" for b in kernel.bindings]
        if kernel.parameter_count:
            types.append("uniform")
        entries = [
            {"binding": i, "visibility": _COMPUTE, "buffer": {"type": binding_type}}
            for i, binding_type in enumerate(types)
        ]
        device = self._device
        with self._guard(lambda kind, text: shader_error(kind, text, kernel)):
            layout = device.create_bind_group_layout(entries=entries)
            module = device.create_shader_module(
                label=kernel.name, code=_with_extensions(kernel.wgsl)
            )
            pipeline = device.create_compute_pipeline(
                label=kernel.name,
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        return pipeline, layout

    def bind_group_maker(
        self, layout: Handle, ranges: Sequence[tuple[int, int]], name: str
    ) -> BindGroupMaker:
        """A function that makes bind groups of one kernel, see `Backend.bind_group_maker`."""

        def make(buffers: Sequence[Handle], starts: Sequence[int] = ()) -> Handle:
            places = zip(buffers, ranges, starts or [0] * len(ranges), strict=True)
            entries = [
                {
                    "binding": i,
                    "resource": {"buffer": buffer, "offset": start + offset, "size": nbytes},
                }
                for i, (buffer, (offset, nbytes), start) in enumerate(places)
            ]
            with self._guard(lambda kind, text: device_error(kind, text, f"binding {name}")):
                return self._device.create_bind_group(layout=layout, entries=entries)

        return make

    def submit(self, commands: Sequence[Command], name: str) -> int:
        """Encodes commands in order and submits them, without waiting; the submission's number."""
        with (
            self._lock,
            self._guard(lambda kind, text: device_error(kind, text, f"running {name}")),
        ):
            encoder = self._device.create_command_encoder()
            encoder_pass = current = None
            for command in commands:
                if isinstance(command, DispatchRun):
                    encoder_pass = encoder_pass or encoder.begin_compute_pass()
                    for pipeline, group, x, y, z in command.items:
                        if pipeline is not None and pipeline is not current:
                            encoder_pass.set_pipeline(pipeline)
                            current = pipeline
                        encoder_pass.set_bind_group(0, group)
                        encoder_pass.dispatch_workgroups(x, y, z)
                    continue
                if encoder_pass is not None:
                    encoder_pass.end()
                    encoder_pass = current = None
                encoder.copy_buffer_to_buffer(
                    command.source,
                    command.source_offset,
                    command.destination,
                    command.destination_offset,
                    command.nbytes,
                )
            if encoder_pass is not None:
                encoder_pass.end()
            self._device.queue.submit([encoder.finish()])
            self.submissions += 1
            return self.submissions

    def wait(self, submission: int | None = None) -> None:
        """Waits for everything submitted, by mapping a buffer that a copy at the end writes."""
        with self._lock, self._guard(lambda kind, text: device_error(kind, text, "synchronize")):
            if self._fence is None:
                mark = self._device.create_buffer(size=4, usage=COPY_SRC)
                self._fence = mark, self._device.create_buffer(size=4, usage=MAP_READ | COPY_DST)
            # on_submitted_work_done_sync fails in wgpu-py 0.32; a mapping waits for the queue too,
            # behind a copy: what is written from the host does not go through Dawn's queue.
            mark, fence = self._fence
            encoder = self._device.create_command_encoder()
            encoder.copy_buffer_to_buffer(mark, 0, fence, 0, 4)
            self._device.queue.submit([encoder.finish()])
            fence.map_sync(MAP_READ)
            fence.unmap()

    def submit_timed(self, run: DispatchRun, name: str) -> list[Span] | None:
        """None: the profiler then measures on the host.

        Timestamp queries are only implemented by `NativeBackend`.
        """
        return None
