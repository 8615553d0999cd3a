"""Complex tensors in compiled functions: CPU and device tensors, gradients, sizes that vary."""

from __future__ import annotations

import pytest
import torch

import torch_webgpu_compile
from torch_webgpu_compile import FallbackWarning, counters, fallbacks
from torch_webgpu_compile.device.autoload import register

pytestmark = pytest.mark.rotates(12)

register()


def numbers(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, dtype=torch.complex64, generator=generator)


def rotary(x, rotations):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2)


FUNCTIONS = {
    "arithmetic": (lambda a, b: (a * b.conj() + 1j, a / b, a.abs()), (numbers(3, 4), numbers(4))),
    "matrices": (lambda a, b: (a @ b.mH).tanh(), (numbers(3, 4), numbers(5, 4, seed=1))),
    "layouts": (lambda a, b: (a.t()[1:] * 2, a.real.t(), b[::2].imag), (numbers(3, 4), numbers(5))),
    "rotary": (rotary, (torch.randn(2, 3, 8), numbers(3, 4))),
    "polar": (lambda r, t: torch.polar(r.exp(), t).sum(0), (torch.randn(3, 4), torch.randn(3, 4))),
    "fourier": (lambda a, b: torch.fft.ifft(torch.fft.fft(a) * b), (numbers(3, 8), numbers(8))),
    "constants": (
        lambda a, b: a * torch.tensor([1j, 2.0], device=a.device) + b,
        (numbers(3, 2), torch.randn(2)),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward(name, dynamic, device):
    torch._dynamo.reset()
    function, arguments = FUNCTIONS[name]
    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=dynamic)
    counters.reset()
    for _ in range(2):
        plain = [a.clone().requires_grad_() for a in arguments]
        moved = [a.clone().to(device).requires_grad_() for a in arguments]
        wanted, got = function(*plain), compiled(*moved)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        got = got if isinstance(got, tuple) else (got,)
        tangents = [torch.randn_like(w) for w in wanted]
        grads = torch.autograd.grad(wanted, plain, tangents)
        moved_grads = torch.autograd.grad(got, moved, [t.to(device) for t in tangents])
        for g, w in zip((*got, *moved_grads), (*wanted, *grads), strict=True):
            torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=1e-4, atol=1e-5)
            assert g.stride() == w.stride()
    assert not counters.fallbacks


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_one_graph_for_many_sizes(device):
    torch._dynamo.reset()

    def function(x, y):
        return x[1:].conj() * y.t()[1:], (x @ y).exp().abs()

    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=True)
    plans = 0
    for n, (rows, columns) in enumerate([(4, 4), (7, 7), (5, 5), (32, 32)]):
        x, y = numbers(rows, columns) * 0.3, numbers(columns, rows, seed=1) * 0.3
        for g, w in zip(compiled(x.to(device), y.to(device)), function(x, y), strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)
        plans = counters.plans_compiled if n == 0 else plans
    assert counters.plans_compiled == plans


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_changed_and_lazy_arguments(device):
    torch._dynamo.reset()

    def change(x):
        x.mul_(2j)
        x[1:].add_(1)
        return x.abs()

    def read(x, y):
        return x * 2, y.exp()

    changing, reading = (torch.compile(f, backend="webgpu") for f in (change, read))
    for view in (lambda x: x, lambda x: x.conj(), lambda x: x.t()):
        x = numbers(3, 4)
        moved = x.clone().to(device)
        torch.testing.assert_close(changing(view(moved)).cpu(), change(view(x)))
        torch.testing.assert_close(moved.cpu(), x)
        lazy = view(moved), view(moved).imag
        for g, w in zip(reading(*lazy), read(view(x), view(x).imag), strict=True):
            torch.testing.assert_close(g.cpu(), w)


@pytest.mark.rotates(1)
@pytest.mark.parametrize("lazy", [torch.conj, lambda y: y.conj().imag])
def test_a_gradient_that_is_lazily_conjugated(lazy):
    torch._dynamo.reset()

    def function(x):
        return x * (2 + 3j)

    x = numbers(3, 4)
    gradients = []
    for call in (function, torch.compile(function, backend="webgpu")):
        y = x.clone().requires_grad_()
        (lazy(call(y)) * numbers(3, 4, seed=1)).sum().abs().backward()
        gradients.append(y.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_small_network_learns(device):
    torch._dynamo.reset()

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 6, dtype=torch.complex64)
            self.second = torch.nn.Linear(6, 1, dtype=torch.complex64)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x))).abs()

    def train(where, backend):
        torch.manual_seed(0)
        model = Network().to(where)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        step = torch.compile(model, backend=backend, fullgraph=True)
        x, losses = numbers(8, 4).to(where), []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (step(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().cpu() for p in model.parameters()]

    counters.reset()
    losses, weights = train(device, "webgpu")
    assert not counters.fallbacks
    wanted, expected = train("cpu", "eager")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_how_many_kernels():
    """Complex numbers fuse as real ones do."""
    x, y = numbers(16, 16), numbers(16, 16, seed=1)
    counts = {
        "map": (lambda a, b: a * b.conj() + 1, (x, y), 1),
        "rotary": (rotary, (torch.randn(2, 5, 16), numbers(8)), 1),
        "join": (lambda a, b: torch.cat([a[1:], b.t()]), (x, y), 1),
        "norm": (lambda a: a.abs().square().mean(), (x,), 1),
        "product": (lambda a, b: a @ b, (x, y), 2),
        "filter": (lambda a, b: torch.fft.ifft(torch.fft.fft(a) * b), (x, y), 2),
    }
    for name, (function, arguments, wanted) in counts.items():
        report = torch_webgpu_compile.explain(function, *arguments)
        assert report.dispatch_count == wanted, name
        assert not report.fallbacks


def test_products_of_several_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.prod(0), x.cumprod(1)), backend="webgpu", fullgraph=True)
    for rows in (3, 4, 6):
        x = numbers(rows, 5)
        for g, w in zip(compiled(x), (x.prod(0), x.cumprod(1)), strict=True):
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_what_has_no_kernel_for_complex_numbers_leaves_its_graph_to_pytorch(device):
    def f(x):
        return torch.linalg.eigvals(x * 1j).abs().sum()

    fallbacks.reset_warnings()
    torch._dynamo.reset()
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    with pytest.warns(FallbackWarning, match="leaves its graph to PyTorch"):
        given = torch.compile(f, backend="webgpu")(x.to(device))
    assert given.device.type == device
    torch.testing.assert_close(given.cpu(), f(x))
