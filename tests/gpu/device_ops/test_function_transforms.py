"""``torch.func`` and forward mode on device tensors: jacobians, vmap, per-sample gradients."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from tests.device_checks import DEVICE, compare, network, numbers

pytestmark = pytest.mark.rotates(3)

# ---- torch.func


def test_func_transforms():
    def f(device):
        x, w = (numbers(3, device=device, seed=k, grad=False) for k in range(2))

        def loss(x):
            return (x.sin() * w).sum()

        value, back = vjp(loss, x)
        result, along = linearize(loss, x)
        return (
            grad(loss)(x),
            jvp(loss, (x,), (w,)),
            jacrev(lambda x: x * w)(x),
            jacfwd(lambda x: x.exp())(x),
            hessian(loss)(x),
            vmap(grad(loss))(torch.stack([x, w])),
            value,
            back(torch.ones_like(value)),
            result,
            along(w),
        )

    compare(f, rtol=1e-4, atol=1e-5)


def test_vmap():
    def f(device):
        x = numbers(4, 3, device=device, grad=False)
        w = numbers(4, 3, 2, device=device, seed=1, grad=False)
        return (
            vmap(torch.matmul)(x, w),
            vmap(lambda x: x.softmax(0))(x),
            vmap(lambda x, y: x + y, in_dims=(0, None))(x, x[0]),
            vmap(vmap(torch.sin))(x),
            vmap(lambda x: x[torch.tensor([0, 2], device=device)])(x),
            vmap(torch.sum, out_dims=0)(x),
            vmap(lambda x: nn.functional.layer_norm(x, (3,)))(x),
        )

    compare(f, rtol=1e-4, atol=1e-5)


def test_vmap_of_random_numbers():
    x = torch.zeros(3, 100, device=DEVICE)
    different = vmap(lambda x: x + torch.rand_like(x), randomness="different")(x)
    same = vmap(lambda x: x + torch.rand_like(x), randomness="same")(x)
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same[0], same[1])


def test_per_sample_gradients():
    def f(device):
        model = network(device)
        x, y = numbers(5, 4, device=device, grad=False), torch.arange(5, device=device) % 3
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params, x, y):
            return nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])

        return vmap(grad(loss), (None, 0, 0))(params, x, y)

    compare(f, rtol=1e-4, atol=1e-5)


def test_ensembles():
    def f(device):
        models = [network(device) for _ in range(2)]
        params, buffers = torch.func.stack_module_state(models)
        x = numbers(5, 4, device=device, grad=False)
        return vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(params, buffers)

    compare(f, rtol=1e-4, atol=1e-5)


# ---- forward mode


def test_forward_mode():
    def f(device):
        x = numbers(3, device=device, grad=False)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y = (dual.sin() * dual).view(1, 3)
            y[0, 1] = dual[0] * 2
            return tuple(forward_ad.unpack_dual(y))

    compare(f)


def test_functional_jacobians():
    def f(device):
        x = numbers(3, device=device)
        function = torch.autograd.functional
        return (
            function.jacobian(torch.exp, x),
            function.hessian(lambda x: x.pow(3).sum(), x),
            function.vhp(lambda x: x.pow(3).sum(), x, torch.ones_like(x)),
        )

    compare(f)


def test_a_tangent_without_memory_is_copied() -> None:
    """Forward-mode AD has zeros at no address, which must not be read."""
    for shape in ((3, 5), (300, 400)):
        zeros = torch._efficientzerotensor(shape)
        for dtype in (torch.float32, torch.float64):
            assert not zeros.to("webgpu", dtype).cpu().count_nonzero()
        assert not torch.ones(shape[::-1], device="webgpu").T.copy_(zeros).count_nonzero()
    compiled = torch.compile(lambda x: x + 1, backend="webgpu")
    assert compiled(torch._efficientzerotensor((3, 5))).eq(1).all()
