"""What products of bfloat16 have to be right for: numbers of all exponents."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(rows: int, columns: int, low: int, high: int) -> Tensor:
    """Numbers whose exponents are any of a range."""
    return (torch.rand(rows, columns) + 1) * torch.exp2(torch.randint(low, high, (rows, columns)))


def factors(m: int, k: int, n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What is multiplied, by what it is about."""
    torch.manual_seed(0)
    a, b = torch.randn(m, k), torch.randn(k, n)
    found = {"normal numbers": (a, b), "zeros": (a * 0, b), "half zeros": (a.relu(), b.relu())}

    left, right = a.clone(), b.clone()
    left[3] = 0
    left[3, 5] = 2.0**-40
    right[:, 9] = 0
    right[7, 9] = -(2.0**-50)
    found["a row and a column with nothing but one small number"] = left, right

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[0, 0], left[3, 7], left[4, 7] = 1, 2.0**-60, 1
    right[0, 0], right[7, 9], right[7, 8] = 1, 2.0**-60, 1
    found["a small number times a small one"] = left, right

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[:, 0], left[:, 1], right[1] = 1e10, 1e-5, 1
    found["small beside large"] = left, right
    left, right = a * 1e-9, b.clone()
    left[::2] *= 1e12
    right[:, ::3] *= 1e-13
    found["rows and columns of their own scales"] = left, right

    grows = torch.exp2(torch.arange(k) * 4.0)
    found["larger in each step"] = a * grows, b / grows.unsqueeze(1)
    found["larger in each step on both sides"] = a * grows, b * grows.sqrt().unsqueeze(1)
    found["smaller in each step"] = a / grows, b

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[0, 0] = right[0, 0] = 1
    left[1, 16], right[17, 1] = 2.0**120, 2.0**120
    found["sums that would be lost when scales grow"] = left, right

    left = torch.zeros(m, k)
    left[0, 0], left[1, 8:12], left[6, 8:12] = 1, 2.0**40, 2.0**-10
    found["small in the step in which others are large"] = left, b
    left = a.clone()
    left[5], left[5, :4], left[6, 4] = 0, 2.0**-110, 2.0**-20
    found["tiny numbers in the first step"] = left, b * 2.0**40
    found["rows of all scales"] = a * torch.exp2(torch.linspace(-120, 120, m)).unsqueeze(1), b

    for high in (20, 60):
        name = f"exponents from -{high} to {high}"
        found[name] = spread(m, k, -high, high), -spread(k, n, -high, high)
    found["all exponents on one side"] = spread(m, k, -126, 127), spread(k, n, -30, -10)
    found["products that are too large"] = a.abs() * 2.0**100, b.abs() * 2.0**100
    found["products that are small"] = a * 2.0**-58, b * 2.0**-58
    found["products that are too small"] = a * 2.0**-100, b * 2.0**-100

    left, right = a.clone(), b.clone()
    left[4, 6], left[9, 18], left[20, 3], left[21, 3:5] = (
        torch.inf,
        torch.nan,
        -torch.inf,
        torch.inf,
    )
    right[6, 2], right[6, 7], right[11, 11] = 0, 2.0**-60, -torch.inf
    found["infinities and NaN"] = left, right
    found["infinities and NaN among all exponents"] = (
        torch.where(left.isfinite(), spread(m, k, -60, 60), left),
        torch.where(right.isfinite() & (right != 0), spread(k, n, -30, 30), right),
    )
    return {name: (x.bfloat16(), y.bfloat16()) for name, (x, y) in found.items()}


def check(name: str, got: Tensor, a: Tensor, b: Tensor) -> None:
    """Compares a product; of sums that end as infinities or NaN, which they are."""
    wanted = a.float() @ b.float()
    exact = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    # The result's rounding; that of sums in f32; what f32 has no normal number for.
    bound = 2.0**-8 * exact.abs() + 2.0**-18 * terms + 2.0**-125
    finite = wanted.isfinite() & (exact.abs() < 3e38)
    wrong = (got.double() - exact).abs() > bound
    wrong = torch.where(finite, wrong, got.float().nan_to_num(7) != wanted.nan_to_num(7))
    assert not wrong.any(), f"{name}: {got[wrong][:4]}, not {wanted[wrong][:4]}"
