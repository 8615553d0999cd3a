"""Sizes that data decides, and integers that no plan computes, in compiled functions.

The ideas are those of PyTorch's own tests of dynamic shapes. Each program is compiled once and
called with several values: what depends on them is no reason to compile again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.higher_order import R, on, tensors_in
from torch_webgpu_compile import counters
from torch_webgpu_compile.fallbacks import FallbackWarning, reset_warnings

Function = Callable[..., Any]

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("captured")]

# Sums of products are added up in another order than PyTorch's.
SUMS = {"rtol": 1e-4, "atol": 1e-5}


def some(count: int, size: int = 9) -> Tensor:
    """A vector with this number of elements above 0."""
    return torch.where(torch.arange(size) % size < count, 1.0, -1.0) * (R(size).abs() + 0.1)


# ---- programs of a tensor and a number


def expanded(x: Tensor, y: Tensor) -> Any:
    places = x.nonzero()
    return places.expand(-1, 4), y[:, None].expand(-1, places.size(0)), places + 1.5


def broadcast(x: Tensor, y: Tensor) -> Any:
    n = (x > 0).nonzero().size(0)
    return x.new_zeros(n, 6) + x.new_ones(n, 1) * y[:1]


def joined_and_split(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k <= x.shape[0])
    head, tail = torch.split(x, [k, x.shape[0] - k])
    return torch.cat([tail, head, tail]), head.sum(), tail * k


def split_by_a_list(x: Tensor, sizes: Tensor) -> Any:
    a, b = sizes.tolist()
    first, second = torch.split(x, [a, b])
    return first * 2, second.cumsum(0), a + b


def narrowed(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check_is_size(k)
    torch._check(k < x.shape[0])
    return x.narrow(0, 0, k) + 1, x[:k].sin(), x[k:] * 2


def sliced(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    y = x[:, None] * x
    return y[:k].sum(0), y[k:] * 2, y[:, 1:k:2] + 1, y[k:-1].cos(), y.T[-k:]  # type: ignore[misc]


def viewed(x: Tensor, y: Tensor) -> Any:
    chosen = x[x > 0]
    square = chosen[:, None] * y[None, :3]
    return square.view(-1, 3), square.t().contiguous(), square.flatten() + 1, square.unsqueeze(0)


def counted(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    return torch.arange(k, device=x.device) * 2 + k, x * k - k // 2, torch.full((k, 2), 3.0), k * 3


def repeated(x: Tensor, n: Tensor) -> Any:
    times = torch.stack([n, n + 1, n * 0])
    return x[:3].repeat_interleave(times) * 2, x[:2].repeat(n.item(), 1)


def several_times(x: Tensor, y: Tensor) -> Any:
    for k in range(3):
        x = x[(x > 0.2 * k).nonzero().squeeze(1)] - 0.05
    return x, x.sum() + y.sum()


def multiplied(x: Tensor, y: Tensor) -> Any:
    rows = (x > 0).nonzero().squeeze(1)
    left = y[rows % 9, None] * y[None, :]
    return left @ left.t(), (left @ y[:, None]).squeeze(1), torch.bmm(left[None], left.t()[None])


def attended(x: Tensor, y: Tensor) -> Any:
    rows = x[x > 0][:, None] * y[None, :8]
    return F.scaled_dot_product_attention(rows[None, None], rows[None, None], rows[None, None])


def normalised(x: Tensor, y: Tensor) -> Any:
    rows = x[x > 0][:, None] * y[None, :8]
    softmax = rows.softmax(-1) + rows.softmax(0)
    return softmax, F.layer_norm(rows, (8,)), rows.sum(0), rows.var(1), rows.argmax(1)


def gathered(x: Tensor, n: Tensor) -> Any:
    zeros = torch.zeros(n.item(), dtype=torch.int64, device=x.device)
    return x[zeros], torch.stack([x, x])[:, zeros + 1], x.index_add(0, zeros, x.new_ones(n.item()))


def scattered(x: Tensor, y: Tensor) -> Any:
    mask = x > 0
    source = y.new_ones(mask.sum().item()) * 7  # type: ignore[arg-type]
    return torch.masked_scatter(y, mask, source)


def with_a_float(x: Tensor, n: Tensor) -> Any:
    peak = x.max().item()
    return x / peak, x.clamp(max=peak / 2), (x * n).sum().item() * 0.5 + peak


def with_checks(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k > 0)
    torch._check(k < 9)
    return torch.ones(k, k + 1, device=x.device).cumsum(0) * x[:1], x[:: 2 if k else 1]


def from_the_end(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k > 0)
    torch._check(k <= x.shape[0])
    return x[-k], x[x.shape[0] - k :], torch.select_scatter(x, x[0], 0, -k)


@torch.library.custom_op("testing::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("testing::shifted", mutates_args=())
def shifted(x: Tensor, by: int) -> Tensor:
    return x + by


@shifted.register_fake
def _(x: Tensor, by: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("testing::spread", mutates_args=())
def spread(n: Tensor) -> Tensor:
    return torch.empty_strided((1,), (int(n),), device=n.device).fill_(2)


@spread.register_fake
def _(n: Tensor) -> Tensor:
    stride = torch.library.get_ctx().new_dynamic_size()
    return torch.empty_strided((1,), (stride,), device=n.device)


def of_custom_operators(x: Tensor, n: Tensor) -> Any:
    y = shifted(positive(x), n.item())  # type: ignore[arg-type]
    return y * 2, x.new_ones(spread(n).stride(0))


VECTORS = [(some(k), R(9)) for k in (4, 1, 7, 3)]
# Dynamo knows an integer on the CPU at first: x[k:] with one row would be a graph of its own.
NUMBERS = [(R(9), torch.tensor(k)) for k in (3, 5, 2, 7)]
PROGRAMS: dict[Function, list[tuple[Tensor, Tensor]]] = {
    expanded: VECTORS,
    broadcast: VECTORS,
    joined_and_split: NUMBERS,
    split_by_a_list: [(R(9), torch.tensor([k, 9 - k])) for k in (3, 5, 2)],
    narrowed: NUMBERS,
    viewed: VECTORS,
    counted: NUMBERS,
    repeated: NUMBERS,
    several_times: VECTORS,
    multiplied: VECTORS,
    attended: VECTORS,
    normalised: VECTORS[::2],
    gathered: NUMBERS,
    scattered: VECTORS,
    with_a_float: NUMBERS,
    with_checks: NUMBERS,
    from_the_end: NUMBERS,
    of_custom_operators: NUMBERS,
}
EMPTY = (expanded, broadcast, viewed, several_times, multiplied, scattered)


def called(function: Function, calls: list[Any], device: str, **options: Any) -> None:
    """Compares each call with eager PyTorch; Dynamo makes one graph for all of them."""
    backend = CompileCounterWithBackend("webgpu")
    run = torch.compile(function, backend=backend, fullgraph=True, **options)
    for arguments in calls:
        wanted, got = function(*arguments), run(*on(device, arguments))
        torch.testing.assert_close(on("cpu", got), on("cpu", wanted), **SUMS)
        assert backend.frame_count == 1


@pytest.mark.rotates(3)
@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
@pytest.mark.filterwarnings("ignore:_check_is_size")
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_programs(function: Function, device: str) -> None:
    if function is attended and device == "cpu":
        pytest.skip("PyTorch asks whether there are no rows, of CPU tensors only")
    calls = PROGRAMS[function] + ([(some(0), R(9))] if function in EMPTY else [])
    called(function, calls, device)


def test_they_need_no_fallback() -> None:
    called(normalised, VECTORS[:1], "webgpu")
    called(joined_and_split, NUMBERS[:1], "webgpu")
    called(sliced, [(R(9), torch.tensor(k)) for k in (3, 0, 12, -2, 9)], "webgpu")
    assert not counters.fallbacks


def test_a_measured_tiling_of_unbacked_rows() -> None:
    run = torch.compile(multiplied, backend="webgpu", fullgraph=True, mode="max-autotune")
    for arguments in VECTORS[:2]:
        got, wanted = run(*on("webgpu", arguments)), multiplied(*arguments)
        torch.testing.assert_close(on("cpu", got), wanted, **SUMS)


def test_unbacked_arguments() -> None:
    """``mark_unbacked``: a size of which nothing may be assumed, not even that it is not 0 or 1."""
    run = torch.compile(lambda x: (x.sum(0), x * 2), backend="webgpu", fullgraph=True)
    plans = set()
    for size in (5, 1, 0):
        x = R(size, 4)
        given = x.to("webgpu")
        torch._dynamo.decorators.mark_unbacked(given, 0)
        torch.testing.assert_close(on("cpu", run(given)), (x.sum(0), x * 2))
        plans.add(counters.plans_compiled)
    assert plans == {1}


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_gradients(device: str) -> None:
    def weighed(x: Tensor, w: Tensor, sizes: Tensor) -> Any:
        a, b = sizes.tolist()
        first = torch.ones(a, device=x.device) * w
        second = x[x > 0][:, None] * x.new_ones(1, b)
        return torch.cat([first, second.flatten()]).square()

    backend = CompileCounterWithBackend("webgpu")
    run = torch.compile(weighed, backend=backend, fullgraph=True)
    for sizes in ([4, 3], [2, 5]):
        own = [some(4).requires_grad_(), R(1).requires_grad_(), torch.tensor(sizes)]
        given = on(device, own)
        weighed(*own).sum().backward()
        run(*given).sum().backward()
        for mine, other in zip(tensors_in(given)[:2], own, strict=False):
            torch.testing.assert_close(on("cpu", mine.grad), other.grad)
        assert backend.frame_count == 1


# ---- integers that the host computes of sizes


def scaled(x: Tensor) -> Any:
    n = x.shape[0]
    return x[: int(n * 0.3)] + 1, x.new_ones(math.ceil(n / 1.7)), round(n / 3 + 0.2)


def distance(x: Tensor, y: Tensor) -> Any:
    n = abs(x.shape[0] - y.shape[0])
    return x[:n] * n, y.sum() + n


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_integers_of_sizes(device: str) -> None:
    called(scaled, [(R(n),) for n in (12, 31, 7)], device, dynamic=True)
    called(distance, [(R(a), R(b)) for a, b in ((12, 5), (9, 6), (6, 4))], device, dynamic=True)
    x = R(12)
    given = on(device, x.requires_grad_())
    torch.compile(scaled, backend="webgpu", dynamic=True)(given)[0].square().sum().backward()
    scaled(x)[0].square().sum().backward()
    torch.testing.assert_close(on("cpu", given.grad), x.grad)


def test_integers_of_data() -> None:
    def part(x: Tensor, y: Tensor) -> Any:
        k = int(y.sum().item() * 2.5)
        torch._check(k >= 0)
        return torch.zeros(k, device=x.device) + x[0]

    called(part, [(R(3), torch.tensor([0.7, 1.0])), (R(3), torch.tensor([3.0, 0.5]))], "webgpu")


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_negative_positions_are_counted_from_the_end(device: str) -> None:
    def at(n: int, x: Tensor) -> Any:
        y = x.clone()
        y[n] = -1
        return x[n] + 1, y, torch.select_scatter(x, x[0], 0, n)

    run = torch.compile(at, backend="webgpu", fullgraph=True, dynamic=True)
    x = torch.arange(7.0)
    for n in (2, 5, -7, -1, -2):
        torch.testing.assert_close(on("cpu", run(n, on(device, x))), at(n, x))


# ---- what the same tests found besides


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_numbers_of_python_s_random(device: str) -> None:
    """Dynamo says that they are float32, and gives float64."""

    def noisy(x: Tensor) -> Any:
        return (x + random.randint(1, 100)) * random.uniform(0, 1)

    run = torch.compile(noisy, backend="webgpu", fullgraph=True)
    for seed in range(3):
        random.seed(seed)
        got = run(on(device, R(3)))
        random.seed(seed)
        torch.testing.assert_close(on("cpu", got), noisy(R(3)))


def of_zeros(x: Tensor) -> Any:
    a = torch.zeros(4, device=x.device)
    return a, a[1:]


def of_a_copy(x: Tensor) -> Any:
    y = x + 1
    z = y.clone()
    return y, z, z[1:]


def of_transposed_zeros(x: Tensor) -> Any:
    a = torch.zeros(2, 3, device=x.device).t()
    return a, a[1:]


def of_chosen(x: Tensor) -> Any:
    a = x[x > 0] * 2
    return a, a[1:]


def of_a_slice(x: Tensor) -> Any:
    a = x * 2
    return a, a[(x > 0).sum().item() :]  # type: ignore[misc]


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize(
    "function", [of_zeros, of_a_copy, of_transposed_zeros, of_chosen, of_a_slice]
)
def test_outputs_share_memory(function: Function, device: str) -> None:
    got, wanted = torch.compile(function, backend="webgpu")(on(device, some(3))), function(some(3))
    for results in (got, wanted):
        results[-1].fill_(5)
    torch.testing.assert_close(on("cpu", got), wanted)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_graph_that_no_plan_can_hold_is_left_to_pytorch(device: str) -> None:
    def windows(x: Tensor) -> Any:
        return torch.as_strided(x[:2], (3, 4), (4, 1), 0) + 1, x.sum()

    reset_warnings()
    given = on(device, R(3, 4))
    with pytest.warns(FallbackWarning, match="as_strided.*leaves its graph to PyTorch"):
        got = torch.compile(windows, backend="webgpu", fullgraph=True)(given)
    torch.testing.assert_close(on("cpu", got), windows(R(3, 4)))
    refused = torch.compile(windows, backend="webgpu", options={"fallback": "error"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="view of larger memory"):
        refused(given)


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_backward_graph_left_to_pytorch_has_what_was_saved(device: str) -> None:
    """The forward graph is compiled, and would have kept it on the GPU for a compiled one."""

    class Windows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.sin().exp()
            ctx.save_for_backward(y)
            return y.sum(0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient * y + torch.as_strided(y[:2], (3, 4), (4, 1), 0)

    def gradient(function: Function, place: str) -> Tensor:
        x, w = on(place, R(3, 5)), on(place, R(5, 4)).requires_grad_()
        function(x, w).sum().backward()
        return on("cpu", w.grad)  # type: ignore[no-any-return]

    def network(x: Tensor, w: Tensor) -> Any:
        return Windows.apply(x @ w)  # type: ignore[no-untyped-call]

    got = gradient(torch.compile(network, backend="webgpu", fullgraph=True), device)
    torch.testing.assert_close(got, gradient(network, "cpu"))


def test_a_lowering_that_needs_a_constant_goes_to_the_host() -> None:
    def grouped(x: Tensor, w: Tensor) -> Any:
        return F.conv2d(x, w, groups=w.shape[0])

    reset_warnings()
    run = torch.compile(grouped, backend="webgpu", fullgraph=True, dynamic=True)
    with pytest.warns(FallbackWarning, match="symbolic, a constant is needed"):
        got = run(R(2, 3, 6, 6).to("webgpu"), R(3, 1, 3, 3).to("webgpu"))
    wanted = grouped(R(2, 3, 6, 6), R(3, 1, 3, 3))
    torch.testing.assert_close(got.cpu(), wanted, **SUMS)


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_part_that_no_plan_can_hold_is_left_to_pytorch(device: str) -> None:
    def windows(x: Tensor, y: Tensor) -> Any:
        chosen = x[x > 0]
        return torch.as_strided(y[:4], (3, 4), (1, 1), 1) + chosen.new_ones(
            chosen.shape[0] * 2, 1, 1
        )

    called(windows, VECTORS[:2], device)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.filterwarnings("ignore:.*leaves its graph to PyTorch")
@pytest.mark.filterwarnings("ignore:.*float64 has no kernels on this GPU")  # where that is so
def test_a_part_left_to_pytorch_has_floats_that_data_decides(device: str) -> None:
    def run(x: Tensor) -> Any:
        peak = x.max().item()
        return x * round(peak * 2.0, 1), x + peak

    compiled = torch.compile(run, backend="webgpu", fullgraph=True)
    for x in (torch.tensor([1.0, 3.25]), torch.tensor([2.5, -1.0])):
        torch.testing.assert_close([y.cpu() for y in compiled(x.to(device))], list(run(x)))
