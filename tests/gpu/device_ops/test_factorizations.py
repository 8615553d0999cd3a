"""Matrix factorisations, what is computed by them, and triangular systems."""

from __future__ import annotations

import math

import pytest
import torch

from tests.device_checks import compare, compare_eager_and_compiled
from torch_webgpu_compile import counters

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


def regular(*sizes):
    """Needs exchanges of rows, and is well conditioned."""
    return numbers(*sizes) + 2 * math.sqrt(sizes[-1]) * torch.eye(sizes[-1]).flip(0)


def definite(*sizes):
    a = numbers(*sizes)
    return a @ a.mT / max(1, sizes[-1]) + torch.eye(sizes[-1])


def by_lu(a):
    return (
        torch.linalg.lu_factor_ex(a),
        torch.linalg.lu(a),
        torch.linalg.det(a),
        torch.linalg.slogdet(a),
        torch.linalg.inv_ex(a),
        torch.linalg.solve_ex(a, a.mT),
        torch.linalg.solve_ex(a, a.mT, left=False),
        torch.logdet(a @ a.mT),
    )


# 100 and, where workgroup memory is small, 64 rows do not fit in it.
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3, 3), (2, 3, 17, 17), (64, 64), (100, 100)])
def test_what_lu_factors_give(sizes):
    compare_eager_and_compiled(by_lu, regular(*sizes), rtol=1e-3, atol=1e-3)
    compare(lambda device: by_lu(regular(*sizes).to(device).mT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "sizes",
    [(4, 7), (2, 7, 4), (70, 50), (1000, 117), (117, 1000), (0, 5), (5, 0), (0, 3, 3), (2, 0, 0)],
)
def test_factors_of_other_shapes(sizes):
    def f(a):
        rest = by_lu(a)[2:] if sizes[-1] == sizes[-2] else ()
        return torch.linalg.lu_factor_ex(a), torch.linalg.lu(a), *rest

    compare_eager_and_compiled(f, numbers(*sizes), rtol=1e-3, atol=1e-3)


def test_right_hand_sides():
    def f(a, b):
        return (
            torch.linalg.solve(a, b[0, :, 0]),
            torch.linalg.solve(a[0], b[0, :, 0]),
            torch.linalg.solve(a[:, None], b),  # broadcast
            torch.linalg.solve_ex(a, b[..., 0])[0],  # a vector for each matrix
            torch.linalg.inv(a),
            torch.linalg.matrix_power(a, -2),
            torch.linalg.tensorsolve(a[0].view(2, 3, 6), b[0, :, 0].view(2, 3)),
        )

    a, b = regular(3, 6, 6), numbers(3, 6, 4)
    compare(lambda device: f(a.to(device), b.to(device)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sizes", [(1, 1), (5, 3, 3), (2, 64, 64), (200, 200), (0, 3, 3), (2, 0, 0)]
)
def test_cholesky_factors(sizes):
    def f(a):
        return (
            torch.linalg.cholesky_ex(a.tril()),
            torch.linalg.cholesky_ex(a.triu(), upper=True),
            torch.linalg.cholesky_ex(a.mT)[0],
        )

    compare_eager_and_compiled(f, definite(*sizes), rtol=1e-3, atol=1e-4)


def test_matrices_of_special_numbers():
    singular = torch.tensor([[[1.0, 2, 3], [2, 4, 6], [1, 1, 1]], [[0, 0, 0]] * 3])
    # Pivots are powers of two, so no step is rounded: which of two rows is taken where both are
    # as great depends on no library's order of operations.
    ties = torch.randint(-1, 2, (200, 6, 6), generator=torch.Generator().manual_seed(0)).float()
    pivots = torch.linalg.lu_factor_ex(ties.double()).LU.diagonal(dim1=1, dim2=2)
    ties = ties[torch.isin(pivots.abs(), torch.tensor([0, 0.5, 1, 2, 4])).all(-1)]
    special = torch.eye(4).repeat(3, 1, 1)
    special[0, 2, 2], special[1, 2, 2], special[2, 0, 0] = math.nan, math.inf, -0.0
    indefinite = torch.eye(3).repeat(3, 1, 1)
    indefinite[0, 1, 1], indefinite[1, 2, :2], indefinite[2, 1, 1] = -1, torch.ones(2), math.nan

    def f(singular, ties, special, indefinite):
        return (
            torch.linalg.lu_factor_ex(singular),
            torch.linalg.det(singular),
            torch.linalg.lu_factor_ex(ties),
            torch.linalg.lu_factor_ex(special),
            torch.linalg.det(special),
            torch.linalg.inv_ex(special)[1],
            torch.linalg.cholesky_ex(indefinite)[1],
        )

    compare_eager_and_compiled(f, singular, ties, special, indefinite)


REFUSED = {
    "inv": lambda a: torch.linalg.inv(a),
    "inv of a batch": lambda a: torch.linalg.inv(torch.stack([a + torch.eye(3).to(a), a])),
    "solve": lambda a: torch.linalg.solve(a, a),
    "lu_factor": lambda a: torch.linalg.lu_factor(a),
    "cholesky": lambda a: torch.linalg.cholesky(-a),
    "torch.cholesky": lambda a: torch.cholesky(a - 1),
    "sizes": lambda a: torch.linalg.inv(a[:2]),
    "right-hand side": lambda a: torch.linalg.solve(a, a[:2]),
    "dtypes": lambda a: torch.linalg.solve(a, a.int()),
    "integers": lambda a: torch.linalg.cholesky(a.int()),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_data_and_of_arguments(name):
    compare(lambda device: REFUSED[name](torch.zeros(3, 3, device=device)))


@pytest.mark.parametrize("function", [by_lu, torch.linalg.cholesky], ids=["lu", "cholesky"])
def test_second_derivatives(function):
    a = definite(2, 5, 5) + torch.eye(5).flip(0) if function is by_lu else definite(2, 5, 5)

    def f(device):
        leaf = a.to(device).requires_grad_()
        made = torch.utils._pytree.tree_leaves(function(leaf))
        floats = [x for x in made if x.requires_grad]
        (first,) = torch.autograd.grad(sum(x.sin().sum() for x in floats), leaf, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), leaf)

    compare(f, rtol=1e-2, atol=1e-2)


def test_compiled_gradients():
    def f(a):
        return torch.linalg.inv(a).sum() + torch.linalg.slogdet(a)[1].sum() + torch.logdet(a).sum()

    a = definite(2, 5, 5).requires_grad_()
    (wanted,) = torch.autograd.grad(f(a), a)
    for device in ("cpu", "webgpu"):
        torch._dynamo.reset()
        leaf = a.detach().to(device).requires_grad_()
        compiled = torch.compile(f, backend="webgpu", fullgraph=True)
        (got,) = torch.autograd.grad(compiled(leaf), leaf)
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-4)


def test_normal_distributions_of_many_variables():
    mean, covariance = numbers(3, 5), definite(3, 5, 5)

    def f(device):
        m, c = (t.to(device).requires_grad_() for t in (mean, covariance))
        normal = torch.distributions.MultivariateNormal(m, c)
        low_rank = torch.distributions.LowRankMultivariateNormal(m, c[..., :2], c.diagonal(0, 1, 2))
        x = m.detach() + 1
        made = normal.log_prob(x), normal.entropy(), normal.precision_matrix, low_rank.log_prob(x)
        made = *made, torch.distributions.kl_divergence(normal, low_rank)
        return made, torch.autograd.grad(sum(x.sum() for x in made), (m, c))

    compare(f, rtol=1e-3, atol=1e-3)


def test_any_size_after_two():
    """No plan is made for a third size, up to what one workgroup factors."""
    for size in (5, 9, 40, 240):
        a = regular(size, size)
        before = counters.kernels_compiled
        got = torch.linalg.inv_ex(a.to("webgpu"))[0].cpu()
        torch.testing.assert_close(got, torch.linalg.inv(a), rtol=1e-3, atol=1e-4)
    assert counters.kernels_compiled == before
