"""Counting and repeating: results whose sizes depend on data, made on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare
from tests.providers import has_float64, require_float64

pytestmark = pytest.mark.rotates(16)

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]
NAN = float("nan")


def numbers(device, dtype=torch.int64, sizes=(5, 40)):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 9, sizes, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unique(dtype):
    if dtype is torch.float64:
        require_float64()

    def f(device):
        x = numbers(device, dtype)
        return (
            x.unique(),
            x.unique(return_inverse=True, return_counts=True),
            torch.ops.aten._unique(x, True, True),
            x.unique_consecutive(return_inverse=True, return_counts=True),
            x.sort().values.unique_consecutive(return_counts=True),
            x[0].unique_consecutive(dim=0),
            x[:0].unique(return_inverse=True, return_counts=True),
        )

    compare(f)


def test_unique_of_nan():
    compare(lambda device: torch.tensor([1.0, NAN, 1.0, NAN], device=device).unique())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "dim"), [((40, 2), 0), ((3, 50), -1), ((30, 5), 0), ((6, 9, 3), 1)]
)
def test_unique_rows(dtype, sizes, dim):
    if dtype is torch.float64:
        require_float64()

    def f(device):
        x = (numbers(device, sizes=sizes) % 3).to(dtype)
        return (
            x.unique(dim=dim, return_inverse=True, return_counts=True),
            x.unique_consecutive(dim=dim, return_inverse=True, return_counts=True),
            torch.ops.aten.unique_dim_consecutive(x, dim, True, True),
            x.transpose(0, 1).unique(dim=dim),
            x.flatten().unique(dim=0, return_counts=True),
            x[:0].unique(dim=0, return_inverse=True, return_counts=True),
            x[:0].unique_consecutive(dim=0, return_counts=True),
        )

    compare(f)


def test_unique_rows_with_nan():
    """Each is another one; they are in order where PyTorch's comparison of NaN has one."""

    def f(device):
        x = torch.tensor([[1.0, NAN], [0.0, 2.0], [1.0, NAN], [-0.0, 2.0]], device=device)
        return x.unique(dim=0, return_inverse=True, return_counts=True)

    compare(f)


UNIQUE_ERRORS = {
    "no rows to choose from": lambda x: x[:, :0].unique(dim=0),
    "neither rows nor columns": lambda x: x[:0, :0].unique(dim=0),
    "no such dimension": lambda x: torch.ops.aten.unique_dim(x, 5),
    "no dimension": lambda x: torch.ops.aten.unique_consecutive(x[0, 0], True, True, 0),
    "no order": lambda x: x.to(torch.complex64).unique(dim=0),
}


@pytest.mark.parametrize("name", UNIQUE_ERRORS)
def test_errors_of_unique(name):
    compare(lambda device: UNIQUE_ERRORS[name](torch.ones(3, 2, device=device)), host=None)


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (1, 1), (3, 6), (5, 3)])
def test_positions_of_triangles(rows, columns):
    def f(device):
        return [
            function(rows, columns, offset, device=device, dtype=dtype)
            for function in (torch.tril_indices, torch.triu_indices)
            for offset in (-7, -2, 0, 1, 8)
            for dtype in (torch.int32, torch.int64)
        ]

    compare(f)


def test_extremes_of_nothing_for_no_results():
    compare(lambda device: torch.aminmax(torch.ones(5, 0, 3, device=device), dim=0))


def test_bincount():
    def f(device):
        x = numbers(device, sizes=(1000,))
        weights = torch.rand(1000, generator=torch.Generator().manual_seed(0)).to(device)
        return (
            x.bincount(),
            x.to(torch.uint8).bincount(minlength=20),
            x.bincount(weights),
            x.bincount(weights.double()),
            x.bincount(x),
            x[:0].bincount(),
            x[:0].bincount(minlength=3),
        )

    host = {"aten._to_copy.default", "aten.zeros.default", "aten.index_add_.default"}
    compare(f, host=() if has_float64() else host)  # with weights in float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_histc_rounds_as_the_cpu(dtype):
    """Single numbers lie on the edge between the fifth and the sixth of ten bins."""
    single = torch.linspace(-4, 4, 60).to(dtype)
    many = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)

    def f(device):
        return (
            torch.stack([torch.histc(x, 10) for x in single.to(device)]),
            torch.histc(many.to(device), 10),
            torch.histc(many.to(device), 7, -2.3, 1.9),
        )

    compare(f)


def test_repeat_interleave():
    def f(device):
        repeats = torch.tensor([2, 0, 3, 1], device=device)
        rows = torch.arange(12.0, device=device).view(4, 3)
        return (
            repeats.repeat_interleave(),
            torch.repeat_interleave(repeats.int()),
            torch.repeat_interleave(repeats * 0),
            rows.repeat_interleave(repeats, 0),
            rows.repeat_interleave(repeats, 0, output_size=6),
            rows.repeat_interleave(2, 1),
        )

    compare(f)


ERRORS = {
    "dtype of out=": lambda device: torch.histogram(
        torch.ones(3, device=device),
        4,
        out=(torch.ones(4, device=device).long(), torch.ones(5, device=device)),
    ),
    "three dimensions": lambda device: torch.multinomial(torch.ones(2, 3, 4, device=device), 1),
    "no samples": lambda device: torch.multinomial(torch.ones(3, device=device), 0),
    "negative": lambda device: torch.bincount(torch.tensor([1, -1], device=device)),
    "two dimensions": lambda device: torch.bincount(torch.ones(3, 2, device=device).long()),
    "negative repeats": lambda device: torch.repeat_interleave(
        torch.tensor([1, -1], device=device)
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    compare(ERRORS[name], host=None)
