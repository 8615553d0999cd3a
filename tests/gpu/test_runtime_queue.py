"""The order of recorded commands, uploads and downloads; errors of pending commands."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.runtime_plans import (
    add_plan,
    chain_plan,
    download,
    floats,
    on_gpu,
    read,
)
from tests.providers import PROVIDERS, device_in_use, device_of
from torch_webgpu_compile import errors
from torch_webgpu_compile.plan.model import Dispatch
from torch_webgpu_compile.runtime import queue
from torch_webgpu_compile.runtime.device import Device, GpuBuffer
from torch_webgpu_compile.runtime.executor import BoundPlan, Executor
from torch_webgpu_compile.runtime.interface import Copy, DispatchRun
from torch_webgpu_compile.runtime.pacing import Pace, pace_of
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.runtime.queue import Recording
from torch_webgpu_compile.symbolic.sizes import as_expr

RNG = np.random.default_rng(0)


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = device_of(request.param)
    device.synchronize()
    yield device
    device.synchronize()


def adder(device: Device, x: GpuBuffer, y: GpuBuffer, numel: int) -> BoundPlan:
    """y = x + x"""
    return Executor(add_plan(numel), device).bind({}, {"a": x, "b": x, "c": y})


def invalid(bound: BoundPlan, name: str) -> Recording:
    """The plan's dispatch with a grid that the GPU refuses."""
    segment = bound.segments()[0]
    assert isinstance(segment, Recording)
    run = segment.commands[0]
    assert isinstance(run, DispatchRun)
    pipeline, group, *_ = run.items[0]
    return Recording([DispatchRun([(pipeline, group, 70_000, 1, 1)])], name)


# ---- batches


def test_a_call_and_its_download_are_one_submit(device: Device) -> None:
    bound = Executor(chain_plan(100, 5), device).bind()
    x = floats(100)
    device.upload(bound.buffer("x"), x)
    before = device.backend.submissions
    bound.replay()
    assert device.backend.submissions == before
    np.testing.assert_array_equal(read(device, bound.buffer("y"), 100), x * 8)
    assert device.backend.submissions == before + 1


def test_a_compiled_call_is_one_submit() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, dim=-1).sum(0)

    compiled = torch.compile(function, backend="webgpu")
    backend = device_in_use().backend
    x = torch.randn(32, 32)
    compiled(x)
    for _ in range(3):
        before = backend.submissions
        torch.testing.assert_close(compiled(x), function(x))
        assert backend.submissions == before + 1


def test_commands_are_submitted_in_batches(device: Device) -> None:
    x = on_gpu(device, floats(64))
    bound = adder(device, x, device.allocate(256), 64)
    for _ in range(2):
        start = device.backend.submissions
        batches = [16, 32, 64, 64]
        for submissions, size in enumerate(batches):
            for _ in range(size):
                assert device.backend.submissions == start + submissions
                bound.replay()
        bound.replay()
        assert device.backend.submissions == start + len(batches)
        device.synchronize()
        assert device.backend.submissions == start + len(batches) + 1
        device.synchronize()
        assert device.queue.flush() is None
        assert device.backend.submissions == start + len(batches) + 1


def test_a_long_plan_is_submitted_piece_by_piece(device: Device) -> None:
    """So that the GPU runs its first dispatches while the host encodes the others."""
    bound = Executor(chain_plan(10, 16 + 32 + 3), device).bind()
    x = np.zeros(10, np.float32)
    x[0] = 1
    device.upload(bound.buffer("x"), x)
    device.synchronize()
    before = device.backend.submissions
    bound.replay()
    assert device.backend.submissions == before + 2
    assert bound.dispatch_count == 51
    assert len(time_steps(bound)) == 51
    np.testing.assert_array_equal(read(device, bound.buffer("y"), 10), x * 2.0**26)


@pytest.mark.parametrize("numel", [100, 300_003])
def test_uploads_come_after_what_is_pending(device: Device, numel: int) -> None:
    first, second = floats(numel), floats(numel)
    x, y = on_gpu(device, first), device.allocate(4 * numel)
    bound = adder(device, x, y, numel)
    before = device.backend.submissions
    bound.replay()
    device.upload(x, second)
    is_pending = device.backend.submissions == before
    assert is_pending == (numel == 100)  # a large one submits what is pending, and goes ahead
    np.testing.assert_array_equal(read(device, y, numel), first + first)
    np.testing.assert_array_equal(read(device, x, numel), second)


def test_many_uploads_after_what_is_pending(device: Device) -> None:
    """They wait with it in memory of their own, but not forever."""
    x, y = on_gpu(device, floats(16)), device.allocate(64)
    before = device.backend.submissions
    adder(device, x, y, 16).replay()
    data = [floats(16) for _ in range(2 * queue.MAX_BATCH)]
    for values in data:
        device.upload(x, values)
    assert 1 <= device.backend.submissions - before <= 2
    np.testing.assert_array_equal(read(device, x, 16), data[-1])


@pytest.mark.parametrize("offset", [0, 1, 4, 6])
def test_small_uploads_into_pending_buffers(device: Device, offset: int) -> None:
    first = floats(16)
    x, y = on_gpu(device, first), device.allocate(64)
    adder(device, x, y, 16).replay()
    device.upload(x, b"\x01\x02\x03", offset)
    expected = bytearray(first.tobytes())
    expected[offset : offset + 3] = b"\x01\x02\x03"
    assert read(device, x, 16).tobytes() == bytes(expected)
    np.testing.assert_array_equal(read(device, y, 16), first + first)


def test_copies_between_dispatches_keep_their_place(device: Device) -> None:
    x, y, z = on_gpu(device, floats(64)), device.allocate(256), device.allocate(256)
    bound = adder(device, x, y, 64)
    expected = read(device, x, 64)
    bound.replay()
    device.queue.record(Recording([Copy(y.handle, 0, z.handle, 0, 256)], "copy"))
    device.queue.record(Recording([Copy(y.handle, 0, x.handle, 0, 256)], "copy"))
    bound.replay()
    np.testing.assert_array_equal(read(device, z, 64), expected * 2)
    np.testing.assert_array_equal(read(device, y, 64), expected * 4)


def test_profiling_comes_after_what_is_pending(device: Device) -> None:
    first, second = floats(64), floats(64)
    x, y, z = on_gpu(device, first), device.allocate(256), device.allocate(256)
    device.queue.record(
        Recording([Copy(on_gpu(device, second).handle, 0, x.handle, 0, 256)], "copy")
    )
    bound = adder(device, x, y, 64)
    other = adder(device, y, z, 64)
    bound.replay()
    assert len(time_steps(other)) == 1
    np.testing.assert_array_equal(read(device, z, 64), second * 4)


# ---- memory


def test_bind_groups_live_until_they_are_submitted(device: Device) -> None:
    x = floats(64)
    bound = adder(device, on_gpu(device, x), device.allocate(256), 64)
    result = bound.buffer("c")
    bound.replay()
    del bound
    gc.collect()
    np.testing.assert_array_equal(read(device, result, 64), x + x)


def test_memory_is_not_freed_while_commands_use_it(device: Device) -> None:
    x = floats(64)
    y = device.allocate(256)
    source = on_gpu(device, x)
    device.synchronize()
    device.queue.record(Recording([Copy(source.handle, 0, y.handle, 0, 256)], "copy"))
    del source
    device.empty_cache()
    np.testing.assert_array_equal(read(device, y, 64), x)


def test_memory_lent_again_while_commands_use_it(device: Device) -> None:
    data = [floats(64) for _ in range(2 * queue.MIN_BATCH)]
    results = [device.allocate(256) for _ in data]
    for content, result in zip(data, results, strict=True):
        gpu = on_gpu(device, content)
        adder(device, gpu, result, 64).replay()
        del gpu
    for content, result in zip(data, results, strict=True):
        np.testing.assert_array_equal(read(device, result, 64), content + content)


@pytest.mark.parametrize("nbytes", [0, 1, 4, 6, 256])
def test_small_uploads_do_not_flush(device: Device, nbytes: int) -> None:
    x = on_gpu(device, floats(64))
    bound = adder(device, x, device.allocate(256), 64)
    data = RNG.bytes(nbytes)
    bound.replay()
    before = device.backend.submissions
    small, new = device.upload_small(data), device.upload_new(data)
    assert device.backend.submissions == before
    for gpu in (small, new):
        result = bytearray(nbytes)
        download(device, gpu, result)
        assert result == data


@pytest.mark.parametrize("numel", [16, 500_000])
def test_uploads_to_new_buffers_spare_what_is_pending(device: Device, numel: int) -> None:
    """Memory given back while commands use it comes back first, but not for these uploads."""
    first = floats(numel)
    result = device.allocate(4 * numel)
    for _ in range(3):
        x = on_gpu(device, first)
        adder(device, x, result, numel).replay()
        serial = x.serial
        del x
        new = device.upload_new(floats(numel))
        assert new.serial != serial
        np.testing.assert_array_equal(read(device, result, numel), first + first)
        del new
    device.synchronize()
    device.empty_cache()


def test_small_uploads_are_never_overwritten_while_pending(device: Device) -> None:
    """Every step adds a scalar that it uploads, and drops the buffer at once."""
    total = device.upload_new(np.zeros(4, np.float32))
    other = device.allocate(16)
    launcher = Executor(add_plan(4), device).launcher()
    assert launcher.names == ("a", "b", "c")
    reserved = 0
    for step in range(1000):
        value = device.upload_small(np.full(4, step, np.float32).tobytes())
        launcher([total, value, other])
        total, other = other, total
        del value
        if step == 200:
            reserved = device.pool.stats()["reserved"]
    assert device.pool.stats()["reserved"] <= reserved + 4096
    np.testing.assert_array_equal(read(device, total, 4), np.full(4, sum(range(1000))))


# ---- errors


def test_an_error_names_the_culprit_and_spares_the_others(device: Device) -> None:
    x = floats(64)
    y, z = device.allocate(256), device.allocate(256)
    first = adder(device, on_gpu(device, x), y, 64)
    second = adder(device, y, z, 64)
    first.replay()
    device.queue.record(invalid(first, "aten.bad"))
    second.replay()
    with pytest.raises(errors.DeviceError, match=r"running aten\.bad"):
        device.synchronize()
    np.testing.assert_array_equal(read(device, z, 64), x * 4)


def test_an_error_surfaces_in_a_download_or_a_later_record(device: Device) -> None:
    x = on_gpu(device, floats(64))
    bound = adder(device, x, device.allocate(256), 64)
    device.queue.record(invalid(bound, "aten.bad"))
    with pytest.raises(errors.DeviceError, match=r"running aten\.bad"):
        read(device, x, 64)
    device.queue.record(invalid(bound, "aten.worse"))
    with pytest.raises(errors.DeviceError, match=r"running aten\.worse"):  # noqa: PT012
        for _ in range(queue.MIN_BATCH):
            bound.replay()
    bound.replay()
    device.synchronize()


def test_an_interrupt_keeps_pending_commands(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = floats(64)
    bound = adder(device, on_gpu(device, x), device.allocate(256), 64)
    bound.replay()

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device.backend, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.synchronize()
    np.testing.assert_array_equal(read(device, bound.buffer("c"), 64), x + x)


def test_finalisers_in_the_middle_of_a_submit(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may record and free; what would have to wait is refused."""
    x = floats(64)
    bound = adder(device, on_gpu(device, x), device.allocate(256), 64)
    z = device.allocate(256)
    finalised = adder(device, bound.buffer("c"), z, 64)
    submit = device.backend.submit
    serials = []

    def finaliser(*arguments: Any) -> int:
        monkeypatch.undo()
        finalised.replay()
        for refused in (device.queue.flush, device.synchronize, lambda: read(device, z, 64)):
            with pytest.raises(errors.DeviceError, match="finaliser"):
                refused()
        temporary = device.allocate(400)
        serials.append(temporary.serial)
        copy = Copy(temporary.handle, 0, z.handle, 0, 4)
        device.queue.record(Recording([copy], "copy"))
        del temporary
        return submit(*arguments)

    monkeypatch.setattr(device.backend, "submit", finaliser)
    bound.replay()
    device.queue.flush()
    assert not device.queue.is_empty
    assert device.upload_new(bytes(400)).serial not in serials
    np.testing.assert_array_equal(read(device, z, 64)[1:], x[1:] * 4)
    assert device.queue.is_empty


# ---- long work


@pytest.mark.parametrize(("seconds", "most"), [(0.4, 2), (0.2, 4), (10.0, 1)])
def test_long_work_is_submitted_in_parts(
    device: Device, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """``seconds`` of each dispatch, ``most`` of them in a submission."""
    x, length = floats(100), 12
    plan = chain_plan(100, length)
    steps = [
        replace(step, bytes_read=as_expr(100)) for step in plan.steps if isinstance(step, Dispatch)
    ]
    plan = replace(plan, steps=tuple(steps))
    results = []
    for pace in (device.pace, Pace(100 / seconds, 1e12)):
        monkeypatch.setattr(device, "pace", pace)
        bound = Executor(plan, device).bind()
        device.upload(bound.buffer("x"), x)
        before = device.backend.submissions
        bound.replay()
        bound.replay()
        device.queue.flush()
        made = device.backend.submissions - before
        results.append(read(device, bound.buffer("y"), 100))
    assert made >= 2 * length / most
    np.testing.assert_array_equal(*results)


def test_work_that_a_gpu_takes_a_while_for_does_not_wait_for_more(device: Device) -> None:
    """Else the GPU waits while the host records, and then the host for all of it."""
    quick = Recording((), "quick")
    steps = [SimpleNamespace(seconds=0.006)] * 3
    long = Recording((), "long", steps)  # type: ignore[arg-type]
    start = device.backend.submissions
    device.queue.record(quick)
    assert device.backend.submissions == start
    device.queue.record(long)
    assert device.backend.submissions == start + 1
    device.queue.wait()


def test_the_prediction_is_of_bytes_or_operations() -> None:
    pace = pace_of("discrete")
    assert pace.seconds(200 * 10**9, 0) == 2.0
    assert pace.seconds(10, 3 * 10**12) == 3.0
    assert pace_of("cpu").seconds(1 << 20, 0) > pace_of("unknown").seconds(1 << 20, 0)
