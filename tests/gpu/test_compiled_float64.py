"""float64 kernels against eager, to the last digits. Needs an adapter with shader-f64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.providers import require_float64

pytestmark = pytest.mark.rotates(6)

F = torch.nn.functional
F64 = torch.float64
SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1e-310, 1e-300, 0.3, -0.5, 0.5, 1.0, -1.0,
     1.5, -2.5, 2.0, 3.0, 20.0, -40.0, 709.0, -745.0, 1e6, 1e16, -1e22, 1e300],
    dtype=F64,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _adapter():
    require_float64()


def close(fn, *tensors, ulps=4):
    """``fn`` compiled, without the host, against eager: ``ulps`` units in the last place."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="webgpu", fullgraph=True, options={"fallback": "error"})
    got, wanted = compiled(*tensors), fn(*tensors)
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        torch.testing.assert_close(g, w, rtol=ulps * 2**-53, atol=5e-324, equal_nan=True)
        if g.dtype.is_floating_point:
            zero = (w == 0) & ~w.isnan()
            assert (g.signbit() == w.signbit())[zero].all(), "the sign of zero"


UNARY = (
    "abs neg sign floor ceil trunc round sqrt rsqrt reciprocal square exp exp2 expm1 log log2 "
    "log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf sigmoid "
    "isnan isinf"
)


@pytest.mark.parametrize("name", UNARY.split())
def test_functions(name):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(500, generator=generator, dtype=F64) * torch.logspace(
        -12, 12, 500, dtype=F64
    )
    near = torch.linspace(-3, 3, 701, dtype=F64)
    close(getattr(torch, name), torch.cat([SPECIAL, wide, near]), ulps=5)


@pytest.mark.parametrize("name", ["x - x", "x * 0", "x * -0.0", "0 / x", "x / x", "x / 0"])
def test_what_drivers_take_for_a_number(name):
    close(eval(f"lambda x: {name}"), SPECIAL)
    close(eval(f"lambda x: ({name}) * x[1]"), SPECIAL[:16])  # four lanes, times infinity


def test_erfc():
    # Both are within 3 ulp of the true value.
    close(torch.erfc, torch.cat([SPECIAL, torch.linspace(-6, 26, 999, dtype=F64)]), ulps=8)


BINARY = {
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "pow": torch.pow,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "comparisons": lambda a, b: (a < b, a <= b, a == b, a != b),
    "where": lambda a, b: torch.where(a > b, a, b),
}


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two(name):
    close(BINARY[name], SPECIAL[:, None], SPECIAL[None])
    a = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=F64)
    close(BINARY[name], a.abs() if name == "pow" else a, a.flip(0) * 3)


def test_remainders_are_exact():
    a = torch.tensor([1e300, -7.5, 5e-324, 123456789.125, -0.0, 1e17], dtype=F64)
    b = torch.tensor([3.7, 2.0, 1e-323, -1e-3, 5.0, 10.0], dtype=F64)
    wanted = torch.tensor([math.fmod(x, y) for x, y in zip(a, b, strict=True)], dtype=F64)
    got = torch.compile(torch.fmod, backend="webgpu")(a, b)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
)
def test_casts(dtype):
    x = torch.tensor([0.0, -0.0, 1.5, 100.99, 7.0, 3.25, 2.0**-1060], dtype=F64)
    close(lambda x: (x.to(dtype), x.bool()), x)
    close(lambda x: x.double(), x.to(dtype))
    floats = torch.tensor([math.nan, math.inf, -math.inf, 1e300, 1 + 2**-30], dtype=F64)
    if dtype.is_floating_point:
        close(lambda x: x.to(dtype), floats)


REDUCTIONS = {
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: (x.abs() + 0.5).prod(0),
    "mean": lambda x: x.mean(),
    "variance": lambda x: x.var(-1),
    "norm": lambda x: x.norm(3, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(0),
    "extremes": lambda x: (x.amin(0), x.amax(-1), x.argmin(-1), x.argmax(0)),
    "any": lambda x: ((x > 1).any(0), (x > -9).all(-1)),
    "cumsum": lambda x: x.cumsum(0),
    "matmul": lambda x: x @ x.mT,
    "convolution": lambda x: F.conv1d(x[None], x[None, :, :3]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sort": lambda x: x.sort(-1),
    "index_add": lambda x: x.index_add(0, torch.arange(x.shape[0]) % 3, x),
}


@pytest.mark.parametrize("shape", [(5, 7), (33, 260)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    torch._dynamo.reset()
    fn = REDUCTIONS[name]
    compiled = torch.compile(fn, backend="webgpu", fullgraph=True, options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), fn(x), rtol=1e-12, atol=1e-12)


def test_reductions_of_special_values():
    x = torch.tensor([[1.0, math.nan, -math.inf], [math.inf, 0.0, 2.0]], dtype=F64)
    close(lambda x: (x.amin(-1), x.amax(0), x.argmax(-1), x.argmin(0), x.sum(-1)), x)


@pytest.mark.rotates(1)
def test_maps_side_by_side_that_read_one_argument():
    x, a, b = torch.randn(3, 600, dtype=F64)
    close(lambda x, a, b: (torch.sin(x * a), torch.sin(x * b)), x, a, b)
