"""Long dispatches, divided within their grid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_webgpu_compile
from tests.compilations import compile_function
from tests.compiling import compiled, native
from tests.golden.graphs import GRAPHS
from tests.gpu.runtime_plans import (
    ADD_KERNEL,
    add_plan,
    buffer,
    dispatch,
    floats,
    plan,
    read,
)
from tests.providers import PROVIDERS, device_in_use, device_of
from torch_webgpu_compile.counters import counters
from torch_webgpu_compile.errors import IndexOutOfRangeError
from torch_webgpu_compile.plan.entry_point import entry_point, sliced_kernel
from torch_webgpu_compile.plan.model import USER_KERNEL, Kernel, KernelBinding
from torch_webgpu_compile.runtime import executor
from torch_webgpu_compile.runtime.device import Device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.pacing import Grid, Pace, slices_of
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.runtime.sized import SizedDispatch, SizedPlan
from torch_webgpu_compile.symbolic.sizes import as_expr

pytestmark = pytest.mark.rotates(12)

randn = torch.randn


class Always(Pace):
    """Predicts as many seconds as it has bytes per second, whatever a dispatch does."""

    def seconds(self, nbytes: int, flops: int) -> float:
        return self.bytes_per_second


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> list[SizedPlan]:
    """The plans that are sized from here on."""
    found: list[SizedPlan] = []
    size_plan = executor.size_plan

    def spy(*arguments: Any) -> SizedPlan:
        found.append(size_plan(*arguments))
        return found[-1]

    monkeypatch.setattr(executor, "size_plan", spy)
    return found


def check_divided(found: list[SizedPlan]) -> int:
    """Each kernel of more than one workgroup was divided into at least two; how many they are."""
    divided = 0
    for entry in found:
        steps: dict[int, list[SizedDispatch]] = defaultdict(list)
        for step in entry.steps:
            if isinstance(step, SizedDispatch):
                steps[step.index].append(step)
        for parts in steps.values():
            assert len(parts) > 1 or parts[0].grid == (1, 1, 1), parts[0].kernel.wgsl
            assert sum(part.share for part in parts) == pytest.approx(1)
            divided += len(parts) > 1
    return divided


# ---- slices of a grid


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (5, 4, 1), (3, 5, 4), (65535, 2, 1)])
@pytest.mark.parametrize("part", [1.0, 0.6, 0.5, 0.3, 0.001])
def test_slices_cover_a_grid_once_and_are_small_enough(grid: Grid, part: float) -> None:
    most = max(1, int(math.prod(grid) * part))
    parts = slices_of(grid, most)
    assert max(part.workgroups for part in parts) <= most
    assert sum(part.share(grid) for part in parts) == pytest.approx(1)
    seen = np.zeros(grid, int)
    for part in parts:
        assert min(part.grid) > 0
        box = zip(part.first, part.grid, strict=True)
        seen[tuple(slice(first, first + extent) for first, extent in box)] += 1
    assert (seen == 1).all()


# ---- the variant of a kernel


@pytest.mark.parametrize("name", GRAPHS)
def test_every_kernel_has_a_variant_that_compiles(name: str) -> None:
    function, arguments, dynamic = GRAPHS[name]
    device = device_in_use()
    dynamic_or_none = True if dynamic else None
    state = compile_function(function, *arguments, dynamic=dynamic_or_none, target=device.target)
    found = state.plan
    kernels = [*found.kernels, *(found.preparation.kernels if found.preparation else ())]
    # A user's own kernel may use its grid as it likes.
    kernels = [kernel for kernel in kernels if kernel.kind != USER_KERNEL]
    variants = [sliced_kernel(kernel) for kernel in kernels]
    assert variants
    for kernel, variant in zip(kernels, variants, strict=True):
        assert variant is not None, kernel.wgsl
        assert variant.wgsl != kernel.wgsl
        device.pipelines.compile(variant)


HEAD = "enable f16;\n@group(0) @binding(0) var<storage, read_write> out: array<i32>;\n"
UNIFORM = "@group(0) @binding(1) var<uniform> parameters: array<vec4<i32>, 2>;  // s0, …\n"
MAIN = "@compute @workgroup_size(1)\n"
BODY = "  out[group.y * groups.x + group.x] = i32(group.z + groups.z);\n}\n"


def handwritten(*text: str, parameters: int = 0) -> Kernel:
    return Kernel("hand", "test", "".join(text), (KernelBinding(True),), (1, 1, 1), parameters)


def test_the_text_of_a_variant() -> None:
    variant = sliced_kernel(handwritten(HEAD, MAIN, entry_point("local"), BODY))
    assert variant is not None
    assert variant.parameter_count == 8
    entry = (
        "fn main(@builtin(workgroup_id) tw_group: vec3<u32>, "
        "@builtin(local_invocation_index) local: u32) {\n"
        "  let group = tw_group + bitcast<vec4<u32>>(parameters[FIRST]).xyz;\n"
        "  let groups = bitcast<vec4<u32>>(parameters[GRID]).xyz;\n"
    )
    declared = "@group(0) @binding(1) var<uniform> parameters: array<vec4<i32>, 2>;\n"
    alone = entry.replace("FIRST", "0").replace("GRID", "1")
    assert variant.wgsl == HEAD + MAIN + alone + BODY + declared
    text = HEAD, UNIFORM, MAIN, entry_point("local"), BODY
    variant = sliced_kernel(handwritten(*text, parameters=5))
    assert variant is not None
    assert variant.parameter_count == 16
    after = entry.replace("FIRST", "2").replace("GRID", "3")
    assert variant.wgsl == HEAD + UNIFORM.replace(", 2>", ", 4>") + MAIN + after + BODY


@pytest.mark.parametrize(
    "kernel",
    [
        ADD_KERNEL,
        handwritten(HEAD, MAIN, "fn main(@builtin(workgroup_id) group: vec3<u32>) {\n}\n"),
        handwritten(HEAD, MAIN, entry_point("local"), BODY, parameters=3),  # not declared
        handwritten(HEAD, "/*", entry_point("local"), "*/", MAIN, entry_point("local"), BODY),
    ],
)
def test_other_entry_points_have_no_variant(kernel: Kernel) -> None:
    assert sliced_kernel(kernel) is None


# ---- results


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.layer_norm(x @ w, (24,)), torch.arange(600) % 24)


ORDER = torch.randperm(300)
ZOO: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "pointwise": (lambda x: torch.sin(x) * 2, [randn(9999)]),
    "row reduction": (lambda x: torch.softmax(x, -1), [randn(50, 70)]),
    "column reduction": (lambda x: x.sum(0), [randn(300, 130)]),
    "full reduction": (lambda x: x.square().mean(), [randn(512, 600)]),
    "matmul": (lambda x, w: F.gelu(x @ w), [randn(150, 40), randn(40, 170)]),
    "matrix-vector": (lambda x, w: F.linear(x, w), [randn(1, 128), randn(300, 128)]),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        [randn(2, 4, 20, 20), randn(8, 4, 3, 3)],
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [randn(2, 3, 70, 16) for _ in range(3)],
    ),
    "scan": (lambda x: torch.cumsum(x, -1), [randn(20, 600)]),
    "sort": (lambda x: torch.sort(x, -1), [randn(9, 300)]),
    "scatter": (
        lambda x, i, y: x.index_add(0, i, y),
        [torch.arange(900).view(300, 3), ORDER, torch.arange(900).view(300, 3)],
    ),
    "gather": (lambda x, i: x[i] + 1, [randn(300, 5), ORDER]),
    "foreach": (lambda *x: torch._foreach_mul(x, 2.0), [randn(300), randn(7), randn(40, 6)]),
    "fourier": (lambda x: torch.fft.rfft(x).abs(), [randn(30, 64)]),
    "transpose": (lambda x: x.mT.contiguous(), [randn(2, 132, 130)]),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        [randn(9, 8, 8).tril() + 4 * torch.eye(8), randn(9, 8, 5)],
    ),
    "training": (loss, [randn(600, 16), randn(16, 24)]),
}


def results(function: Callable[..., Any], arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the compiled function returns; for a loss its gradients as well."""
    if function is not loss:
        return torch.utils._pytree.tree_leaves(compiled(function)(*arguments))
    leaves = [x.clone().requires_grad_() for x in arguments]
    value = compiled(function)(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize(("seconds", "max_grid"), [(1.6, 0), (1e9, 19)])
@pytest.mark.parametrize("name", ZOO)
def test_divided_kernels_compute_the_same(
    name: str,
    seconds: float,
    max_grid: int,
    fresh: None,
    sized: list[SizedPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a few slices; and workgroup by workgroup, of folded grids."""
    function, arguments = ZOO[name]
    device = device_in_use()
    wanted = results(function, arguments)
    torch._dynamo.reset()
    if max_grid:
        grid = replace(device.target, max_grid=max_grid)
        monkeypatch.setattr(device, "target", grid)
    monkeypatch.setattr(device, "pace", Always(seconds, 1.0))
    del sized[:]
    actual = results(function, arguments)
    assert check_divided(sized)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def slow(device: Device, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.6) -> None:
    """Predicts so many seconds for each dispatch from here on."""
    monkeypatch.setattr(device, "pace", Always(seconds, 1.0))


def test_sizes_that_are_known_at_the_call(
    fresh: None, sized: list[SizedPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One variant for all sizes: its parameters follow the kernel's."""
    device = device_in_use()
    slow(device, monkeypatch)
    model = torch.compile(
        lambda x: torch.softmax(x, -1) * x.shape[0], backend="webgpu", dynamic=True
    )
    made = []
    for rows in (300, 420, 300, 777):
        x = randn(rows, 33)
        torch.testing.assert_close(model(x), torch.softmax(x, -1) * rows)
        made.append(counters.kernels_compiled)
    assert check_divided(sized) >= 3
    assert made[0] == made[-1]


def test_indices_are_checked_in_every_slice(
    fresh: None, sized: list[SizedPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(device_in_use(), monkeypatch)
    model = native(lambda x, i: x[i] * 2)
    x, i = randn(50, 40), torch.arange(300) % 50
    torch.testing.assert_close(model(x, i), x[i] * 2)
    assert check_divided(sized)
    for wrong in (0, 299):
        i[wrong] = 50
        with pytest.raises(IndexOutOfRangeError, match="50"):
            model(x, i)
        i[wrong] = 0


def test_windows_of_a_buffer_beyond_the_binding_limit(
    fresh: None, sized: list[SizedPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_in_use()
    small = replace(device.target, max_binding_nbytes=1 << 16)
    monkeypatch.setattr(device, "target", small)
    slow(device, monkeypatch)
    x, i = randn(1000, 40), torch.randperm(1000)
    actual = native(lambda x, i: x[i] * 2)(x, i)
    torch.testing.assert_close(actual, x[i] * 2, rtol=0, atol=0)
    assert check_divided(sized)
    steps = [step for entry in sized for step in entry.steps if isinstance(step, SizedDispatch)]
    assert any(binding.offset_nbytes for step in steps for binding in step.step.bindings)


# ---- what is made of it


def streaming_plan(numel: int) -> Any:
    """c = a + b by a kernel that is written as the templates write theirs."""
    wgsl = f"""
        @group(0) @binding(0) var<storage, read> a: array<f32>;
        @group(0) @binding(1) var<storage, read> b: array<f32>;
        @group(0) @binding(2) var<storage, read_write> c: array<f32>;
        @compute @workgroup_size(64) {entry_point("local")}
            let i = (group.y * groups.x + group.x) * 64u + local;
            if (i < arrayLength(&c)) {{ c[i] = a[i] + b[i]; }}
        }}
    """
    kernel = replace(ADD_KERNEL, wgsl=wgsl)
    buffers = [buffer(name, "input", numel) for name in "ab"] + [buffer("c", "output", numel)]
    step = replace(dispatch(0, ["a", "b", "c"], numel), bytes_read=as_expr(1000), flops=as_expr(10))
    return plan([kernel], buffers, [step])


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = device_of(request.param)
    device.synchronize()
    yield device
    device.synchronize()


def run(device: Device, numel: int, whole: Any = None) -> tuple[Any, np.ndarray, np.ndarray]:
    bound = Executor(streaming_plan(numel) if whole is None else whole, device).bind()
    a, b = floats(numel), floats(numel)
    device.upload(bound.buffer("a"), a)
    device.upload(bound.buffer("b"), b)
    return bound, a, b


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 1), (0.9, 2), (5.0, 10), (1e6, 100)])
def test_slices_are_submitted_apart(
    device: Device, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """None of them takes longer than a submission may; at most two are in one."""
    slow(device, monkeypatch, seconds)
    numel = 64 * 100
    bound, a, b = run(device, numel)
    before = device.backend.submissions
    bound.replay()
    device.queue.flush()
    assert bound.dispatch_count == count
    assert count / 2 <= device.backend.submissions - before <= count
    np.testing.assert_array_equal(read(device, bound.buffer("c"), numel), a + b)


def test_a_kernel_that_cannot_be_divided_is_run_whole(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(device, monkeypatch)
    bound, a, b = run(device, 640, add_plan(640))
    bound.replay()
    assert bound.dispatch_count == 1
    np.testing.assert_array_equal(read(device, bound.buffer("c"), 640), a + b)


def test_times_of_slices_are_their_kernels(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(device, monkeypatch)
    bound, a, b = run(device, 640)
    assert bound.dispatch_count == 4
    (seconds,) = time_steps(bound)
    assert seconds > 0
    np.testing.assert_array_equal(read(device, bound.buffer("c"), 640), a + b)


def test_a_profile_shows_each_slice_with_its_part_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = device_in_use()
    slow(device, monkeypatch)
    bound, _, _ = run(device, 640)
    monkeypatch.undo()
    with torch_webgpu_compile.profile() as profile:
        bound.replay()
    (total,) = profile.kernels
    assert total.calls == len(profile.runs) == 4
    assert [entry.nbytes for entry in profile.runs] == [200, 300, 200, 300]
    assert total.nbytes == 1000
    assert total.flops == 10


def test_nothing_is_divided_or_compiled_for_short_work(sized: list[SizedPlan]) -> None:
    device = device_in_use()
    bound, _, _ = run(device, 640)
    before = counters.kernels_compiled
    second, _, _ = run(device, 6400)
    assert counters.kernels_compiled == before
    assert bound.dispatch_count == second.dispatch_count == 1
    steps = [step for found in sized for step in found.steps]
    assert all(isinstance(step, SizedDispatch) and step.share == 1 for step in steps)
