"""Operators on lists of tensors, which become few kernels, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.device_checks import DEVICE, compare
from tests.providers import device_in_use
from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(18)

SHAPES = [(), (1,), (3,), (4, 5), (0, 3), (64, 33), (1025,), (1, 7), (2, 3, 4), (300, 8)]
SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0]


def tensors(device, dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator) * 3
        if value.numel() > len(SPECIAL) and dtype.is_floating_point:
            value.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
        found.append(value.to(dtype).to(device))
    return found


def layouts(device, dtype=torch.float32, seed=0):
    """Slices, transposed and expanded tensors, and parts of one storage."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 36, generator=generator).to(dtype).to(device)
    parts = torch.randn(600, generator=generator).to(dtype).to(device)
    return [x[::2, 3:9], x.t(), x[5], x[:, 7], parts[128:259], parts[320:], parts[:3].view(3, 1)]


DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [tensors, layouts])
def test_lists(make, dtype):
    def f(device):
        xs, ys = make(device, dtype), make(device, dtype, seed=1)
        results = torch._foreach_add(xs, ys, alpha=2), torch._foreach_mul(xs, 3)
        torch._foreach_mul_(xs, ys)
        torch._foreach_add_(xs, 1)
        torch._foreach_addcmul_(ys, xs, xs, 2)
        return results, xs, ys

    compare(f, host=None)


@pytest.mark.parametrize("make", [tensors, layouts])
def test_floats(make):
    def f(device):
        xs, ys = make(device), make(device, seed=1)
        torch._foreach_lerp_(xs, ys, 0.3)
        torch._foreach_addcdiv_(xs, ys, torch._foreach_exp(ys), 0.5)
        torch._foreach_sqrt_(ys)
        torch._foreach_clamp_min_(ys, 0.25)
        numbers = [float(k) for k in range(len(xs))]
        torch._foreach_mul_(xs, numbers)
        return xs, ys, torch._foreach_pow(ys, 2), torch._foreach_sign(xs)

    # y / exp(y) of a difference: what WGSL rounds otherwise grows.
    compare(f, host=None, rtol=1e-4, atol=1e-5)


def test_bools():
    def f(device):
        xs = [x > 0 for x in tensors(device)]
        torch._foreach_copy_(xs, [x < 1 for x in tensors(device, seed=1)])
        return xs

    compare(f)


def test_neighbours_in_a_storage_are_left_alone():
    """Vectors and words past the end of a slice belong to what follows."""

    def f(device):
        found = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
            x = torch.arange(100).to(dtype).to(device)
            y = torch.arange(100).to(dtype).to(device)
            torch._foreach_mul_([x[:5], y[:7]], 2)
            torch._foreach_add_([x[:6], y[:1]], 2)
            found += [x, y]
        return found

    compare(f)


def test_one_memory_twice():
    def f(device):
        x, y = torch.arange(700.0, device=device), torch.arange(700.0, device=device)
        torch._foreach_add_([x[:64], y], [x[64:128], y])  # reads what it changes, and next to it
        torch._foreach_mul_([x[:64], x[64:192], x[192:]], 2)
        return x, y

    compare(f)


def test_counters_are_few_dispatches():
    steps = [torch.zeros((), device=DEVICE) for _ in range(20)]
    torch._foreach_add_(steps, 1)
    counters.reset()
    torch._foreach_add_(steps, 1)
    assert counters.dispatches == -(-20 // min(16, device_in_use().target.max_storage_buffers))
    assert all(float(step) == 2 for step in steps)


def test_dispatches_of_an_operator():
    limit = device_in_use().target.max_storage_buffers
    shapes = [(k % 7 + 2, 4 * (k % 5 + 1)) for k in range(40)]
    xs, ys = tensors(DEVICE, shapes=shapes), tensors(DEVICE, shapes=shapes, seed=1)
    for _ in range(2):
        counters.reset()
        torch._foreach_add_(xs, ys)
    assert counters.dispatches == -(-40 // min(40, limit // 2))
    assert counters.plans_compiled == 0


def parameters(device, dtype=torch.float32):
    """Of several shapes and layouts, with gradients, in two groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (5,), (6, 4), (0,), (9, 7), (3, 2, 2)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made = [*made, torch.randn(8, 6, generator=generator).to(dtype).t()]
    return [nn.Parameter(x.to(device)) for x in made]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
}
FORMS = ["foreach", "fused", "compiled", "compiled fused"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, form, dtype):
    made, options = OPTIMIZERS[name]
    if "fused" in form and made is torch.optim.RMSprop:
        pytest.skip("there is no fused form")
    loose = dtype is not torch.float32  # the fused form rounds once, eager after every operator
    if loose and made is not torch.optim.SGD:
        options = {**options, "eps": 1e-3}  # the default is 0 in float16

    def f(device):
        torch._dynamo.reset()
        params = parameters(device, dtype)
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}]
        # Compiled steps round once, as fused ones. The CPU's fused SGD is wrong for 16 bits: its
        # results differ from those of float32 by more than a half.
        fused = "fused" in form
        if device == "cpu":
            fused = form != "foreach" and made not in (torch.optim.SGD, torch.optim.RMSprop)
        optimizer = made(groups, **options, **{"fused" if fused else "foreach": True})

        def step():
            optimizer.step()

        if device != "cpu" and form.startswith("compiled"):
            step = torch.compile(step, backend="webgpu")
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in params:
                grad = torch.randn(p.shape, generator=generator).to(dtype).to(device)
                # The CPU's fused kernels want the layout of the parameter.
                p.grad = grad if form == "foreach" else torch.empty_like(p).copy_(grad)
            step()
        return [p.detach() for p in params]

    counters.reset()
    tolerance = {"rtol": 0.05, "atol": 0.05} if loose else {"rtol": 1e-4, "atol": 1e-5}
    compare(f, host=None, **tolerance)
    assert not counters.fallbacks


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_in_a_tensor(form):
    def f(device):
        torch._dynamo.reset()
        params = parameters(device)
        kind = {} if device == "cpu" else {"fused" if "fused" in form else "foreach": True}
        if device != "cpu" and "fused" not in form:
            kind["capturable"] = True
        lr = torch.tensor(0.01, device=device)
        optimizer = torch.optim.AdamW(params, lr, **kind)
        step = optimizer.step
        if device != "cpu" and form.startswith("compiled"):
            step = torch.compile(lambda: optimizer.step(), backend="webgpu")
        for count in range(3):
            lr.fill_(0.01 / (count + 1))
            for p in params:
                p.grad = torch.ones_like(p) * (count + 1)
            step()
        return [p.detach() for p in params]

    compare(f, host=None, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("infinite", [False, True])
def test_scaled_gradients(infinite):
    def f(device):
        xs, grads, first, second = (
            [torch.full(shape, value, device=device) for shape in [(3,), (4, 4), ()]]
            for value in (1.0, 8.0, 0.1, 0.2)
        )
        if device == "cpu" and infinite:
            return xs, grads, first, second
        if device == "cpu":
            scaled = [g / 4 for g in grads]
            torch._fused_adam_(
                xs, scaled, first, second, [], [torch.ones(()) for _ in xs], **KEYWORDS
            )
            return xs, scaled, first, second
        flag, scale = torch.tensor(float(infinite)).to(device), torch.tensor(4.0).to(device)
        steps = [torch.ones((), device=device) for _ in xs]
        torch._fused_adam_(
            xs, grads, first, second, [], steps, **KEYWORDS, grad_scale=scale, found_inf=flag
        )
        return xs, grads, first, second

    compare(f, rtol=1e-5, atol=1e-6)


KEYWORDS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
KEYWORDS |= {"amsgrad": False, "maximize": False}


def test_a_fused_step_is_few_dispatches():
    limit = device_in_use().target.max_storage_buffers
    params = [nn.Parameter(torch.randn(k + 2, 4).to(DEVICE)) for k in range(24)]
    optimizer = torch.optim.AdamW(params, fused=True)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        counters.reset()
        optimizer.step()
    # Two kernels for as many parameters as there are bindings for: six of each, and the numbers.
    assert counters.dispatches <= 2 * -(-24 // ((limit - 1) // 6))
    assert counters.plans_compiled == 0


def test_a_number_that_decides_what_is_computed():
    """Without weight decay there is no term for it: such a graph does not serve other numbers."""
    for weight_decay in (0.0, 0.1, 0.0, 0.2):
        results = []
        for device in ("cpu", "webgpu"):
            param = torch.nn.Parameter(torch.ones(4, device=device))
            param.grad = torch.tensor([0.05, -0.05, 0.5, -0.5], device=device)
            torch.optim.Adagrad([param], weight_decay=weight_decay, fused=True).step()
            results.append(param.detach().cpu())
        torch.testing.assert_close(results[1], results[0])


def test_in_place_in_a_compiled_function():
    def f(device):
        torch._dynamo.reset()
        xs, ys, zs = (tensors(device, seed=k) for k in range(3))

        def step(xs, ys, zs):
            torch._foreach_sub_(xs, ys)
            torch._foreach_zero_(ys)
            torch._foreach_copy_(zs, xs)

        call = step if device == "cpu" else torch.compile(step, backend="webgpu", fullgraph=True)
        with torch.no_grad():
            call(xs, ys, zs)
        return xs, ys, zs

    compare(f)
