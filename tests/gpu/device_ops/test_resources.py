"""Memory that comes back, threads, tensors larger than a binding."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from torch import nn

from tests.device_checks import DEVICE, compare
from torch_webgpu_compile import counters
from torch_webgpu_compile.device.eager import dispatch
from torch_webgpu_compile.tensors import devices, storages

pytestmark = pytest.mark.rotates(9)

STEPS = int(os.environ.get("TORCH_WEBGPU_TEST_STEPS", "300"))


def in_use():
    """(allocated bytes, reserved bytes, live storages)."""
    gc.collect()
    torch.webgpu.synchronize()
    stats = devices.get_device(0).pool.stats()
    live = len(storages._references)
    return stats["allocated"], stats["reserved"], live


# ---- memory


def test_ten_thousand_tensors():
    """The table of storages and the reserved memory do not grow with the tensors that have died."""
    for _ in range(100):
        torch.empty(1000, device=DEVICE)
    before = in_use()
    for k in range(10_000):
        x = torch.empty(1000 + k % 7, device=DEVICE)
        y = x[3:]
        del x, y
    after = in_use()
    assert after[0] == before[0]
    assert after[1] <= before[1] + (1 << 16)
    assert after[2] == before[2]


def test_memory_follows_the_storage():
    before = in_use()
    x = torch.empty(1 << 16, device=DEVICE)  # no kernel, which may keep its parameters
    part = x[5:9]
    del x
    assert in_use()[0] >= before[0] + (1 << 18)
    del part
    assert in_use()[0] == before[0]


def test_a_cycle_is_collected():
    before = in_use()
    x = torch.empty(1 << 16, device=DEVICE)  # no kernel, which may keep its parameters
    x.itself = [x]
    del x
    assert in_use()[0] == before[0]


def test_autograd_graphs_are_freed():
    def work():
        x = torch.ones(1 << 14, device=DEVICE, requires_grad=True)
        y = x
        for _ in range(5):
            y = y.sin() * x
        y.sum().backward()

    work()  # what was compiled keeps its constants
    before = in_use()
    work()
    assert in_use()[0] == before[0]


def train(steps):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(8, 16, device=DEVICE), torch.randint(4, (8,), device=DEVICE)
    for step in range(steps):
        if step == 60:  # after a read in the midst of steps: what waits for one takes a buffer more
            start, plans = in_use(), counters.plans_compiled
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            loss.item()
    return start, in_use(), counters.plans_compiled - plans, loss.item()


def test_training_leaves_memory_flat():
    """``TORCH_WEBGPU_TEST_STEPS=1000`` for more steps."""
    start, end, plans, loss = train(STEPS)
    assert end == start
    assert plans == 0
    assert loss < 1.0 or STEPS < 300


def test_compiled_operators_are_bounded(monkeypatch):
    """Those of other arguments give way; their pipelines die with them."""
    monkeypatch.setattr(dispatch, "_MAX_OPS", 4)
    dispatch.forget()
    for dtype in (torch.float32, torch.int32, torch.float16, torch.int64, torch.bool) * 2:
        x = torch.tensor([0, 1, 3, 0]).to(dtype)
        y = x.to(DEVICE)
        torch.testing.assert_close((y + y).cpu(), x + x)
        torch.testing.assert_close(torch.where(y > 0, y, 0).cpu(), torch.where(x > 0, x, 0))
        assert 0 < sum(map(len, dispatch._by_kind.values())) <= 4


def test_out_of_memory():
    with pytest.raises(RuntimeError, match="larger than this GPU allows"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"^aten\.zeros\.default: the GPU is out of memory\. A"):
        torch.zeros(1 << 50, dtype=torch.uint8, device=DEVICE)
    compiled = torch.compile(lambda x: x.new_zeros(1 << 50), backend="webgpu")
    with pytest.raises(RuntimeError, match=r"^the GPU is[^$]*test_resources\.py:\d+: .*new_zeros"):
        compiled(torch.ones(1, device=DEVICE))
    assert torch.ones(3, device=DEVICE).sum().item() == 3


# ---- threads


def test_threads():
    """Eager operators, with autograd, from four threads at once."""
    errors = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for size in (3, 17, 40 + seed):
                x = torch.randn(size, 4, generator=generator)
                for _ in range(10):
                    on = x.to(DEVICE).requires_grad_()
                    y = (on.softmax(1) @ on.t()).relu() * 2
                    y[0, :1] += 1
                    y.sum().backward()
                    host = x.clone().requires_grad_()
                    z = (host.softmax(1) @ host.t()).relu() * 2
                    z[0, :1] += 1
                    z.sum().backward()
                    torch.testing.assert_close(on.grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_tensor_of_another_thread():
    x = torch.ones(100, device=DEVICE)
    threads = [threading.Thread(target=lambda k=k: x[k * 25 :][:25].mul_(k)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert x.view(4, 25).sum(1).tolist() == [0.0, 25.0, 50.0, 75.0]


# ---- large tensors


def available_gib():
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) / (1 << 20)


@pytest.mark.skipif(
    os.path.exists("/proc/meminfo") and available_gib() < 4, reason="not enough memory"
)
def test_tensors_larger_than_a_binding():
    """More than 128 MiB, the least that an adapter may bind at once."""
    count = (136 << 20) // 4

    def f(device):
        x = torch.arange(count, dtype=torch.int32, device=device)
        x[-5:].mul_(2)
        x[1::1000].add_(1)
        y = x + 1
        halves = y[count // 2 :].clone()
        return x[-7:].clone(), y[:3].clone(), y[-3:].clone(), halves[:4].clone(), y.max()

    compare(f)
