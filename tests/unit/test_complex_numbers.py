"""Complex tensors as pairs of real ones: each rule against eager PyTorch, on the interpreter."""

from __future__ import annotations

import cmath
import itertools
import math

import pytest
import torch

from tests.eager_calls import check_call, check_reuse, describe
from torch_webgpu_compile.backend import native_operators
from torch_webgpu_compile.capture.complex_numbers.pair import Pair
from torch_webgpu_compile.capture.complex_numbers.registry import RULES, ComplexCall, rule
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.errors import UnsupportedOp

aten = torch.ops.aten
pytestmark = [
    pytest.mark.rotates(3),
    pytest.mark.filterwarnings("ignore:(ComplexHalf support|Casting complex values)"),
]


def numbers(*sizes: int, dtype: torch.dtype = torch.complex64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, dtype=torch.complex64, generator=generator).to(dtype)


UNARY = {
    **{
        name: getattr(aten, name).default
        for name in (
            *("abs", "angle", "sgn", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
            *("sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos"),
            *("atan", "asinh", "acosh", "atanh", "sigmoid", "silu", "reciprocal", "square"),
            *("neg", "_conj_physical", "isnan", "isinf", "isfinite", "logical_not"),
        )
    }
}


@pytest.mark.parametrize("name", UNARY)
def test_functions(name):
    for x in (numbers(3, 5), numbers(4, 3).t()[1:], numbers(), numbers(0, 2), 3 * numbers(40)):
        check_call(UNARY[name], x, rtol=1e-5, atol=1e-6)


GRID = [
    complex(re, im)
    for re, im in itertools.product([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5], repeat=2)
]
ANNEX_G = (
    *("exp", "log", "sqrt", "sinh", "cosh", "tanh", "sin", "cos", "tan"),
    *("asin", "acos", "atanh", "asinh", "acosh", "atan"),
)


def by_rule(name: str, z: Pair) -> Pair:
    """What the rule of an elementary function gives."""
    op = getattr(aten, name).default
    return RULES[op](ComplexCall(op, z.dtype, (), ()), z)


@pytest.mark.parametrize("name", ANNEX_G)
def test_special_values(name):
    """What C99 Annex G says of infinities, NaN and signed zeros, by way of Python's ``cmath``."""
    given, wanted = [], []
    for z in GRID:
        try:
            wanted.append(getattr(cmath, name)(z))
        except (ValueError, OverflowError):  # C99 raises an exception of the hardware
            continue
        if name == "acosh" and z.real == 0 and math.isnan(z.imag):
            wanted[-1] = complex(math.nan, math.pi / 2)  # defect report 471, as PyTorch
        if name == "tanh" and z.real == 0 and math.isnan(z.imag):
            wanted[-1] = z  # the same
        if name == "tan" and z.imag == 0 and math.isnan(z.real):
            wanted[-1] = z
        given.append(z)
    assert len(given) > 30
    x = torch.tensor(given, dtype=torch.complex64)
    found = by_rule(name, Pair(x.real.clone(), x.imag.clone()))
    expected = torch.tensor(wanted, dtype=torch.complex64)
    known = ~x.isnan()  # else C99 leaves signs open
    for got, want in ((found.re, expected.real), (found.im, expected.imag)):
        torch.testing.assert_close(got.abs(), want.abs(), equal_nan=True, rtol=1e-5, atol=1e-6)
        signed = known & ~want.isnan()
        assert torch.equal(got.signbit()[signed], want.signbit()[signed])  # of zeros, too


@pytest.mark.parametrize("name", ["sqrt", "asin", "acos", "atanh", "log", "tanh"])
def test_magnitudes(name):
    """No overflow or cancellation on the way, up to the ends of float32."""
    parts = [1e-30, 1e-8, 0.3, 1.0, 1.0 + 1e-6, 40.0, 1e9, 1e30]
    both = [complex(a, b) for a, b in itertools.product([*parts, *(-p for p in parts)], parts)]
    x = torch.tensor(both, dtype=torch.complex64)
    found = by_rule(name, Pair(x.real.clone(), x.imag.clone()))
    expected = torch.tensor([getattr(cmath, name)(z) for z in x.tolist()], dtype=torch.complex128)
    got = torch.complex(found.re, found.im).to(torch.complex128)
    error = (got - expected).abs() / expected.abs()
    assert error.max() < 2e-6, x[error.argmax()]


BINARY = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "eq": aten.eq.Tensor,
    "ne": aten.ne.Tensor,
    "logical_and": aten.logical_and.default,
    "logical_xor": aten.logical_xor.default,
    "pow": aten.pow.Tensor_Tensor,
}


@pytest.mark.parametrize("name", BINARY)
def test_promotion(name):
    op = BINARY[name]
    x, real, whole = numbers(4, 3), torch.randn(3), torch.arange(1, 4)
    for a, b in ((x, numbers(3, seed=1)), (x, real), (real, x), (x, whole), (x, numbers(seed=2))):
        check_call(op, a, b, rtol=1e-4, atol=1e-5)
    check_call(op, x, x.clone(), rtol=1e-4, atol=1e-5)


def test_numbers():
    x = numbers(5)
    check_call(aten.mul.Tensor, x, 2.5)
    check_call(aten.mul.Tensor, x, 1 - 2j)
    check_call(aten.mul.Tensor, torch.randn(4), 2j)
    check_call(aten.add.Tensor, x, numbers(5, seed=1), alpha=2 - 1j)
    check_call(aten.rsub.Scalar, x, 3j)
    for exponent in (0, 0.5, 1, 2, 3, -1, -2, 2.5, 1 + 2j):
        check_call(aten.pow.Tensor_Scalar, x, exponent, rtol=1e-5, atol=1e-5)
    check_call(aten.pow.Scalar, 2 - 1j, x, rtol=1e-5, atol=1e-5)
    check_call(aten.eq.Scalar, torch.tensor([1j, 2.0]), 1j)
    check_call(aten.addcmul.default, x, numbers(5, seed=1), numbers(5, seed=2), value=1j)
    check_call(aten.addcdiv.default, x, numbers(5, seed=1), numbers(5, seed=2), value=2)
    check_call(aten.lerp.Scalar, x, numbers(5, seed=1), 0.75)


def test_division_of_extremes():
    a = torch.tensor([1e30 + 1e30j, 1e-30 - 1e-30j, 3 + 4j, 1j, 1 + 0j])
    b = torch.tensor([1e30 - 1e29j, 1e-30 + 1e-31j, 1e-20j, 5 + 0j, math.inf + 0j])
    check_call(aten.div.Tensor, a, b)


def test_by_parts():
    x, y, index = numbers(4, 5), numbers(4, 5, seed=1), torch.tensor([[0, 3, 1], [2, 2, 0]])
    mask = torch.rand(4, 5) > 0.5
    check_call(aten.cat.default, [x, torch.randn(2, 5), y])
    check_call(aten.stack.default, [x, y], 1)
    check_call(aten.where.self, mask, x, torch.randn(5))
    check_call(aten.masked_fill.Scalar, x, mask, 1 - 2j)
    check_call(aten.gather.default, x, 1, index)
    check_call(aten.scatter.src, x, 1, index, y)
    check_call(aten.scatter.value, x, 1, index, 2j)
    check_call(aten.scatter_add.default, x, 1, index, y)
    check_call(aten.index_add.default, x, 0, torch.tensor([3, 1]), y[:2], alpha=1j)
    check_call(aten.index_put.default, x, [torch.tensor([0, 2])], y[:2], True)
    check_call(aten.index.Tensor, x, [None, torch.tensor([0, 4])])
    check_call(aten.index_select.default, x, 1, torch.tensor([0, 4]))
    check_call(aten.constant_pad_nd.default, x, [1, -2], 3 + 1j)
    check_call(aten.flip.default, x, [0])
    check_call(aten.roll.default, x, [2], [1])
    check_call(aten.tril.default, x, -1)
    check_call(aten.repeat.default, x, [2, 1])
    check_call(aten.clone.default, x.t())
    check_call(aten.sum.dim_IntList, x, [0], True)
    check_call(aten.mean.default, x)
    special = torch.tensor(
        [[1 + 2j, complex(math.inf, math.nan)], [complex(-math.inf, 1), complex(2, math.nan)]]
    )
    for dims in ([], [0], [-1], [0, 1]):
        check_call(aten.mean.dim, special, dims, True)  # a quotient of complex numbers
    check_call(aten.cumsum.default, x, 1)


def test_making():
    real, imag = torch.randn(3, 1), torch.randn(4)
    check_call(aten.complex.default, real, imag)
    check_call(aten.polar.default, real.abs(), imag)
    check_call(aten.full.default, [2, 3], 1 - 2j)
    check_call(aten.full_like.default, real, 2j, dtype=torch.complex64)
    check_call(aten.zeros.default, [2], dtype=torch.complex64)
    check_call(aten.scalar_tensor.default, 3, dtype=torch.complex64)
    check_call(aten.linspace.default, 1 + 1j, 3 - 2j, 7, dtype=torch.complex64)
    check_call(aten._to_copy.default, real, dtype=torch.complex64)
    check_call(aten._to_copy.default, numbers(3), dtype=torch.float32)
    check_call(aten._to_copy.default, torch.tensor([0j, 1j, 1.0]), dtype=torch.bool)
    check_call(aten._to_copy.default, numbers(3), dtype=torch.complex32)


def test_reductions():
    x = numbers(3, 7)
    for op in (aten.prod.default, aten.any.default, aten.all.default):
        check_call(op, x)
    check_call(aten.prod.dim_int, x, 1, True)
    check_call(aten.prod.dim_int, numbers(0, 2), 0)
    check_call(aten.cumprod.default, x, 1)
    check_call(aten.linalg_vector_norm.default, x, 3.0, [1], True)
    check_call(aten.var.correction, x, [1], correction=0, keepdim=True)
    check_call(aten.logsumexp.default, x, [1], rtol=1e-5, atol=1e-5)
    check_call(aten.count_nonzero.default, torch.tensor([0j, 1j, 2]))


def test_products():
    a, b = numbers(3, 4), numbers(5, 4, seed=1).t()
    check_call(aten.mm.default, a, b)
    check_call(aten.mm.default, a.conj(), b)
    check_call(aten.addmm.default, numbers(5), a, b, beta=2j, alpha=1 - 1j)
    check_call(aten.bmm.default, numbers(2, 3, 4), numbers(2, 4, 2))
    check_call(aten.dot.default, numbers(6), numbers(6, seed=1))
    check_call(aten.vdot.default, numbers(6), numbers(6, seed=1))
    check_call(aten.mv.default, a, numbers(4))
    check_call(aten.mm.default, numbers(3, 0), numbers(0, 2))


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed):
    x, w = numbers(2, 4, 6, 5), numbers(4, 2, 3, 3, seed=1)
    bias = numbers(4, seed=2)
    layout = [2, 1], [1, 0], [1, 1], transposed, [1, 0] if transposed else [0, 0], 2
    inputs = torch.view_as_real(x).unbind(-1)
    kernels = torch.view_as_real(w).unbind(-1)
    made = [
        [aten.convolution.default(i, k, None, *layout) for k in kernels] for i in inputs
    ]  # PyTorch has no complex kernel of this operator
    wanted = torch.complex(made[0][0] - made[1][1], made[0][1] + made[1][0])
    rule = RULES[aten.convolution.default]
    call = ComplexCall(aten.convolution.default, torch.float32, (), ())
    got = rule(call, Pair(*inputs), Pair(*kernels), Pair(bias.real, bias.imag), *layout)
    torch.testing.assert_close(torch.complex(got.re, got.im), wanted + bias[:, None, None])


def test_lazy_arguments():
    x = numbers(3, 4)
    check_call(aten.exp.default, x.conj())
    check_call(aten.mul.Tensor, x.conj().imag, x)
    check_call(aten._to_copy.default, x.conj(), dtype=torch.complex32)


def test_changes():
    mixed = torch.randn(3, 4)
    check_call(aten.mul_.Tensor, numbers(3, 4), 2j)
    check_call(aten.add_.Tensor, numbers(4, 6)[1:, ::2], mixed[:, :3])
    check_call(aten.copy_.default, numbers(3, 4), mixed)
    check_call(aten.copy_.default, torch.randn(3, 4), numbers(3, 4))
    check_call(aten.exp.out, numbers(3, 4), out=torch.empty(0, dtype=torch.complex64))
    check_call(aten.abs.out, numbers(3, 4), out=torch.empty(4, 3).t())


def test_symbolic_sizes():
    x = numbers(4, 6)
    call = capture_call(
        aten.mul.Tensor, *describe(((x, x.conj()), {})), native_operators(), dynamic=True
    )
    for y in (x, numbers(8, 2), numbers(12, 5)):
        check_reuse(call, aten.mul.Tensor, y, y.conj())
    call = capture_call(
        aten.exp.default, *describe(((x[1:, 1:],), {})), native_operators(), dynamic=True
    )
    check_reuse(call, aten.exp.default, numbers(7, 9)[2:, 3:])


def test_half_precision_computes_in_float32():
    x, y = numbers(50, dtype=torch.complex32), numbers(50, dtype=torch.complex32, seed=1)
    wide = x.to(torch.complex64) * y.to(torch.complex64)
    check_call(aten.mul.Tensor, x, y, rtol=1e-3, atol=1e-3)
    assert wide.isfinite().all()


def test_without_rule():
    with pytest.raises(UnsupportedOp, match="complex"):
        capture_call(aten.linalg_eig.default, *describe(((numbers(3, 3),), {})), native_operators())


def test_one_rule_for_an_operator():
    with pytest.raises(KeyError):
        rule(aten.mm.default)(lambda *_: None)
