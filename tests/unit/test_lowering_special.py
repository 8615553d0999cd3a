"""Special functions, in float32 and float64, with the values that they have by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import TARGET, check
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.ir import scalar
from torch_webgpu_compile.ir.folding import of_constants

FLOAT64 = replace(TARGET, features=TARGET.features | {"shader-f64"})
NUMBERS = torch.cat([torch.linspace(-9, 30, 157), torch.tensor([0.0, 1e-6, 1.5e5])])
OPEN_UNIT = torch.cat([torch.linspace(0.001, 0.999, 99), torch.logspace(-30, -3, 20)])
POSITIVE = torch.cat([torch.linspace(0.01, 20, 99), torch.logspace(-3, 5, 20)])
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "i0": (torch.i0, NUMBERS),
    "i0e": (torch.special.i0e, NUMBERS),
    "i1": (torch.special.i1, NUMBERS),
    "i1e": (torch.special.i1e, NUMBERS),
    "erfcx": (torch.special.erfcx, NUMBERS),
    "log_ndtr": (torch.special.log_ndtr, -NUMBERS),
    "ndtri": (torch.special.ndtri, OPEN_UNIT),
    "ndtr": (torch.special.ndtr, NUMBERS),
    "digamma": (torch.digamma, torch.cat([POSITIVE, -POSITIVE - 0.1])),
    "lgamma": (torch.lgamma, torch.cat([POSITIVE, -POSITIVE[:99] - 0.1])),
    "trigamma": (lambda x: torch.polygamma(1, x), POSITIVE),
    "polygamma 2": (lambda x: torch.polygamma(2, x), torch.cat([POSITIVE, -POSITIVE[:50] - 0.1])),
    "polygamma 5": (lambda x: torch.polygamma(5, x), torch.cat([POSITIVE, -POSITIVE[:50] - 0.1])),
}
BESSEL = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"]
MODIFIED = [f"{scaled}modified_bessel_k{n}" for scaled in ("", "scaled_") for n in (0, 1)]
for _name in (*BESSEL, *MODIFIED, "spherical_bessel_j0", "airy_ai"):
    FUNCTIONS[_name] = (getattr(torch.special, _name), torch.cat([NUMBERS[:-1], OPEN_UNIT]))
TOLERANCE = {
    "trigamma": 2e-9,  # PyTorch's is 13 terms of a series: 5e-10
    # PyTorch leaves out the leading coefficient of monic denominators.
    **dict.fromkeys(BESSEL, 2e-6),
    "airy_ai": 5e-6,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    fn, x = FUNCTIONS[name]
    check(fn, x, rtol=5e-5, atol=2e-6)
    tolerance = TOLERANCE.get(name, 2e-12)
    check(fn, x.double(), target=FLOAT64, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    fn, _ = FUNCTIONS[name]
    check(fn, torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0]))
    check(fn, torch.empty(0))
    check(fn, torch.tensor(0.25))


POLYNOMIALS = [
    *(f"chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he"),
    *("laguerre_polynomial_l", "legendre_polynomial_p"),
]


def pairs(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of a value of each, as two tensors of rank 1."""
    a, b = torch.meshgrid(left, right, indexing="ij")
    return a.reshape(-1), b.reshape(-1)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str) -> None:
    fn = getattr(torch.special, name)
    x = torch.cat([torch.linspace(-3, 3, 25), torch.tensor([1e-30, math.inf, 0.25])])
    n = torch.tensor([-1.0, -0.5, 0, 1, 2, 3.7, 5, 6, 7, 9, 40, 128, 140, 513, math.nan, math.inf])
    x, n = pairs(x, n)
    check(fn, x, n, rtol=2e-4, atol=2e-4)
    check(fn, x.double(), n.double(), target=FLOAT64, rtol=1e-9, atol=1e-9)
    check(lambda x: fn(x, 5), torch.linspace(-2, 2, 9), rtol=1e-5, atol=1e-5)
    check(lambda n: fn(0.3, n), torch.arange(12), rtol=1e-5, atol=1e-5)
    check(fn, torch.empty(0), torch.empty(0))


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0, 0.5, -0.5, -2.0, 30.0])


def test_zeta() -> None:
    s, q = pairs(
        torch.tensor([1.0, 0.5, 1.001, 1.5, 2, 3, 8, 30, 100]),
        torch.cat([torch.logspace(-3, 5, 33), -torch.linspace(0, 20, 41) - 0.125]),
    )
    check(torch.special.zeta, s, q, rtol=2e-5, atol=1e-6)
    check(torch.special.zeta, s.double(), q.double(), target=FLOAT64, rtol=1e-12, atol=1e-12)
    check(torch.special.zeta, *pairs(SPECIAL, SPECIAL))
    check(lambda q: torch.special.zeta(2, q), torch.arange(1, 9))
    check(lambda s: torch.special.zeta(s, 2.5), torch.linspace(1, 9, 17))


@pytest.mark.parametrize("fn", [torch.igamma, torch.igammac])
def test_incomplete_gamma(fn: Callable[..., torch.Tensor]) -> None:
    a, ratio = pairs(torch.logspace(-3, 3, 25), torch.logspace(-2, 1, 25))
    check(fn, a, a * ratio, rtol=1e-4, atol=2e-6)
    check(fn, *pairs(SPECIAL, SPECIAL))
    check(fn, a.bfloat16(), (a * ratio).bfloat16())


def test_divisors() -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        a, b = pairs(*2 * [torch.arange(-12, 13, dtype=dtype)])
        check(torch.gcd, a, b)
        check(torch.lcm, a, b)
    check(torch.gcd, torch.tensor([0, 250, 17], dtype=torch.uint8), torch.tensor(100).byte())


def test_high_derivatives_of_digamma() -> None:
    for n in (21, 33, 34, 40):
        check(
            lambda x, n=n: torch.polygamma(n, x), torch.linspace(0.5, 9, 18), rtol=1e-4, atol=1e-6
        )


def test_integers_become_floats() -> None:
    check(torch.i0, torch.tensor([0, 3, -7]))
    check(lambda x: torch.polygamma(3, x), torch.tensor([1, 3, 70]))


def test_poles() -> None:
    whole = torch.tensor([0.0, -1.0, -2.0, -30.0])
    check(lambda x: torch.polygamma(2, x), whole)
    check(lambda x: torch.polygamma(3, x), whole)
    check(torch.special.ndtri, torch.tensor([0.0, 1.0, -0.1, 1.1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_frexp(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.7, math.inf, -math.inf, math.nan, 3e38, 0.5, 6e-8, 1e-40])
    target = FLOAT64 if dtype is torch.float64 else TARGET
    check(torch.frexp, x.to(dtype), target=target, rtol=0, atol=0)
    check(torch.frexp, torch.tensor(10.0, dtype=dtype), target=target, rtol=0, atol=0)


def test_what_loops_is_folded_while_tensors_are_fake():
    with FakeTensorMode():
        found = scalar.apply("zeta", scalar.const(2, dtypes.float32), 1.0)
        assert of_constants(found).value == pytest.approx(math.pi**2 / 6)
