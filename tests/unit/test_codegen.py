"""Kernel text: completeness of op tables, vector widths, windows, folded grids, constants."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.codegen.kernels.builder import fold_grid
from torch_webgpu_compile.codegen.wgsl.op_table import op_row
from torch_webgpu_compile.codegen.wgsl.storage import Bindings
from torch_webgpu_compile.dtypes import DType, Kind
from torch_webgpu_compile.errors import AdapterError
from torch_webgpu_compile.ir import numeric
from torch_webgpu_compile.ir.buffers import Buffer, BufferOrigin
from torch_webgpu_compile.ir.scalar import OPS, POLYNOMIALS
from torch_webgpu_compile.lowering import special  # noqa: F401 - defines ops
from torch_webgpu_compile.symbolic.sizes import ZERO, as_expr, evaluate, symbol

randn = torch.randn

_OF_FLOATS = [
    "div",
    "atan2",
    "copysign",
    "nextafter",
    "reciprocal",
    "sqrt",
    "rsqrt",
    "exp",
    "fast_exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "sigmoid",
    "isnan",
    "isinf",
    "zeta",
    "igamma",
    "igammac",
    *POLYNOMIALS.split(),
]
_OF_BITS = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"]
_OF_NUMBERS = [
    "floor_divide",
    "trunc_divide",
    "remainder",
    "fmod",
    "pow",
    "neg",
    "abs",
    "sign",
    "square",
    "floor",
    "ceil",
    "trunc",
    "round",
]

# Combinations without a WGSL row, and why none is needed.
UNSUPPORTED: dict[tuple[str, Kind], str] = {
    **{
        (name, kind): "PyTorch converts to a float first"
        for name in _OF_FLOATS
        for kind in (Kind.SIGNED, Kind.UNSIGNED, Kind.BOOL)
    },
    **{(name, Kind.FLOAT): "PyTorch has no bits of floats" for name in _OF_BITS},
    **{(name, Kind.BOOL): "PyTorch promotes bool to an integer, or raises" for name in _OF_NUMBERS},
    **{(name, Kind.BOOL): "PyTorch raises" for name in ("shift_left", "shift_right", "gcd")},
    ("gcd", Kind.FLOAT): "PyTorch raises",
    **{
        (name, kind): "hardening is of floats"
        for name in ("opaque", "exact_div", "wide_div")
        for kind in (Kind.SIGNED, Kind.UNSIGNED, Kind.BOOL)
    },
}
_ELSEWHERE = {"cast", "bitcast"}  # rendered by `Renderer`, evaluated by `numeric.convert`
_SAMPLES = {
    Kind.FLOAT: dtypes.float32,
    Kind.SIGNED: dtypes.int64,
    Kind.UNSIGNED: dtypes.uint8,
    Kind.BOOL: dtypes.bool_,
}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", sorted(set(OPS) - _ELSEWHERE))
def test_every_scalar_op_has_wgsl_or_a_reason(name, kind):
    row = op_row(name, _SAMPLES[kind])
    if row is None:
        assert (name, kind) in UNSUPPORTED
    elif (name, kind) in UNSUPPORTED:
        pytest.fail(f"{name} of {kind.value} has a row: remove it from UNSUPPORTED")


@pytest.mark.parametrize("name", sorted(set(OPS) - _ELSEWHERE))
def test_integers_in_words_have_the_operations_of_others(name):
    rows = [op_row(name, dtype) for dtype in (dtypes.int64, dtypes.int64_in_words)]
    assert rows.count(None) in (0, 2)


@pytest.mark.parametrize("name", sorted(set(OPS) - _ELSEWHERE))
def test_every_scalar_op_is_interpreted(name):
    assert name in numeric._OPS


def test_the_interpreter_knows_no_other_ops():
    assert set(numeric._OPS) <= set(OPS)


def kernels(function, *arguments, **options):
    return compile_function(function, *arguments, **options).plan.kernels


def softmax(x):
    return F.softmax(x, -1)


def attention(x):
    return F.scaled_dot_product_attention(x, x, x)


def wgsl(function, *arguments, **options):
    (kernel,) = kernels(function, *arguments, **options)
    return kernel.wgsl


# ---- vector widths

VECTORS = [
    dtypes.float32,
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.int32,
    dtypes.uint8,
    dtypes.bool_,
]


def tensor(shape, dtype: DType):
    return torch.zeros(shape, dtype=getattr(torch, dtype.name))


@pytest.mark.parametrize("dtype", VECTORS, ids=repr)
@pytest.mark.parametrize("shape", [(64,), (63,), (5, 8)])
def test_contiguous_elements_move_in_fours(shape, dtype):
    text = wgsl(lambda x: torch.where(x == 0, x, x), tensor(shape, dtype))
    assert "load4_" in text
    assert "store4_" in text


def test_wide_integers_move_one_by_one():
    text = wgsl(lambda x: x + 1, tensor((63,), dtypes.int64))
    assert "load4_" not in text
    assert "store4_" not in text


def test_a_transposed_operand_is_loaded_one_by_one():
    text = wgsl(lambda x, y: x + y.t(), randn(8, 12), randn(12, 8))
    assert "load4_" in text
    assert re.search(r"load_x\d", text)
    assert "store4_" in text


def test_a_slice_off_the_alignment_is_loaded_one_by_one():
    assert "load4_" not in wgsl(lambda x: x[1:65] * 2, randn(80))
    assert "load4_" in wgsl(lambda x: x[4:68] * 2, randn(80))


@pytest.mark.parametrize("dtype", [dtypes.bool_, dtypes.uint8, dtypes.bfloat16], ids=repr)
def test_packed_outputs_are_stored_in_whole_words(dtype):
    text = wgsl(lambda x: x.t().clone(memory_format=torch.contiguous_format), tensor((7, 9), dtype))
    assert "atomic" not in text
    assert "store4_" in text


def test_wide_outputs_next_to_packed_ones_stay_in_bounds():
    def function(x, y):
        both = torch.cat([x, y])
        return both, both > 1

    text = wgsl(function, torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    stores = re.findall(r"fn (store\w*)\(i: i32, v: ([\w<>]+)\)", text)
    assert all(not name.startswith("store4") for name, kind in stores if "i64" in kind)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float16, "tw_f16_rounded"), (torch.bfloat16, "bf16_bits")]
)
def test_rows_go_on_with_16_bit_numbers_as_they_are_stored(dtype, rounding):
    def function(x):
        y = x.exp()
        return y, y.mean(-1)

    text = wgsl(function, torch.zeros(8, 64, dtype=dtype))
    assert rounding in text.split("fn main")[1]  # besides in the functions that store


def test_mixed_stores_of_a_buffer_are_scalar():
    def function(x):
        return ((x - x.mean()) * torch.rsqrt(x.var() + 1)).permute(1, 0, 2, 3)

    text = wgsl(function, randn(2, 4, 7, 9))
    for buffer in set(re.findall(r"fn store_(x\d)\(", text)):
        assert re.search(rf"\b{buffer}: array<f32>", text)


def test_choices_in_choices_are_computed_once():
    def masked_windows(x):
        regions = torch.zeros(14, 14)
        slices = [slice(0, -7), slice(-7, -3), slice(-3, None)]
        for k in range(9):
            regions[slices[k // 3], slices[k % 3]] = k
        windows = regions.view(2, 7, 2, 7).permute(0, 2, 1, 3).reshape(4, 49)
        return x + (windows[:, None] - windows[:, :, None])

    text = wgsl(masked_windows, randn(4, 49, 49)).split("fn main")[1]
    named = re.findall(r"let \w+ = (.*);", text)
    assert len(named) == len(set(named))
    assert len(text) < 10_000


# ---- constants


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.tensor(-1.0).sqrt(),
        lambda x: x[:, :0].mean(1),
        lambda x: x + torch.tensor(float("inf")) - float("inf"),
    ],
)
def test_no_constant_expression_is_left_to_wgsl(function):
    for kernel in kernels(function, randn(3, 4)):
        assert not re.search(r"\(-?\d[\d.]*f [-+*/] -?\d[\d.]*f\)", kernel.wgsl)
        assert not re.search(r"\b(sqrt|log|exp)\(\(?-?\d", kernel.wgsl)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / 0.0,
        lambda x: x * -0.0,
        lambda x: 0 / x,
        lambda x: x - x,
        lambda x: x / x,
        lambda x: (x > 0) * x,
        lambda x: torch.where(x > 0, x, 0),
        lambda x: torch.nn.functional.pad(x, [0, 3]) * x[0],
    ],
)
def test_numbers_that_drivers_could_know_are_opaque(function):
    assert re.search("tw_opaque|tw_quotient", wgsl(function, randn(8)).split("fn main")[1])


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, softmax, attention])
@pytest.mark.parametrize("keeps_nan", [True, False])
def test_exponentials_are_the_drivers_if_it_keeps_nan(function, keeps_nan):
    target = replace(TARGET, exp_keeps_nan=keeps_nan)
    text = "".join(k.wgsl for k in kernels(function, randn(1, 1, 16, 16), target=target))
    assert ("fn tw_exp" in text) == (not keeps_nan)
    assert bool(re.search(r"\bexp\(", text)) == keeps_nan
    assert "tw_fast_exp" not in text


# ---- limits


def test_buffers_above_the_binding_limit_get_windows():
    target = replace(TARGET, max_binding_nbytes=1 << 12)
    state = compile_function(lambda x: x * 2, randn(3000), target=target)
    (step,) = state.plan.steps
    by_buffer: dict[str, list[int]] = {}
    for binding in step.bindings:
        assert binding.offset_nbytes % 256 == 0
        assert binding.nbytes is not None
        assert int(binding.nbytes) <= 1 << 12
        by_buffer.setdefault(binding.buffer, []).append(binding.offset_nbytes)
    assert all(offsets == [0, 4096, 8192] for offsets in by_buffer.values())


def test_grids_above_the_limit_are_folded():
    target = replace(TARGET, max_grid=4)
    (step,) = compile_function(lambda x: x * 2, randn(1 << 14), target=target).plan.steps
    grid = [int(g) for g in step.grid]
    assert all(1 <= g <= 4 for g in grid)
    assert grid[0] * grid[1] >= 16


@pytest.mark.parametrize("count", [1, 65535, 65536, 100_003, 1 << 22])
def test_folded_grids_cover_all_workgroups(count):
    for workgroups, values in ((as_expr(count), {}), (symbol("s", 1), {"s": count})):
        x, y, z = (evaluate(g, values) for g in fold_grid(workgroups, TARGET))
        assert x <= 65535
        assert y <= 65535
        assert z == 1
        assert count <= x * y <= count + y


def test_symbolic_sizes_are_parameters():
    state = compile_function(lambda x: x * 2, randn(6, 7), dynamic=True)
    (kernel,) = state.plan.kernels
    assert kernel.parameter_count > 0
    assert "var<uniform> parameters" in kernel.wgsl


def test_addresses_have_32_bits():
    """Also those of what is only read, between whose elements lies more than they are."""
    large = replace(TARGET, max_buffer_nbytes=1 << 33)
    rows, step = symbol("rows", 0), symbol("step", 0)
    two, half = as_expr(2), as_expr(1 << 31)

    def narrow(target, size, stride):
        buffer = Buffer("x", dtypes.int8, (size,), (stride,), ZERO, BufferOrigin.INPUT)
        bindings = Bindings(target, {"x": buffer})
        bindings.function("x", "load")
        bindings.declarations()
        return list(bindings.narrow)

    assert narrow(large, two, half - 2) == []
    with pytest.raises(AdapterError, match="less than 2\\*\\*31"):
        narrow(large, two, half)
    assert narrow(TARGET, rows, step) == []  # no buffer is that large
    assert narrow(large, rows, step) == [rows * step - step + 1]
