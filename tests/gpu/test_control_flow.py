"""Loops, branches, scans and maps in compiled graphs, and sizes that data decides between plans."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.testing._internal.hop_db import hop_db

from tests.higher_order import R, agree, calls, on, refusal
from torch_webgpu_compile import counters, explain
from torch_webgpu_compile.fallbacks import FallbackWarning, reset_warnings

Function = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("captured")


# ---- PyTorch's own samples


@pytest.mark.rotates(6)
@pytest.mark.filterwarnings("ignore:testlib.mutating_custom_op")
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize(
    "info", hop_db, ids=lambda entry: f"{entry.name}-{entry.variant_test_name}"
)
def test_samples_of_pytorch(info: Any, device: str) -> None:
    for function, arguments in calls(info):
        reason = refusal(function, arguments)
        if reason:
            pytest.skip(f"PyTorch refuses it: {reason}")
        agree(function, arguments, device)


# ---- what people write

W = R(8, 8)


def heavy_branches(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).relu(), lambda x: (x @ w.t()).sin(), (x,)) * 2


def nested_branches(x: Tensor, w: Tensor) -> Any:
    def inner(x: Tensor) -> Any:
        return torch.cond(x.sum() > 100, lambda x: x @ w, lambda x: x - w[: len(x)], (x,))

    return torch.cond(x.sum() > -1e9, inner, lambda x: x @ w + 1, (x,))


def branch_on_size(x: Tensor) -> Any:
    large = torch.tensor(x.shape[0] > 3, device=x.device)
    return torch.cond(large, lambda x: x.cos(), lambda x: x.sin(), (x,))


def counted_loop(x: Tensor, w: Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, torch.tanh(x @ w)), (start, x))


def loop_of_many_turns(x: Tensor, w: Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x: i < 21, lambda i, x: (i + 1, torch.sin(x @ w)), (start, x))[1]


def loop_of_numbers(x: Tensor) -> Any:
    return while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x + i), (0, x))[1]


def loop_until_small(x: Tensor) -> Any:
    return while_loop(lambda x: x.norm() > 1e-2, lambda x: (x / 2,), (x,))


def long_scan(xs: Tensor, h: Tensor, w: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h.clone()

    return scan(step, h, xs)


def short_scan(xs: Tensor, h: Tensor) -> Any:
    return scan(lambda h, x: (torch.tanh(h + x), h * x), h, xs, reverse=True)


def state_space(a: Tensor, b: Tensor) -> Any:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (a, b), dim=0, combine_mode="generic")


def running_sum(xs: Tensor) -> Any:
    return associative_scan(lambda a, b: a * 0.5 + b, xs, dim=0, combine_mode="generic")


def mapped(xs: Tensor, w: Tensor) -> Any:
    return map_rows(lambda x, w: (x @ w).softmax(-1), xs, w)


def chosen(x: Tensor) -> Any:
    return (x[x > 0] * 2).sum() + torch.masked_select(x, x > 0.3).sigmoid().sum()


def counted(x: Tensor) -> Any:
    kinds, places, counts = torch.unique((x * 2).long(), return_inverse=True, return_counts=True)
    return kinds * 2, places, counts, torch.bincount(places.flatten()) + 1


def sized_by_data(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    peak = x.max().item()
    return x.narrow(0, 0, k) * peak + k, torch.zeros(k, 3, device=x.device) + 1


def changing(x: Tensor, b: Tensor) -> Any:
    b.add_(1)
    z = x[x > 0]
    b.mul_(z.sum())
    return z * 2


def experts(x: Tensor, gate: Tensor, weights: Tensor) -> Any:
    share, chosen = (x @ gate).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for k in range(weights.shape[0]):
        row, column = torch.where(chosen == k)
        out = out.index_add(0, row, (x[row] @ weights[k]) * share[row, column, None])
    return out


def grad(*tensors: Tensor) -> list[Tensor]:
    """The tensors, to be differentiated by."""
    return [tensor.clone().requires_grad_() for tensor in tensors]


PROGRAMS: list[tuple[Function, Any, dict[str, Any]]] = [
    (heavy_branches, grad(R(4, 8), W), {}),
    (nested_branches, [R(8, 8), W], {}),
    (branch_on_size, [R(5, 8)], {"dynamic": True}),
    (counted_loop, grad(R(4, 8), W), {}),
    (loop_of_many_turns, grad(R(4, 8), W / 3), {}),
    (loop_of_numbers, [R(4, 8)], {}),
    (loop_until_small, [R(4, 8)], {}),
    (long_scan, grad(R(40, 2, 8) / 4, R(2, 8), W / 3), {}),
    (short_scan, [R(9, 4, 8), R(4, 8)], {}),
    (state_space, grad(R(37, 4), R(37, 4)), {}),
    (running_sum, [R(37, 4)], {"dynamic": True}),
    (mapped, grad(R(6, 4, 8), W), {}),
    (chosen, grad(R(5, 7)), {}),
    (counted, [R(5, 7)], {}),
    (sized_by_data, [R(5, 7), torch.tensor(3)], {}),
    (changing, [R(5, 3), R(3)], {}),
    (experts, grad(R(6, 8), R(8, 3), R(3, 8, 8)), {}),
]


@pytest.mark.rotates(6)
@pytest.mark.parametrize(
    ("function", "arguments", "options"), PROGRAMS, ids=[p[0].__name__ for p in PROGRAMS]
)
def test_programs(function: Function, arguments: Any, options: dict[str, Any]) -> None:
    agree(function, arguments, "webgpu", **options)
    assert not counters.fallbacks


@pytest.mark.rotates(2)
@pytest.mark.parametrize("function", [heavy_branches, long_scan, changing, sized_by_data])
def test_programs_on_cpu_tensors(function: Function) -> None:
    agree(*next((p[0], p[1], "cpu") for p in PROGRAMS if p[0] is function))


def test_an_associative_scan_in_its_default_mode() -> None:
    """PyTorch refuses it for devices other than CUDA and XPU."""
    xs = R(20, 3)
    for run in (associative_scan, torch.compile(associative_scan, backend="webgpu")):
        got = run(lambda a, b: a + b, xs.to("webgpu"), dim=0)
        torch.testing.assert_close(got.cpu(), xs.cumsum(0))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("length", [2, 100, 300])
def test_an_associative_scan_in_blocks(length: int) -> None:
    """A few kernels of loops, whatever the length; and the gradients."""

    def run(a: Tensor, b: Tensor, mode: str) -> Any:
        return associative_scan(_linear, (a, b), 1, reverse=True, combine_mode=mode)

    inputs = [R(3, length), R(3, length)]
    moved = [x.to("webgpu").requires_grad_() for x in inputs]
    compiled = torch.compile(run, backend="webgpu", fullgraph=True)
    got = compiled(*moved, "pointwise")
    before = counters.dispatches
    with torch.no_grad():
        compiled(*moved, "pointwise")
    assert counters.dispatches - before <= 5
    wanted = run(*(grads := grad(*inputs)), "generic")
    cotangents = [R(3, length), R(3, length)]
    found = torch.autograd.grad(got, moved, [c.to("webgpu") for c in cotangents])
    expected = torch.autograd.grad(wanted, grads, cotangents)
    for g, w in zip((*got, *found), (*wanted, *expected), strict=True):
        torch.testing.assert_close(g.detach().cpu(), w.detach())


def _linear(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[1] * right[0] + right[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_a_loop_in_a_kernel(dtype: torch.dtype) -> None:
    def run(h: Tensor, xs: Tensor) -> Any:
        def turn(h: Tensor, x: Tensor) -> Any:
            h = torch.where(x > 0, x, h) if dtype == torch.bool else h * 0.5 + x
            return h.to(dtype), torch.logical_not(h)

        return scan(turn, h, xs)

    inputs = [(R(5) * 9).to(dtype), (R(150, 5) * 9).to(dtype)]
    compiled = torch.compile(run, backend="webgpu", fullgraph=True)
    for got, wanted in zip(compiled(*inputs), run(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    before = counters.dispatches
    compiled(*inputs)
    assert counters.dispatches - before <= 3


def test_each_step_has_its_own_random_numbers() -> None:
    def run(xs: Tensor) -> Any:
        return scan(lambda h, x: (h * 0.5 + x, x * torch.rand(3)), xs[0], xs)[1]

    rows = torch.compile(run, backend="webgpu", fullgraph=True)(torch.ones(70, 3))
    assert rows.unique().numel() > 200


def test_kernels_of_cheap_branches_maps_and_short_scans() -> None:
    """They are one plan, and what can be is one kernel."""

    def chained(x: Tensor) -> Any:
        y = torch.cond(x[0, 0] > 0, lambda x: x.cos(), lambda x: x.sin(), (x * 2,))
        return map_rows(lambda row: row.exp() + 1, y) * 3

    assert explain(chained, R(4, 8)).dispatch_count == 1
    report = explain(lambda xs: scan(lambda h, x: (h + x, h * x), xs[0], xs)[1], R(5, 8))
    assert len(report.graphs) == 1


def test_one_plan_of_a_loop_serves_all_turns() -> None:
    compiled = torch.compile(loop_until_small, backend="webgpu", fullgraph=True)
    compiled(R(4, 8))
    plans, kernels = counters.plans_compiled, counters.kernels_compiled
    torch.testing.assert_close(compiled(R(4, 8) * 100), loop_until_small(R(4, 8) * 100))
    assert (counters.plans_compiled, counters.kernels_compiled) == (plans, kernels)


def test_a_repeated_block_is_compiled_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Any:
            return x + self.linear(x).relu()

    model = nn.Sequential(*(Block() for _ in range(6)))
    moved = copy.deepcopy(model).to("webgpu")
    compiled = torch.compile(moved, backend="webgpu", fullgraph=True)
    x = R(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.to("webgpu")).cpu(), model(x))
    assert counters.plans_compiled == 1
    compiled(x.to("webgpu")).sum().backward()
    model(x).sum().backward()
    for got, wanted in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), wanted.grad)  # type: ignore[union-attr]


def test_training_with_a_branch_sees_new_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            y = torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x).relu(), (x,))
            return y.square().mean()

    model = Model()
    for device in ("cpu", "webgpu"):
        other = copy.deepcopy(model).to(device)
        mine = copy.deepcopy(model)
        compiled = torch.compile(other, backend="webgpu", fullgraph=True)
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (mine, other)]
        for k in range(4):
            x = R(4, 8 + 0 * k) * (-1) ** k
            losses = mine(x), compiled(x.to(device))
            torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-4, atol=1e-5)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        torch.testing.assert_close(other.calls.cpu(), mine.calls)


def test_parameters_of_a_divided_graph_travel_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return loop_until_small(self.linear(x) * 100)

    model = Model()
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    weight, x = model.linear.weight, R(4, 8)
    with torch.no_grad():
        compiled(x)
        changes: list[tuple[Any, int]] = [
            (lambda: None, 0),
            (lambda: weight.mul_(2), weight.nbytes),
            (lambda: setattr(weight, "data", weight.data / 3), weight.nbytes),
        ]
        for change, nbytes in changes:
            change()
            before = counters.bytes_uploaded
            torch.testing.assert_close(compiled(x), model(x))
            assert counters.bytes_uploaded - before == x.nbytes + nbytes


class Normed(nn.Module):
    """It changes buffers, then checks a number that data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        self.most.copy_(torch.maximum(self.most, x.max()))
        positive = (x[:, 0] > 0).sum().item()
        torch._check(positive < 4)
        return y * positive


@pytest.mark.parametrize("trains", [False, True])
def test_buffers_that_a_divided_graph_changes_travel_once(trains: bool) -> None:
    """Down after each call, and up again only if something else has changed them."""
    other = Normed()
    model = copy.deepcopy(other)
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    mean, state = model.norm.running_mean, copy.deepcopy(model.state_dict())
    x, wrong = R(4, 8), R(4, 8)
    x[0, 0], wrong[:, 0] = -1, 1
    both = model, other
    all_buffers = sum(buffer.nbytes for buffer in model.buffers())
    whole = sum(value.nbytes for value in state.values())

    def failed_call() -> None:
        with pytest.raises(RuntimeError, match="failed for expression"):
            compiled(wrong)

    changes: list[tuple[Any, int]] = [
        (lambda: None, 0),
        (lambda: None, 0),
        (lambda: [m.norm.running_mean.mul_(2) for m in both], mean.nbytes),
        (lambda: [m.norm.running_mean.data.mul_(2) for m in both], all_buffers),
        (lambda: [m.load_state_dict(state) for m in both], whole),
        (failed_call, all_buffers),
        (lambda: None, 0),
    ]
    with torch.set_grad_enabled(trains):
        compiled(x), other(x)
        for change, nbytes in changes:
            change()
            before = counters.bytes_uploaded
            torch.testing.assert_close(compiled(x), other(x))
            assert counters.bytes_uploaded - before == x.nbytes + nbytes
            for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(mine, theirs)


def test_arguments_of_a_divided_graph_keep_their_layout() -> None:
    """Elements that share memory do so on the GPU, whether they are a buffer's or an input's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("row", R(1, 8).expand(4, 8))

        def forward(self, x: Tensor) -> Any:
            return (x * self.row)[x > 0] + x.sum()

    model = Model()
    compiled = torch.compile(model, backend="webgpu", fullgraph=True)
    x = R(4, 1).expand(4, 8)
    compiled(x)
    before = counters.bytes_uploaded
    torch.testing.assert_close(compiled(x), model(x))
    assert counters.bytes_uploaded - before == 4 * 4


def test_inference_tensors_that_a_divided_graph_changes() -> None:
    """They have no version counters."""
    with torch.inference_mode():
        other = Normed()
        model = copy.deepcopy(other)
        compiled = torch.compile(model, backend="webgpu", fullgraph=True)
        for k in range(3):
            x = R(4, 8) + k
            x[0, 0] = -1
            torch.testing.assert_close(compiled(x), other(x))
            for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("has_hooks", [False, True])
def test_what_is_saved_between_parts_stays_on_the_gpu(has_hooks: bool) -> None:
    """And what comes back is waited for once a graph."""

    @torch.compiler.nested_compile_region
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return x + (x @ weight).tanh()

    def network(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = block(x, weight)
        return x

    compiled = torch.compile(network, backend="webgpu", fullgraph=True)
    mine = [R(64, 8).requires_grad_(), *(R(8, 8).requires_grad_() for _ in range(4))]
    other = [tensor.detach().clone().requires_grad_() for tensor in mine]
    hooks = torch.autograd.graph.save_on_cpu() if has_hooks else nullcontext()
    before = counters.bytes_downloaded
    with hooks:
        result = compiled(*mine)
    result.square().mean().backward()
    moved = counters.bytes_downloaded - before
    wanted = network(*other)
    wanted.square().mean().backward()
    torch.testing.assert_close(result, wanted)
    for got, known in zip(mine, other, strict=True):
        torch.testing.assert_close(got.grad, known.grad)
    gradients = sum(tensor.nbytes for tensor in mine)
    assert moved > result.nbytes + gradients if has_hooks else moved == result.nbytes + gradients


def test_a_backward_graph_without_calls_takes_what_parts_saved() -> None:
    def selected(x: Tensor) -> Tensor:
        y = x.tanh()
        return y[(y > 0).nonzero().squeeze(1)].sin().sum()

    mine, other = R(40).requires_grad_(), R(40).requires_grad_()
    other.data.copy_(mine.data)
    torch.compile(selected, backend="webgpu", fullgraph=True)(mine).backward()
    selected(other).backward()
    torch.testing.assert_close(mine.grad, other.grad)


def test_a_backward_graph_in_parts_takes_what_a_graph_without_calls_saved() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.sin() * 2
            ctx.save_for_backward(y)
            return y.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (y,) = ctx.saved_tensors
            start = torch.zeros((), dtype=torch.int64)
            turn = lambda k, value: (k + 1, value * 2)  # noqa: E731
            _, value = while_loop(lambda k, value: k < 3, turn, (start, y.clone()))
            return gradient * value

    x = R(64).requires_grad_()
    compiled = torch.compile(lambda x: Doubled.apply(x).sum(), backend="webgpu", fullgraph=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, x.detach().sin() * 16)


def test_a_broken_promise_about_a_size_is_an_error() -> None:
    compiled = torch.compile(sized_by_data, backend="webgpu", fullgraph=True)
    compiled(R(5, 7).to("webgpu"), torch.tensor(3, device="webgpu"))
    with pytest.raises(RuntimeError, match=r"u\d+ <= 5"):
        compiled(R(5, 7).to("webgpu"), torch.tensor(6, device="webgpu"))


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_second_derivatives(device: str) -> None:
    """A gradient penalty; AOTAutograd refuses it, and eager PyTorch gives it, with one warning."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    moved = copy.deepcopy(model).to(device)
    compiled = torch.compile(moved, backend="webgpu")

    def penalty(network: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss.detach()

    reset_warnings()
    with pytest.warns(FallbackWarning, match="create_graph"):
        penalty(compiled, R(5, 4).to(device))
    got = penalty(compiled, R(5, 4).to(device))  # a second warning would be an error
    penalty(model, R(5, 4))
    wanted = penalty(model, R(5, 4))
    torch.testing.assert_close(got.cpu(), wanted)
    for mine, other in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(on("cpu", mine.grad), other.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_second_derivatives_within_a_compiled_function() -> None:
    """A gradient penalty: Dynamo compiles what is before and after ``grad``, nothing else."""
    torch._dynamo.reset()
    graphs = dynamo_counters["stats"]["unique_graphs"]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    moved = copy.deepcopy(model)

    def penalty(network: Any, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        loss = torch.compile(penalty, backend="webgpu")(moved, R(5, 4).requires_grad_())
        loss.backward()
    expected = penalty(model, R(5, 4).requires_grad_())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert dynamo_counters["stats"]["unique_graphs"] - graphs == 2


def test_second_derivatives_of_random_graphs_are_refused() -> None:
    """The graph run once more would draw other numbers."""
    compiled = torch.compile(lambda x: nn.functional.dropout(x.sin(), 0.5), backend="webgpu")
    x = R(4).to("webgpu").requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
