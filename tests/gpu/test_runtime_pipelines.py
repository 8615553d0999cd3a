"""Pipelines: compiled once, kept while they are of use, errors that name the kernel."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.gpu.runtime_plans import (
    ADD,
    ADD_KERNEL,
    add_plan,
    floats,
    kernel,
    on_gpu,
    read,
)
from tests.interrupts import count_places, interrupt
from tests.providers import PROVIDERS, device_of, require
from torch_webgpu_compile import counters, errors
from torch_webgpu_compile.plan.model import Kernel
from torch_webgpu_compile.runtime.adapters import find_adapter
from torch_webgpu_compile.runtime.dawn_blobs import BlobCache
from torch_webgpu_compile.runtime.device import Device, create_device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.pipelines import PipelineCache

RNG = np.random.default_rng(0)


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(request.param)


def fresh_kernel() -> Kernel:
    """One that was not compiled before."""
    return replace(ADD_KERNEL, wgsl=ADD + f"// {RNG.integers(1 << 40)}")


def test_equal_kernels_are_compiled_once(device: Device) -> None:
    fresh = fresh_kernel()
    before = counters.kernels_compiled
    pipelines = device.pipelines.compile_many([fresh, replace(fresh, name="other"), fresh])
    assert counters.kernels_compiled == before + 1
    assert len({id(pipeline) for pipeline in pipelines}) == 1


def test_interrupted_compilations_end_so(device: Device) -> None:
    """Dawn's callback swallowed Ctrl-C, and a pipeline that was none ended the process."""
    cache = PipelineCache(device.backend, checked=False, threads=1)
    kernel = fresh_kernel()

    def compile_anew() -> None:
        cache.compile(replace(kernel, wgsl=f"{kernel.wgsl}{RNG.integers(1 << 40)}"))

    compile_anew()
    count = count_places(compile_anew)
    places = {interrupt(compile_anew, at) for at in range(1, count, max(1, count // 60))}
    assert {place.partition(":")[0] for place in places} >= {"native.py", "pipelines.py"}, places
    assert cache.compile(kernel).handle


def test_pipelines_die_with_their_users(device: Device) -> None:
    cache = PipelineCache(device.backend, checked=False, threads=1, recent=3)
    kernels = [fresh_kernel() for _ in range(6)]
    before = counters.kernels_compiled
    kept = cache.compile(kernels[0])
    dead = [weakref.ref(cache.compile(k)) for k in kernels[1:3]]
    recent = [weakref.ref(pipeline) for pipeline in cache.compile_many(kernels[3:])]
    assert cache.compile(kernels[0]) is kept
    assert counters.kernels_compiled == before + 6
    assert [pipeline() for pipeline in dead] == [None, None]
    assert [pipeline() is not None for pipeline in recent] == [False, True, True]
    cache.compile_many(kernels[4:])
    assert counters.kernels_compiled == before + 6
    cache.compile(kernels[1])
    assert counters.kernels_compiled == before + 7


def test_more_kernels_at_once_than_are_kept(device: Device) -> None:
    cache = PipelineCache(device.backend, checked=False, threads=2, recent=2)
    kernels = [fresh_kernel() for _ in range(8)]
    before = counters.kernels_compiled
    assert len({id(pipeline) for pipeline in cache.compile_many(kernels)}) == 8
    assert counters.kernels_compiled == before + 8


def test_pending_commands_keep_their_pipelines(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PipelineCache(device.backend, checked=False, recent=0)
    monkeypatch.setattr(device, "pipelines", cache)
    x = floats(100)
    source = on_gpu(device, x)
    device.synchronize()
    plan = replace(add_plan(100), kernels=(fresh_kernel(),))
    bound = Executor(plan, device).bind({}, {"a": source, "b": source})
    result = bound.buffer("c")
    bound.replay()
    del bound
    gc.collect()
    assert not device.queue.is_empty
    np.testing.assert_array_equal(read(device, result, 100), x + x)
    gc.collect()
    assert not cache._pipelines


def test_shader_error_names_kernel_and_line(device: Device) -> None:
    wgsl = ADD.replace("a[id.x] + b[id.x]", "a[id.x] + nonsense")
    bad = replace(ADD_KERNEL, name="bad_7", wgsl=wgsl, ops=("aten.add.Tensor",))
    for _ in range(2):
        with pytest.raises(errors.ShaderError) as info:
            device.pipelines.compile(bad)
        message = str(info.value)
        assert "bad_7" in message
        assert "aten.add.Tensor" in message
        assert "nonsense" in message
        assert "c[id.x] = a[id.x]" in message
    device.pipelines.compile(ADD_KERNEL)


def test_shader_error_of_the_pipeline(device: Device) -> None:
    """A valid module whose bindings do not fit the layout."""
    bad = kernel("misbound_1", ADD, (False, False))
    with pytest.raises(errors.ShaderError, match="misbound_1"):
        device.pipelines.compile_many([ADD_KERNEL, bad])


def test_kernels_begun_ahead(device: Device) -> None:
    """A kernel is compiled from when its text is known, and only once."""
    cache = PipelineCache(device.backend, checked=False, threads=2, recent=0)
    first, second = fresh_kernel(), fresh_kernel()
    before = counters.kernels_compiled
    with cache.ahead() as start:
        for known in (first, second, first):
            start(known)
        pipelines = cache.compile_many([first, second])
        assert [cache.compile(first), cache.compile(second)] == pipelines
    assert counters.kernels_compiled == before + 2


def test_kernels_are_not_begun_after_an_error(device: Device) -> None:
    began, go_on = threading.Event(), threading.Event()
    compiled: list[Kernel] = []

    class SlowBackend:
        def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[Any, Any]:
            compiled.append(kernel)
            began.set()
            assert go_on.wait(60)
            return device.backend.create_pipeline(kernel, checked)

    cache = PipelineCache(cast(Any, SlowBackend()), checked=False, threads=1)
    first, second, last = (fresh_kernel() for _ in range(3))

    def fail_while_one_is_compiled() -> None:
        with cache.ahead() as start:
            start(first)
            assert began.wait(60)
            start(second)
            raise errors.OptionError("wrong")

    with pytest.raises(errors.OptionError):
        fail_while_one_is_compiled()
    go_on.set()
    cache.compile_many([first, last])
    assert compiled == [first, last]


def test_shader_error_of_a_kernel_begun_ahead(device: Device) -> None:
    bad = kernel("misbound_2", ADD, (False, False))
    with device.pipelines.ahead() as start:
        start(bad)
        with pytest.raises(errors.ShaderError, match="misbound_2"):
            device.pipelines.compile(bad)


def test_dawn_keeps_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device finds what those before it have stored, as a device of another process does."""
    info, adapter = find_adapter(require("wgpudawn"), None)
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(folder := tmp_path / "cache"))
    texts = [ADD.replace("= a[id.x] +", f"= {number}.0 + a[id.x] +") for number in range(4)]
    kernels = [replace(ADD_KERNEL, wgsl=text) for text in texts]
    loads: list[bool] = []

    def load(self: BlobCache, *arguments: Any, original: Any = BlobCache.load) -> int:
        found: int = original(self, *arguments)
        loads.append(bool(found))
        return found

    def added() -> Any:
        loads.clear()
        device = create_device("wgpudawn", info, adapter, checked=False)
        device.pipelines.compile_many(kernels)
        x = floats(100)
        source = on_gpu(device, x)
        plan = replace(add_plan(100), kernels=(kernels[3],))
        bound = Executor(plan, device).bind({}, {"a": source, "b": source})
        bound.replay()
        return read(device, bound.buffer("c"), 100) - (3 + x + x)

    monkeypatch.setattr(BlobCache, "load", load)
    assert abs(added()).max() < 1e-6
    stored = list(folder.glob("*.dawn"))
    assert len(stored) >= len(kernels)
    assert not any(loads)
    assert abs(added()).max() < 1e-6
    assert all(loads)
    # Of what is damaged nothing is used, and it is stored again.
    for number, path in enumerate(stored):
        content = path.read_bytes()
        cut = len(content) // 2
        changed = content[:cut] + bytes([content[cut] ^ 1]) + content[cut + 1 :]
        path.write_bytes((changed, content[:cut], b"")[number % 3])
    assert abs(added()).max() < 1e-6
    assert not any(loads)
    assert abs(added()).max() < 1e-6
    assert all(loads)


@pytest.mark.usefixtures("kept_garbage")  # a device of another test ends in a callback of Dawn's
def test_interrupts_while_dawn_asks_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, adapter = find_adapter(require("wgpudawn"), None)
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path / "cache"))
    device = create_device("wgpudawn", info, adapter, checked=False)

    def compile_anew() -> None:
        PipelineCache(device.backend, checked=False, threads=1).compile(fresh_kernel())

    compile_anew()
    count = count_places(compile_anew)
    places = {interrupt(compile_anew, at) for at in range(1, count, max(1, count // 40))}
    assert any("dawn_blobs" in place for place in places), places
    compile_anew()
