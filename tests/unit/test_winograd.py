"""Winograd's convolutions: the transforms, and for which convolutions they pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compilations import compile_function
from tests.harness import capture, compare, lower_checked, run_graph
from torch_webgpu_compile.compilation import Compilation
from torch_webgpu_compile.ir.graph import LoopGraph
from torch_webgpu_compile.ir.nodes import Contraction
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler import winograd
from torch_webgpu_compile.scheduler.inline import inline_producers
from torch_webgpu_compile.scheduler.layouts import choose_layouts
from torch_webgpu_compile.scheduler.units import drop_unit_symbols
from torch_webgpu_compile.target import Target


@pytest.fixture
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "ENABLED", True)


@pytest.fixture
def _always(_enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it does not pay."""
    monkeypatch.setattr(winograd, "_pays", lambda *_: True)
    monkeypatch.setattr(winograd, "_PART_OF_A_CALL", 1e-9)


def images(*sizes: int) -> Tensor:
    """Channels-last images."""
    return torch.randn(sizes).to(memory_format=torch.channels_last)


def written(function: Any, x: Tensor, *weights: Tensor) -> LoopGraph:
    """The loop graph, with static weights, after the choice of layouts."""
    graph = lower_checked(capture(function, x, *weights))
    inputs = (graph.inputs[0], *(replace(spec, static=True) for spec in graph.inputs[1:]))
    changed = inline_producers(drop_unit_symbols(replace(graph, inputs=inputs)), Target())
    made = choose_layouts(changed, Target())
    verify_loop_graph(made)
    return made


def products(graph: LoopGraph) -> list[tuple[int, ...]]:
    """Sizes of the contractions with a batch of 16."""
    return [
        tuple(size.constant for size in (*node.batch, *node.rows, *node.columns, *node.inner))
        for node in graph.nodes
        if isinstance(node, Contraction) and [b.constant for b in node.batch] == [16]
    ]


SIZES = [
    (1, 8, 8, 6, 6, 1),
    (3, 4, 12, 7, 5, 1),
    (2, 8, 4, 9, 8, 0),
    (3, 12, 8, 7, 7, 0),
    (1, 4, 4, 3, 3, 0),
    (2, 8, 8, 5, 2, 1),
    (1, 8, 8, 4, 3, 0),
    (1, 8, 4, 8, 8, 2),
]


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(("batch", "inputs", "outputs", "height", "width", "padding"), SIZES)
def test_convolutions(
    batch: int, inputs: int, outputs: int, height: int, width: int, padding: int
) -> None:
    torch.manual_seed(0)
    x, weight = images(batch, inputs, height, width), torch.randn(outputs, inputs, 3, 3)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=padding)

    graph = written(function, x, weight)
    wanted = function(x, weight)
    tiles = [-(-size // 2) for size in wanted.shape[2:]]
    assert products(graph) == [(16, batch, *tiles, outputs, inputs)]
    compare(run_graph(graph, [x, weight]), [wanted], atol=1e-4, rtol=1e-4)


OTHERS = {
    "stride": (images(1, 8, 8, 8), torch.randn(8, 8, 3, 3), {"stride": 2}),
    "dilation": (images(1, 8, 8, 8), torch.randn(8, 8, 3, 3), {"dilation": 2}),
    "groups": (images(1, 8, 8, 8), torch.randn(8, 4, 3, 3), {"groups": 2}),
    "5×5": (images(1, 8, 8, 8), torch.randn(8, 8, 5, 5), {"padding": 2}),
    "1×3": (images(1, 8, 8, 8), torch.randn(8, 8, 1, 3), {}),
    "much padding": (images(1, 8, 8, 8), torch.randn(8, 8, 3, 3), {"padding": 3}),
    "three channels": (images(1, 3, 8, 8), torch.randn(8, 3, 3, 3), {"padding": 1}),
    "channels first": (torch.randn(1, 8, 8, 8), torch.randn(8, 8, 3, 3), {"padding": 1}),
    "half": (images(1, 8, 8, 8).half(), torch.randn(8, 8, 3, 3).half(), {"padding": 1}),
    "one position": (images(2, 8, 1, 1), torch.randn(8, 8, 3, 3), {"padding": 1}),
}


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name: str) -> None:
    x, weight, options = OTHERS[name]
    graph = written(lambda x, w: F.conv2d(x, w, **options), x, weight)
    assert products(graph) == []


@pytest.mark.usefixtures("_always")
def test_changed_inputs_stay_direct() -> None:
    """What is computed from the images on the way is not computed 2.25 times instead."""
    x, weight = images(1, 8, 8, 8), torch.randn(8, 8, 3, 3)
    graph = written(lambda x, w: F.conv2d(x * 2, w, padding=1), x, weight)
    wanted = F.conv2d(x * 2, weight, padding=1)
    compare(run_graph(graph, [x, weight]), [wanted], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_always")
def test_a_weight_used_twice_is_transformed_once() -> None:
    x, weight = images(1, 8, 8, 8), torch.randn(8, 8, 3, 3) / 9

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(torch.relu(F.conv2d(x, w, padding=1)), w, padding=1)

    graph = written(function, x, weight)
    assert len(products(graph)) == 2
    assert sum(name.endswith("_transformed") for name in graph.buffers) == 1
    compare(run_graph(graph, [x, weight]), [function(x, weight)], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_special_values_reach_what_they_reach(special: float) -> None:
    """The same results are finite, though others may be NaN instead of an infinity."""
    x, weight = images(2, 4, 9, 7), torch.randn(8, 4, 3, 3)
    for at in ((0, 1, 0, 0), (0, 2, 3, 4), (1, 0, 4, 3), (1, 3, 8, 6), (0, 0, 5, 5)):
        x[at] = special
        graph = written(lambda x, w: F.conv2d(x, w, padding=1), x, weight)
        (got,) = run_graph(graph, [x, weight])
        wanted = F.conv2d(x, weight, padding=1)
        finite = torch.isfinite(wanted)
        assert np.array_equal(np.isfinite(np.asarray(got)), finite.numpy())
        close = torch.as_tensor(np.asarray(got))[finite]
        torch.testing.assert_close(close, wanted[finite], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_always")
def test_weights_that_are_not_finite() -> None:
    x, weight = images(1, 4, 6, 6), torch.randn(8, 4, 3, 3)
    weight[2, 1, 1, 1] = float("inf")
    weight[5, 0, 0, 2] = float("nan")
    graph = written(lambda x, w: F.conv2d(x, w), x, weight)
    (got,) = run_graph(graph, [x, weight])
    wanted = F.conv2d(x, weight)
    assert np.array_equal(np.isfinite(np.asarray(got)), torch.isfinite(wanted).numpy())


def compiled(channels: int, size: int, width: int = 16) -> Compilation:
    """A convolution between 1×1 ones, of which one needs ``width`` times as much memory."""
    model = nn.Sequential(
        nn.Conv2d(channels, width * channels, 1),
        nn.Conv2d(width * channels, channels, 1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 4 * channels, 1),
    ).eval()
    return compile_function(model, torch.randn(8, channels, size, size))


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    ("channels", "size", "pays"), [(64, 56, False), (128, 28, True), (256, 14, True)]
)
def test_what_pays(channels: int, size: int, pays: bool) -> None:
    """Of ResNet-50's stages: with few channels, the transforms move more than is saved."""
    state = compiled(channels, size)
    assert bool(_products(state)) == pays
    if pays:
        # The weight is prepared; what follows the convolution fuses with the last transform.
        assert state.plan.preparation is not None
        prepared = [n for n, b in state.plan.buffers.items() if b.role == "prepared"]
        assert any(name.endswith("_transformed") for name in prepared)
        # Of the 1×1 convolutions the second one is a sum of two parts.
        assert state.plan.dispatch_count == 1 + 2 + 3 + 1


@pytest.mark.usefixtures("_enabled")
def test_the_peak_of_memory_stays() -> None:
    """Transformed images and results are not what a call needs most memory for."""
    assert not _products(compiled(128, 28, width=2))


def test_off_by_default() -> None:
    assert not _products(compiled(256, 14))


def _products(state: Compilation) -> list[str]:
    return [name for name in state.schedule.graph.buffers if name.endswith("_products")]
