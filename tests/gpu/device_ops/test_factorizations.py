"""Parts of matrix factorisations, and triangular systems."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare, compare_eager_and_compiled

pytestmark = pytest.mark.rotates(8)


def numbers(*sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("sizes", [(4, 4), (3, 7, 5), (2, 2, 5, 7), (40, 37), (0, 3, 3), (3, 0)])
def test_lu_unpack(sizes):
    packed, pivots = torch.linalg.lu_factor(numbers(*sizes))

    def f(packed, pivots):
        return (
            torch.lu_unpack(packed, pivots),
            torch.lu_unpack(packed, pivots, unpack_data=False)[0],
            torch.lu_unpack(packed, pivots, unpack_pivots=False)[1:],
        )

    compare_eager_and_compiled(f, packed, pivots)


def triangular(*sizes):
    """Well conditioned, with elements on both sides of the diagonal."""
    return numbers(*sizes) / sizes[-1] + 2 * torch.eye(sizes[-1])


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_solve_triangular(upper, unit):
    def f(matrix, rhs, many):
        def solve(a, b, **options):
            return torch.linalg.solve_triangular(
                a, b, upper=upper, unitriangular=unit, **options
            ).contiguous()

        return (
            solve(matrix, rhs),
            solve(matrix.mT, rhs),
            solve(matrix[0], rhs),  # broadcast
            solve(matrix, rhs[:1, :, :1]),
            solve(matrix, rhs.mT, left=False),
            solve(matrix[:0], rhs[:0]),
            solve(matrix, rhs[..., :0]),
            solve(matrix[:, :1, :1], rhs[:, :1]),
            solve(many, many[:, :40]),
            solve(many, many[:3], left=False),
        )

    matrix, many = triangular(3, 19, 19), triangular(300, 300)
    compare_eager_and_compiled(f, matrix, numbers(3, 19, 33), many, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_deprecated_triangular_solve(upper, transpose):
    def f(matrix, rhs):
        return (
            *torch.triangular_solve(rhs, matrix, upper, transpose),
            *torch.triangular_solve(rhs[0], matrix, upper, transpose, unitriangular=True),
        )

    compare_eager_and_compiled(f, triangular(3, 9, 9), numbers(3, 9, 5), rtol=1e-4, atol=1e-5)


def test_singular_and_special():
    def f(matrix, rhs):
        return torch.linalg.solve_triangular(matrix, rhs, upper=False)

    matrix = triangular(5, 5)
    matrix[2, 2] = 0
    rhs = numbers(5, 3)
    rhs[3, 1] = float("nan")
    compare_eager_and_compiled(f, matrix, rhs, rtol=1e-4, atol=1e-5)


def test_gradients_of_solve_triangular():
    matrix, rhs = triangular(2, 6, 6), numbers(2, 6, 4)

    def f(device):
        leaves = [t.to(device).requires_grad_() for t in (matrix, rhs)]
        solution = torch.linalg.solve_triangular(*leaves, upper=True)
        return torch.autograd.grad(solution.square().sum(), leaves)

    compare(f, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_solve(upper):
    def f(factor, rhs):
        return (
            torch.cholesky_solve(rhs, factor, upper=upper),
            torch.cholesky_solve(rhs[0], factor, upper=upper),
            torch.cholesky_solve(rhs[:, :0, :0], factor[:, :0, :0], upper=upper),
            torch.cholesky_inverse(factor, upper=upper),
            torch.cholesky_inverse(factor[0], upper=upper),
        )

    compare_eager_and_compiled(f, triangular(3, 9, 9), numbers(3, 9, 5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adjoint", [False, True])
def test_lu_solve(adjoint):
    def f(packed, pivots, rhs):
        def solve(*arguments, left=True):
            return torch.linalg.lu_solve(*arguments, left=left, adjoint=adjoint)

        return (
            solve(packed, pivots, rhs),
            solve(packed, pivots, rhs.mT, left=False),
            solve(packed[0], pivots[0], rhs),
            solve(packed, pivots, rhs[0, :, :1]),
            solve(packed, pivots, rhs[..., :0]),
        )

    packed, pivots = torch.linalg.lu_factor(numbers(3, 37, 37) + 8 * torch.eye(37).flip(0))
    rhs = numbers(3, 37, 5)
    compare_eager_and_compiled(f, packed, pivots, rhs, rtol=1e-4, atol=1e-5)
