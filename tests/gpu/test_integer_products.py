"""Products of integers: exact, as kernels of tiles, with the sums in 32 bits."""

from __future__ import annotations

import pytest
import torch

from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(6)

out_dtype = torch.ops.higher_order.out_dtype
aten = torch.ops.aten
# Sizes that tiles divide and do not, one row, one column, and nothing.
SIZES = [(20, 64, 48), (17, 23, 9), (1, 24, 8), (33, 8, 1), (130, 257, 66), (0, 3, 2), (2, 0, 3)]


def integers(*sizes: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, sizes, dtype=dtype, generator=generator)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return out_dtype(aten.mm.default, torch.int32, a, b)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_of_int8_in_int32(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = integers(m, k), integers(k, n)
    expected = a.int() @ b.int()
    before = dict(counters.fallbacks)
    torch._dynamo.reset()
    compiled = torch.compile(torch._int_mm, backend="webgpu", fullgraph=True)
    assert torch.equal(compiled(a, b), expected)
    a, b = a.to("webgpu"), b.to("webgpu")
    assert torch.equal(torch._int_mm(a, b).cpu(), expected)
    wide = torch.compile(product, backend="webgpu", fullgraph=True)
    assert torch.equal(wide(a, b).cpu(), expected)
    assert dict(counters.fallbacks) == before


def test_unsigned_rows() -> None:
    a, b = integers(20, 40, dtype=torch.uint8), integers(40, 24)
    try:
        expected = torch._int_mm(a, b)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch takes int8 only: {error}")
    assert torch.equal(expected, a.int() @ b.int())
    assert torch.equal(torch._int_mm(a.to("webgpu"), b.to("webgpu")).cpu(), expected)
    compiled = torch.compile(torch._int_mm, backend="webgpu", fullgraph=True)
    assert torch.equal(compiled(a, b), expected)


def test_strides_and_symbolic_sizes() -> None:
    compiled = torch.compile(torch._int_mm, backend="webgpu", fullgraph=True, dynamic=True)
    before = dict(counters.fallbacks)
    for m, k, n in ((20, 31, 18), (37, 64, 50)):
        a, b = integers(k, m).t(), integers(n, 2 * k)[:, ::2].t()
        expected = a.int() @ b.int()
        assert torch.equal(compiled(a, b), expected)
        assert torch.equal(torch._int_mm(a.to("webgpu"), b.to("webgpu")).cpu(), expected)
    assert dict(counters.fallbacks) == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_sums_wrap(dtype: torch.dtype) -> None:
    a, b = integers(19, 70, dtype=dtype), integers(70, 21, dtype=dtype)
    on_device = a.to("webgpu"), b.to("webgpu")
    assert torch.equal((on_device[0] @ on_device[1]).cpu(), a @ b)
    batches = [x.expand(3, *x.shape) for x in (a, b)]
    assert torch.equal(torch.bmm(*(x.to("webgpu") for x in batches)).cpu(), torch.bmm(*batches))


@pytest.mark.parametrize(
    ("op", "dtype", "arguments"),
    [
        (aten.mul.Tensor, torch.int32, (integers(5, 7), integers(7))),
        (aten.mul.Scalar, torch.int32, (integers(5, 7), 300)),
        (aten.div.Tensor, torch.float32, (integers(5, 7), integers(5, 7).clamp(min=1))),
        (aten.mm.default, torch.int32, (integers(5, 7, dtype=torch.int16), integers(7, 3))),
        (aten.mm.default, torch.float32, (integers(5, 7), integers(7, 3))),
    ],
    ids=str,
)
def test_operators_in_a_wide_dtype(op, dtype, arguments) -> None:
    def function(*tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        filled = [next(given) if isinstance(a, torch.Tensor) else a for a in arguments]
        return out_dtype(op, dtype, *filled)

    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    expected = out_dtype(op, dtype, *arguments)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), expected)
    on_device = compiled(*(tensor.to("webgpu") for tensor in tensors))
    torch.testing.assert_close(on_device.cpu(), expected)
