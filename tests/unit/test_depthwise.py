"""Depthwise convolutions: which kernels they become, how those are tiled, gradients in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from tests.harness import capture, compare, lower_checked, run_graph
from torch_webgpu_compile.codegen.tilings.depthwise import (
    Problem,
    choose_depthwise_tiling,
    image_tile,
    workgroup_nbytes,
)
from torch_webgpu_compile.compiler import Compilation
from torch_webgpu_compile.ir.depthwise_nodes import ConvolutionWindows, DepthwiseWeightGradient
from torch_webgpu_compile.ir.nodes import Pointwise
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.plan.model import KernelCall
from torch_webgpu_compile.scheduler.cost import tap_parts
from torch_webgpu_compile.scheduler.rewrites.split import split_weight_gradients


def kinds(state: Compilation) -> list[str]:
    """Of the kernels, in order."""
    return [call.kernel.kind for call in state.calls if isinstance(call, KernelCall)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_surrounds_a_convolution_joins_it(dynamic: bool | None) -> None:
    def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(F.relu(x), w, b, padding=1, groups=8)
        return F.gelu(y) * 2 + y

    given = torch.randn(3, 8, 10, 12), torch.randn(8, 1, 3, 3), torch.randn(8)
    torch._dynamo.mark_static(given[1])
    assert kinds(compile_function(block, *given, dynamic=dynamic)) == ["depthwise"]


def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    strides = [2, 2], [1, 1], [1, 1], False, [0, 0]
    mask = [True, True, False]
    made = torch.ops.aten.convolution_backward(g, x, w, None, *strides, x.shape[1], mask)
    return made[0], made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype) -> None:
    sizes = (2, 8, 9, 8), (2, 4, 17, 16), (8, 1, 3, 3)  # two results of each channel
    state = compile_function(gradients, *(torch.randn(s, dtype=dtype) for s in sizes))
    assert sorted(kinds(state)) == ["depthwise", "depthwise_weight_gradient"]


def test_gradients_of_few_channels_are_sums_of_parts() -> None:
    g, x, w = torch.randn(6, 4, 70, 64), torch.randn(6, 4, 140, 128), torch.randn(4, 1, 3, 3)
    graph = lower_checked(capture(lambda *given: gradients(*given)[1], g, x, w))
    split = split_weight_gradients(graph, TARGET)
    verify_loop_graph(split)
    assert [type(node) for node in split.nodes] == [DepthwiseWeightGradient, Pointwise]
    compare(run_graph(split, [g, x, w]), [gradients(g, x, w)[1]], atol=1e-3, rtol=1e-4)
    found = compile_function(lambda *given: gradients(*given)[1], g, x, w)
    assert kinds(found) == ["depthwise_weight_gradient", "pointwise"]


def windows() -> Iterator[ConvolutionWindows]:
    for kernel, stride, dilation in product((1, 2, 7, 64), (1, 2, 4), (1, 5)):
        for transposed in (False, True):
            one = ConvolutionWindows((kernel,), (stride,), (kernel // 2,), (dilation,), transposed)
            two = ConvolutionWindows(
                *(2 * entry for entry in (one.kernel, one.stride)), (3, 0), (1, dilation)
            )
            yield from (found for found in (one, two) if found.fits_tiles())
    # The farthest that windows may reach.
    yield ConvolutionWindows((4, 4), (1, 1), (0, 0), (42, 1))
    yield ConvolutionWindows((4, 4), (4, 4), (0, 0), (1, 42), True)
    yield ConvolutionWindows((8, 8), (4, 4), (0, 0), (3, 3))


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_tilings(neighbours: bool, sums: bool) -> None:
    """Workgroups fit every adapter, and their tiles have all that windows read."""
    for found in windows():
        if sums and found.transposed:
            continue
        for lines, elements in ((1, 1), (7, 7), (56, 55), (1, 5000)):
            problem = Problem(found, 2, 24, lines, elements, neighbours, sums, lines)
            tiling = choose_depthwise_tiling(problem, TARGET)
            assert tiling.workgroup <= TARGET.max_workgroup_invocations
            assert workgroup_nbytes(tiling, found, sums) <= TARGET.max_workgroup_nbytes
            tile = image_tile(tiling, found)
            last = len(found.kernel) - 1
            for dim, first, count, results in (
                (last, 4 * tile.first_quad, 4 * tile.quads, 4 * tiling.vectors * tiling.columns),
                (0, tile.first_line, tile.lines, tiling.rows * tiling.lines),
            )[: last + 1]:
                for position, tap in product(range(results), range(found.kernel[dim])):
                    at = found.read_at(dim, position, tap)
                    assert at is None or first <= at < first + count


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_tilings_fill_workgroups(neighbours: bool, sums: bool) -> None:
    """They have many invocations, and all channels of the sectors that they load."""
    target = replace(TARGET, max_workgroup_nbytes=48 << 10)
    for kernel, (channels, size) in product((3, 7), ((96, 56), (192, 28), (384, 14))):
        found = ConvolutionWindows((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1))
        parts = 8 * 96 // channels if sums and neighbours else 1
        problem = Problem(found, 8, channels, size, size, neighbours, sums, size, parts)
        tiling = choose_depthwise_tiling(problem, target)
        assert tiling.workgroup >= 112
        assert not neighbours or tiling.channels >= 8


def test_gradients_with_few_workgroups_are_in_parts() -> None:
    """A workgroup has one channel, or eight where those are neighbours in memory."""
    positions = 8 * 56 * 56
    assert tap_parts(96, positions, False, TARGET) == 1
    assert tap_parts(32, positions, False, TARGET) > 1
    assert tap_parts(96, positions, True, TARGET) >= 8
    assert tap_parts(768, positions, True, TARGET) == 1
    assert tap_parts(192, 8 * 7 * 7, True, TARGET) <= 1
