"""PyTorch's optimizers (``optim_db``) on the device, against the CPU; what goes with training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.testing._internal.common_optimizers import optim_db

from tests.device_checks import DEVICE, compare
from tests.providers import device_in_use, has_float64, require_bindings
from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(20)

STEPS = 4
INFOS = {info.optim_cls.__name__: info for info in optim_db if not info.only_supports_sparse_grads}


def forms(info):
    """(name, keywords) of every configuration, in the forms that the device has."""
    for sample in info.optim_inputs_func("cuda"):  # with those for capturable optimizers
        yield sample.desc, sample.kwargs
        for form in ("foreach", "fused", "differentiable"):
            if form in info.supported_impls and form != "differentiable":
                yield f"{sample.desc}, {form}", {**sample.kwargs, form: True}
        if "foreach" in info.supported_impls:
            yield f"{sample.desc}, for-loop", {**sample.kwargs, "foreach": False}


CASES = [(name, desc, kwargs) for name, info in INFOS.items() for desc, kwargs in forms(info)]


def trajectory(name, kwargs, device):
    """Parameters after each step of fitting a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    params = model.parameters()
    if name == "Muon":
        params = [p for p in params if p.dim() == 2]
    if isinstance(kwargs.get("lr"), torch.Tensor):
        kwargs = {**kwargs, "lr": kwargs["lr"].clone().to(device)}
    if device == "cpu":  # the same values without what the CPU does not have
        kwargs = {**kwargs, "capturable": False} if "capturable" in kwargs else kwargs
        kwargs = {k: v for k, v in kwargs.items() if k not in ("foreach", "fused")}
    optimizer = getattr(torch.optim, name)(params, **kwargs)
    x, y = torch.randn(8, 4).to(device), torch.randn(8, 2).to(device)
    found = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        found.append([p.detach().cpu().clone() for p in model.parameters()])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "desc", "kwargs"), CASES, ids=[f"{name}-{desc}" for name, desc, _ in CASES]
)
def test_optimizer(name, desc, kwargs):
    wanted = trajectory(name, copy.deepcopy(kwargs), "cpu")
    counters.reset()
    got = trajectory(name, copy.deepcopy(kwargs), DEVICE)
    # Rounding differs, and Adam's kin divide by the root of a square that is near zero at first.
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-4)
    assert not counters.fallbacks


STEADY = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "ASGD": {"lr": 0.1},
    "Adafactor": {"lr": 0.01},
}


@pytest.mark.parametrize("form", ["foreach", "fused", "for-loop", "capturable"])
@pytest.mark.parametrize("name", STEADY)
def test_steps_compile_nothing_new(name, form):
    """After some steps every operator of a step has been compiled, whatever the step counts.

    RAdam changes its rule at the sixth step.
    """
    info = INFOS[name]
    if form == "fused" and "fused" not in info.supported_impls:
        pytest.skip("there is no fused form")
    if form == "capturable" and not info.has_capturable_arg:
        pytest.skip("it cannot be captured")
    kwargs = {"foreach": form == "foreach"} if form in ("foreach", "for-loop") else {form: True}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEVICE)
    optimizer = getattr(torch.optim, name)(model.parameters(), **STEADY[name], **kwargs)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(8, 4, device=DEVICE)
    first = 8 if name == "RAdam" else 3
    for step in range(first + 5):
        if step == first:
            counters.reset()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    assert counters.plans_compiled == 0
    assert not counters.fallbacks


@pytest.mark.parametrize("form", ["foreach", "fused", "for-loop", "capturable"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_cycle_of_momentum_compiles_nothing_new(name, form):
    """`OneCycleLR` changes the learning rate and the momentum, or beta1, with every step."""
    if form == "capturable" and not INFOS[name].has_capturable_arg:
        pytest.skip("it cannot be captured")
    if form == "capturable" and torch.__version__ < (2, 13):
        pytest.skip("this PyTorch compiles a power again for each base")
    kwargs = {"foreach": form == "foreach"} if form in ("foreach", "for-loop") else {form: True}

    def train(device, **kwargs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), **STEADY[name], **kwargs)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        x = torch.arange(32.0, device=device).view(8, 4).sin()
        for step in range(9):
            if step == 3:
                counters.reset()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            schedule.step()
        return [weight.detach().cpu() for weight in model.parameters()]

    found = train(DEVICE, **kwargs)
    assert counters.plans_compiled == 0
    assert not counters.fallbacks
    torch.testing.assert_close(found, train("cpu"), rtol=1e-4, atol=1e-5)


def test_the_default_is_foreach():
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    assert _default_to_fused_or_foreach([w], False) == (False, True)
    assert _default_to_fused_or_foreach([w], False, True) == (True, False)


# ---- gradients


def gradients(device):
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((4, 3), (5,), (2, 2, 2))
    ]
    sum((w**2).sum() for w in weights).backward()
    return weights


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf"), 3.0])
def test_clip_grad_norm(kind, foreach):
    def f(device):
        weights = gradients(device)
        total = nn.utils.clip_grad_norm_(weights, 0.5, kind, foreach=foreach)
        return total, [w.grad for w in weights]

    compare(f, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_value(foreach):
    def f(device):
        weights = gradients(device)
        nn.utils.clip_grad_value_(weights, 0.3, foreach=foreach)
        return [w.grad for w in weights]

    compare(f)


def test_total_norm_and_parameter_vectors():
    def f(device):
        weights = gradients(device)
        vector = nn.utils.parameters_to_vector(weights)
        nn.utils.vector_to_parameters(vector * 2, weights)
        return vector, weights, nn.utils.get_total_norm([w.grad for w in weights])

    compare(f)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    weights = gradients(DEVICE)
    before = [w.grad for w in weights]
    torch.optim.SGD(weights, 0.1).zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(w.grad is None for w in weights)
    else:
        assert all(w.grad is g and not g.any() for w, g in zip(weights, before, strict=True))


# ---- around the optimizer


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, tensor_lr):
    def f(device):
        w = torch.ones(3, device=device, requires_grad=True)
        lr = torch.tensor(0.1, device=device) if tensor_lr else 0.1
        optimizer = torch.optim.SGD([w], lr, momentum=0.9)
        scheduler = SCHEDULES[schedule](optimizer)
        rates = []
        for _ in range(5):
            (w**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return w, torch.tensor(rates).to(device)

    compare(f, host=None, rtol=1e-5, atol=1e-6)


def test_plateau_and_state():
    def f(device):
        w = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([w], 0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        for step in range(4):
            loss = (w**2).sum()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())
            if step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = torch.optim.Adam([w], 0.3)
                optimizer.load_state_dict(state)
        return w, optimizer.state[w]["exp_avg"]

    compare(f, rtol=1e-5, atol=1e-6)


def test_parameter_groups():
    def f(device):
        a, b = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
        optimizer = torch.optim.AdamW([{"params": [a], "lr": 0.1}, {"params": [b]}], lr=0.01)
        for _ in range(3):
            (a * b).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.add_param_group({"params": [torch.ones(2, device=device, requires_grad=True)]})
        return a, b

    compare(f, rtol=1e-5, atol=1e-6)


def test_grad_scaler():
    """Infinite gradients skip a step and halve the scale."""
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=2)
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([w], 10.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0, 4.0]
    torch.testing.assert_close(w.detach().cpu(), torch.full((3,), 0.7))
    restored = torch.amp.GradScaler(DEVICE)
    restored.load_state_dict(scaler.state_dict())
    assert restored.get_scale() == 4.0


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models(average):
    def f(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        rule = swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
        # PyTorch's rule of equal weights does not average integers on devices.
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=rule, use_buffers=average == "ema")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.arange(12.0).view(4, 3).sin().to(device)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        swa_utils.update_bn([x], averaged)
        return averaged(x), list(averaged.parameters())

    compare(f, rtol=1e-4, atol=1e-5)


COMPILED = [name for name in STEADY if name != "Adafactor"]  # has matrices to multiply
# Their learning rates are numbers of operators on lists, which older Dynamos make constants.
STEADY_LATER = frozenset({"SGD", "RMSprop", "Adagrad", "Adadelta"})


def host_of_learning_rates():
    """A learning rate is a float64: without kernels for it, the host makes it a float32."""
    return () if has_float64() else ("aten._to_copy.default",)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_step_is_few_dispatches_at_any_learning_rate(name):
    require_bindings(16)
    if name in STEADY_LATER and torch.__version__ < (2, 13):
        pytest.skip("this PyTorch compiles a step again for each learning rate")
    # Of four parameters with up to six tensors each, and what all of them share.
    few = 3 if device_in_use().target.max_storage_buffers >= 32 else 4

    def train(device):
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)

        def numbers(shape):
            return torch.randn(shape, generator=generator).to(device)

        params = [nn.Parameter(numbers(shape)) for shape in [(4, 3), (5,), (2, 3), (7,)]]
        optimizer = getattr(torch.optim, name)(params, **STEADY[name])
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = optimizer.step
        if device == DEVICE:
            step = torch.compile(step, backend="webgpu")
        for k in range(7):
            for p in params:
                p.grad = numbers(p.shape)
            if device == DEVICE:
                torch.webgpu.synchronize()
            counters.reset()
            step()
            schedule.step()
            if device == DEVICE and k > 2:
                torch.webgpu.synchronize()
                assert counters.dispatches <= few
                assert counters.plans_compiled == 0
                # The others count steps on the host.
                assert counters.bytes_downloaded == 0 or not INFOS[name].has_capturable_arg
        return [p.detach() for p in params]

    # Rprop starts with it, but has a rate for each number then.
    host = () if name == "Rprop" else host_of_learning_rates()
    compare(train, rtol=1e-4, atol=1e-5, host=host)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at the loss's
@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_a_whole_step_in_one_compiled_function(compiled_autograd):
    def train(device):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        generator = torch.Generator().manual_seed(1)

        def step(x, labels):
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = step if device == "cpu" else torch.compile(step, backend="webgpu")
        losses = []
        for k in range(6):
            x = torch.randn(16, 8, generator=generator).to(device)
            labels = torch.randint(4, (16,), generator=generator).to(device)
            if k == 3:
                counters.reset()
            losses.append(call(x, labels))
            schedule.step()
        if device == DEVICE:
            assert counters.plans_compiled == 0
        return losses

    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        compare(train, host=host_of_learning_rates())
