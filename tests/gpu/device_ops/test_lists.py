"""Calls on lists of tensors that are gathered: `device.eager.lists`."""

from __future__ import annotations

import threading
from math import inf

import pytest
import torch
from torch import nn

from tests.device_checks import DEVICE, compare
from tests.providers import device_in_use, require_bindings
from torch_webgpu_compile import counters
from torch_webgpu_compile.device.eager import lists

pytestmark = pytest.mark.rotates(2)

SHAPES = [(3,), (4, 4), (), (2, 0), (5, 1)]


class Step(torch.optim.Optimizer):
    """A step that does what it is told: calls are gathered in it."""

    def __init__(self, function):
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.function = function

    @torch.no_grad()
    def step(self, *arguments):
        return self.function(*arguments)


def in_step(function):
    """The function, in an optimizer's step."""
    return Step(function).step


def tensors(device, value=1.0, shapes=SHAPES):
    return [torch.full(shape, value + k, device=device) for k, shape in enumerate(shapes)]


# With the bindings of a kernel that makes the step.
@pytest.mark.parametrize(
    ("name", "bindings"), [("SGD", 9), ("AdamW", 17), ("RMSprop", 13), ("NAdam", 17)]
)
def test_a_step_is_few_dispatches(name, bindings):
    require_bindings(bindings)
    params = [torch.ones(4, 3, device=DEVICE, requires_grad=True) for _ in range(4)]
    optimizer = getattr(torch.optim, name)(params, lr=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        torch.webgpu.synchronize()
        counters.reset()
        optimizer.step()
        torch.webgpu.synchronize()
    assert counters.dispatches == 1
    assert counters.plans_compiled == 0


def test_results_that_are_needed_later():
    def f(device):
        xs, ys = tensors(device), tensors(device, 4.0)
        roots = torch._foreach_sqrt(ys)
        torch._foreach_mul_(xs, roots)
        sums = torch._foreach_add(xs, ys, alpha=2)
        torch._foreach_neg_(ys)
        return xs, ys, roots[1:], sums

    for _ in range(3):  # what nobody has any more is used again
        compare(in_step(f))


def test_results_are_not_used_again_while_somebody_has_them():
    kept = []

    def f(k):
        xs = tensors(DEVICE, float(k))
        made = torch._foreach_exp(torch._foreach_mul(xs, 0.5))
        kept.append(made[0] if k % 2 else made[0].view(-1)[:2])

    for k in range(4):
        in_step(f)(k)
    for k, found in enumerate(kept):
        torch.testing.assert_close(found.cpu(), torch.full(found.shape, 0.5 * k).exp())


def test_results_of_which_only_views_are_left():
    def f(device):
        xs = tensors(device, 1.0, [(4, 2)] * 9)
        made = torch._foreach_neg(xs)
        shared, rows = [x.detach() for x in made[:5]], [x[1] for x in made]
        torch._foreach_mul_(made, 3.0)
        del made
        torch._foreach_add_(rows, 1.0)
        torch._foreach_add_(xs[:5], shared)
        return xs, shared, rows

    step = in_step(f)
    for _ in range(3):
        compare(step)


def test_what_is_done_in_between_counts():
    def f(device):
        xs, ys = tensors(device), tensors(device, 2.0)
        torch._foreach_add_(xs, ys)
        ys[0].zero_()
        torch._foreach_mul_(xs, ys)
        old = xs[1].detach()
        xs[1].data = torch.full((4, 4), 7.0, device=device)
        torch._foreach_mul_(xs[1:], 3.0)
        ys[1].data = torch.full((4, 4), 5.0, device=device)
        torch._foreach_add_(xs, 1.0)
        ys[1].copy_(xs[1])
        torch._foreach_add_(xs, ys)
        torch._foreach_mul_(ys, xs)
        torch._foreach_add_(xs, 1.0)
        for tensor in (xs[4], ys[4]):
            tensor.t_()
        torch._foreach_add_(xs, ys)
        xs[1].data, ys[1].data = ys[1], xs[1]
        xs[4].t_()
        return xs, ys, old

    compare(in_step(f))


def test_lists_that_are_like_earlier_ones_until_they_change():
    """Long lists are compared at once with those that were met first."""

    def f(device):
        xs, ys = (tensors(device, value, [(4, 4)] * 9) for value in (1.0, 2.0))
        for tensor in (xs[2], ys[2]):
            tensor.add_(torch.arange(16.0).reshape(4, 4).to(device))
        for turn in range(8):
            torch._foreach_mul_(xs, 0.5)
            torch._foreach_add_(xs, ys)
            if turn == 3:
                ys[3].data = torch.full((4, 4), 7.0, device=device)
            if turn == 4:
                ys[4].requires_grad_()
            if turn == 5:
                xs[5] = torch.ones(4, 8, device=device)[:, ::2]
            torch._foreach_add_(ys, xs)
            if turn in (2, 6):
                xs[2].data = xs[2].t()  # other strides, the same memory
            xs[0].sum().item()  # all that was gathered has run
        return xs, ys

    compare(in_step(f))


@pytest.mark.parametrize("count", [3, 12])
def test_lists_that_lie_otherwise_between_two_calls(count):
    """``tensor.data = view``: the same object and address, and nothing that settles."""

    def f(device):
        ys = tensors(device, 2.0, [(3, 3)] * count)
        for y in ys:
            y.add_(torch.arange(9.0).reshape(3, 3).to(device))
        found = []
        for _ in range(3):
            xs = [y * 3 for y in ys]
            views = [x.t() for x in xs]
            torch._foreach_add_(xs, ys)
            for x, view in zip(xs, views, strict=True):
                x.data = view
            torch._foreach_mul_(xs, ys)
            found += [x.clone() for x in xs]
        return found

    compare(in_step(f))


@pytest.mark.parametrize("count", [3, 12])
def test_lists_that_come_to_share_memory(count):
    """In a step that was the same many times: other tensors, or the same ones elsewhere."""

    def f(device):
        wholes = tensors(device, 1.0, [(6,)] * count)
        xs, ys = [x[:3] for x in wholes], tensors(device, 2.0, [(3,)] * count)
        for turn in range(9):
            if turn == 3:
                ys[1].data = wholes[2][2:5]
            if turn == 5:
                ys[1].data = torch.ones(3, device=device)
            if turn == 7:
                ys = [x[:3] for x in wholes]
            torch._foreach_add_(xs, 1.0)
            torch._foreach_mul_(ys, 2.0)
            torch._foreach_add_(xs, ys)
            wholes[0].sum().item()  # all that was gathered has run
        return wholes, ys

    compare(in_step(f))


def test_shared_memory():
    def f(device):
        x = torch.arange(8.0, device=device)
        parts = [x[:4], x[2:6], x[4:]]
        torch._foreach_add_(parts, 1.0)
        torch._foreach_mul_(parts, parts[::-1])
        twice = [torch.ones(3, device=device)] * 2
        torch._foreach_add_(twice, 1.0)
        torch._foreach_mul_(twice, 3.0)
        return x, twice

    compare(in_step(f), host=None)


def test_lists_with_common_tensors():
    def f(device):
        xs = tensors(device)
        torch._foreach_mul_(xs[:3], 2.0)
        torch._foreach_add_(xs[1:], [x + 1 for x in xs[1:]], alpha=0.25)
        torch._foreach_sub_([*xs[2:], *tensors(device, 9.0)], 0.5)
        made = torch._foreach_neg(xs)
        torch._foreach_add_([*made[:2], *xs[2:]], 1.0)
        return xs, made

    compare(in_step(f))


def test_a_call_that_is_refused_leaves_the_others():
    xs, ys = tensors(DEVICE, shapes=[(3,), (2, 2)]), tensors(DEVICE, shapes=[(3,), (3, 3)])

    @in_step
    def f():
        torch._foreach_add_(xs, 1.0)
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            torch._foreach_mul_(xs, ys)
        torch._foreach_add_(xs, 1.0)

    f()
    assert [x.flatten()[0].item() for x in xs] == [3.0, 4.0]


def test_versions_are_counted_at_once():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = x.square()

    @in_step
    def f():
        torch._foreach_mul_([x], 2.0)
        torch._foreach_add_([x], 1.0)
        assert x._version == 2

    f()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert x._version == 2


def test_numbers_are_data():
    xs = tensors(DEVICE)

    @in_step
    def f(k):
        torch._foreach_mul_(xs, 1.0 + k)
        torch._foreach_add_(xs, [0.5 * k + j for j in range(len(xs))])

    for k in range(4):
        if k == 1:
            counters.reset()
        f(k)
    assert counters.plans_compiled == 0
    expected = torch.tensor(1.0)
    for k in range(4):
        expected = expected * (1.0 + k) + 0.5 * k
    assert xs[0][0].item() == expected.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_by_each_operator(dtype):
    def f(device):
        xs = [torch.tensor([0.25, 3e-6, 2e-7], dtype=dtype).to(device)]
        torch._foreach_mul_(xs, 2.0**-4)  # to nothing, in float16
        torch._foreach_add_(xs, torch._foreach_sqrt(xs))
        return xs

    compare(in_step(f))


def test_other_modes_and_threads():
    with torch.inference_mode():
        inside = tensors(DEVICE)
        torch._foreach_add_(inside, 1.0)
        torch._foreach_mul_(inside, 2.0)
    assert inside[0][0].item() == 4.0
    xs = tensors(DEVICE)
    found = []

    @in_step
    def f():
        torch._foreach_add_(xs, 1.0)
        torch._foreach_mul_(xs, 2.0)
        thread = threading.Thread(target=lambda: found.append(xs[0][0].item()))
        thread.start()
        thread.join()

    f()
    assert found == [4.0]


def test_an_interrupt_loses_nothing(monkeypatch):
    xs = tensors(DEVICE)
    real = lists.compile_lists

    def interrupted(*arguments):
        monkeypatch.setattr(lists, "compile_lists", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(lists, "_roots", {})
    monkeypatch.setattr(lists, "compile_lists", interrupted)

    @in_step
    def f():
        torch._foreach_add_(xs, 1.0)
        torch._foreach_mul_(xs, 2.0)

    with pytest.raises(KeyboardInterrupt):
        f()
    assert xs[0][0].item() == 4.0


# With keywords that need more of the operators on lists than the defaults.
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adam": {"capturable": True},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {},
    "Adamax": {},
    "Adafactor": {"foreach": True},
}
WIDTHS = [(3,), (4, 4), (6, 2), (1,), (), (40,)] * 3


def trained(name, is_read):
    """Parameters after steps, after some of which somebody reads; what was compiled for them."""
    torch.manual_seed(0)
    shapes = [s for s in WIDTHS if len(s) == 2] if name == "Adafactor" else WIDTHS
    params = [nn.Parameter(torch.randn(shape).to(DEVICE)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(params, lr=0.1, **OPTIMIZERS[name])
    for p in params:
        p.grad = torch.randn(p.shape).to(DEVICE)
    counters.reset()
    for k in range(8):
        optimizer.step()
        if is_read(k):
            params[0].detach().cpu()
    torch.webgpu.synchronize()
    return [p.detach().cpu() for p in params], (counters.plans_compiled, counters.dispatches)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_reads_when_decides_nothing(name):
    """Steps that nobody reads would be ever longer sequences, and sums of others be rounded."""
    trained(name, lambda k: True)
    unread, first = trained(name, lambda k: False)
    read, second = trained(name, lambda k: k in (0, 3, 4))
    assert first == second
    assert first[0] == 0
    for one, other in zip(unread, read, strict=True):
        assert torch.equal(one, other)


def test_lists_of_any_length_and_shape_are_compiled_once():
    def step(shapes):
        params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.SGD(params, lr=0.25, weight_decay=0.5, maximize=True)
        counters.reset()
        optimizer.step()
        return params

    room = min(16, (device_in_use().target.max_storage_buffers - 1) // 2)  # and the numbers
    step([(4, 9)] * 67)
    for shapes in ([(12, 2), (60,), (3, 2, 2)] * 20, [(8, k + 1) for k in range(90)]):
        params = step(shapes)
        # A kernel is for as many entries as it has room for; what is left over is fewer.
        assert counters.kernels_compiled <= 1
        assert counters.dispatches == -(-len(shapes) // room)
        for p in params[::17]:
            torch.testing.assert_close(p.cpu(), torch.full(p.shape, 1.125))


def test_calls_outside_of_a_step_are_not_gathered():
    """Nor are they after a step that has failed."""
    params = [nn.Parameter(torch.ones(3, device=DEVICE))]

    def failing():
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        torch.optim.SGD(params).step(failing)
    xs = tensors(DEVICE, shapes=[(3,), (5,)])
    with torch.no_grad():
        torch._foreach_add_(xs, 1.0)
        torch.webgpu.synchronize()
        counters.reset()
        for _ in range(3):
            torch._foreach_add_(xs, 1.0)
        assert counters.dispatches == 3
    assert xs[0][0].item() == 5.0


def test_groups_of_parameters_are_compiled_alike():
    """A step of many groups is no sequence that is cut anywhere."""

    def step(groups):
        params = [[torch.ones(8, k + 2, device=DEVICE) for k in range(3)] for _ in range(groups)]
        for group in params:
            for p in group:
                p.grad = torch.ones_like(p)
        options = [{"params": group, "lr": 0.5**k} for k, group in enumerate(params)]
        torch.optim.RMSprop(options, momentum=0.5, centered=True).step()
        return params

    step(1)
    counters.reset()
    params = step(9)
    torch.webgpu.synchronize()
    assert counters.kernels_compiled == 0
    expected = torch.ones(1)
    expected.grad = torch.ones(1)
    torch.optim.RMSprop([expected], lr=0.25, momentum=0.5, centered=True).step()
    torch.testing.assert_close(params[2][1].cpu(), expected.expand(8, 3))


def test_memory_is_given_back():
    params = [nn.Parameter(torch.ones(1 << 18, device=DEVICE)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    before = torch.webgpu.memory_allocated()
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.webgpu.memory_allocated() <= before + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_are_few_dispatches(dtype):
    """They are views of one buffer, so that their stack is one copy; the code of each is shared."""
    count = 70
    room = min(16, device_in_use().target.max_storage_buffers // 2)
    xs = [torch.randn(40, 30).to(dtype) for _ in range(count)]
    ys = [x.to(DEVICE) for x in xs]
    for _ in range(2):
        counters.reset()
        norms = torch._foreach_norm(ys)
        stacked = torch.stack(norms)
        torch.webgpu.synchronize()
        if dtype is torch.float32:
            assert counters.dispatches == -(-count // room) + 1
    expected = torch.stack(torch._foreach_norm(xs))
    torch.testing.assert_close(stacked.cpu(), expected)
    norms[3].fill_(5.0)
    assert norms[3]._version == 1
    assert norms[4]._version == 0
    torch.testing.assert_close(norms[4].cpu(), expected[4])
    torch.testing.assert_close(stacked.cpu(), expected)


def test_clipping_compiles_nothing_again():
    """Parameters of several shapes and dtypes, of whose gradients some are not there."""

    def f(device):
        torch.manual_seed(0)
        dtypes = [torch.float32, torch.bfloat16]
        params = [
            nn.Parameter(torch.randn(3, k % 4 + 1).to(dtypes[k % 2]).to(device)) for k in range(40)
        ]
        found = []
        for step in range(3):
            for p in params[step:]:
                p.grad = torch.full_like(p, step + 1.5)
            if step == 2:
                counters.reset()
            found += [torch.nn.utils.clip_grad_norm_(params, 1.5, kind) for kind in (2.0, inf, 1.0)]
        return found, [p.grad for p in params]

    compare(f)
    assert counters.plans_compiled == 0


def test_views_that_follow_each_other_are_stacked_at_once():
    def f(device):
        x = torch.arange(96.0).reshape(8, 12).to(device)
        rows, columns = list(x), list(x.t())
        others = [*rows[:7], rows[6]], rows[::-1], [x[k, k % 2 :][:8] for k in range(8)]
        stacks = [torch.stack(list(rows), dim) for dim in (0, 1, -1)]
        stacks += [torch.stack(columns[::2] + columns[1::2]), torch.stack(columns, 1)]
        stacks[0][0, 0] = 7.0  # of its own
        return x, stacks, [torch.stack(views) for views in others]

    compare(f)
    x = torch.ones(40, 3, device=DEVICE)
    counters.reset()
    torch.stack(list(x))
    torch.webgpu.synchronize()
    assert counters.dispatches == 1
