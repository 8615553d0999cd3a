"""Devices, memory and transfers."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.runtime_plans import add_plan, chain_plan, download
from tests.providers import PROVIDERS, device_of, environment, require
from torch_webgpu_compile import errors
from torch_webgpu_compile.runtime import transfer
from torch_webgpu_compile.runtime.buffers import bucket_nbytes
from torch_webgpu_compile.runtime.device import Device, list_adapters, open_device
from torch_webgpu_compile.runtime.executor import Executor

pytestmark = pytest.mark.rotates(3)

RNG = np.random.default_rng(0)


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(request.param)


def random_bytes(nbytes: int) -> np.ndarray:
    return RNG.integers(0, 256, nbytes, dtype=np.uint8)


# ---- adapters


def test_adapters_are_described_and_ordered() -> None:
    adapters = list_adapters()
    assert [info.index for info in adapters] == list(range(len(adapters)))
    backends = [info.backend for info in adapters]
    assert backends == sorted(backends, key=lambda name: name.startswith("OpenGL"))
    best = adapters[0]
    assert best.name
    assert best.type in ("discrete", "integrated", "cpu", "unknown")
    assert best.limits["max-buffer-size"] >= 256 << 20


def test_the_same_device_for_the_same_arguments() -> None:
    best = open_device()
    assert best is open_device(adapter=0)
    assert best is open_device(adapter=best.info.name[:5].upper())
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: open_device(), range(8))) == {best}


def test_unknown_adapters_and_providers_are_errors() -> None:
    with pytest.raises(errors.AdapterError, match="there are 0: "):
        open_device(adapter="no such gpu")
    with pytest.raises(errors.AdapterError, match="no adapter matches 99"):
        open_device(adapter=99)
    with pytest.raises(errors.OptionError, match="wgpu, wgpudawn"):
        open_device("cuda")


def test_no_adapter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_webgpu_compile.runtime.adapters._adapters", lambda _: [])
    with pytest.raises(errors.AdapterError, match="mesa-vulkan-drivers"):
        open_device()


def test_target_holds_the_limits_of_the_adapter() -> None:
    device = open_device()
    target, limits = device.target, device.info.limits
    assert target.max_binding_nbytes == limits["max-storage-buffer-binding-size"] & ~3
    assert target.max_grid == 65535
    assert target.features <= device.info.features
    if "subgroup" in target.features:
        assert 0 < target.subgroup_sizes[0] <= target.subgroup_sizes[1]


# ---- memory


def test_buckets_waste_little() -> None:
    for nbytes in [0, 1, 16, 17, 100, 255, 256, 257, *RNG.integers(1, 1 << 40, 500).tolist()]:
        bucket = bucket_nbytes(nbytes)
        assert bucket % 16 == 0
        assert bucket >= max(16, nbytes)
        most = 1 + 1 / 64 if nbytes > 1 << 20 else 1.125
        assert bucket <= max(nbytes * most, nbytes + 16)
        assert bucket_nbytes(bucket) == bucket
    # Of a cache: 8 heads of 128 half-precision numbers for any thousands of positions.
    for positions in range(1 << 10, 1 << 17, 1 << 10):
        nbytes = 8 * 128 * 2 * positions
        assert bucket_nbytes(nbytes) <= nbytes * (1 + 1 / 64)


def test_memory_is_freed_although_bind_groups_are_kept(device: Device) -> None:
    if device.info.type != "cpu" or not sys.platform.startswith("linux"):
        pytest.skip("memory of the process is looked at")
    numel, turns = 1_000_000, 12
    launcher = Executor(add_plan(numel), device).launcher()
    before = _resident_nbytes()
    for _ in range(turns):
        launcher.run([device.allocate(4 * numel) for _ in launcher.names])
        device.synchronize()
        device.pool.empty()
    assert _resident_nbytes() - before < turns // 2 * len(launcher.names) * 4 * numel


def _resident_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.usefixtures("kept_garbage")
def test_released_memory_is_reused_and_counted(device: Device) -> None:
    device.empty_cache()
    before = device.pool.stats()
    first = device.allocate(100_000)
    serial = first.serial
    held = device.pool.stats()
    assert held["allocated"] - before["allocated"] == first.capacity >= 100_000
    del first
    second = device.allocate(100_000)
    assert second.serial == serial
    del second
    after = device.pool.stats()
    assert after["allocated"] == before["allocated"]
    assert after["reserved"] == held["reserved"]
    assert after["peak_allocated"] >= held["allocated"]
    device.empty_cache()
    emptied = device.pool.stats()
    assert emptied["reserved"] == emptied["allocated"] == before["allocated"]
    device.pool.reset_peak()
    assert device.pool.stats()["peak_allocated"] == before["allocated"]


def test_a_loop_gets_the_same_memory_in_every_turn(device: Device) -> None:
    """Whatever order it is given back in: bind groups are made for it once."""
    sizes = [512, 4096, 512, 512, 4096, 512]
    first = [device.allocate(nbytes) for nbytes in sizes]
    serials = [buffer.serial for buffer in first]
    for order in ([3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0], [1, 2, 0, 5, 3, 4]):
        for k in order:
            first[k] = None
        first = [device.allocate(nbytes) for nbytes in sizes]
        assert [buffer.serial for buffer in first] == serials


def test_buffers_dropped_by_the_garbage_collector_are_reused(device: Device) -> None:
    gc.collect()  # what other tests have left
    before = device.pool.stats()["allocated"]
    for _ in range(100):
        cycle: list[Any] = [device.allocate(5000)]
        cycle.append(cycle)
    del cycle
    gc.collect()
    assert device.pool.stats()["allocated"] == before


def test_absurd_sizes_are_out_of_memory(device: Device) -> None:
    with pytest.raises(errors.OutOfMemoryError, match=r"35,184,372,088,832 bytes.*split"):
        device.allocate(1 << 45)
    with pytest.raises(ValueError, match="negative"):
        device.allocate(-1)


def test_out_of_memory_empties_the_cache_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device()
    device.allocate(1 << 20)
    create = device.backend.create_buffer
    failures = [1]

    def create_buffer(nbytes: int, usage: int) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise errors.OutOfMemoryError("not enough memory left")
        return create(nbytes, usage)

    monkeypatch.setattr(device.backend, "create_buffer", create_buffer)
    reserved = device.pool.stats()["reserved"]
    buffer = device.allocate(3 << 20)
    assert device.pool.stats()["reserved"] <= reserved - (1 << 20) + buffer.capacity
    failures[0] = 2
    with pytest.raises(errors.OutOfMemoryError, match=r"5\.0 MiB were asked for"):
        device.allocate(5 << 20)
    assert device.allocate(5 << 20).capacity == 5 << 20


# ---- transfers


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 15, 16, 17, 1023, 4097, 1_000_003])
def test_round_trip_of_odd_sizes(device: Device, nbytes: int) -> None:
    data = random_bytes(nbytes)
    buffer = device.allocate(nbytes)
    device.upload(buffer, data)
    result = np.zeros(nbytes + 8, np.uint8)
    download(device, buffer, result[:nbytes])
    np.testing.assert_array_equal(result[:nbytes], data)
    assert not result[nbytes:].any()


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 7, 100])
def test_uploads_and_downloads_of_ranges(device: Device, offset: int, nbytes: int) -> None:
    expected = random_bytes(200)
    buffer = device.allocate(200)
    device.upload(buffer, bytes(expected))
    part = random_bytes(nbytes)
    device.upload(buffer, (int(part.ctypes.data), nbytes), offset)
    expected[offset : offset + nbytes] = part
    everything = bytearray(200)
    download(device, buffer, everything)
    assert everything == expected.tobytes()
    piece = bytearray(nbytes)
    download(device, buffer, piece, offset)
    assert piece == part.tobytes()


def test_large_transfers_go_in_chunks(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_CHUNK", 1 << 16)
    monkeypatch.setattr(transfer, "_STAGED", 1 << 15)
    device.transfers.empty()
    data = random_bytes(1_000_001)
    buffer = device.allocate(data.nbytes + 7)
    device.upload(buffer, data, 3)
    result = np.empty_like(data)
    download(device, buffer, result, 3)
    np.testing.assert_array_equal(result, data)
    device.transfers.empty()


def test_many_downloads_at_once(device: Device) -> None:
    data = [random_bytes(int(n)) for n in RNG.integers(0, 5000, 30)]
    buffers = [device.allocate(d.nbytes) for d in data]
    for buffer, content in zip(buffers, data, strict=True):
        device.upload(buffer, content)
    results = [np.empty_like(d) for d in data]
    device.download_many(
        [(b, 0, r.nbytes, int(r.ctypes.data)) for b, r in zip(buffers, results, strict=True)]
    )
    for content, result in zip(data, results, strict=True):
        np.testing.assert_array_equal(result, content)


def test_ranges_outside_the_buffer_are_errors(device: Device) -> None:
    buffer = device.allocate(10)
    with pytest.raises(errors.DeviceError, match="an upload of 17 bytes"):
        device.upload(buffer, bytes(17))
    with pytest.raises(errors.DeviceError, match="at offset 15"):
        download(device, buffer, bytearray(2), 15)
    with pytest.raises(ValueError, match="contiguous"):
        device.upload(buffer, np.zeros((4, 4), np.uint8)[:, ::2])


def test_staging_memory_is_reused() -> None:
    device = open_device()
    buffer = device.allocate(3 << 20)
    data = random_bytes(3 << 20)

    def staging() -> int:
        uploads, downloads = device.transfers._uploads, device.transfers._staging
        return len(uploads) + sum(len(handles) for handles in downloads.values())

    for _ in range(10):
        device.upload(buffer, data)
        download(device, buffer, data)
    count = staging()
    for _ in range(50):
        device.upload(buffer, data)
        download(device, buffer, data)
    assert staging() == count


# ---- threads


@pytest.mark.parametrize("awake_seconds", [0.0, 1e-3, 20.0])
def test_a_wait_ends_when_the_work_is_done(
    awake_seconds: float, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = device.backend
    assert not (device.info.type == "cpu" and backend.library.awake_seconds)
    monkeypatch.setattr(backend.library, "awake_seconds", awake_seconds)
    source, target = device.allocate(16 << 20), device.allocate(16 << 20)
    values, found = random_bytes(8), bytearray(8)
    for _ in range(3):
        for _ in range(20):
            device.copy(source, 0, target, 0, 16 << 20)
        device.synchronize()
        assert device.backend.wait_at_most(0)
        device.upload(source, values)
        device.copy(source, 0, target, 0, 16 << 20)
        download(device, target, found)
        assert found == values


def test_threads_with_their_own_executors(device: Device) -> None:
    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        numel = 1000 + 77 * seed
        executor = Executor(chain_plan(numel, 3), device)
        wrong = 0
        for _ in range(15):
            x = rng.random(numel, dtype=np.float32)
            gpu = device.allocate(x.nbytes)
            device.upload(gpu, x)
            with executor.lock:
                bound = executor.bind({}, {"x": gpu})
                bound.replay()
                result = np.empty_like(x)
                download(device, bound.buffer("y"), result)
            wrong += not np.array_equal(result, x * 4)
            del bound, gpu
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(8))) == [0] * 8


def test_threads_with_one_executor(device: Device) -> None:
    executor = Executor(add_plan(5000), device)
    failures: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            a, b = rng.random((2, 5000), dtype=np.float32)
            result = np.empty_like(a)
            with executor.lock:
                bound = executor.bind()
                device.upload(bound.buffer("a"), a)
                device.upload(bound.buffer("b"), b)
                bound.replay()
                download(device, bound.buffer("c"), result)
            if not np.array_equal(result, a + b):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- the end


def run_python(code: str, provider: str, first: str = "") -> subprocess.CompletedProcess[str]:
    prelude = (
        "import sys\n"
        "import numpy as np\n"
        "from tests.gpu.runtime_plans import add_plan\n"
        "from torch_webgpu_compile import errors\n"
        "from torch_webgpu_compile.runtime.device import open_device\n"
        "from torch_webgpu_compile.runtime.executor import Executor\n"
        f"device = open_device({require(provider)!r})\n"
        "executor = Executor(add_plan(64), device)\n"
        "bound = executor.bind()\n"
        "bound.replay()\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", first + prelude + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(provider),
    )


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "code",
    [
        "bound.replay()",
        "device.close(); bound.replay()",
        "device.close(); assert open_device(*device.opened_as) is not device",
        "device.upload(bound.buffer('a'), bytes(256)); sys.exit(0)",
    ],
)
def test_interpreter_exit_is_quiet(code: str, provider: str) -> None:
    done = run_python(code, provider)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Handlers that are registered first come last.
IS_DONE = """
import atexit, os
os.environ["MESA_SHADER_CACHE_DISABLE"] = "true"
@atexit.register
def is_done():
    assert device.backend.wait_at_most(0)
"""
# A driver on the CPU is busy compiling for a while when such a kernel first runs.
SUBMIT = """
from dataclasses import replace
from tests.gpu.runtime_plans import ADD, ADD_KERNEL
long = " + ".join(f"sin(a[id.x] * {k}.5) / cos(b[id.x] + {k}.5)" for k in range(100))
kernel = replace(ADD_KERNEL, wgsl=ADD.replace("a[id.x] + b[id.x]", long))
slow = Executor(replace(add_plan(64), kernels=(kernel,)), device).bind()
def submit():
    slow.replay()
    device.queue.flush()
"""


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "code",
    [
        "submit()",
        "atexit.unregister(is_done)\nclass Late:\n"
        "    def __del__(self, submit=submit, is_done=is_done): submit(); is_done()\n"
        "late = Late(); late.itself = late",
    ],
    ids=["before the exit", "during the exit"],
)
def test_the_exit_waits_for_work(code: str, provider: str) -> None:
    done = run_python(SUBMIT + code, provider, IS_DONE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LOST = """
import logging, warnings; logging.disable()
import numpy as np
staged = device.allocate(2 << 20)
device.upload(staged, bytes(2 << 20))
lib = device.backend.lib
lib.wgpuDeviceDestroy(device.backend.device)
def lost(call, *args):
    try:
        call(*args)
    except errors.DeviceLostError as error:
        assert "was lost" in str(error), error
    else:
        raise AssertionError(call)
bound.replay()
lost(device.synchronize)
lost(device.allocate, 1 << 21)
lost(device.upload, staged, bytes(8))
lost(device.upload, staged, bytes(2 << 20))
host = np.empty(8, np.uint8)
lost(device.download_many, [(staged, 0, 8, host.ctypes.data)])
lost(device.synchronize)
assert device.is_lost
warnings.simplefilter("ignore")  # that it is opened again
fresh = open_device(*device.opened_as)
assert fresh is not device
bound = Executor(add_plan(64), fresh).bind()
bound.replay()
fresh.synchronize()
"""


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_lost_device_raises_and_can_be_reopened(provider: str) -> None:
    done = run_python(LOST, provider)
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
import os
child = os.fork()
if child == 0:
    try:
        bound.replay()
        device.synchronize()
    except errors.DeviceError as error:
        assert "spawn" in str(error)
        del bound, executor
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
bound.replay()
device.synchronize()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_forked_child_gets_an_error(provider: str) -> None:
    done = run_python(FORK, provider)
    assert (done.returncode, done.stderr) == (0, "")
