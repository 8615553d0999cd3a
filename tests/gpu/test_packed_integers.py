"""Products of one row with packed weights, computed by integers: as good as in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_webgpu_compile import counters
from torch_webgpu_compile.torch_ops import gguf, int4

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]

Product = Callable[[Tensor], Tensor]


def of_int4(rows: int, columns: int, group: int = 32) -> tuple[Product, Tensor]:
    packed = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
    scale, zero = torch.rand(columns // group, rows), torch.randn(columns // group, rows)
    parts = packed, scale.bfloat16(), zero.bfloat16()
    return lambda x: torch.ops.webgpu.int4_linear(x, *parts), int4.dequantized(*parts)


def of_int4_in_small_groups(rows: int, columns: int) -> tuple[Product, Tensor]:
    return of_int4(rows, columns, 16)


def of_tiles(rows: int, columns: int) -> tuple[Product, Tensor]:
    """Of levels from which 8 is taken."""
    words = torch.randint(-(2**31), 2**31 - 1, (rows // 8, columns // 32, 32, 1)).int()
    both = torch.rand(columns // 32, rows, 2).bfloat16()
    levels = int4.unpacked(words.reshape(rows, -1)) - 8
    weight = int4.affine(levels, 32, *both.unbind(2))
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, words, 32, both), weight


def of_bytes(rows: int, columns: int) -> tuple[Product, Tensor]:
    packed, scale = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows)
    product = torch.ops.aten._weight_int8pack_mm
    return lambda x: product(x, packed, scale), packed.float() * scale[:, None]


def of_unsigned_bytes(rows: int, columns: int) -> tuple[Product, Tensor]:
    packed, scale = torch.randint(256, (rows, columns), dtype=torch.uint8), torch.rand(rows, 1)
    packed[0] = 255
    weight = (packed.float() - 100) * scale
    return lambda x: F.linear(x.float(), (packed.float() - 100) * scale).to(x.dtype), weight


def of_gguf(name: str) -> Callable[[int, int], tuple[Product, Tensor]]:
    form = gguf.FORMATS[name]

    def make(rows: int, columns: int) -> tuple[Product, Tensor]:
        nbytes = columns // form.block * form.nbytes
        blocks = torch.randint(256, (rows, nbytes), dtype=torch.uint8)
        packed = gguf.pack(blocks, form.number)
        *_, halves, rest = form.words(columns)
        start = packed.shape[1] - halves - rest  # random bits would be halves of any magnitude
        packed[:, start : start + halves] = torch.rand(rows, 2 * halves).half().view(torch.int32)
        weight = gguf.dequantized(packed, form.number, columns)
        return lambda x: torch.ops.webgpu.gguf_linear(x, packed, form.number), weight

    return make


GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FORMATS: dict[str, Callable[[int, int], tuple[Product, Tensor]]] = {
    "int4": of_int4,
    "int4 in groups of 16": of_int4_in_small_groups,
    "int4 in tiles": of_tiles,
    "int8": of_bytes,
    "uint8": of_unsigned_bytes,
    **{name: of_gguf(name) for name in GGUF},
}


def computed(function: Product, x: Tensor) -> Tensor:
    compiled = torch.compile(function, backend="webgpu", dynamic=False)
    with torch.no_grad():
        compiled(x)
        before = counters.dispatches
        result = compiled(x)
    assert counters.dispatches - before == 1
    return result


def check(function: Product, weight: Tensor, x: Tensor) -> None:
    """Of a result in float32, the error is a few units of the last digit of what is added up.

    The last digit of an element is one of the largest among the 32 that it is a part of.
    """
    got, wanted = computed(function, x).double(), x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    largest = x.double().abs().view(-1, 32).amax(1).repeat_interleave(32)
    rounded = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[x.dtype]
    last_digits = 2.0**-23 * (largest @ weight.double().abs().T)
    allowed = 3e-7 * size + last_digits + 1.01 * rounded * wanted.abs() + 1e-37
    assert ((got - wanted).abs() <= allowed).all(), ((got - wanted).abs() / size).max()


# Rows that are a multiple of none; of several to an invocation; columns of one block, of several,
# of blocks that are not full, and of fewer chunks than lanes.
SHAPES = [(300, 2048), (3205, 1024), (256, 8192), (260, 8448), (256, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["int4", "int8", "Q6_K"])
def test_shapes(name: str, shape: tuple[int, int]) -> None:
    function, weight = FORMATS[name](*shape)
    check(function, weight, torch.randn(1, shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, dtype: torch.dtype) -> None:
    function, weight = FORMATS[name](264, 1024)
    check(function, weight, torch.randn(1, 1024).to(dtype))


@pytest.mark.parametrize("columns", [672, 4128])
@pytest.mark.parametrize("name", ["int4", "int8", "Q4_0"])
def test_odd_numbers_of_chunks(name: str, columns: int) -> None:
    function, weight = FORMATS[name](261, columns)
    check(function, weight, torch.randn(1, columns))


def test_float16() -> None:
    """The weight of bytes is exact there; others are rounded, and multiplied as floats."""
    function, weight = of_bytes(256, 1024)
    check(function, weight, torch.randn(1, 1024).half() / 64)


@pytest.mark.parametrize("seed", range(8))
def test_magnitudes(seed: int) -> None:
    """Elements of all magnitudes side by side; among them one that is as large as all others."""
    torch.manual_seed(seed)
    name = list(FORMATS)[seed]
    columns = 256 * (1 + seed % 5)
    function, weight = FORMATS[name](256 + 8 * seed, columns)
    x = torch.randn(1, columns) * torch.exp2(torch.randint(-30, 6, (1, columns)).float())
    check(function, weight, x)
    x = torch.randn(1, columns)
    x[0, 37 * seed] *= 1e4
    check(function, weight, x)
    check(function, weight, x.sign() * (1 + torch.rand(1, columns) * 1e-3) * 1.9999)


@pytest.mark.parametrize("scale", [1e-40, 1e-36, 1e-20, 1e30])
@pytest.mark.parametrize("name", ["int4", "int8", "Q6_K"])
def test_small_and_large(name: str, scale: float) -> None:
    function, weight = FORMATS[name](256, 512)
    x = torch.randn(1, 512).clamp(-3, 3) * scale
    x[0, 64:96] = 0
    if scale < 1e-30:  # subnormal numbers may be 0
        got, wanted = computed(function, x).double(), x.double() @ weight.double().T
        assert ((got - wanted).abs() <= 2.0**-126 * weight.double().abs().sum(1)).all()
    else:
        check(function, weight, x)


@pytest.mark.parametrize("name", ["int4", "int8", "Q4_K", "Q6_K"])
def test_zeros_and_what_is_not_finite(name: str) -> None:
    function, weight = FORMATS[name](256, 1024)
    compiled = torch.compile(function, backend="webgpu", dynamic=False)
    x = torch.randn(1, 1024)
    assert not compiled(torch.zeros_like(x)).any()
    for value in (torch.inf, -torch.inf):
        x[0, 100] = value
        wanted = x @ weight.T
        known = wanted.isinf() & (weight[:, 100].abs() > 1e-3 * weight.abs().max())
        assert known.sum() > 200
        assert torch.equal(compiled(x)[known], wanted[known])
    x[0, 700] = torch.nan
    assert compiled(x).isnan().all()
    x[0, 100] = 1
    assert compiled(x).isnan().all()


@pytest.mark.parametrize("name", ["int4", "int8", "Q4_K"])
def test_bias_and_residual(name: str) -> None:
    function, weight = FORMATS[name](256, 512)
    bias, residual = torch.randn(256), torch.randn(1, 256)
    x = torch.randn(1, 512)
    got = computed(lambda x: F.silu(function(x) + bias) + residual, x)
    wanted = F.silu(x.double() @ weight.double().T + bias) + residual
    assert ((got - wanted).abs() <= 1e-5 * (1 + wanted.abs())).all()


@pytest.mark.parametrize(("rows", "columns"), [(256, 8192), (3216, 1024)])
@pytest.mark.parametrize("name", ["int4", "int8", "Q4_K", "Q6_K"])
def test_gate_and_up(name: str, rows: int, columns: int) -> None:
    """Both products of one norm, whose statistic is a float beside them, in one kernel."""
    gate, of_gate = FORMATS[name](rows, columns)
    up, of_up = FORMATS[name](rows, columns)
    norm = torch.rand(columns)

    def normed(x: Tensor) -> Tensor:
        return norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def function(x: Tensor) -> Tensor:
        return torch.tanh(gate(normed(x)) / columns) * up(normed(x))

    x = torch.randn(1, columns)
    h = normed(x.double())
    wanted = torch.tanh(h @ of_gate.double().T / columns) * (h @ of_up.double().T)
    size = h.abs() @ of_up.double().abs().T
    assert ((computed(function, x) - wanted).abs() <= 1e-5 * size).all()


def test_side_by_side() -> None:
    """Products of one row with weights of several formats, of which a joint kernel may be made."""
    made = [
        FORMATS[name](rows, 1024) for name, rows in (("int4", 512), ("int8", 256), ("Q6_K", 256))
    ]
    made.append(of_int4(256, 1024))
    x = torch.randn(1, 1024)
    compiled = torch.compile(
        lambda x: torch.cat([function(x) for function, _ in made], 1), backend="webgpu"
    )
    got = compiled(x)
    wanted = torch.cat([x.double() @ weight.double().T for _, weight in made], 1)
    size = torch.cat([x.double().abs() @ weight.double().abs().T for _, weight in made], 1)
    assert ((got - wanted).abs() <= 3e-7 * size).all()
