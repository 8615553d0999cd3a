"""Gathers, scatters, scans and sorting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import TARGET, capture, check, lower_checked, run_graph
from torch_webgpu_compile.ir.sorting_nodes import TILES, DigitScatter, SortTiling
from torch_webgpu_compile.lowering import radix

F = torch.nn.functional
INDEX = torch.tensor([[0, 2, -1], [1, -3, 0]])
GATHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda x: x[INDEX],
    "index middle": lambda x: x[:, INDEX],
    "index two": lambda x: x[INDEX, :, INDEX],
    "index with a gap": lambda x: x[None][:, INDEX % 2, :, INDEX],
    "index adjacent": lambda x: x[:, INDEX, INDEX],
    "index broadcast": lambda x: x[INDEX[:, :1], INDEX],
    "index of arange": lambda x: x[torch.arange(2)] + 0,
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 1, 1])),
    "gather": lambda x: x.gather(1, torch.tensor([[[0, 1], [2, 2]]])),
    "take": lambda x: x.take(torch.tensor([5, 0, -1])),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 2], [1, 1]]), x[0]),
    "gather of a view": lambda x: x.permute(2, 0, 1).reshape(4, -1)[:, INDEX[0]],
    "one_hot": lambda x: F.one_hot(torch.tensor([0, 2, 1]), 4),
    "pixel shuffle": lambda x: F.pixel_unshuffle(x[:, :2], 2),
    "grid_sample": lambda x: F.grid_sample(
        x[None], torch.tanh(x.permute(1, 2, 0)[None]), align_corners=False
    ),
}
MASK = torch.arange(24).view(2, 3, 4) % 3 == 0
SCATTERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_put": lambda x: x.index_put((torch.tensor([0, -1]),), x[:1] * 2),
    "index_put accumulate": lambda x: x.index_put((torch.tensor([1, 1]),), x[:1], True),
    "index_put two": lambda x: x.index_put((INDEX, INDEX), torch.tensor(3.0)),
    "index_put mask": lambda x: x.index_put((x > 0,), torch.tensor(7.0)),
    "index_put mask of rows": lambda x: x.index_put((x[:, 0, 0] > 0,), torch.tensor(7.0)),
    "index_put values by mask": lambda x: x.index_put((MASK,), torch.arange(8.0)),
    "index_put rows by mask": lambda x: x.index_put(
        (torch.tensor([True, False]),), x[:1] * torch.tensor([2.0]), True
    ),
    "index_put later mask": lambda x: _assign_columns(x),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.arange(100.0)),
    "scatter": lambda x: x.scatter(1, torch.tensor([[[0, 1], [2, 0]]]), x[:, :2, :2] * 5),
    "scatter value": lambda x: x.scatter(2, torch.tensor([[[3], [1], [0]]]), 9.0),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(2, 2, 3, dtype=torch.long), x),
    "scatter_reduce": lambda x: x.scatter_reduce(
        1, torch.ones(2, 2, 3, dtype=torch.long), x, "amax", include_self=False
    ),
    "scatter mean": lambda x: x.scatter_reduce(0, torch.ones(2, 2, 3, dtype=torch.long), x, "mean"),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 0, 2]), x, alpha=2),
    "index_copy": lambda x: x.index_copy(2, torch.tensor([1, 3]), x[..., :2] * 3),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2]), 5.0),
    "index_reduce": lambda x: x.index_reduce(1, torch.tensor([0, 0, 2]), x, "prod"),
    "put": lambda x: x.put(torch.tensor([1, -1]), torch.tensor([5.0, 6.0])),
    "setitem": lambda x: _assign(x),
}
SCANS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum dim 0": lambda x: x.cumsum(0),
    "cumprod": lambda x: (x * 0.3 + 1).cumprod(-1),
    "cummax": lambda x: x.cummax(-1),
    "cummin values": lambda x: x.cummin(0)[0],
    "sort": lambda x: x.sort(-1),
    "sort descending": lambda x: x.sort(0, descending=True),
    "argsort": lambda x: x.argsort(dim=-1, stable=True),
    "topk": lambda x: x.topk(2, -1),
    "topk smallest": lambda x: x.topk(2, 0, largest=False)[0],
    "kthvalue": lambda x: x.kthvalue(2, -1)[0],
    "median": lambda x: x.median(-1)[0],
    "median of all": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(-1)[0],
    "quantile": lambda x: x.quantile(0.3, -1),
    "searchsorted": lambda x: torch.searchsorted(x.sort(-1)[0], x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), right=True),
}


def sample() -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def _assign_columns(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, torch.tensor([True, False, True])] = torch.tensor([[1.0], [2.0]])
    return y


def _assign(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[torch.tensor([1]), :, torch.tensor([2])] = 4.0
    y[y < -1] = 0.0
    return y


@pytest.mark.parametrize("name", GATHERS)
def test_gathers(name: str) -> None:
    x = torch.randn(3, 3, 4) if "index" in name else sample()
    x = torch.randn(3, 3, 3) if "two" in name or "adjacent" in name else x
    check(GATHERS[name], x.permute(0, 1, 2), atol=1e-5, rtol=1e-5)
    check(GATHERS[name], torch.cat([x, x])[::2].contiguous() * 2, atol=1e-5, rtol=1e-5)


def test_an_index_that_is_known_is_a_view() -> None:
    graph = lower_checked(capture(lambda x: x[torch.arange(1, 3)] * 2, sample().repeat(2, 1, 1)))
    assert len(graph.nodes) == 1


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatters(name: str, dtype: torch.dtype) -> None:
    if name == "index_put two":
        x = torch.randn(3, 3, 4)
    elif "scatter_add" in name or "scatter_reduce" in name or "scatter mean" in name:
        x = sample()[..., :3].contiguous()
    else:
        x = sample()
    if dtype is torch.bfloat16 and name in ("index_put mask", "setitem", "masked_scatter"):
        pytest.skip("the values of the function are float32")

    def fn(x: torch.Tensor) -> Any:
        return SCATTERS[name](x)

    if dtype is torch.float32 or name in ("index_put accumulate", "scatter_add", "scatter mean"):
        check(fn, x.to(dtype))


@pytest.mark.parametrize("name", SCANS)
def test_scans_and_sorts(name: str) -> None:
    # From PyTorch 2.14 on the positions of a quantile are float64.
    target = replace(TARGET, features=TARGET.features | {"shader-f64"})
    check(SCANS[name], sample(), target=target)
    check(SCANS[name], torch.randn(5, 200), target=target, atol=1e-4, rtol=1e-4)


def test_scan_of_integers_and_long_rows() -> None:
    check(lambda x: x.cumsum(0), torch.arange(5000))
    check(lambda x: x.cumsum(-1), torch.ones(2, 130, dtype=torch.bool))
    check(lambda x: x.cumsum(0), torch.randn(130), dynamic=True, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_extremes_of_many_updates(reduce: str, dtype: torch.dtype) -> None:
    values = [-2.5, 1e-3, 3.0]
    if dtype.is_floating_point:
        values += [float("nan"), float("-inf"), float("inf"), -0.0]
    x = torch.tensor(values).to(dtype)

    def fn(x: torch.Tensor, at: torch.Tensor) -> Any:
        start = torch.ones(len(x) + 1, dtype=x.dtype)  # the last one gets nothing
        included = start.scatter_reduce(0, at, x[at], reduce)
        alone = start.scatter_reduce(0, at, x[at], reduce, include_self=False)
        return included, alone, start[:, None].index_reduce(0, at, x[at][:, None], reduce)

    at = torch.arange(3 * len(x)) % len(x)
    graph = check(fn, x, at, dynamic=True)
    sorts = any(isinstance(node, DigitScatter) for node in graph.nodes)
    assert sorts is (dtype is torch.int32)
    if dtype.is_floating_point:
        _, alone, _ = run_graph(graph, [x, at])
        assert alone[6].signbit()  # that of -0.0


def test_sort_of_special_values() -> None:
    nan = float("nan")
    x = torch.tensor([1.0, nan, float("-inf"), -nan, 1.0, float("inf"), -0.0, 0.0])
    check(lambda x: (x.sort(), x.sort(descending=True), x.median(), x.nanmedian()), x)
    check(lambda x: x.sort(stable=True), torch.tensor([3, 1, 3, 1, 2], dtype=torch.int8))


def test_embedding_gradient() -> None:
    def gradient(weight: torch.Tensor, indices: torch.Tensor) -> Any:
        out = F.embedding(indices, weight, padding_idx=1)
        return torch.autograd.grad(out, weight, out.cos())

    check(gradient, torch.randn(5, 3).requires_grad_(), torch.tensor([[0, 1, 4], [4, 4, 2]]))
    check(lambda w: F.embedding(torch.empty(0, dtype=torch.long), w), torch.randn(5, 3))


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_rows_of_scalars_and_of_nothing() -> None:
    x, one, none = torch.tensor(2.0), torch.tensor([0]), torch.tensor([], dtype=torch.long)
    check(lambda x: x.index_add(0, one, x * 3), x)
    check(lambda x: x.index_copy(0, one[0], x * 3), x)
    check(lambda x: x.index_reduce(0, one[0], x * 3, "amax"), x)
    rows = sample()
    check(lambda x: x.index_add(1, none, x[:, :0]), rows)
    check(lambda x: x.index_reduce(1, none, x[:, :0], "mean"), rows)
    check(lambda x: x.take(none), rows)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in tuple(TILES):
        monkeypatch.delitem(TILES, size)
    monkeypatch.setitem(TILES, 4, SortTiling(4, 256, 4))
    monkeypatch.setattr(radix, "_LEAST_PART", 4)


ORDERED = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.int8, torch.float64)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("size", [5, 8, 9, 31])
def test_long_rows(size: int, largest: bool) -> None:
    """They are sorted digit by digit, and what is wanted of them is selected."""
    target = replace(TARGET, features=TARGET.features | {"shader-f64"})
    x = torch.randint(-4, 5, (2, size), generator=torch.Generator().manual_seed(size)).double()
    x[0, size // 2], x[1, 0], x[1, 1] = float("nan"), -0.0, float("-inf")
    wide = x.nan_to_num(0, 0, 0).long() << 31

    def orders(x: torch.Tensor) -> Any:
        return x.sort(dim=-1, descending=largest, stable=True)

    def selected(x: torch.Tensor) -> Any:
        chosen, places = x.topk(3, -1, largest)
        last = x.t().topk(2, 0, not largest)[0]
        middle = x.kthvalue(size // 3, -1)[0], x.median(-1, True)[0], x.nanmedian(-1)[0]
        return chosen, x.gather(-1, places), last, x.gather(1, x.median(1, True)[1]), *middle

    for dtype in ORDERED:
        given = wide if dtype is torch.int64 else x if dtype.is_floating_point else wide >> 31
        check(orders, given.to(dtype), target=target)
        if dtype is not torch.bool:
            check(selected, given.to(dtype), target=target)


SEARCHES: dict[str, Callable[..., Any]] = {
    "searchsorted": lambda edges, x: torch.searchsorted(edges, x),
    "right": lambda edges, x: torch.searchsorted(edges, x, right=True),
    "int32": lambda edges, x: torch.searchsorted(edges, x, out_int32=True),
    "sorter": lambda edges, x: torch.searchsorted(edges.flip(0), x, sorter=edges.argsort().flip(0)),
    "bucketize": lambda edges, x: torch.bucketize(x, edges),
    "number": lambda edges, x: torch.searchsorted(edges, 0.3) + 0,
    "rows": lambda edges, x: torch.searchsorted(edges.repeat(3, 1), x),
    "nothing": lambda edges, x: torch.searchsorted(edges, x[:0]),
    "in nothing": lambda edges, x: torch.searchsorted(edges[:0], x),
}


@pytest.mark.parametrize("count", [1, 7, 64, 65, 300])  # compared in full, or searched
@pytest.mark.parametrize("name", SEARCHES)
def test_searches(name: str, count: int) -> None:
    edges = torch.linspace(-1, 1, count)
    x = torch.cat([edges[:: count // 3 + 1], torch.tensor([-2.0, 0.01, 5.0, float("nan")])])
    check(SEARCHES[name], edges, x.expand(3, -1).contiguous())


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_mode(dtype: torch.dtype, dim: int, keepdim: bool) -> None:
    x = torch.randint(0, 4, (3, 12, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    check(lambda x: x.mode(dim, keepdim), x)
    check(lambda x: x.mode(), torch.tensor(2).to(dtype))
