"""A program that runs on a device with bindings of 64 KiB, see `test_small_bindings`.

Its tensors of some hundred kilobytes are to this device what those beyond 128 MiB are to a phone.
Prints what was wrong with every case, by name: "" for nothing.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from torch_webgpu_compile import counters, errors
from torch_webgpu_compile.callables.device_graph import DeviceGraph
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.device.eager import dispatch
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime import adapters
from torch_webgpu_compile.runtime import device as runtime_device
from torch_webgpu_compile.tensors import devices

BINDING_NBYTES = 1 << 16
BUFFER_NBYTES = 1 << 26
LARGE = 40_000  # of floats: 3 bindings
SIZES = (20, 30, 50, LARGE, 70)


def open_small(**limits: int) -> None:
    """Makes a device with these limits the one that all tensors are on."""
    provider = adapters.choose_provider(from_environment().provider)
    info, adapter = adapters.find_adapter(provider, None)
    small = replace(info, limits={**info.limits, **limits})
    device = runtime_device.create_device(provider, small, adapter, checked=False)
    devices._open[0] = device
    runtime_device._devices[provider, info.index, False, 0] = device


def last(x: Tensor) -> Tensor:
    return torch.tensor([1, x.numel() - 1], device=x.device)


def updated(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        x = x.clone()
        change(x)
        return x

    return call


def sums(optimizer: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Two steps with an embedding of as many numbers."""

    def call(x: Tensor) -> Tensor:
        weight = nn.Parameter(x.clone().view(-1, 10))
        steps = optimizer([weight, nn.Parameter(x[:10].clone())])
        for _ in range(2):
            F.embedding(torch.tensor([0, 1, 1], device=x.device), weight).square().sum().backward()
            steps.step()
            steps.zero_grad()
        return weight.detach()

    return call


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad

    return call


Case = Callable[[Tensor], Any]

MAPS: dict[str, Case] = {
    "mul": lambda x: x * 2,
    "add": lambda x: x + x.flip(0),
    "relu": torch.relu,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "half": lambda x: x.half(),
    "byte": lambda x: (x * 10).to(torch.int16).to(torch.uint8),
    "long": lambda x: (x * 10).long() * 3,
    "compare": lambda x: x > 0.5,
    "expand": lambda x: x[:10].expand(x.numel() // 10, 10) + 0,
    "cat": lambda x: torch.cat([x, x * 2]),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "transpose": lambda x: x.view(-1, 10).t().contiguous(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(3),
    "add_": updated(lambda x: x.add_(1)),
    "fill a part": updated(lambda x: x[1:].fill_(3)),
    "copy a stride": updated(lambda x: x[::2].copy_(x[: x.numel() // 2] * 2)),
    "add to a column": updated(lambda x: x.view(-1, 10)[:, 3].add_(1)),
    "arange": lambda x: torch.arange(x.numel(), device=x.device) * 2,
    "full": lambda x: torch.full_like(x, 3.5),
    "eye": lambda x: torch.eye(int(x.numel() ** 0.5), device=x.device),
}
REDUCTIONS: dict[str, Case] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "max": lambda x: x.max(),
    "argmax": lambda x: x.argmax(),
    "any": lambda x: (x > 5).any(),
    "equal": lambda x: torch.tensor(torch.equal(x, x.clone())),
    "columns": lambda x: x.view(-1, 10).sum(0),
    "rows": lambda x: x.view(-1, 10).sum(1),
    "softmax": lambda x: x.softmax(0),
    "softmax of rows": lambda x: x.view(-1, 10).softmax(1),
    "layer norm": lambda x: F.layer_norm(x.view(-1, 10), (10,)),
    "cumsum": lambda x: x.cumsum(0),
    "loss": lambda x: F.mse_loss(x, x.flip(0)),
    "matmul": lambda x: x.view(-1, 10) @ x[:50].view(10, 5) if x.numel() >= 50 else x,
    "linear": lambda x: F.linear(x[:20].view(2, 10), x.view(-1, 10)),
    "conv": lambda x: F.conv1d(x.view(1, 2, -1), x[:12].view(2, 2, 3), padding=1),
    "sort": lambda x: x.sort().values,
    "topk": lambda x: x.topk(5).values,
}
INDEXING: dict[str, Case] = {
    "embedding": lambda x: F.embedding(last(x[::10]), x.view(-1, 10)),
    "index": lambda x: x[last(x)],
    "gather": lambda x: x.gather(0, last(x)),
    "scatter": lambda x: x.scatter(0, last(x), 5.0),
    "index_add": lambda x: x.index_add(0, last(x), x[:2]),
    "index_put": updated(lambda x: x.__setitem__(last(x), 7.0)),
    "index_copy of rows": lambda x: x.view(-1, 10).index_copy(
        0, last(x[::10]) - torch.tensor([1, 0], device=x.device), x[:20].view(2, 10)
    ),
    "nonzero": lambda x: (x > 1).nonzero(),
    "mask": lambda x: x[x > 0.9],
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 9.0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0.5, x.flip(0)),
    "unique": lambda x: (x * 10).round().unique(),
    "far views": lambda x: x[:: x.numel() // 4][:4] * 2,
    "far views, copied": lambda x: x[:: x.numel() // 4][:4].clone(),
    "far views, changed": updated(lambda x: x[:: x.numel() // 4][:4].mul_(3)),
    "far rows": lambda x: x.view(2, -1)[:, 3:5].sum(0),
    "the end": lambda x: x[-3:] + x[:3],
    "the end, changed": updated(lambda x: x[-3:].zero_()),
}
TRAINING: dict[str, Case] = {
    "gradient of sum": gradient(lambda x: (x * x).sum()),
    "gradient of softmax": gradient(lambda x: x.view(-1, 10).softmax(1).square()),
    "gradient of a gather": gradient(lambda x: x[last(x)] * 2),
    "gradient of an embedding": gradient(lambda x: F.embedding(last(x[::10]), x.view(-1, 10))),
    "gradient of layer norm": gradient(lambda x: F.layer_norm(x.view(-1, 10), (10,)).square()),
    "SGD": sums(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamW": sums(lambda p: torch.optim.AdamW(p, lr=0.1)),
    "AdamW, foreach": sums(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
    "AdamW, fused": sums(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
    "clip": lambda x: clipped(x.clone()),
}


def clipped(x: Tensor) -> Tensor:
    x.grad = x * 2
    nn.utils.clip_grad_norm_(x, 1.0)
    return x.grad


def random_numbers(x: Tensor) -> Tensor:
    """1 where what is drawn has the right mean and deviation."""
    n = x.numel()
    drawn = [torch.randn(n, device=x.device), torch.empty_like(x).normal_()]
    drawn.append((torch.rand(n, device=x.device) - 0.5) * 12**0.5)
    drawn.append(torch.empty_like(x).uniform_(-(3**0.5), 3**0.5))
    drawn.append(F.dropout(torch.ones_like(x), 0.5) - 1)
    right = [abs(d.mean().item()) < 6 / n**0.5 and abs(d.std().item() - 1) < 0.9 for d in drawn]
    return torch.tensor(right)


EAGER = {**MAPS, **REDUCTIONS, **INDEXING, **TRAINING}
COMPILED: dict[str, Case] = {
    "map": lambda x: x * 2 + 1,
    "sum": lambda x: (x * 2).sum(),
    "softmax": lambda x: x.view(-1, 10).softmax(1) * 2,
    "several": lambda x: ((x + 1).relu(), x.view(-1, 10).mean(0), x[-3:] * 2),
    "scatter": lambda x: x.scatter(0, last(x), 5.0) + 1,
    "changed": lambda x: x.mul_(2).sum(),
    "host step": lambda x: torch.linalg.eigvalsh(x[:16].view(4, 4)).sum() + x,
    "far": lambda x: x[::9_000] * 2,
}


def check(function: Case, wanted: Case, size: int, place: str) -> None:
    x = torch.linspace(-0.25, 1, size).roll(size // 3)
    given = x.clone().to(place)
    assert_close(_on_host(function(given)), wanted(x), atol=1e-4, rtol=1e-4)
    assert_close(given.cpu(), x, msg=lambda text: f"the argument: {text}")


def _on_host(value: Any) -> Any:
    return tuple(v.cpu() for v in value) if isinstance(value, tuple) else value.cpu()


def eager(name: str) -> None:
    for size in SIZES:
        check(EAGER[name], EAGER[name], size, "webgpu")


def compiled(name: str, place: str) -> None:
    torch._dynamo.reset()
    options = {"fallback": "silent"}
    function = torch.compile(COMPILED[name], backend="webgpu", dynamic=True, options=options)
    for size in (*SIZES, LARGE, LARGE + 10):
        check(function, COMPILED[name], size, place)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 32)  # 2 bindings
        self.inner = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 700)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.gelu(self.inner(self.table(x)))))


def training(place: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [Model()]
    models.append(copy.deepcopy(models[0]).to(place))
    functions = [models[0], torch.compile(models[1], backend="webgpu", dynamic=True)]
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for length in (3, 5, 60, 60):  # 6 bindings for the last layer's result
        x, wanted = torch.randint(0, 700, (2, length)), torch.randint(0, 700, (2 * length,))
        losses = []
        for function, step, to in zip(functions, steps, ("cpu", place), strict=True):
            loss = F.cross_entropy(function(x.to(to)).view(-1, 700), wanted.to(to))
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.detach().cpu())
        assert_close(*losses, atol=1e-4, rtol=1e-4)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)


N = 1 << 12  # the square of which has 64 MiB as floats
REFUSED: dict[str, Case] = {
    "zeros": lambda x: x.new_zeros(N, N, 2),
    "zeros of doubles": lambda x: torch.zeros(N, N, 2, device=x.device, dtype=torch.float64),
    "full": lambda x: torch.full((N * N * 2,), 3.0, device=x.device),
    "empty": lambda x: torch.empty(N, N, 2, device=x.device),
    "rand": lambda x: torch.rand(N, N, 2, device=x.device),
    "arange": lambda x: torch.arange(N * N, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, N * N * 2, device=x.device),
    "window": lambda x: torch.hann_window(N * N * 2, device=x.device),
    "broadcast": lambda x: x[:, None] + x,
    "broadcast doubles": lambda x: x[:, None] + x,
    "product": lambda x: x[:, None] @ x[None],
    "repeat": lambda x: x.repeat(2 * N),
    "pad": lambda x: F.pad(x, (0, 2 * N * N)),
    "given": lambda x: torch.mul(x[:, None], x, out=torch.empty(0, device=x.device)),
    "after small ones": lambda x: [torch.zeros(n, device=x.device) for n in (4, 5, 6, 2 * N * N)],
    "on the host": lambda x: x.repeat(N),
    "compiled": torch.compile(lambda x: x[:, None] + x, backend="webgpu", dynamic=False),
    "compiled, symbols": torch.compile(lambda x: x[:, None] + x, backend="webgpu", dynamic=True),
}
OF: dict[str, Case] = {
    "broadcast doubles": Tensor.double,
    "on the host": lambda x: torch.complex(x.double(), x.double()),
}


def refused(name: str) -> None:
    """At once: before the host computes what no buffer of the device can hold."""
    x = OF.get(name, Tensor.clone)(torch.ones(2 * N, device="webgpu"))
    before = sum(counters.fallbacks.values())
    with pytest.raises(errors.OutOfMemoryError, match=r"[0-9,]{9,} bytes") as refusal:
        REFUSED[name](x)
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[0-9,]{9,}", str(refusal.value))]
    assert min(numbers) <= BUFFER_NBYTES < max(numbers), refusal.value
    assert sum(counters.fallbacks.values()) == before, counters.fallbacks


def bounded() -> None:
    """Sizes that come again are not compiled again; of many, a few are kept."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: x * 3, backend="webgpu", dynamic=True)
    plans = []
    for step in (0, 0, 1, 1, 0, *range(2, 14), 13, 0):
        before = counters.plans_compiled
        x = torch.ones(LARGE + step, device="webgpu")
        filled = counters.plans_compiled  # by the operator that made x
        assert function(x).sum().item() == 3 * (LARGE + step)
        plans.append((counters.plans_compiled - max(before, filled)) > 0)
    assert plans == [True, False, True, False, False, *[True] * 12, False, True], plans


def precompiled_graph(place: str) -> None:
    """A stored graph with symbols has what larger sizes need."""
    torch._dynamo.reset()
    calls: list[tuple[Any, list[Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        kind = HostGraph if place == "cpu" else DeviceGraph
        run = kind.run

        def noticed(graph: Any, values: list[Any]) -> list[Any]:
            calls.append((graph, values[:]))
            return run(graph, values)

        patch.setattr(kind, "run", noticed)
        table = torch.arange(5.0)
        torch.compile(lambda x: x * 2 + table.to(x.device)[2], backend="webgpu", dynamic=True)(
            torch.ones(30, device=place)
        )
        graph, arguments = calls[-1]
    loaded = pickle.loads(pickle.dumps(graph))
    for size in (40, LARGE):
        x = torch.linspace(0, 1, size)
        given = [size if isinstance(value, int) else value for value in arguments]
        given = [x.to(place) if getattr(v, "shape", ()) == (30,) else v for v in given]
        (result,) = loaded(given)
        assert_close(result.cpu(), x * 2 + 2)


def few_bindings() -> None:
    """Where a kernel needs more bindings than there are, an operator runs on the host.

    Every later case is on this device.
    """
    open_small(
        **{"max-storage-buffer-binding-size": BINDING_NBYTES},
        **{"max-storage-buffers-per-shader-stage": 8},
    )
    dispatch.forget()
    eager("add")
    assert counters.fallbacks.pop("aten.add.Tensor")
    function = torch.compile(lambda x, y: x + y, backend="webgpu", dynamic=True)
    for size in (20, LARGE):
        x = torch.ones(size, device="webgpu")
        if size == 20:
            assert function(x, x * 2).sum().item() == 3 * size
            continue
        with pytest.raises(errors.UnsupportedOp, match=r"need 9 bindings.*allows 8"):
            function(x, torch.ones(size, device="webgpu"))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in EAGER:
        yield name, lambda name=name: eager(name)
    yield "random numbers", lambda: [check_random(n) for n in SIZES] and None
    for place in ("cpu", "webgpu"):
        for name in COMPILED:
            yield f"compiled {name}, {place}", lambda n=name, p=place: compiled(n, p)
        yield f"training, {place}", lambda place=place: training(place)
        yield f"precompiled, {place}", lambda place=place: precompiled_graph(place)
    yield "bounded", bounded
    for name in REFUSED:
        yield f"refused {name}", lambda name=name: refused(name)
    yield "few bindings", few_bindings


def check_random(size: int) -> None:
    assert bool(random_numbers(torch.ones(size, device="webgpu")).all())


def run_cases(left_out: Collection[str] = ()) -> dict[str, Any]:
    """Runs this program: what was ``wrong`` by case, and the operators that ran on the ``host``.

    Raises:
        AssertionError: it ended with an error.
    """
    root = Path(__file__).parents[2]
    places = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, *left_out],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs all cases but those that are named."""
    register()
    open_small(
        **{"max-storage-buffer-binding-size": BINDING_NBYTES, "max-buffer-size": BUFFER_NBYTES}
    )
    torch.manual_seed(0)
    wrong: dict[str, str] = {}
    for name, case in cases():
        if name in sys.argv[1:]:
            continue
        try:
            case()
            wrong[name] = ""
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"wrong": wrong, "host": sorted(counters.fallbacks)}))


if __name__ == "__main__":
    main()
