"""Timestamp queries on wgpu-native: GPU time of single dispatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .failures import device_error
from .interface import COPY_DST, COPY_SRC, MAP_READ, QUERY_RESOLVE, DispatchRun, Handle, Span

if TYPE_CHECKING:
    from .native import NativeBackend

_MAX_QUERIES = 4096  # WebGPU spec, the largest query set


def time_run(backend: NativeBackend, run: DispatchRun, name: str) -> list[Span]:
    """Runs the dispatches, each in a pass of its own, and waits. Raises DeviceError."""
    spans: list[Span] = []
    current: Handle | None = None
    for first in range(0, len(run.items), _MAX_QUERIES // 2):
        items = []
        for pipeline, *rest in run.items[first : first + _MAX_QUERIES // 2]:
            current = pipeline if pipeline is not None else current
            items.append((current, *rest))
        spans += _time(backend, DispatchRun(items), name)
    return spans


def _time(backend: NativeBackend, run: DispatchRun, name: str) -> list[Span]:
    ffi, lib = backend.ffi, backend.lib
    count = 2 * len(run.items)
    desc = ffi.new("WGPUQuerySetDescriptor *")
    desc.type = lib.WGPUQueryType_Timestamp
    desc.count = count
    with backend.guard(lambda kind, text: device_error(kind, text, "timestamp queries")):
        query_set = lib.wgpuDeviceCreateQuerySet(backend.device, desc)
    values = backend.create_buffer(8 * count, QUERY_RESOLVE | COPY_SRC)
    staging = backend.create_buffer(8 * count, MAP_READ | COPY_DST)

    def encode(encoder: Handle) -> None:
        writes = ffi.new("WGPUPassTimestampWrites *")
        writes.querySet = query_set
        pass_desc = ffi.new("WGPUComputePassDescriptor *")
        pass_desc.timestampWrites = writes
        for i, item in enumerate(run.items):
            writes.beginningOfPassWriteIndex = 2 * i
            writes.endOfPassWriteIndex = 2 * i + 1
            backend.encode_pass(encoder, [item], pass_desc)
        lib.wgpuCommandEncoderResolveQuerySet(encoder, query_set, 0, count, values, 0)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, values, 0, staging, 0, 8 * count)

    try:
        submission = backend.submit_encoded(encode, name)
        address = backend.map(staging, 8 * count, submission)
        ticks = ffi.unpack(ffi.cast("uint64_t *", address), count)
        backend.unmap(staging)
    finally:
        lib.wgpuQuerySetRelease(query_set)
        backend.release_buffer(values)
        backend.release_buffer(staging)
    period = lib.wgpuQueueGetTimestampPeriod(backend.queue) * 1e-9
    return [(ticks[i] * period, max(ticks[i], ticks[i + 1]) * period) for i in range(0, count, 2)]
