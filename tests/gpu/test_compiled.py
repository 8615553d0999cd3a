"""Compiled functions end to end: values, strides, mutations, training, sizes, threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from tests.compiling import compiled
from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]


def same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()
        return
    for g, w in zip(got, wanted, strict=True):
        same(g, w)


# ---- in and out


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (4, 1, 6)])
def test_dtypes_and_sizes(dtype, shape):
    x = torch.randn(shape).mul(10).to(dtype)

    def f(x):
        return torch.where(x > 0, x, x.logical_not().to(x.dtype))

    same(compiled(f)(x), f(x))


LAYOUTS = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(8, 9)[1::2, 2:7],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "offset": lambda: torch.randn(30)[7:19].view(3, 4),
    "empty": lambda: torch.randn(3, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x = LAYOUTS[layout]()

    def f(x):
        return x + 1, x * 2

    same(compiled(f)(x), f(x))


def test_a_layout_that_changes_between_calls():
    f = compiled(lambda x: x * 2 + 1)
    for x in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]):
        torch.testing.assert_close(f(x), x * 2 + 1)


def test_outputs_that_are_views_of_each_other_or_of_inputs():
    def f(x):
        y = x * 2
        return y, y.t(), y[1:], x, x.view(-1), y

    x = torch.randn(3, 4)
    got, wanted = compiled(f)(x), f(x)
    same(got, wanted)
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
    assert got[4].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_nested_results_and_constants():
    def f(x):
        return {"a": x + 1, "b": [x.sum(), 3, None]}, x.shape[0]

    x = torch.randn(3, 4)
    got, wanted = compiled(f)(x), f(x)
    torch.testing.assert_close(got[0]["a"], wanted[0]["a"])
    torch.testing.assert_close(got[0]["b"][0], wanted[0]["b"][0])
    assert got[0]["b"][1:] == [3, None]
    assert got[1] == 3


def test_results_are_fresh_tensors():
    f = compiled(lambda x: x + 1)
    a = f(torch.zeros(3))
    b = f(torch.ones(3))
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_modes_of_autograd(mode):
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    f = compiled(model)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(mode, torch.enable_grad)():
        got = f(x)
    torch.testing.assert_close(got, model(x))
    assert got.requires_grad == (mode == "grad")


def test_inference_tensors_as_parameters_are_never_stale():
    with torch.inference_mode():
        model = nn.Linear(4, 3)
        f = compiled(model)
        x = torch.randn(2, 4)
        torch.testing.assert_close(f(x), model(x))
        model.weight.mul_(2)
        torch.testing.assert_close(f(x), model(x))


def test_autocast():
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    f = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, wanted = f(x), model(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


# ---- mutation


def test_inputs_are_changed_in_place():
    def f(x, y):
        x.add_(1)
        y[:, 1:3] = x
        return x * y[:, :2]

    def arguments():
        torch.manual_seed(0)
        return torch.randn(3, 2), torch.randn(3, 5)

    ours, theirs = arguments(), arguments()
    versions = [t._version for t in ours]
    got, wanted = compiled(f)(*ours), f(*theirs)
    same(got, wanted)
    same(ours, theirs)
    assert all(t._version > v for t, v in zip(ours, versions, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_strided_inputs_are_changed_in_place(layout):
    x = LAYOUTS[layout]()
    wanted = x.clone() * 3

    def f(x):
        x.mul_(3)
        return x.sum()

    compiled(f)(x)
    torch.testing.assert_close(x, wanted)


def test_a_state_is_not_copied_back_to_the_gpu():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(128, 16))

        def forward(self, x, at):
            self.rows[at] = x
            return self.rows.sum(0)

    model, twin = Cache(), Cache()
    f = compiled(model)
    at = torch.tensor([3])
    for step in range(4):
        x = torch.randn(1, 16)
        at = torch.tensor([step * 2])
        before = counters.bytes_uploaded
        with torch.no_grad():
            torch.testing.assert_close(f(x, at), twin(x, at))
        torch.testing.assert_close(model.rows, twin.rows)
        if step:
            assert counters.bytes_uploaded - before == x.nbytes + at.nbytes
    model.rows.zero_()  # a change on the CPU is seen all the same
    twin.rows.zero_()
    with torch.no_grad():
        torch.testing.assert_close(f(x, at), twin(x, at))


# ---- training


def block():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )


def test_training_steps_are_eagers():
    ours = block()
    theirs = copy.deepcopy(ours)
    f = compiled(ours)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (ours, theirs)]
    for _ in range(4):
        x, y = torch.randn(6, 3, 4, 4), torch.randint(0, 5, (6,))
        for model, optimizer in zip((f, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_saved_values_do_not_travel():
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 1))
    f = compiled(model)
    x = torch.randn(256, 64)
    f(x).sum().backward()
    before = counters.bytes_downloaded
    f(x)
    # The hidden values (256 × 512) stay on the GPU; the result (256 × 1) comes down.
    assert counters.bytes_downloaded - before == 256 * 4


def test_saved_tensor_hooks_get_real_values():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    with torch.autograd.graph.save_on_cpu():
        compiled(model)(x).sum().backward()
    twin(x).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    f = compiled(model)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    compiled(lambda x: checkpoint(model, x, use_reentrant=False).sum())(x).backward()
    twin(x).sum().mul(2).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_graph_is_kept_for_a_second_backward():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(4, 8)
    loss = compiled(model)(x).sum()
    loss.backward(retain_graph=True)
    first = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, first * 2)


def test_several_forwards_before_the_backwards():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    f = compiled(model)
    inputs = [torch.randn(4, 8) for _ in range(3)]
    losses = [f(x).square().sum() for x in inputs]
    got = [torch.autograd.grad(loss, model[0].weight)[0] for loss in reversed(losses)]
    for g, x in zip(got, reversed(inputs), strict=True):
        (wanted,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
        torch.testing.assert_close(g, wanted)


# ---- sizes


def test_dynamic_sizes():
    f = compiled(lambda x: torch.softmax(x, -1) @ x.t(), dynamic=True)
    for rows, columns in ((3, 5), (7, 4), (2, 9), (3, 5)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(f(x), torch.softmax(x, -1) @ x.t())
    assert counters.plans_compiled == 1


def test_dynamic_training():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    f = compiled(model, dynamic=True)
    for rows in (3, 7, 5):
        x = torch.randn(rows, 8)
        (got,) = torch.autograd.grad(f(x).sum(), model[0].weight)
        (wanted,) = torch.autograd.grad(model(x).sum(), model[0].weight)
        torch.testing.assert_close(got, wanted)


# ---- threads


def test_threads():
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    functions = [compiled(model) for model in models]
    inputs = torch.randn(4, 3, 8)
    wanted = [[model(x).detach() for x in inputs] for model in models]
    with torch.no_grad():
        for f in functions:
            f(inputs[0])
    failures = []

    def work(thread):
        try:
            with torch.no_grad():
                for k in range(50):
                    which = (thread + k) % 2
                    got = functions[which](inputs[thread])
                    torch.testing.assert_close(got, wanted[which][thread])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_recurrent_modules_in_another_thread():
    """Dynamo's settings are per thread from torch 2.13 on; ours must hold in all of them."""
    model = nn.LSTM(4, 6, batch_first=True)
    x = torch.randn(2, 3, 4)
    results = []

    def work():
        with torch.no_grad():
            results.append(compiled(model)(x)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0], model(x)[0].detach())


@pytest.mark.parametrize("shape", [(4, 4), (4, 8), (4, 4, 1), (2, 16, 1, 1), (4, 4, 3)])
def test_group_norm_of_few_elements(shape):
    """A read at i // 2 does not determine i: the rest runs over the elements of a row."""

    def f(x):
        return nn.functional.group_norm(x, 2)

    x = torch.rand(shape)
    torch.testing.assert_close(compiled(f)(x), f(x))
