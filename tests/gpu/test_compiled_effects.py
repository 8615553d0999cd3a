"""Operators that are there for what they do: checks that raise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiling import compiled
from torch_webgpu_compile.device.autoload import register

register()
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:.*runs on the CPU"),  # checks and factorisations do
]
on_devices = pytest.mark.parametrize("device", ["cpu", "webgpu"])


def positive_root(x):
    torch._assert_async((x >= 0).all(), "a negative number")
    return x.sqrt() + 1


@on_devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_assertions(device, dynamic):
    f = compiled(positive_root, dynamic=dynamic)
    x = torch.rand(5, device=device)
    for n in (5, 3):
        torch.testing.assert_close(f(x[:n]), positive_root(x[:n]))
    with pytest.raises(RuntimeError, match="a negative number"):
        f(x - 2)
    torch.testing.assert_close(f(x), positive_root(x))


@on_devices
def test_an_assertion_alone(device):
    def f(x):
        torch._assert_async(x.isfinite().all(), "not finite")
        return

    for call in (compiled(f), f):
        assert call(torch.ones(3, device=device)) is None
        with pytest.raises(RuntimeError, match="not finite"):
            call(torch.full((3,), torch.inf, device=device))


def test_assertions_of_eager_operators():
    """An operator that is made of others keeps their checks."""
    x = torch.arange(6.0, device="webgpu")
    with pytest.raises(RuntimeError, match="got zero"):
        torch._assert_async((x > 7).all())
    lengths = torch.tensor([[0, 2], [2, 1]], device="webgpu")
    with pytest.raises(RuntimeError, match="Expected all rows of lengths along axis"):
        torch.segment_reduce(x.view(2, 3), "sum", lengths=lengths, axis=1)
    if hasattr(torch.ops.aten, "cholesky"):  # PyTorch 2.14 has it no more
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            torch.ops.aten.cholesky(-torch.eye(3, device="webgpu"))


@on_devices
def test_assertions_in_training(device):
    x = torch.rand(5, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(positive_root)(x).sum(), x)
    (wanted,) = torch.autograd.grad(positive_root(x).sum(), x)
    torch.testing.assert_close(gradient, wanted)
    with pytest.raises(RuntimeError, match="a negative number"):
        compiled(positive_root)(x - 2)


@on_devices
@pytest.mark.filterwarnings("error")
def test_assertions_are_no_missing_kernels(device):
    for options in ({"fallback": "error"}, {}):
        torch._dynamo.reset()
        x = torch.rand(5, device=device)
        torch.testing.assert_close(compiled(positive_root, options=options)(x), positive_root(x))
        classes = torch.arange(5, device=device) % 3
        got = compiled(lambda i: F.one_hot(i, 4), options=options)(classes)  # asserts its range
        assert torch.equal(got, F.one_hot(classes, 4))


def checks_are_kept(function, *arguments):
    """Whether PyTorch, which drops checks from graphs in older versions, lets backends see them."""
    try:
        torch.compile(function, backend="aot_eager")(*arguments)
    except torch.linalg.LinAlgError:
        return True
    return False


@on_devices
def test_a_singular_matrix(device):
    def f(x):
        return torch.linalg.inv(x) + 1

    x = (torch.randn(4, 4) + 4 * torch.eye(4)).to(device)
    g = compiled(f)
    torch.testing.assert_close(g(x).cpu(), f(x.cpu()))
    if checks_are_kept(f, torch.zeros(4, 4)):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            g(torch.zeros(4, 4, device=device))
    torch.testing.assert_close(g(x).cpu(), f(x.cpu()))


def test_several_in_order():
    def f(x):
        torch._assert_async((x > 0).all(), "first")
        y = x.exp()
        torch._assert_async((x > 1).all(), "second")
        return y

    g = compiled(f)
    with pytest.raises(RuntimeError, match="first"):
        g(torch.zeros(2))
    with pytest.raises(RuntimeError, match="second"):
        g(torch.ones(2))
    torch.testing.assert_close(g(torch.full((2,), 2.0)), f(torch.full((2,), 2.0)))
