"""Plans are found by Dynamo's graph, and then serve as those that were made by tracing it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torch_webgpu_compile.capture.graph import aot, autograd_function
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.plan import cache as plan_cache


class Block(nn.Module):
    """Parameters, a buffer that changes, a mask made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        mask = torch.ones_like(x).tril()
        return self.norm(nn.functional.gelu(self.linear(x))) * mask + self.steps


def several(x: Tensor) -> Any:
    y = x.view(4, 3, 2).transpose(1, 2).contiguous()
    return {"a": y.softmax(-1), "b": [y, 3]}, y.argmax(-1)


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.round() @ torch.ones(6, 2)).float()


def changed(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] = 1
    return x.sum(1) + 1


@torch.compiler.allow_in_graph
def of_user(x: Tensor) -> Tensor:
    return x * 3


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin() + 1, x, use_reentrant=False)


FOUND: list[Callable[..., Any]] = [
    several,
    with_autocast,
    changed,
    lambda x: (x + 1, None, x.exp()),
]
TRACED: list[Callable[..., Any]] = [
    lambda x: (x[1:], x + 1),
    lambda x: nn.functional.dropout(x) > 9,
    lambda x: of_user(x) + 1,
    checkpointed,
]


@pytest.fixture
def again(tmp_path, monkeypatch):
    """Compiles a function as a process would that is started again; counts what it traces."""
    traced = []

    def counting(module: Any, *arguments: Any, **keywords: Any) -> Any:
        traced.append(module)
        return original(module, *arguments, **keywords)

    original = aot.aot_module_simplified
    monkeypatch.setattr(aot, "aot_module_simplified", counting)
    options = {"cache": str(tmp_path / "cache"), "fallback": "silent"}

    def compiled(function: Any, **keywords: Any) -> tuple[Any, list[Any]]:
        torch._dynamo.reset()
        plan_cache.clear()
        traced.clear()
        return torch.compile(function, backend="webgpu", options=options, **keywords), traced

    yield compiled
    plan_cache.clear()


def check(function: Any, reference: Any, x: Tensor) -> None:
    given, expected = x.clone(), x.clone()
    torch.testing.assert_close(function(given), reference(expected), equal_nan=True)
    torch.testing.assert_close(given, expected, equal_nan=True)


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_functions(number, is_found, again):
    function = (FOUND if is_found else TRACED)[number]
    check(again(function)[0], function, torch.randn(4, 6))
    compiled, traced = again(function)
    check(compiled, function, torch.randn(4, 6))
    assert bool(traced) is not is_found
    check(compiled, function, torch.full((4, 6), float("nan")))
    check(compiled, function, torch.randn(6, 4).T)  # another graph, as ever


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_module(device, again):
    if device == "webgpu":
        register()
    module = Block().to(device)
    first = deepcopy(module)
    with torch.no_grad():
        again(first)[0](torch.randn(5, 6, device=device))
        compiled, traced = again(module)
        other = deepcopy(module)
        for _ in range(3):
            x = torch.randn(5, 6, device=device)
            torch.testing.assert_close(compiled(x), other(x))
    assert not traced
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    nn.init.ones_(module.linear.weight)
    nn.init.ones_(other.linear.weight)
    with torch.no_grad():
        x = torch.randn(5, 6, device=device)
        torch.testing.assert_close(compiled(x), other(x))


class Trained(nn.Module):
    """Statistics that change, a frozen weight, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5, self.training))


def train(module: nn.Module, compiled: Any, device: str, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x, labels = torch.randn(5, 6).to(device), torch.arange(5, device=device) % 3
        loss = nn.functional.cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_training(device, again):
    if device == "webgpu":
        register()
    torch.manual_seed(0)
    modules = [Trained().to(device) for _ in range(3)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    wanted = train(modules[0], again(modules[0])[0], device)
    compiled, traced = again(modules[1])
    assert train(modules[1], compiled, device) == wanted
    assert not traced
    for mine, theirs in zip(modules[1].buffers(), modules[0].buffers(), strict=True):
        assert torch.equal(mine, theirs)
    without_dropout, reference = modules[2], deepcopy(modules[2])
    for module in (without_dropout, reference):
        module.norm.momentum = 0.3
        module.forward = lambda x, m=module: m.last(m.norm(m.first(x)).relu())
    for expected in (True, False):
        compiled, traced = again(without_dropout)
        trained, eager = (
            train(without_dropout, compiled, device),
            train(reference, reference, device),
        )
        torch.testing.assert_close(trained, eager, rtol=1e-4, atol=1e-5)
        assert bool(traced) is expected


def gradients(function: Any, *inputs: Tensor, **keywords: Any) -> list[Any]:
    """Results, gradients of those that have some, and what has become of the inputs."""
    leaves = [x.clone().requires_grad_(x.requires_grad) for x in inputs]
    results = tree_leaves(function(*[x * 1 if x.requires_grad else x for x in leaves]))
    wanted = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    weights = [
        torch.linspace(-1, 1, r.numel()).reshape(r.shape[::-1]).permute(list(range(r.dim()))[::-1])
        for r in wanted
    ]
    given = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(wanted, given, weights, **keywords)
    return [*[r.detach() if isinstance(r, Tensor) else r for r in results], *found]


def with_views(x: Tensor, y: Tensor) -> Any:
    z = (x * y).sin()
    return z, z[1:], z.view(-1), x.T, z.argmax(), 3, None, y.detach() + z.detach()


def with_changes(x: Tensor, y: Tensor) -> Any:
    x.mul_(2)
    y = y + 1
    y[0] = x[1] * 3
    return y.exp(), x


def with_sums(x: Tensor, y: Tensor) -> Any:
    return x.softmax(-1) @ y.T, (x * y.cumsum(0)).sum(), y.log_softmax(0).amax(1)


WITH_GRADIENTS: list[Callable[..., Any]] = [
    with_views,
    with_changes,
    with_sums,
    lambda x, y: checkpoint(with_sums, x, y, use_reentrant=False),
]


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("number", range(4))
def test_gradients(number, which, again):
    function = WITH_GRADIENTS[number]
    x, y = (torch.randn(4, 6, requires_grad=needs) for needs in which)
    again(function)
    for is_traced in (True, number == 3):
        compiled, traced = again(function)
        torch.testing.assert_close(gradients(compiled, x, y), gradients(function, x, y))
        assert bool(traced) is is_traced
    special = x.detach().clone().fill_(float("inf")).requires_grad_(which[0])
    found, wanted = (gradients(f, special, y) for f in (compiled, function))
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.filterwarnings("ignore:backward:torch_webgpu_compile.FallbackWarning")
def test_what_gradients_are_asked_for(again):
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * x, (x**3).sum()

    for is_traced in (True, False):
        compiled, traced = again(function)
        x = torch.randn(4, requires_grad=True)
        first, second = compiled(x)
        (one,) = torch.autograd.grad(first.sum(), x, retain_graph=True)  # the other's is none
        (other,) = torch.autograd.grad(second, x, retain_graph=True)
        (both,) = torch.autograd.grad((first.sum(), second), x)
        torch.testing.assert_close(one, x.sin() + x * x.cos())
        torch.testing.assert_close(other, 3 * x**2)
        torch.testing.assert_close(both, one + other)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(second, x)
        assert bool(traced) is is_traced
        (slope,) = torch.autograd.grad(compiled(x)[1], x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], 6 * x)


def test_what_decides_about_gradients(again):
    """Each of these is traced for itself, the first two for the first time."""
    x = torch.randn(4, 6)
    frozen = x.clone().requires_grad_()

    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T).tanh()

    def run(*inputs: Tensor) -> bool:
        compiled, traced = again(function)
        torch.testing.assert_close(gradients(compiled, *inputs), gradients(function, *inputs))
        return bool(traced)

    assert [run(frozen, x), run(x, frozen), run(frozen, x)] == [True, True, False]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert run(frozen, x)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert [run(frozen, x), run(frozen, x)] == [True, False]
    with torch._functorch.config.patch(activation_memory_budget_solver=lambda *_: None):
        assert [run(frozen, x), run(frozen, x)] == [True, True]  # it cannot be compared
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert run(frozen, x)
    assert not run(frozen, x)
    compiled, traced = again(function)
    result = compiled(frozen, x).sum()
    with (
        pytest.raises(RuntimeError, match="compiled autograd was turned on after"),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        result.backward()
    assert not traced


def test_gradients_in_a_compiled_function(again):
    """Dynamo looks at every frame that starts in the backward pass, and not at this package's."""
    weight = torch.randn(6, 3, requires_grad=True)
    frames = torch._dynamo.utils.counters["frames"]
    counts = []

    def step(x: Tensor) -> Tensor:
        loss = (x @ weight).tanh().sum()
        loss.backward()
        return loss.detach() + 1

    for is_traced in (True, False):
        compiled, traced = again(step)
        frames.clear()
        for _ in range(2):
            x = torch.randn(4, 6)
            weight.grad = None
            loss = compiled(x)
            found, weight.grad = weight.grad, None
            torch.testing.assert_close((loss, found), (step(x), weight.grad))
        assert bool(traced) is is_traced
        counts.append(frames["total"])
    assert counts[1] <= counts[0]


def test_backward_graphs_that_are_counted_are_made_by_tracing():
    """DDP's optimizer knows a bucket by how many backward graphs were compiled before."""
    context = torch._guards.TracingContext(None)
    with torch._guards.tracing(context):
        assert autograd_function.settings() is not None
        context.ddp_optimizer_ctx = object()
        assert autograd_function.settings() is None


def test_a_forward_pass_alone_is_traced_again(again):
    """What the backward graph is of is not known before it is asked for."""
    for _ in range(2):
        compiled, traced = again(torch.sin)
        compiled(torch.randn(4, requires_grad=True))
        assert traced


def test_sizes_that_change_are_traced(again):
    def function(x: Tensor) -> Tensor:
        return x * x.shape[0]

    for _ in range(2):
        compiled, traced = again(function, dynamic=True)
        check(compiled, function, torch.randn(4, 6))
        check(compiled, function, torch.randn(5, 6))
        assert len(traced) == 1


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("damage", ["dynamo", "plan"])
def test_a_damaged_entry_is_made_again(damage, has_gradients, again, tmp_path):
    def check(function: Any, reference: Any, x: Tensor) -> None:
        x.requires_grad_(has_gradients)
        if x.requires_grad:
            torch.testing.assert_close(gradients(function, x), gradients(reference, x))
        else:
            torch.testing.assert_close(function(x), reference(x))

    check(again(torch.sin)[0], torch.sin, torch.randn(4, 6))
    paths = list((tmp_path / "cache").glob(f"*.{damage}"))
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    for has_traced in (True, False):
        compiled, traced = again(torch.sin)
        check(compiled, torch.sin, torch.randn(4, 6))
        assert bool(traced) is has_traced
