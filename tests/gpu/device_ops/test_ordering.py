"""Orders and order statistics: rows that a workgroup sorts, alone or together, and longer ones."""

from __future__ import annotations

import pytest
import torch

from tests.compilations import compile_function
from tests.device_checks import compare_eager_and_compiled
from tests.providers import device_in_use, require_float64
from tests.tint import tint
from torch_webgpu_compile import counters
from torch_webgpu_compile.bundle.targets import BROWSER
from torch_webgpu_compile.ir.sorting_nodes import TILES

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
SIZES = (30, 1200, 9000, 13_000)
"""In workgroups with other rows, alone, passing through their memory in turns, and by digits."""


def rows(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Three rows with ties and, of floats, with all special values."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-100, 101, (3, size), generator=generator)
    if not dtype.is_floating_point:
        return ((x << 40) + x if dtype is torch.int64 else x).to(dtype)
    x = x.double() / 8
    x[:, :5] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), -float("nan")])
    x[1:, size // 2] = torch.tensor([float("nan"), 1e-40])
    return x.to(dtype)


def orders(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    down = x.sort(dim=-1, descending=True, stable=True)
    return *x.sort(dim=-1, stable=True), *down, x.t().argsort(dim=0, stable=True)


def selected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest, at = x.topk(5, -1)
    few = x.topk(x.shape[1] // 3, -1, largest=False, sorted=False)[0].sort(-1)[0]
    middle = x.median(-1, keepdim=True)[1]
    statistics = x.kthvalue(2, -1)[0], x.nanmedian(-1)[0], x.median()
    return largest, x.gather(-1, at), few, x.gather(-1, middle), *statistics, x.topk(0, -1)[1]


@pytest.mark.rotates(15)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_orders(size: int, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        require_float64()
    x = rows(size, dtype)
    compare_eager_and_compiled(orders, x)
    if dtype is not torch.bool:
        compare_eager_and_compiled(selected, x)


def test_of_equal_elements_the_first_are_selected() -> None:
    x = torch.zeros(2, 20_000)
    x[1, 777::1000] = 1
    places = x.to("webgpu").topk(30, -1)[1].cpu()
    assert places[0].tolist() == list(range(30))
    assert places[1].tolist() == [*range(777, 20_000, 1000), *range(10)]


def test_positions_of_extremes_in_one_long_row() -> None:
    """Parts of it are looked through side by side; which of them are empty, a call decides."""
    for size in (200_001, 200_004):
        x = torch.zeros(1, size)
        for place in (size - 1, size // 2, 777):
            x[0, place] = 1
            assert x.to("webgpu").argmax(-1).item() == place
        x[0, [999, size - 1]] = float("nan")
        row = x.to("webgpu")
        assert row.argmin().item() == 999
        before = counters.dispatches
        row.argmin().cpu()
        assert counters.dispatches - before == 2


def test_the_first_alone_is_an_extreme() -> None:
    """A long row is read once for it, neither ordered nor selected from by digits."""
    x = torch.randn(2, 40_000)
    x[1, [70, 33_000]] = float("nan")
    for row in (x, x.half(), (x.nan_to_num() * 100).int()):
        for largest in (True, False):
            values, places = row.to("webgpu").topk(1, largest=largest)
            wanted = row.topk(1, largest=largest)
            torch.testing.assert_close(values.cpu(), wanted[0], equal_nan=True)
            torch.testing.assert_close(row.gather(-1, places.cpu()), wanted[0], equal_nan=True)
    row = x.to("webgpu")
    before = counters.dispatches
    row.topk(1)[1].cpu()
    assert counters.dispatches - before <= 4


def test_lengths_share_kernels() -> None:
    """Also lengths that are sorted in different ways."""
    lengths = (2, 3, 50, 51, 400, 999, 3000, 5000, 9000, 20_000)
    rows = [torch.zeros(3, n, dtype=torch.int16).to("webgpu") for n in lengths]
    before = counters.kernels_compiled
    for row in rows:
        row.argsort()
    assert counters.kernels_compiled - before <= 15  # of which those that move digits are five


def test_one_kernel_orders_rows_and_writes_what_is_wanted() -> None:
    most = max(size for size, tile in TILES.items() if tile.fits(device_in_use().target))
    for size in (2, 700, *(size for size in (4096, 9001) if size <= most)):
        x = torch.zeros(3, size).to("webgpu")
        x.sort(-1), x.topk(2)
        torch.webgpu.synchronize()  # type: ignore[attr-defined]
        before = counters.dispatches
        x.sort(-1), x.topk(2)
        torch.webgpu.synchronize()  # type: ignore[attr-defined]
        assert counters.dispatches - before == 2


def test_browsers_take_the_kernels() -> None:
    def sort_all(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *x.topk(50), *i.sort(), *x[:, :900].sort(), i.median()

    arguments = torch.zeros(2, 5000), torch.zeros(3, 5000, dtype=torch.int64)
    for kernel in compile_function(sort_all, *arguments, target=BROWSER).plan.kernels:
        assert len(kernel.bindings) <= BROWSER.max_storage_buffers
        assert kernel.workgroup_nbytes <= BROWSER.max_workgroup_nbytes
        assert not tint().error(kernel.wgsl)
