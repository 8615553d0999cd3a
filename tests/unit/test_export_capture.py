"""Functions captured for bundles, run as FX graphs on CPU tensors beside themselves."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, StepLR

from torch_webgpu_compile.compiler import host_numbers, native_operators
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.exports.capture import CapturedFunction, capture_function
from torch_webgpu_compile.exports.inputs import ExportInputs
from torch_webgpu_compile.exports.names import Names, key_of


def captured(function, *args, **keywords):
    inputs = ExportInputs(function, args, **keywords)
    names = Names({"forward": function})
    with names.kept():
        found = capture_function("forward", inputs, names, native_operators(), host_numbers)
        known = names.known()
    labels = [known[key_of(s)].name if key_of(s) in known else "?" for s in found.states]
    return found, labels


class Runner:
    """A captured function as a function, with copies of its states."""

    def __init__(self, found: CapturedFunction):
        self.found = found
        self.states = [state.detach().clone() for state in found.states]

    def __call__(self, *args):
        assert not self.found.draft.phase.seeds
        with torch.no_grad():
            results = self.found.draft.module(*args, *self.states)
        given = [*args, *self.states]
        return [
            results[r.output] if r.argument is None else given[r.argument]
            for r in self.found.returned
        ]


def mlp():
    torch.manual_seed(0)
    # Without a bias before the norm: its gradients are rounding errors, which Adam scales to 1.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_steps(name):
    model = mlp()
    average = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(model.state_dict())

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():  # as exponential moving averages are written
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(value.data, alpha=0.1)
        return {"loss": loss.detach()}

    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(4)]
    found, labels = captured(step, *batches[0])
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before)
    assert "model.0.weight" in labels
    assert "average.3.bias" in labels
    runner = Runner(found)
    for x, y in batches:
        (got,) = runner(x, y)
        torch.testing.assert_close(got, step(x, y)["loss"])
    for label, state, real in zip(labels, runner.states, found.states, strict=True):
        # Four steps: a centred variance near 0 magnifies what the first step rounds otherwise.
        close = {"rtol": 1e-4, "atol": 1e-5, "msg": lambda m, label=label: f"{label}: {m}"}
        torch.testing.assert_close(state, real.detach(), **close)


def test_gradients_that_stay_are_state():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(x):
        model(x).square().mean().backward()

    def update(x):
        accumulate(x)
        optimizer.step()

    x = torch.randn(5, 6)
    found, labels = captured(update, x)
    assert "0.weight.grad" in labels
    assert model[0].weight.grad is None
    runner = Runner(found)
    for _ in range(3):
        runner(x)
        update(x)
    torch.testing.assert_close(runner.states[labels.index("0.weight")], model[0].weight.detach())


GRID = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
CHOSEN = torch.tensor([2, 0])


def counted(x, t):
    counts = torch.zeros(5, 3)
    counts[t] = x
    counts[t, 1:] += 2
    counts[:, t] = counts[t, t]
    row = counts[t]
    row += 1
    counts[t] = row
    return counts * row


def trained_row(x, t):
    weight = GRID.clone().requires_grad_()
    return torch.autograd.grad((x * weight[t, 1]).square().sum(), weight)[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: x * GRID[t],
        lambda x, t: x * GRID[t, :],
        lambda x, t: x * GRID[:, t],
        lambda x, t: x[0] * GRID[..., t],
        lambda x, t: x * GRID[None, t, 1, None],
        lambda x, t: x * GRID[t, t],
        lambda x, t: x[0] * GRID[t, :, CHOSEN],  # the dimension of `CHOSEN` stays where it is
        lambda x, t: x[0] * GRID[[0, 1], 1:, t],
        lambda x, t: GRID[t, CHOSEN].mul_(2),  # a copy, in PyTorch too
        lambda x, t: x * GRID[torch.tensor(-1)][t],
        lambda x, t: torch.vmap(lambda row: row[t] * 2)(GRID),
        counted,
        trained_row,
    ],
)
def test_a_tensor_without_dimensions_is_an_index(function, dtype):
    calls = [(torch.randn(3), torch.tensor(t, dtype=dtype)) for t in (0, 2, -1, -3)]
    found, _ = captured(function, *calls[0])
    runner = Runner(found)
    for call in calls:
        torch.testing.assert_close(runner(*call)[0], function(*call))


class Ring(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 2))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x):
        before = self.rows[self.position].clone()
        self.rows[self.position] = x
        self.position.add_(1).remainder_(3)
        return before


def test_a_state_is_an_index():
    model = Ring()
    found, labels = captured(model, torch.randn(2))
    assert set(labels) == {"rows", "position"}
    runner = Runner(found)
    for _ in range(5):
        x = torch.randn(2)
        torch.testing.assert_close(runner(x)[0], model(x))


def changed_row(x, t):
    x[t].mul_(2)
    return x


def changed_part(x, t):
    x[t][0] = 1
    return x


def row_of_a_changed_tensor(x, t):
    row = x[t]
    x += 1
    return row


@pytest.mark.parametrize("function", [changed_row, changed_part, row_of_a_changed_tensor])
def test_a_row_that_is_no_view_is_refused(function):
    with pytest.raises(UnsupportedOp, match=r"(?s)a 0-d tensor chose.*table\[t\].*capture.py:"):
        captured(lambda x, t: function(x.clone(), t), torch.randn(4, 4), torch.tensor(1))


def test_ranges_that_are_left_open():
    def paths(x):
        return x * 2 if 1 < x.shape[0] < 500 else x

    found, _ = captured(paths, torch.randn(8), dynamic_shapes=({0: Dim("n")},))
    (n,) = found.dimensions
    assert (n.low, n.high, n.is_open) == (2, 499, True)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x, scale=2.0):
        self.total = 0.5 * self.total + x * scale  # replaced, not changed in place
        self.calls += 1
        return self.total, {"calls": self.calls, "same": x}


def test_buffers_that_python_replaces():
    model, x = Counter(), torch.randn(4)
    found, labels = captured(model, x, keywords={"scale": 3.0})
    assert labels == ["total", "calls"]
    assert not model.total.any()
    assert found.structure == [
        {"result": "0"},
        {"calls": {"result": "1.calls"}, "same": {"result": "1.same"}},
    ]
    runner = Runner(found)
    for _ in range(2):
        total, calls, same = runner(x)
        wanted, rest = model(x, scale=3.0)
        torch.testing.assert_close([total, calls, same], [wanted, rest["calls"], x])


class Counting:
    """Functions that change what Python keeps."""

    def __init__(self):
        self.step, self.rate, self.log = 0, 0.5, []
        self.hidden, self.last = torch.zeros(3), torch.zeros(3)
        self.calls = itertools.count()  # of which nobody sees that it changes

    def scaled(self, x):
        self.step += 1
        return x * self.step

    def literal(self, x):
        self.step += 1
        return x + torch.tensor(float(self.step))

    def decayed(self, x):
        self.rate *= 0.9
        return x * self.rate

    def sometimes(self, x):
        self.step += 1
        return x * 2 if self.step % 2 else x

    def seldom(self, x):
        self.step += 1
        return x * 2 if self.step % 100 == 0 else x

    def counted(self, x):
        self.log.append(x.sum())
        return x / len(self.log)

    def told(self, x):
        self.step += 1
        return x * 2, self.step

    def drawn(self, x):
        return x * random.random()

    def logged(self, x):
        self.step += 1
        self.log.append(x.mean() * self.step)
        random.random()
        next(self.calls)
        return x * 2

    def cached(self, x):
        self.step += 1
        if not hasattr(self, "mask"):
            self.mask = torch.ones(3)
        next(self.calls)
        return x * self.mask * 2

    def plain(self, x):
        next(self.calls)
        return x * 2

    def replaced(self, x):
        self.hidden = 0.5 * self.hidden + x
        self.last = x  # of which nothing is read
        return self.hidden


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("scaled", r"self.step: 0, then 1.*capture.py:.*x \* self.step"),
        ("literal", "self.step: 0, then 1"),
        ("decayed", "self.rate: 0.5, then 0.45"),
        ("sometimes", "self.step: 0, then 1"),
        ("seldom", "self.step: 0, then 1"),
        ("counted", r"len\(self.log\): 0, then 1"),
        ("told", "self.step: 0, then 1"),
        ("drawn", "Python's random numbers"),
    ],
)
def test_numbers_that_calls_change_are_refused(name, what):
    keeper = Counting()
    with pytest.raises(UnsupportedOp, match=rf"(?s)what a call of the function changes \({what}"):
        captured(getattr(keeper, name), torch.randn(3))
    assert keeper.step <= 1
    assert len(keeper.log) <= 1


def test_what_is_done_seldom_with_gradients_that_stay():
    model, step = nn.Linear(3, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(x):
        nonlocal step
        model(x).sum().backward()
        step += 1
        if step % 10 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    with pytest.raises(UnsupportedOp, match=r"\(step: 1, then 2\)"):
        captured(accumulate, torch.randn(3))
    assert model.weight.grad is None


def test_variables_that_calls_change_are_refused():
    step = 0

    def outer(x):
        nonlocal step
        step += 1
        return x * step

    with pytest.raises(UnsupportedOp, match=r"\(step: 0, then 1\)"):
        captured(functools.partial(torch.no_grad()(outer)), torch.randn(3))
    assert step == 1


@pytest.mark.parametrize(("name", "calls"), [("plain", 1), ("logged", 3), ("cached", 2)])
def test_numbers_that_change_nothing(name, calls):
    """They are as after one call, and there are more calls only where a number changes."""
    keeper, x = Counting(), torch.randn(3)
    random.seed(0)
    found, _ = captured(getattr(keeper, name), x)
    torch.testing.assert_close(Runner(found)(x)[0], x * 2)
    assert next(keeper.calls) == calls
    assert (keeper.step, len(keeper.log)) == {"logged": (1, 1), "cached": (1, 0)}.get(name, (0, 0))
    left = random.random()
    random.seed(0)
    assert left == [random.random() for _ in range(2)][name == "logged"]


def test_tensors_that_python_replaces():
    keeper = Counting()
    before = keeper.hidden
    found, labels = captured(keeper.replaced, torch.randn(3))
    assert labels == ["hidden"]
    assert keeper.hidden is before
    runner = Runner(found)
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(runner(x)[0], keeper.replaced(x))


def test_a_tensor_in_two_places_that_become_different():
    keeper = Counting()
    keeper.last = keeper.hidden
    with pytest.raises(UnsupportedOp, match="two places"):
        captured(keeper.replaced, torch.randn(3))
    assert keeper.last is keeper.hidden


def trained(rate, schedule):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = schedule(optimizer)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step, optimizer, scheduler


SCHEDULES = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2),  # of which two calls see the same rate
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 9),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_schedules_of_the_learning_rate(name, is_tensor):
    step, *_ = trained(torch.tensor(0.1) if is_tensor else 0.1, SCHEDULES[name])
    x = torch.randn(4, 3)
    if name == "ExponentialLR" and is_tensor:
        found, _ = captured(step, x)
        runner = Runner(found)
        for _ in range(4):
            torch.testing.assert_close(runner(x)[0], step(x))
        return
    with pytest.raises(UnsupportedOp, match=rf"{name}.step: Python computes the learning rate"):
        captured(step, x)


def test_a_learning_rate_that_is_an_input():
    whole, optimizer, _ = trained(torch.tensor(0.1), SCHEDULES["StepLR"])
    model = inspect.getclosurevars(whole).nonlocals["model"]

    def step(x, rate):
        optimizer.param_groups[0]["lr"].copy_(rate)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(4, 3)
    found, _ = captured(step, x, torch.tensor(0.1))
    runner = Runner(found)
    for _ in range(5):
        rate = optimizer.param_groups[0]["lr"].clone()
        torch.testing.assert_close(runner(x, rate)[0], whole(x))


def test_sizes_are_symbols():
    table = nn.Embedding(50, 8)
    length = Dim("length", max=40)

    def pooled(batch, weights):
        mask = batch["mask"].unsqueeze(-1).to(torch.float32)
        return (table(batch["ids"]) * mask * weights).sum(1) / mask.sum(1)

    def example(n):
        return {"ids": torch.randint(0, 50, (2, n)), "mask": torch.ones(2, n)}, torch.rand(n, 8)

    shapes = {"batch": {"ids": {1: length}, "mask": {1: length}}, "weights": (length, None)}
    with torch.no_grad():
        found, labels = captured(pooled, *example(5), dynamic_shapes=shapes)
        assert labels == ["weight"]
        assert list(found.inputs) == ["batch.ids", "batch.mask", "weights"]
        assert [(d.name, d.low, d.high) for d in found.dimensions] == [("length", 1, 40)]
        for n in (1, 5, 17):
            batch, weights = example(n)
            (got,) = Runner(found)(batch["ids"], batch["mask"], weights)
            torch.testing.assert_close(got, pooled(batch, weights))


def test_names():
    class Policy:
        def __init__(self):
            self.actor, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)
            self.shared = [self.actor]

        def act(self, x):
            return self.actor(x) + self.critic(x)

    _, labels = captured(Policy().act, torch.randn(2))
    assert labels == ["actor.weight", "actor.bias", "critic.weight", "critic.bias"]
    layer, scale = nn.Linear(2, 2), torch.randn(2)
    partial = functools.partial(lambda s, x: layer(x) * s, scale)
    _, labels = captured(partial, torch.randn(2))
    assert labels == ["weight", "bias", "argument0"]


def item(x):
    return x * 2 if x.sum().item() > 0 else x


def writes(x):
    return x.add_(1)


def returns_size(x):
    return x.sum(), x.shape[0]


ROWS = {0: Dim("rows", min=2, max=64)}


@pytest.mark.parametrize(
    ("function", "shapes", "text"),
    [
        (item, None, r"needs the values.*\n.*test_export_capture.py:\d+: return x \* 2 if"),
        (writes, None, "the input x is changed in place"),
        (returns_size, (ROWS,), "a result is a size"),
        (lambda x: x.view(8, -1), (ROWS,), r"2\*rows, 8\), 0\) does not hold, as for rows = 2"),
        (lambda x: x + 1 if x.shape[0] < 9 else x, (ROWS,), "rows < 9 does not hold.*rows = "),
        (lambda x: x + torch.zeros(8, 2), (ROWS,), "fixes the size rows to 8"),
    ],
)
def test_what_is_refused(function, shapes, text):
    with pytest.raises(UnsupportedOp, match=text):
        captured(function, torch.randn(8, 2), dynamic_shapes=shapes)


def test_two_views_of_memory_that_changes_are_refused():
    whole = torch.zeros(4, 4)
    row = whole[1]

    def write(x):
        whole.add_(x)
        return row * 2

    with pytest.raises(UnsupportedOp, match="share memory"):
        captured(write, torch.ones(()))


def test_an_optimizer_that_needs_a_step_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(UnsupportedOp, match="take one step in PyTorch"):
        captured(step, torch.randn(5, 6))
    step(torch.randn(5, 6))
    captured(step, torch.randn(5, 6))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x, y: F.linear(x.long(), y), RuntimeError),
        (lambda x, y: torch.softmax(x, 2), IndexError),
        (lambda x, y: torch.index_add(x, 0, torch.tensor([0, 1]), y.half()), RuntimeError),
        (lambda x, y: F.cross_entropy(x, y[:, 0].int()), RuntimeError),
        (
            lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None, :, 1:], y),
            RuntimeError,
        ),
    ],
    ids=["dtypes", "dimension", "rows", "classes", "widths"],
)
def test_what_pytorch_refuses_is_not_exported(function, error):
    x = torch.ones(2, 3)
    with pytest.raises(error):
        function(x, x)
    with pytest.raises(error) as raised:
        captured(function, x, x)
    assert not isinstance(raised.value, UnsupportedOp)
