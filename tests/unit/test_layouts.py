"""Channels-last intermediates: which are chosen, what kernels become, and that results stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compilations import TARGET, compile_function
from tests.harness import backend_of, capture, compare, lower_checked, run_graph
from torch_webgpu_compile.captured import CapturedGraph
from torch_webgpu_compile.codegen.tilings.contraction import problem_of
from torch_webgpu_compile.compiler import Compilation
from torch_webgpu_compile.ir.graph import (
    AnchorGroup,
    ForeachGroup,
    JointGroup,
    LoopGraph,
    MapGroup,
    RowGroup,
)
from torch_webgpu_compile.ir.nodes import Contraction
from torch_webgpu_compile.ir.scalar import loads_of
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler.rewrites.common_nodes import drop_unit_symbols
from torch_webgpu_compile.scheduler.rewrites.layouts import channels_last, choose_layouts
from torch_webgpu_compile.symbolic.sizes import ONE


def randn(*sizes: int) -> Tensor:
    """The same values in every run."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def weight(*sizes: int) -> Tensor:
    """A weight that keeps the scale of what it is applied to."""
    return randn(*sizes) / math.sqrt(math.prod(sizes[1:]))


def by(function: Callable[..., Tensor], *sizes: int, **options: Any) -> Callable[[Tensor], Tensor]:
    """``function`` with a weight of these sizes."""
    made = weight(*sizes)
    return lambda x: function(x, made, **options)


class Block(nn.Module):
    """A residual bottleneck with batch norm."""

    def __init__(self, inputs: int = 16, width: int = 8, stride: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * inputs, 1, bias=False),
            nn.BatchNorm2d(2 * inputs),
        )
        self.shortcut = nn.Conv2d(inputs, 2 * inputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def stem(*layers: nn.Module) -> nn.Sequential:
    """Layers after a convolution of RGB images, and a classifier."""
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(5))
    model = nn.Sequential(nn.Conv2d(3, 16, 5, 2, padding=2), nn.ReLU(), *layers, *end)
    model(randn(1, 3, 32, 32))
    return model.eval()


def chained(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One after the other."""
    return lambda x: reduce(lambda value, function: function(value), functions, x)


def between(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function between two 3×3 convolutions with 16 and 8 channels."""
    first, second = weight(16, 4, 3, 3), weight(8, 8, 3, 3)

    def run(x: Tensor) -> Tensor:
        hidden = module(F.relu(F.conv2d(x, first, padding=1)))
        return F.conv2d(hidden[:, :8], second, padding=1)

    return run


# name: (function, argument)
GRAPHS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "residual": (stem(nn.MaxPool2d(3, 2, padding=1), Block()), randn(2, 3, 32, 32)),
    "one image": (stem(Block()), randn(1, 3, 24, 20)),
    "channels-last input": (
        stem(Block()),
        randn(2, 3, 24, 20).to(memory_format=torch.channels_last),
    ),
    "relu": (between(F.relu), randn(2, 4, 9, 8)),
    "average pool": (between(lambda x: F.avg_pool2d(x, 2)), randn(2, 4, 12, 8)),
    "maximum pool": (between(lambda x: F.max_pool2d(x, 3, 2, 1)), randn(2, 4, 12, 9)),
    "nearest": (
        between(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")),
        randn(2, 4, 6, 5),
    ),
    "bilinear": (
        between(lambda x: F.interpolate(x, size=(9, 7), mode="bilinear")),
        randn(2, 4, 6, 5),
    ),
    "concatenated": (between(lambda x: torch.cat([x[:, 8:], x.sigmoid()], 1)), randn(2, 4, 9, 8)),
    "padded": (between(lambda x: F.pad(x, (1, 2, 0, 1))), randn(2, 4, 9, 8)),
    "group norm": (between(lambda x: F.silu(F.group_norm(x, 4))), randn(2, 4, 9, 8)),
    "batch statistics": (
        between(lambda x: F.batch_norm(x, None, None, training=True)),
        randn(2, 4, 9, 8),
    ),
    "softmax of channels": (between(lambda x: x.softmax(1)), randn(2, 4, 9, 8)),
    "transposed": (
        between(by(F.conv_transpose2d, 16, 8, 3, 3, stride=2, padding=1)),
        randn(2, 4, 7, 6),
    ),
    "dilated": (between(by(F.conv2d, 8, 16, 3, 2, dilation=(2, 1))), randn(2, 4, 9, 8)),
    "grouped": (between(by(F.conv2d, 16, 4, 3, 3, padding=1, groups=4)), randn(2, 4, 9, 8)),
    "depthwise": (between(by(F.conv2d, 16, 1, 3, 3, padding=1, groups=16)), randn(2, 4, 9, 8)),
    "odd channels": (
        between(chained(by(F.conv2d, 7, 16, 1, 1), by(F.conv2d, 8, 7, 3, 3))),
        randn(2, 4, 9, 8),
    ),
    "1d": (chained(by(F.conv1d, 8, 4, 3), by(F.conv1d, 8, 8, 5)), randn(2, 4, 40)),
    "3d": (chained(by(F.conv3d, 8, 4, 2, 3, 2), by(F.conv3d, 4, 8, 2, 2, 2)), randn(2, 4, 5, 6, 7)),
    "shared weight": (
        between(chained(*[by(F.conv2d, 16, 16, 2, 2)] * 2)),
        randn(2, 4, 20, 20),
    ),
}


def laid_out(graph: LoopGraph) -> LoopGraph:
    """The graph with layouts chosen, verified."""
    chosen = choose_layouts(drop_unit_symbols(graph), TARGET)
    verify_loop_graph(chosen)
    return chosen


def channels_last_buffers(graph: LoopGraph) -> list[str]:
    """Names of the intermediates whose channels are fastest."""
    return [
        name
        for name, buffer in graph.buffers.items()
        if len(buffer.sizes) >= 3
        and name not in graph.returned
        and not name.startswith("in")
        and buffer.strides == channels_last(buffer.sizes)
        and any(int(size) > 1 for size in buffer.sizes[2:])
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_results_stay(name: str) -> None:
    function, x = GRAPHS[name]
    with torch.no_grad():
        graph = laid_out(lower_checked(capture(function, x)))
        assert channels_last_buffers(graph)
        compare(run_graph(graph, [x]), [function(x)], atol=1e-4, rtol=1e-4)


def test_results_stay_with_symbolic_sizes() -> None:
    model = stem(nn.MaxPool2d(3, 2, padding=1), Block())
    x = randn(3, 3, 24, 28)
    with torch.no_grad():
        captured = capture(model, x, dynamic=True)
        graph = laid_out(lower_checked(captured))
        compare(run_graph(graph, [x]), [model(x)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_stay(memory_format: torch.memory_format) -> None:
    model = stem(nn.MaxPool2d(3, 2, padding=1), Block()).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None  # not to be changed
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    x = randn(2, 3, 24, 20).to(memory_format=memory_format)
    names, values = zip(*model.named_parameters(), strict=True)

    def gradients(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return torch.autograd.grad(out.square().mean(), values)

    graph = laid_out(lower_checked(capture(gradients, x, *values)))
    wanted = gradients(x, *values)
    compare(run_graph(graph, [x, *values])[: len(wanted)], wanted, atol=1e-4, rtol=1e-3)


def operands(state: Compilation) -> list[tuple[str, str, bool]]:
    """(axis of lhs, axis of rhs, whether it stores vectors) of each contraction."""
    buffers = state.schedule.graph.buffers
    found = []
    for group, call in zip(state.schedule.groups, state.calls, strict=True):
        if isinstance(group, AnchorGroup) and isinstance(group.anchor, Contraction):
            problem = problem_of(group, buffers)
            stores = "n: i32, value: vec4" in call.kernel.wgsl
            found.append((problem.lhs, problem.rhs, stores))
    return found


def copies(state: Compilation) -> list[str]:
    """What is copied from one layout into another, before the first call."""
    preparation = state.program.prepared
    return [
        member.output
        for group in (() if preparation is None else preparation.groups)
        if isinstance(group, MapGroup | ForeachGroup)
        for part in (group.groups if isinstance(group, ForeachGroup) else (group,))
        for member in part.members
        if member.output.endswith("_layout")
    ]


def test_convolutions_load_and_store_vectors() -> None:
    state = compile_function(stem(nn.MaxPool2d(3, 2, padding=1), Block()), randn(8, 3, 64, 64))
    first, *others, _ = operands(state)
    assert first == ("scalar_inner", "outer", True)  # three channels are no vector
    assert others == [
        ("inner", "inner", True),  # 1×1
        ("inner", "outer", True),  # 3×3
        ("inner", "inner", True),
        ("inner", "inner", True),
    ]
    assert len(copies(state)) == 2  # the weights of the 5×5 and the 3×3 convolution


def test_no_kernel_but_copies_of_weights_is_added() -> None:
    model = stem(nn.MaxPool2d(3, 2, padding=1), Block())
    state = compile_function(model, randn(8, 3, 64, 64))
    # 5 convolutions with all that follows each, two pools, the classifier
    assert state.plan.dispatch_count == 8
    assert state.plan.preparation is not None
    assert len(copies(state)) == 2
    assert state.plan.preparation.dispatch_count == 1  # both copies together


def test_channels_last_weights_are_not_copied() -> None:
    model = stem(Block()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = randn(8, 3, 64, 64).to(memory_format=torch.channels_last)
    state = compile_function(model, x)
    assert [axes[:2] for axes in operands(state)[1:]] == [("inner", "inner")] * 5
    assert len(copies(state)) <= 1  # of the first, whose rows of 75 elements are no vectors


def test_group_norm_reads_channels_last_images_once() -> None:
    function, _ = GRAPHS["group norm"]
    state = compile_function(function, randn(2, 4, 24, 24))
    parts = [
        p for g in state.schedule.groups for p in (g.groups if isinstance(g, JointGroup) else [g])
    ]
    (group,) = [part for part in parts if isinstance(part, RowGroup)]
    images = {
        load.index
        for member in group.members
        for load in loads_of(member.body)
        if len(load.index) == 4 and load.buffer not in {m.output for m in group.members}
    }
    assert len(images) == 1  # statistics and result go through the images at the same points
    assert int(group.elements[-1]) == 4  # channels of a group, side by side in memory


def test_few_positions_do_not_pay_for_a_copy_of_the_weight() -> None:
    state = compile_function(between(F.relu), randn(1, 4, 5, 4))
    assert not copies(state)


def test_outputs_keep_their_strides() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    x = randn(2, 4, 20, 20)
    state = compile_function(lambda x: (model(x), model[:2](x)), x)
    for output in state.plan.outputs:
        assert int(output.strides[-1]) == 1


def test_saved_activations_keep_their_strides() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    graphs: list[CapturedGraph] = []

    def keep(captured: CapturedGraph) -> Callable[..., Any]:
        graphs.append(captured)
        return captured.module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend_of(keep), fullgraph=True)(randn(2, 4, 20, 20))
    graph = laid_out(lower_checked(graphs[0]))
    shown = [o for o in graph.outputs if len(o.strides) == 4 and int(o.sizes[2]) > 3]
    assert len(shown) >= 2
    for output in shown:
        assert graph.buffers[output.buffer or ""].strides[-1] is output.strides[-1] is ONE
