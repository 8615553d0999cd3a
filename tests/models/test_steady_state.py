"""Many calls and many threads."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.models.model_checks import BACKEND, compiled, no_fallbacks
from tests.models.test_training import TransformerBlock

pytestmark = pytest.mark.rotates(9)

CALLS = 1000


def gpu_nbytes() -> dict[str, int]:
    """Allocated and reserved GPU memory of the process."""
    if BACKEND != "webgpu":
        return {}
    from tests.providers import device_in_use

    stats = device_in_use().pool.stats()
    return {name: stats[name] for name in ("allocated", "reserved")}


def host_nbytes() -> int:
    """Resident memory of the process."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc/self/statm")
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("training", [False, True])
def test_memory_is_flat(training: bool) -> None:
    model = TransformerBlock().train(training)
    function = compiled(model)

    def call(seed: int) -> None:
        x = torch.full((2, 12, 32), float(seed % 7))
        result = function(x)
        if training:
            result.sum().backward()
            model.zero_grad(set_to_none=True)

    with torch.set_grad_enabled(training), no_fallbacks():
        for seed in range(100):
            call(seed)
        gc.collect()
        gpu, host = gpu_nbytes(), host_nbytes()
        for seed in range(CALLS):
            call(seed)
        gc.collect()
    assert gpu_nbytes() == gpu
    # 4 KB a call would be a leak of the smallest kind of object; the allocator itself wobbles.
    assert host_nbytes() - host < 4096 * CALLS


def test_memory_returns_when_the_model_dies() -> None:
    def use(features: int) -> None:
        model = nn.Linear(features, features).eval()
        function = compiled(model)
        with torch.no_grad(), no_fallbacks():
            function(torch.randn(2, features))

    use(16)
    torch._dynamo.reset()
    gc.collect()
    before = gpu_nbytes()
    use(1024)
    torch._dynamo.reset()
    gc.collect()
    after = gpu_nbytes()
    if before:
        assert after["allocated"] - before["allocated"] < 1024 * 1024  # the weight has 4 MiB


def run_in_threads(count: int, work: list[tuple[object, Tensor, Tensor]], calls: int) -> None:
    """Thread i calls each function of work, from item i on, and compares the results."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(first: int) -> None:
        try:
            barrier.wait(60)
            for call in range(calls):
                function, x, expected = work[(first + call) % len(work)]
                with torch.no_grad():
                    assert_close(function(x), expected, rtol=1e-5, atol=1e-5)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def test_four_threads_call_one_model() -> None:
    model = TransformerBlock().eval()
    function = compiled(model)
    with torch.no_grad(), no_fallbacks():
        inputs = [torch.randn(2, 12, 32) for _ in range(8)]
        function(inputs[0])
        run_in_threads(4, [(function, x, model(x)) for x in inputs], calls=50)


def test_four_threads_call_four_models() -> None:
    work = []
    with torch.no_grad(), no_fallbacks():
        for features in (32, 32, 64, 64):
            model = TransformerBlock(features).eval()
            function = compiled(model)
            x = torch.randn(2, 12, features)
            function(x)
            work.append((function, x, model(x)))
        run_in_threads(4, work, calls=50)


def test_four_threads_compile_at_once() -> None:
    work = []
    with torch.no_grad(), no_fallbacks():
        for features in (8, 16, 24, 40):
            model = nn.Sequential(nn.Linear(features, features), nn.GELU()).eval()
            x = torch.randn(5, features)
            work.append((compiled(model), x, model(x)))
        run_in_threads(4, work, calls=8)
