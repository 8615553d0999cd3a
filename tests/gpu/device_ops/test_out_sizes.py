"""``out=`` and sizes: outputs that are arguments, ranges, and memory that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device_checks import compare
from tests.providers import has_float64

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def _pair(device: str) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6, device=device), torch.zeros(4, 6, device=device)


READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda a, b: torch.cat([a, b], out=a),
    "cat, along rows": lambda a, b: torch.cat([a, b], 1, out=b),
    "vstack": lambda a, b: torch.vstack([a, b], out=a),
    "pointwise": lambda a, b: (lambda row: torch.add(row, b, out=row))(a[0]),
    "clamp": lambda a, b: (lambda row: torch.clamp(b, row, out=row))(a[0]),
}


@pytest.mark.parametrize("name", READ)
def test_an_argument_is_not_resized(name: str) -> None:
    """Computing again from what has been resized would not end."""
    compare(lambda device: READ[name](*_pair(device)))


def test_an_undefined_result_is_refused() -> None:
    a, b = _pair("webgpu")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.mm(a, b.t(), out=a)
    assert a.tolist() == [[1.0] * 6] * 4


RANGES: dict[str, Callable[[Tensor], Any]] = {
    "arange": lambda out: torch.arange(4, out=out),
    "arange, of floats": lambda out: torch.arange(1.0, 3.0, 0.5, out=out),
    "linspace": lambda out: torch.linspace(0, 3, 4, out=out),
    "logspace": lambda out: torch.logspace(0, 3, 4, base=2, out=out),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_fill_out_as_it_lies(name: str) -> None:
    def f(device: str) -> Any:
        memory = torch.full((2, 3), -1.0, device=device)
        small = torch.ones(0, dtype=torch.int64, device=device)
        same = RANGES[name](memory[:, 1:])
        return memory, same, RANGES[name](small)

    powers_on_host = name == "logspace" and not has_float64()  # those of whole numbers are float64
    compare(f, host=["aten.logspace.default"] if powers_on_host else ())


def test_a_range_of_another_number_warns() -> None:
    with pytest.warns(UserWarning, match="which does not match the computed number") as found:
        compare(lambda device: torch.arange(4, out=torch.ones(3, device=device)))
    assert len(found) == 2  # one on each device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_memory_of_no_whole_words_grows(dtype: torch.dtype) -> None:
    def f(device: str) -> Any:
        x = torch.ones(3, dtype=dtype, device=device)
        out = torch.zeros(1, dtype=dtype, device=device)
        return x.resize_(90)[:3], torch.cat([x[:3], x[:1]], out=out)

    compare(f)


def test_shared_memory_does_not_grow() -> None:
    """Its other tensors would not follow."""
    memory = torch.ones(4, device="webgpu")
    with pytest.raises(RuntimeError, match="while other tensors are views of it"):
        memory[1:].resize_(9)
    assert memory.tolist() == [1.0] * 4
    assert memory[1:].resize_(2).tolist() == [1.0] * 2


NUMBERS: dict[str, Callable[..., Any]] = {
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "zeta": torch.special.zeta,
    "chebyshev": torch.special.chebyshev_polynomial_t,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_comes_first(name: str) -> None:
    def f(device: str) -> Any:
        x = torch.tensor([1.0, 2.0], device=device)
        return NUMBERS[name](3.5, x, out=torch.empty(0, device=device))

    compare(f)


def test_layouts_of_the_host_within_larger_memory() -> None:
    """LAPACK gives ``out=`` another layout."""

    def f(device: str) -> Any:
        memory = torch.full((14,), 7.0, device=device)
        matrix = torch.tensor([[2.0, 1, 0], [1, 3, 1], [0, 1, 4]], device=device)
        return torch.linalg.qr(matrix, out=(memory[2:3], torch.empty(0, device=device))), memory

    compare(f, host=None)


def test_a_number_on_the_host_is_no_output() -> None:
    out = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.mul(torch.tensor(2.0, device="webgpu"), 3, out=out)
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.fft.fft(torch.ones(3, device="webgpu"), out=torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("name", ["_foreach_addcmul", "_foreach_addcdiv_"])
def test_numbers_of_lists_in_a_cpu_tensor(name: str) -> None:
    def f(device: str, scalars: Tensor) -> Any:
        lists = [[torch.full((3,), k + 1.0, device=device) for _ in range(2)] for k in range(3)]
        return getattr(torch, name)(*lists, scalars), lists[0]

    compare(lambda device: f(device, torch.tensor([2.0, 3.0])))
    compare(lambda device: f(device, torch.ones(3)))
