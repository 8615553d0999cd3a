"""The executor on hand-written plans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu.runtime_plans import (
    ADD_KERNEL,
    SCALE_KERNEL,
    add_plan,
    buffer,
    chain_plan,
    dispatch,
    download,
    floats,
    on_gpu,
    plan,
)
from tests.providers import PROVIDERS, device_of
from torch_webgpu_compile import errors
from torch_webgpu_compile.plan.model import Binding, HostStep
from torch_webgpu_compile.runtime import program
from torch_webgpu_compile.runtime.device import Device, GpuBuffer, open_device
from torch_webgpu_compile.runtime.executor import BoundPlan, Executor
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.runtime.queue import Recording
from torch_webgpu_compile.runtime.sized import SizedDispatch
from torch_webgpu_compile.symbolic.nested import HostBuffer
from torch_webgpu_compile.symbolic.sizes import as_expr, symbol

RNG = np.random.default_rng(0)


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(request.param)


def read(device: Device, bound: BoundPlan, name: str, numel: int) -> np.ndarray:
    result = np.empty(numel, np.float32)
    download(device, bound.buffer(name), result)
    return result


def on_host(function: Callable[..., Sequence[Any]]) -> Any:
    """A ``host_call`` of a function of (step, contents of what it reads, sizes)."""
    return lambda step, memory, arrays, sizes: function(step, arrays, sizes)


@pytest.mark.parametrize("numel", [1, 63, 1000, 100_003])
def test_vector_add(device: Device, numel: int) -> None:
    executor = Executor(add_plan(numel), device)
    a, b = floats(numel), floats(numel)
    bound = executor.bind()
    device.upload(bound.buffer("a"), a)
    device.upload(bound.buffer("b"), b)
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "c", numel), a + b)
    assert bound.dispatch_count == 1


def test_external_buffers_are_used_and_what_was_bound_is_reused(device: Device) -> None:
    executor = Executor(add_plan(100), device)
    a, b = floats(100), floats(100)
    externals = {"a": on_gpu(device, a), "b": on_gpu(device, b), "c": device.allocate(400)}
    first = executor.bind({}, externals)
    first.replay()
    assert first.buffer("c") is externals["c"]
    np.testing.assert_array_equal(read(device, first, "c", 100), a + b)
    assert executor.bind({}, externals).segments() is first.segments()
    externals["a"] = on_gpu(device, b)
    again = executor.bind({}, externals)
    again.replay()
    np.testing.assert_array_equal(read(device, again, "c", 100), b + b)


def test_new_memory_is_never_mistaken_for_old(device: Device) -> None:
    executor = Executor(add_plan(256), device)
    for _ in range(40):
        a = floats(256)
        gpu = on_gpu(device, a)
        other = device.allocate(int(RNG.integers(1, 4000)))
        bound = executor.bind({}, {"a": gpu, "b": gpu})
        bound.replay()
        np.testing.assert_array_equal(read(device, bound, "c", 256), a + a)
        del other


def test_dynamic_sizes_and_parameters(device: Device) -> None:
    n = symbol("s0")
    steps = [
        dispatch(0, ["x", "t"], n, [n, 3]),
        dispatch(0, ["t", "y"], n, [n, n + 1]),
    ]
    buffers = [buffer("x", "input", n), buffer("t", "intermediate", n, 0), buffer("y", "output", n)]
    executor = Executor(plan([SCALE_KERNEL], buffers, steps), device)
    for numel in (5, 1000, 64, 5, 4096, 1):
        x = floats(numel)
        bound = executor.bind({"s0": numel})
        device.upload(bound.buffer("x"), x)
        bound.replay()
        expected = x * np.float32(3) * np.float32(numel + 1)
        np.testing.assert_allclose(read(device, bound, "y", numel), expected, rtol=1e-6)


def test_grid_of_zero_skips_the_dispatch(device: Device) -> None:
    n = symbol("s0")
    buffers = [buffer("x", "input", n), buffer("y", "output", n)]
    executor = Executor(plan([SCALE_KERNEL], buffers, [dispatch(0, ["x", "y"], n, [n, 2])]), device)
    bound = executor.bind({"s0": 0})
    assert bound.dispatch_count == 0
    bound.replay()
    assert time_steps(bound) == [0.0]


def test_windows_of_a_buffer(device: Device) -> None:
    steps = [
        dispatch(0, [Binding("x", 256, as_expr(64)), Binding("y", 512, as_expr(64))], 16, [16, 2]),
        dispatch(0, [Binding("x", 512), Binding("y", 0, as_expr(256))], 64, [64, 5]),
    ]
    executor = Executor(
        plan([SCALE_KERNEL], [buffer("x", "input", 192), buffer("y", "output", 192)], steps), device
    )
    x = floats(192)
    bound = executor.bind()
    device.upload(bound.buffer("x"), x)
    device.upload(bound.buffer("y"), np.zeros(192, np.float32))
    bound.replay()
    expected = np.zeros(192, np.float32)
    expected[128:144] = x[64:80] * 2
    expected[:64] = x[128:] * 5
    np.testing.assert_array_equal(read(device, bound, "y", 192), expected)


def test_constants(device: Device) -> None:
    one = np.ones(10, np.float32)
    buffers = [
        buffer("x", "input", 10),
        buffer("k", "constant", 10),
        buffer("y", "output", 10, 0),
        buffer("z", "output", 10, 1),
    ]
    steps = [dispatch(0, ["x", "k", "y"], 10), dispatch(0, ["y", "k", "z"], 10)]
    executor = Executor(plan([ADD_KERNEL], buffers, steps, {"k": one.tobytes()}), device)
    x = floats(10)
    bound = executor.bind()
    device.upload(bound.buffer("x"), x)
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "y", 10), x + 1)
    np.testing.assert_array_equal(read(device, bound, "z", 10), x + 1 + 1)


def test_host_step(device: Device) -> None:
    step = HostStep(
        "aten.sort.default", ("s",), ((HostBuffer("t"), True),), (("other", HostBuffer("x")),)
    )
    buffers = [buffer(name, "intermediate", 7) for name in "ts"]
    buffers += [buffer("x", "input", 7), buffer("y", "output", 7)]
    steps = [dispatch(0, ["x", "x", "t"], 7), step, dispatch(0, ["s", "x", "y"], 7)]
    seen: list[Any] = []

    def host_call(step: HostStep, arrays: list[Any], sizes: dict[str, int]) -> Sequence[Any]:
        seen.append((step.target, sizes))
        t, x = (array.view(np.float32) for array in arrays)
        return [np.sort(t) + x]

    whole = plan([ADD_KERNEL], buffers, steps)
    executor = Executor(whole, device, on_host(host_call))
    for _ in range(3):
        x = floats(7)
        bound = executor.bind({}, {"x": on_gpu(device, x)})
        bound.replay()
        np.testing.assert_array_equal(read(device, bound, "y", 7), np.sort(x + x) + x + x)
    assert seen == [("aten.sort.default", {})] * 3
    assert len(time_steps(bound)) == 2
    with pytest.raises(errors.DeviceError, match="host_call"):
        Executor(whole, device)


def test_failing_host_step_leaves_the_executor_usable(device: Device) -> None:
    fail = [True]

    def host_call(step: HostStep, arrays: list[Any], sizes: dict[str, int]) -> Sequence[Any]:
        if fail[0]:
            raise KeyError("boom")
        return arrays

    step = HostStep("aten.clone.default", ("y",), (HostBuffer("x"),), ())
    buffers = [buffer("x", "input", 3), buffer("y", "output", 3)]
    whole = plan([], buffers, [step])
    executor = Executor(whole, device, on_host(host_call))
    x = floats(3)
    bound = executor.bind({}, {"x": on_gpu(device, x)})
    with pytest.raises(KeyError):
        bound.replay()
    fail[0] = False
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "y", 3), x)


def test_reading_and_writing_one_buffer_is_refused(device: Device) -> None:
    executor = Executor(add_plan(4), device)
    gpu = device.allocate(16)
    with pytest.raises(errors.DeviceError, match="add_0 reads and writes"):
        executor.bind({}, {"a": gpu, "c": gpu})
    test_vector_add(device, 8)


def test_too_small_or_unknown_buffers_are_refused(device: Device) -> None:
    executor = Executor(add_plan(400), device)
    with pytest.raises(errors.DeviceError, match="needs 1600 bytes"):
        executor.bind({}, {"a": device.allocate(16)})
    large = device.allocate(1600)
    for known in ({}, {"a": large, "b": large}):
        with pytest.raises(errors.DeviceError, match="no buffer q"):
            executor.bind({}, {**known, "q": device.allocate(16)})


def test_device_refusing_a_replay_leaves_the_executor_usable() -> None:
    device = open_device()
    executor = Executor(add_plan(64), device)
    bound = executor.bind()
    segment = bound.segments()[0]
    assert isinstance(segment, Recording)
    run: Any = segment.commands[0]
    good = list(run.items)
    run.items[0] = (*good[0][:2], 70_000, 1, 1)
    bound.replay()
    with pytest.raises(errors.DeviceError, match="running test"):
        device.synchronize()
    run.items[:] = [(good[0][0], good[0][1], None, 1, 1)]
    bound.replay()
    with pytest.raises(TypeError):
        device.synchronize()
    run.items[:] = good
    bound.replay()
    device.synchronize()


def test_checked_device() -> None:
    checked = open_device(checked=True)
    assert checked is not open_device()
    assert checked.checked
    test_vector_add(checked, 100)


def test_long_chain_and_times(device: Device) -> None:
    executor = Executor(chain_plan(50, 11), device)
    x = floats(50)
    bound = executor.bind()
    device.upload(bound.buffer("x"), x)
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "y", 50), x * 2**6)
    times = time_steps(bound)
    assert len(times) == bound.dispatch_count == 11
    assert all(0 <= seconds < 1 for seconds in times)


def test_programs_are_bounded_and_memory_is_flat(device: Device) -> None:
    n = symbol("s0")
    executor = Executor(chain_plan(n, 6), device)
    device.empty_cache()
    for numel in (3000, 100):
        executor.bind({"s0": numel}).replay()
    start = device.pool.stats()
    for i in range(1000 if device is open_device() else 50):
        bound = executor.bind({"s0": 100 + i % 40}, {"x": device.allocate(12000)})
        bound.replay()
    device.synchronize()
    del bound
    stats = device.pool.stats()
    # 16 sets of sizes keep their uniform buffers
    assert stats["allocated"] - start["allocated"] <= 17 * 2048
    assert stats["reserved"] - start["reserved"] <= 12288 + 17 * 4096
    assert len(executor._own_memory) <= 16
    del executor
    gc.collect()
    device.empty_cache()
    assert device.pool.stats()["reserved"] <= start["reserved"]


def test_launcher_with_memory_from_the_pool(device: Device) -> None:
    """Intermediates go back to the pool right after each call."""
    n = symbol("s0")
    executor = Executor(chain_plan(n, 5), device, max_programs=4)
    for numel in (100, 3000, 7):
        launcher = executor.launcher({"s0": numel})
        assert [(place.key, place.nbytes, place.names) for place in launcher.places] == [
            (0, (4 * numel + 15) // 16 * 16, ("t0", "t2")),
            (1, (4 * numel + 15) // 16 * 16, ("t1", "t3")),
            ("y", (4 * numel + 15) // 16 * 16, ("y",)),
        ]
        results = []
        for _ in range(9):
            x = floats(numel)
            memory = {"x": on_gpu(device, x)}
            for place in launcher.places:
                memory |= dict.fromkeys(place.names, device.allocate(place.nbytes))
            launcher([memory[name] for name in launcher.names])
            results.append((x, memory["y"]))
        for x, y in results:
            actual = np.empty_like(x)
            download(device, y, actual)
            np.testing.assert_array_equal(actual, x * 8)
    assert not executor._owned
    device.empty_cache()


def test_only_dispatches_with_other_memory_are_bound_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = []
    original = program._bind_group

    def bind_group(step: SizedDispatch, *rest: Any) -> Any:
        bound.append(step.index)
        return original(step, *rest)

    monkeypatch.setattr(program, "_bind_group", bind_group)
    launcher = Executor(chain_plan(50, 20), device, max_programs=2).launcher()
    places = [dict.fromkeys(p.names, device.allocate(p.nbytes)) for p in launcher.places]
    memory: dict[str, GpuBuffer] = {name: b for place in places for name, b in place.items()}

    def check(**changed: GpuBuffer) -> list[int]:
        bound.clear()
        memory.update(changed)
        x = floats(50)
        device.upload(memory["x"], x)
        launcher([memory[name] for name in launcher.names])
        actual = np.empty_like(x)
        download(device, memory["y"], actual)
        np.testing.assert_allclose(actual, x * 2**10, rtol=1e-6)
        return sorted(bound)

    xs, ys = ([device.allocate(200) for _ in range(3)] for _ in range(2))
    assert check(x=xs[0]) == list(range(20))
    assert check(x=xs[1]) == [0]
    assert check() == []
    assert check(y=ys[1]) == [19]
    assert check(x=xs[2], y=ys[2]) == [0, 19]
    assert check(x=xs[0], y=ys[0]) == [0, 19]
    with pytest.raises(errors.DeviceError, match="buffer x needs 208 bytes"):
        launcher([{**memory, "x": device.allocate(16)}[name] for name in launcher.names])
    with pytest.raises(errors.DeviceError, match="reads and writes"):
        launcher([{**memory, "x": memory["t0"]}[name] for name in launcher.names])
    assert check(x=xs[1]) == [0]


def test_launcher_with_constants_and_host_steps(device: Device) -> None:
    one = np.ones(8, np.float32)
    buffers = [buffer("k", "constant", 8), buffer("x", "input", 8)]
    buffers += [buffer("t", "intermediate", 8), buffer("s", "intermediate", 8)]
    buffers.append(buffer("y", "output", 8))
    step = HostStep("aten.sort.default", ("s",), (HostBuffer("t"),), ())
    steps = [dispatch(0, ["k", "x", "t"], 8), step, dispatch(0, ["s", "k", "y"], 8)]
    constants = {"k": one.tobytes()}

    def host_call(step: HostStep, arrays: list[Any], sizes: dict[str, int]) -> Sequence[Any]:
        return [np.sort(arrays[0].view(np.float32))]

    whole = plan([ADD_KERNEL], buffers, steps, constants)
    executor = Executor(whole, device, on_host(host_call))
    launcher = executor.launcher()
    assert launcher.names == ("x", "t", "s", "y")
    y = device.allocate(32)
    for _ in range(3):
        x = floats(8)
        launcher([on_gpu(device, x), device.allocate(32), device.allocate(32), y])
        actual = np.empty_like(x)
        download(device, y, actual)
        np.testing.assert_array_equal(actual, np.sort(x + 1) + 1)


def test_host_step_on_a_constant(device: Device) -> None:
    one = np.ones(8, np.float32)
    buffers = [buffer("k", "constant", 8), buffer("x", "input", 8), buffer("y", "output", 8)]
    arguments = (HostBuffer("x"), (HostBuffer("k"), HostBuffer("x")))
    step = HostStep("aten.addcmul.default", ("y",), arguments, (("other", HostBuffer("k")),))

    def host_call(step: HostStep, arrays: list[Any], sizes: dict[str, int]) -> Sequence[Any]:
        x, k, again, last = (array.view(np.float32) for array in arrays)
        return [x + 2 * k + 4 * again + 8 * last]

    whole = plan([], buffers, [step], {"k": one.tobytes()})
    executor = Executor(whole, device, on_host(host_call))
    x = floats(8)
    bound = executor.bind({}, {"x": on_gpu(device, x)})
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "y", 8), x + 2 + 4 * x + 8)
    np.testing.assert_array_equal(read(device, bound, "k", 8), one)
    y = device.allocate(32)
    executor.launcher()([on_gpu(device, x), y])
    actual = np.empty_like(x)
    download(device, y, actual)
    np.testing.assert_array_equal(actual, x + 2 + 4 * x + 8)


def test_launcher_refuses_what_bind_refuses(device: Device) -> None:
    launcher = Executor(add_plan(400), device).launcher()
    good = [device.allocate(1600) for _ in range(3)]
    launcher(good)
    with pytest.raises(errors.DeviceError, match="buffer b needs 1600 bytes"):
        launcher([good[0], device.allocate(16), good[2]])
    with pytest.raises(errors.DeviceError, match="reads and writes c"):
        launcher([good[0], good[1], good[0]])
    with pytest.raises(ValueError, match="longer"):
        launcher(good[:2])
    device.synchronize()


def test_replay_after_empty_cache(device: Device) -> None:
    executor = Executor(add_plan(64), device)
    a = floats(64)
    gpu = on_gpu(device, a)
    bound = executor.bind({}, {"a": gpu, "b": gpu})
    device.empty_cache()
    bound.replay()
    np.testing.assert_array_equal(read(device, bound, "c", 64), a + a)
    again = executor.bind({}, {"a": gpu, "b": gpu})
    again.replay()
    np.testing.assert_array_equal(read(device, again, "c", 64), a + a)


def test_what_is_prepared_is_bound_by_name(device: Device) -> None:
    """The preparation gives its results in another order than the plan has them, of equal size."""
    made = plan(
        [SCALE_KERNEL],
        [buffer("w", "input", 8), buffer("twice", "output", 8), buffer("thrice", "output", 8)],
        [dispatch(0, ["w", "thrice"], 8, [8, 3]), dispatch(0, ["w", "twice"], 8, [8, 2])],
    )
    buffers = [buffer(name, "input", 8) for name in ("x", "w")]
    buffers += [buffer(name, "prepared", 8) for name in ("thrice", "twice")]
    buffers += [buffer("t", "intermediate", 8, 0), buffer("y", "output", 8, 1)]
    steps = [dispatch(0, ["x", "thrice", "t"], 8), dispatch(1, ["t", "y"], 8, [8, 10])]
    # y = 10 (x + thrice); z = x + twice
    buffers.append(buffer("z", "output", 8, 2))
    steps.append(dispatch(0, ["x", "twice", "z"], 8))
    whole = replace(plan([ADD_KERNEL, SCALE_KERNEL], buffers, steps), preparation=made)
    executor = Executor(whole, device)
    launcher = executor.launcher()
    assert launcher.names == ("x", "w", "t", "y", "z")
    x, w = floats(8), floats(8)
    t, y, z = (device.allocate(32) for _ in range(3))
    launcher([on_gpu(device, x), on_gpu(device, w), t, y, z])
    np.testing.assert_allclose(_contents(device, z, 8), x + 2 * w, rtol=1e-6)
    np.testing.assert_allclose(_contents(device, y, 8), 10 * (x + 3 * w), rtol=1e-6)
    given = {"x": on_gpu(device, x), "w": on_gpu(device, w)}
    bound = executor.bind({}, {**given, **executor.prepared(given)})
    bound.replay()
    np.testing.assert_allclose(read(device, bound, "z", 8), x + 2 * w, rtol=1e-6)


def _contents(device: Device, gpu: GpuBuffer, numel: int) -> np.ndarray:
    result = np.empty(numel, np.float32)
    download(device, gpu, result)
    return result
