"""Long dispatches, divided within their grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runtime_plans import ADD_KERNEL, add_plan, buffer, dispatch, floats, plan, portable_device

from tests.compilations import compile_function
from tests.compiling import compiled, native
from tests.golden.test_golden import GRAPHS
from torch_webgpu_compile.errors import IndexOutOfRangeError
from torch_webgpu_compile.plan.model import Kernel, KernelBinding
from torch_webgpu_compile.runtime import executor
from torch_webgpu_compile.runtime.device import Device, open_device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.pacing import Pace
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.runtime.sized import SizedDispatch, SizedPlan
from torch_webgpu_compile.runtime.slicing import Grid, slices_of, sliced_kernel
from torch_webgpu_compile.sizes import as_expr

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
    for plan in found:
        steps: dict[int, list[SizedDispatch]] = defaultdict(list)
        for step in plan.steps:
            if isinstance(step, SizedDispatch):
                steps[step.index].append(step)
        for parts in steps.values():
            assert len(parts) > 1 or parts[0].grid == (1, 1, 1), parts[0].kernel.wgsl
            assert sum(part.share for part in parts) == pytest.approx(1)
            divided += len(parts) > 1
    return divided


# ---- slices of a grid


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (5, 4, 1), (3, 5, 4), (65535, 2, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000])
def test_slices_cover_a_grid_once_and_are_small_enough(grid: Grid, count: int) -> None:
    total = grid[0] * grid[1] * grid[2]
    parts = slices_of(grid, count)
    assert max(part.workgroups for part in parts) <= max(1, total // count)
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
    device = open_device()
    dynamic_or_none = True if dynamic else None
    state = compile_function(
        function, *arguments, dynamic=dynamic_or_none, target=device.target
    )
    found = state.plan
    kernels = [*found.kernels, *(found.preparation.kernels if found.preparation else ())]
    variants = [sliced_kernel(kernel) for kernel in kernels]
    assert variants
    for kernel, variant in zip(kernels, variants, strict=True):
        assert variant is not None, kernel.wgsl
        assert variant.wgsl != kernel.wgsl
        device.compile(variant)


BODY = "  out[group.y * groups.x + group.x] = i32(group.z + groups.z);\n}\n"
ARGUMENTS = "@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>"


def handwritten(arguments: str, head: str = "", parameters: int = 0) -> Kernel:
    wgsl = (
        f"{head}@group(0) @binding(0) var<storage, read_write> out: array<i32>;\n"
        f"// fn main(quoted) {{\n@compute @workgroup_size(1) fn main({arguments}) {{\n{BODY}"
    )
    return Kernel("hand", "test", wgsl, (KernelBinding(True),), (1, 1, 1), parameters)


def test_the_text_of_a_variant() -> None:
    variant = sliced_kernel(handwritten(ARGUMENTS, "enable f16;\n"))
    assert variant is not None
    assert variant.parameter_count == 8
    assert variant.wgsl == (
        "enable f16;\n"
        "@group(0) @binding(1) var<uniform> tw_slice: array<vec4<i32>, 2>;\n"
        "@group(0) @binding(0) var<storage, read_write> out: array<i32>;\n"
        "// fn main(quoted) {\n"
        "@compute @workgroup_size(1) fn main(@builtin(workgroup_id) tw_group: vec3<u32>) {\n"
        "  let group = tw_group + bitcast<vec4<u32>>(tw_slice[0]).xyz;\n"
        "  let groups = bitcast<vec4<u32>>(tw_slice[1]).xyz;\n" + BODY
    )
    uniform = "@group(0) @binding(1) var<uniform> sizes: array<vec4<i32>, 2>;  // s0, …\n"
    variant = sliced_kernel(handwritten(ARGUMENTS, uniform, parameters=5))
    assert variant is not None
    assert variant.parameter_count == 16
    assert "var<uniform> sizes: array<vec4<i32>, 4>;  // s0, …\n" in variant.wgsl
    assert "let groups = bitcast<vec4<u32>>(sizes[3]).xyz;" in variant.wgsl


@pytest.mark.parametrize(
    "kernel",
    [
        ADD_KERNEL,
        handwritten("@builtin(global_invocation_id) group: vec3<u32>"),
        handwritten("input: Input"),
        handwritten(ARGUMENTS, parameters=3),  # a uniform buffer of an unknown form
    ],
)
def test_other_entry_points_have_no_variant(kernel: Kernel) -> None:
    assert sliced_kernel(kernel) is None


# ---- results


def training(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w = w.detach().requires_grad_()
    F.cross_entropy(F.layer_norm(x @ w, (24,)), torch.arange(40) % 24).backward()
    assert w.grad is not None
    return w.grad


ORDER = torch.randperm(300)
ZOO: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "pointwise": (lambda x: torch.sin(x) * 2, [randn(999)]),
    "row reduction": (lambda x: torch.softmax(x, -1), [randn(50, 70)]),
    "column reduction": (lambda x: x.sum(0), [randn(300, 130)]),
    "full reduction": (lambda x: x.square().mean(), [randn(512, 600)]),
    "matmul": (lambda x, w: F.gelu(x @ w), [randn(150, 40), randn(40, 170)]),
    "matrix-vector": (lambda x, w: F.linear(x, w), [randn(1, 128), randn(300, 128)]),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), [randn(2, 4, 20, 20), randn(8, 4, 3, 3)]),
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
        [randn(3, 8, 8).tril() + 4 * torch.eye(8), randn(3, 8, 5)],
    ),
    "training": (training, [randn(40, 16), randn(16, 24)]),
}


@pytest.mark.parametrize(("seconds", "max_grid"), [(1.6, 0), (1e9, 3)])
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
    device = open_device()
    wanted = compiled(function)(*arguments)
    torch._dynamo.reset()
    if max_grid:
        grid = replace(device.target, max_grid=max_grid)
        monkeypatch.setattr(device, "target", grid)
    monkeypatch.setattr(device, "pace", Always(seconds, 1.0))
    del sized[:]
    actual = compiled(function)(*arguments)
    assert check_divided(sized)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
