"""Long work: what a process keeps, on the host and on the GPU, does not grow with what it did.

Each function warms up, does the same kind of work again and again, and looks at the memory of the
host and of the GPU and at what is alive: between the first half and the end, none may grow.
`LONG` has the numbers of the issue, which take half an hour; the table takes a part of them.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.device.eager import dispatch
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.symbolic import expressions
from torch_webgpu_compile.tensors import devices

from .faults import Tally, fault

_LONG = {"operators": 20_000, "sizes": 3_000, "models": 300}
_TABLE = {"operators": 8_000, "sizes": 600, "models": 40}
COUNTS = _LONG if os.environ.get("TRUST_LONG") else _TABLE

_MAX_GROWTH = 24 << 20
"""Bytes: what allocators on the host keep for themselves differs by some MiB."""

_OF_PYTORCH = 250_000
"""Bytes that PyTorch 2.13 itself keeps of each compilation: the same with ``aot_eager``."""


def _host_nbytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("memory is only measured on Linux")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _alive() -> dict[str, int]:
    """What is kept, by what it is."""
    device = devices.get_device(0)
    gc.collect()
    torch.webgpu.synchronize()
    stats = device.pool.stats()
    return {
        "bytes on the host": _host_nbytes(),
        "bytes on the GPU": stats["reserved"],
        "pipelines": len(device.pipelines._pipelines),
        "plans": len(plan_cache._memory),
        "holders of memory": len(device._reclaimable),
        "operators": sum(map(len, dispatch._by_kind.values())),
        "expressions": len(expressions._references),
    }


# What may come on top after the first half.
_LIMITS = {
    "bytes on the host": _MAX_GROWTH,
    "bytes on the GPU": 8 << 20,
    "pipelines": 32,
    "plans": 8,
    "holders of memory": 256,
    "operators": 16,
    "expressions": 20_000,
}


def _soak(tally: Tally, count: int, work: Callable[[int], bool], compiles: bool = False) -> None:
    """Works ``count`` times; ``compiles`` says that PyTorch compiles each time."""
    early: dict[str, int] = {}
    for number in range(count):
        tally(work(number), f"a wrong result at {number}")
        if number == count // 2:
            early = _alive()
    late = _alive()
    limits = dict(_LIMITS)
    if compiles:
        limits["bytes on the host"] += _OF_PYTORCH * (count - count // 2)
    for what, limit in limits.items():
        grown = late[what] - early[what]
        tally(grown <= limit, f"{what} grew from {early[what]:,} to {late[what]:,}")


@fault("thousands of mixed eager operators of ever new sizes and dtypes", seconds=2400)
def mixed_operators(tally: Tally) -> None:
    autoload.register()
    chance = random.Random(0)
    dtypes = (torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x + x,
        lambda x: x * 2 - 1,
        lambda x: x.sum(0),
        lambda x: x.amax(1),
        lambda x: x.t().contiguous(),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.where(x > 1, x, x - 1),
        lambda x: x.flip(0),
        lambda x: x.float() @ x.float().t(),
        lambda x: x[1:, :2].clone(),
        lambda x: torch.softmax(x.float(), -1),
        lambda x: x.cumsum(0),
    ]

    def work(number: int) -> bool:
        sizes = chance.randrange(2, 60), chance.randrange(2, 60)
        host = torch.randint(0, 4, sizes).to(chance.choice(dtypes))
        call = chance.choice(calls)
        got = call(host.to("webgpu"))
        if number % 16:  # not every result is looked at, as in programs
            return True
        return torch.allclose(got.cpu().double(), call(host).double(), rtol=1e-2, atol=1e-2)

    _soak(tally, COUNTS["operators"], work)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())


def _changing_sizes(tally: Tally, device: str) -> None:
    autoload.register()
    torch.manual_seed(0)
    host = nn.Sequential(*[_block() for _ in range(12)]).eval()
    compiled = torch.compile(
        nn.Sequential(*[_block() for _ in range(12)]).eval(), backend="webgpu", dynamic=True
    )
    compiled._orig_mod.load_state_dict(host.state_dict())
    compiled.to(device)

    def work(number: int) -> bool:
        x = torch.randn(number + 2, 16)
        got = compiled(x.to(device))
        return number % 16 != 0 or torch.allclose(got.cpu(), host(x), rtol=1e-3, atol=1e-4)

    with torch.no_grad():
        _soak(tally, COUNTS["sizes"], work)


@fault("hundreds of sizes of a compiled model on the device", seconds=1200)
def changing_sizes_on_the_device(tally: Tally) -> None:
    _changing_sizes(tally, "webgpu")


@fault("hundreds of sizes of a compiled model on CPU tensors", seconds=1200)
def changing_sizes_on_the_host(tally: Tally) -> None:
    _changing_sizes(tally, "cpu")


@fault("models compiled, trained for a step and dropped", seconds=2400)
def dropped_models(tally: Tally) -> None:
    autoload.register()
    chance = random.Random(0)
    # Full after a few models: the last 256 pipelines take 200 MB on a software adapter.
    devices.get_device(0).pipelines._recent.most = 8
    plan_cache._memory.most = 8

    def work(number: int) -> bool:
        torch._dynamo.reset()
        width = chance.randrange(4, 40)
        device = ("cpu", "webgpu")[number % 2]
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)).to(device)
        compiled = torch.compile(model, backend="webgpu")
        x = torch.randn(5, 8)
        compiled(x.to(device)).sum().backward()
        with torch.no_grad():
            got = compiled(x.to(device)).cpu()
        torch._dynamo.reset()
        right = torch.allclose(got, model.cpu()(x), rtol=1e-3, atol=1e-4)
        # Compiled functions are cycles: else Python's collector decides how many there are at once.
        del model, compiled
        gc.collect()
        return right

    _soak(tally, COUNTS["models"], work, compiles=True)
