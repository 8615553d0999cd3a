"""Automatic differentiation on device tensors: backward, hooks, checkpoints, custom functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import (
    grad,
    jvp,
    vmap,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from tests.device_checks import DEVICE, compare, network, numbers

pytestmark = pytest.mark.rotates(6)

# ---- backward


def test_backward_and_accumulation():
    def f(device):
        x, w = numbers(3, 4, device=device), numbers(4, 2, device=device, seed=1)
        y = (x @ w).relu()
        y.sum().backward(retain_graph=True)
        first = w.grad.clone()
        y.pow(2).sum().backward()
        (x[0] * 2).sum().backward()
        return x.grad, w.grad, first

    compare(f)


def test_grad_of_some_inputs():
    def f(device):
        x, w = numbers(3, device=device), numbers(3, device=device, seed=1)
        y = x * w + w.exp()
        return torch.autograd.grad(
            y, (x, w), torch.ones_like(y), retain_graph=True
        ), torch.autograd.grad(y.sum(), w, allow_unused=True)

    compare(f)


def test_double_backward():
    def f(device):
        x = numbers(5, device=device)
        y = (x.sin() * x.exp()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        second.sum().backward()
        return first, second, x.grad

    compare(f, rtol=1e-4, atol=1e-5)


def test_gradient_penalty():
    def f(device):
        model, x = network(device), numbers(5, 4, device=device)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    compare(f, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 4), (5, 4), (5,)],
        [(2, 3, 4), (5, 4), ()],
        [(4,), (5, 4), (5,)],
        [(2, 0, 4), (5, 4), (5,)],
        [(2, 3, 0), (5, 0), (5,)],
        [(2, 3, 4), (5, 4)],
        [(3, 4), (4,)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_linear(shapes, dtype):
    """It has a derivative of its own on devices, of which PyTorch's CPU has none."""

    def f(device):
        inputs = [
            numbers(*shape, device=device, seed=seed).to(dtype) for seed, shape in enumerate(shapes)
        ]
        y = nn.functional.linear(*inputs)
        first = torch.autograd.grad(y.abs().pow(2).sum(), inputs, create_graph=True)
        return y, first, torch.autograd.grad(sum(x.abs().pow(2).sum() for x in first), inputs)

    compare(f, rtol=1e-4, atol=1e-4, strides=False)


def test_linear_is_taken_apart_by_who_asks():
    def f(device):
        x, w, b = (numbers(*s, device=device) for s in ((2, 3, 4), (5, 4), (5,)))
        with FlopCounterMode(display=False) as counter:
            nn.functional.linear(x, w, b).sum().backward()
        each = vmap(grad(lambda w, x: nn.functional.linear(x, w).sum()), (None, 0))(w, x)
        return counter.get_total_flops(), each

    compare(f)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="linear is made of its parts there")
def test_linear_with_a_bias_of_two_dimensions():
    x, w, b = (numbers(*s, device=DEVICE) for s in ((3, 4), (5, 4), (1, 5)))
    with pytest.raises(NotImplementedError, match="add it to the result"):
        nn.functional.linear(x, w, b)
    with torch.no_grad():
        torch.testing.assert_close(nn.functional.linear(x, w, b), x @ w.t() + b)


def test_retain_graph_error():
    def f(device):
        x = numbers(3, device=device)
        y = x.exp().sum()
        y.backward()
        y.backward()

    compare(f)


def test_in_place_operators_in_a_graph():
    def f(device):
        x = numbers(4, 3, device=device)
        y = x * 2
        y[1:3].mul_(x[:2])
        y[:, 1] = x[:, 0] * 3
        y.t()[2].add_(x[:, 2].detach())
        y.relu_().sum().backward()
        return y, x.grad

    compare(f)


def test_views_of_leaves_in_place():
    def f(device):
        x = torch.zeros(4, device=device)
        w = numbers(2, device=device)
        x[1:3] = w
        x[0].copy_(w[0] * 2)
        (x**2).sum().backward()
        return x, w.grad

    compare(f)


def test_non_scalar_and_complex_results():
    def f(device):
        x = numbers(4, device=device)
        (x[None] * x[:, None]).backward(torch.eye(4, device=device))
        return x.grad

    compare(f)


# ---- hooks


def test_tensor_hooks():
    def f(device):
        seen = []
        x = numbers(3, device=device)
        y = x * 2
        y.retain_grad()
        handle = y.register_hook(lambda g: g * 3)
        x.register_hook(lambda g: seen.append(g.clone()))
        x.register_post_accumulate_grad_hook(lambda t: t.grad.mul_(2))
        y.sum().backward(retain_graph=True)
        handle.remove()
        y.sum().backward()
        return seen, x.grad, y.grad

    compare(f)


def test_module_hooks():
    def f(device):
        model, seen = network(device), []
        model[0].register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
        model[1].register_forward_hook(lambda m, inputs, output: output + 1)
        model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
        model(numbers(2, 4, device=device)).sum().backward()
        return seen, [p.grad for p in model.parameters()]

    compare(f, rtol=1e-4, atol=1e-5)


def test_saved_tensor_hooks():
    def f(device):
        packed = []

        def pack(tensor):
            packed.append(tensor.device.type)
            return tensor.cpu()

        x = numbers(3, device=device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
            y = (x.exp() * x).sum()
        y.backward()
        with torch.autograd.graph.save_on_cpu():
            (x.sin() * 2).sum().backward()
        return x.grad, len(packed)

    compare(f)


def test_multi_grad_hooks_and_nodes():
    def f(device):
        x, w, seen = numbers(3, device=device), numbers(3, device=device, seed=1), []
        torch.autograd.graph.register_multi_grad_hook((x, w), lambda gs: seen.extend(gs))
        y = x * w
        y.grad_fn.register_prehook(lambda gs: (gs[0] * 2,))
        y.sum().backward()
        return seen, y.grad_fn.name()

    compare(f)


# ---- checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    def f(device):
        model, x = network(device), numbers(2, 4, device=device)
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.pow(2).sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    compare(f, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_random_numbers(use_reentrant):
    """What dropout dropped forward it drops again when it is computed once more."""
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    kept = []

    def f(x):
        y = nn.functional.dropout(x, 0.5)
        kept.append(y.detach())
        return y * y

    torch.manual_seed(3)
    checkpoint(f, x, use_reentrant=use_reentrant).sum().backward()
    assert len(kept) == 2
    assert torch.equal(kept[0], kept[1])
    torch.testing.assert_close(x.grad, 4 * kept[0])
    assert 0 < kept[0].count_nonzero() < 64


def test_checkpoint_sequential():
    def f(device):
        model, x = network(device), numbers(2, 4, device=device)
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        return x.grad

    compare(f, rtol=1e-4, atol=1e-5)


# ---- custom functions


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * 3 * x**2, None


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_custom_functions():
    def f(device):
        x = numbers(3, device=device)
        y = AddInPlace.apply(Cube.apply(x, 2.0))
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sum().backward()
        doubled = vmap(grad(lambda x: Double.apply(x).sum()))(x.detach()[None])
        return y, x.grad, doubled, jvp(Double.apply, (x.detach(),), (x.detach(),))

    compare(f)


# ---- modes


def test_no_grad_and_inference_mode():
    def f(device):
        x = numbers(3, device=device)
        with torch.no_grad():
            y = x * 2
            y.add_(1)
        with torch.enable_grad(), torch.set_grad_enabled(False):
            z = x * 3
        with torch.inference_mode():
            w = x * 4
            w.add_(1)
            w[0] = 2
        return y, z, w.clone(), w.is_inference(), x.is_inference()

    compare(f)


def test_inference_tensors_are_refused_in_graphs():
    def f(device):
        with torch.inference_mode():
            x = torch.ones(3, device=device)
        w = torch.ones(3, device=device, requires_grad=True)
        return x * w

    compare(f)


@pytest.mark.filterwarnings("ignore:.*[Aa]nomaly.*", "ignore:Error detected in")
def test_anomaly_mode():
    def f(device):
        x = torch.zeros(2, device=device, requires_grad=True)
        with torch.autograd.detect_anomaly():
            (x.sqrt() * 0).sum().backward()

    compare(f)


def test_autograd_in_other_threads():
    """The backward pass runs in a thread of its own per device, or in the caller's."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    threads = []
    y = x * 2
    y.register_hook(lambda g: threads.append(torch._C._current_autograd_node().name()))
    y.sum().backward()
    assert len(threads) == 1
    with torch.autograd.set_multithreading_enabled(False):
        (x * 3).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0, 5.0]


# ---- gradcheck


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
@pytest.mark.parametrize("name", ["linear", "conv", "norm", "softmax", "reductions"])
def test_gradcheck(name):
    """Finite differences in float32: a step of 1e-2 leaves about three digits."""
    device = DEVICE
    x, w = numbers(2, 3, 4, device=device), numbers(4, 4, device=device, seed=2)
    functions = {
        "linear": lambda x, w: (x @ w).tanh(),
        "conv": lambda x, w: nn.functional.conv1d(x, w[:3, :3, None].reshape(3, 3, 1), padding=1),
        "norm": lambda x, w: nn.functional.layer_norm(x, (4,), w[0], w[1]),
        "softmax": lambda x, w: (x @ w).softmax(-1),
        "reductions": lambda x, w: (x.mean(1) * w[0]).prod(1) + x.logsumexp((1, 2)),
    }
    assert torch.autograd.gradcheck(
        functions[name], (x, w), eps=1e-2, atol=2e-2, rtol=2e-2, fast_mode=True,
        nondet_tol=1e-5,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
def test_gradcheck_in_double_precision():
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: (x @ x.t()).sin().sum(0), (x,))
    assert torch.autograd.gradgradcheck(lambda x: x.exp().sum(0), (x,))
