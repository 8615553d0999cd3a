"""Operators without a decomposition in PyTorch: ours, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.eager_calls import check_call
from torch_webgpu_compile.capture.decompositions import counting
from torch_webgpu_compile.capture.decompositions.table import FAMILIES, decompositions
from torch_webgpu_compile.compiler import native_operators

aten = torch.ops.aten

nan = float("nan")
pytestmark = [pytest.mark.rotates(3), pytest.mark.slow]


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("p", [0.0, 0.7, 1.0, 2.0, 3.5, float("inf")])
def test_distances(p: float) -> None:
    x, y = floats(5, 3), floats(4, 3)
    x[1] = x[0]  # a distance of 0
    check_call(aten._pdist_forward.default, x, p)
    found = aten._pdist_forward.default(x, p)
    check_call(aten._pdist_backward.default, floats(10), x, p, found)
    y[2] = x[3]
    found = aten._cdist_forward.default(x, y, p, None)
    check_call(aten._cdist_backward.default, floats(5, 4), x, y, p, found)
    check_call(aten._pdist_forward.default, x[:1], p)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(p: int, weighted: bool, reduction: int) -> None:
    x, target = floats(4, 5), torch.tensor([0, 4, 2, 2])
    weight = torch.rand(5) if weighted else None
    grad = floats(4) if reduction == 0 else torch.tensor(1.7)
    op = aten.multi_margin_loss_backward.default
    check_call(op, grad, x, target, p, 0.7, weight, reduction)
    check_call(op, grad.flatten()[:1].sum(), x[0], target[1], p, 1.0, weight, reduction)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_multilabel_margin_loss(reduction: int) -> None:
    x = floats(3, 4)
    target = torch.tensor([[1, 3, -1, 2], [-1, 0, 0, 0], [0, 1, 2, 3]])
    _, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    grad = floats(3) if reduction == 0 else torch.tensor(1.7)
    op = aten.multilabel_margin_loss_backward.default
    check_call(op, grad, x, target, reduction, is_target)


def test_adaptive_max_pools() -> None:
    x = floats(2, 3, 7, 5)
    out, indices = aten.adaptive_max_pool2d.default(x, [3, 2])
    check_call(aten.adaptive_max_pool2d_backward.default, torch.ones_like(out), x, indices)
    x = floats(3, 4, 5, 6)
    out, indices = aten.adaptive_max_pool3d.default(x, [2, 3, 4])
    check_call(aten.adaptive_max_pool3d_backward.default, torch.ones_like(out), x, indices)


def test_histc() -> None:
    x = torch.cat([floats(50), torch.tensor([0.5, -1.0, 1.0, float("nan")])])
    check_call(aten.histc.default, x, 8, -1, 1)
    check_call(aten.histc.default, x[:-1], 8)
    check_call(aten.histc.default, torch.full((3,), 2.0), 5)
    check_call(aten.histc.default, torch.empty(0), 5, 0, 1)


@pytest.mark.parametrize("density", [False, True])
def test_histograms(density: bool) -> None:
    x = torch.cat([floats(50), torch.tensor([0.5, -1.0, 1.0])])
    options = {"weight": torch.rand(53), "density": density}
    check_call(aten.histogram.bin_ct, x, 8, density=density)
    check_call(aten.histogram.bin_ct, x, 8, range=[-1.0, 1.0], **options)
    edges = torch.tensor([-1.5, -0.2, 0.0, 1.0])
    check_call(aten.histogram.bins_tensor, x, edges, **options)


def test_repetitions_of_a_known_number() -> None:
    repeats = torch.tensor([2, 0, 3, 1])
    check_call(aten.repeat_interleave.Tensor, repeats, output_size=6)
    check_call(aten.repeat_interleave.Tensor, repeats.int(), output_size=6)


@pytest.mark.parametrize("size", [0, 2, 5, 9])
def test_nonzero_static(size: int) -> None:
    x = torch.tensor([[1, 0, 2], [0, 0, 3]])
    check_call(aten.nonzero_static.default, x, size=size, fill_value=-7)
    check_call(aten.nonzero_static.default, x[:0], size=size)
    check_call(aten.nonzero_static.default, x[0, 0], size=size)


@pytest.mark.parametrize("initial", [None, 2.0])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce: str, initial: float | None) -> None:
    """And their gradients, also of NaN and of zeros, with as many dimensions of lengths as two."""
    lengths, offsets = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 2, 2, 5, 6])
    special = torch.tensor([[1.0, nan], [1, 3], [0, 5], [4, 0], [nan, -1], [2, 0]])
    op, backward = aten.segment_reduce.default, aten._segment_reduce_backward.default
    for data, ends in (
        (floats(6), {"lengths": lengths}),
        (floats(6, 2, 3), {"offsets": offsets}),
        (special, {"lengths": lengths}),
        (special, {"lengths": torch.tensor([1, 2, 0]), "unsafe": True}),
        (torch.stack([special, special + 1]), {"lengths": torch.stack([lengths, lengths.flip(0)])}),
        (torch.stack([special, special + 1]), {"offsets": torch.stack([offsets, offsets])}),
    ):
        keywords = {**ends, "axis": next(iter(ends.values())).dim() - 1, "initial": initial}
        check_call(op, data, reduce, **keywords)
        out = op(data, reduce, **keywords)
        keywords.pop("unsafe", None)
        check_call(backward, floats(*out.shape), out, data, reduce, **keywords)


def test_embedding_renorm() -> None:
    weight, indices = floats(5, 3), torch.tensor([[0, 2], [2, 4]])
    check_call(aten.embedding_renorm_.default, weight, indices, 0.5, 2.0)
    check_call(aten.embedding_renorm_.default, weight.clone(), indices, 1.0, 1.0)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize(("rank", "mode"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_grid_samplers(rank: int, mode: int, padding: int, align: bool) -> None:
    x = floats(2, 3, 5, 4, 3)[..., 0] if rank == 2 else floats(2, 3, 5, 4, 3)
    places = [3, 2] if rank == 2 else [2, 1, 3]
    grid = torch.rand(2, *places, rank, generator=torch.Generator().manual_seed(0)) * 3 - 1.5
    options = mode, padding, align
    if rank == 3:
        check_call(aten.grid_sampler_3d.default, x, grid, *options)
    op = getattr(aten, f"grid_sampler_{rank}d_backward").default
    check_call(op, floats(2, 3, *places), x.contiguous(), grid, *options, [True, True])
    check_call(op, floats(2, 3, *places), x.contiguous(), grid, *options, [False, True])


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(3, 4), (9, 13), (1, 1)])
def test_antialiasing(size: tuple[int, int], kind: str, align: bool) -> None:
    op = getattr(aten, f"_upsample_{kind}2d_aa")
    backward = getattr(aten, f"_upsample_{kind}2d_aa_backward")
    check_call(op.default, floats(2, 3, 7, 11), size, align)
    check_call(backward.default, floats(2, 3, *size), size, [2, 3, 7, 11], align)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_used(family: Any) -> None:
    table = decompositions(native_operators())
    rules: dict[Any, Callable[..., Any]] = family.DECOMPOSITIONS
    assert all(table.get(op) is rule for op, rule in rules.items())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ranges_of_integers(dtype):
    """Their ends are rounded first, and steps are not rounded to float32."""
    for start, end in ((0, 7), (4.3, 50), (0, 7.9), (100, 3), (5, 5), (0, 120)):
        for steps in (0, 1, 2, 7, 49, 50, 101):
            wanted = torch.linspace(start, end, steps, dtype=dtype)
            assert torch.equal(counting.linspace(start, end, steps, dtype=dtype), wanted)
            ends = torch.tensor(start), torch.tensor(end)
            assert torch.equal(counting.linspace(*ends, steps, dtype=dtype), wanted)
