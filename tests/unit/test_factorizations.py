"""`Factorization`: what lowering makes of matrices, small and large, on NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.harness import TARGET, capture, check, lower_checked
from torch_webgpu_compile.ir.nodes import Factorization, HostCall


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def factorizations(graph: object) -> int:
    return sum(isinstance(node, Factorization) for node in graph.nodes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [(5, 5), (2, 3, 4), (3, 7, 4), (2, 0, 0), (1, 1)])
def test_lu_factors(sizes: tuple[int, ...]) -> None:
    a = numbers(*sizes)
    a[..., 1:2, :1] = a[..., 2:3, :1]  # of equal candidates the first
    check(lambda a: torch.linalg.lu_factor_ex(a), a, rtol=1e-5, atol=1e-5)


def test_determinants_inverses_and_solutions() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> object:
        made = torch.linalg.det(a), torch.linalg.slogdet(a), torch.linalg.inv_ex(a)
        return *made, torch.linalg.solve_ex(a, b), torch.linalg.solve_ex(a, b.mT, left=False)

    for a in (numbers(2, 5, 5), numbers(2, 5, 5).mT):
        assert factorizations(check(f, a, numbers(5, 3), rtol=1e-4, atol=1e-4)) >= 1


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_factors(upper: bool) -> None:
    a = numbers(2, 5, 5)
    a = a @ a.mT + torch.eye(5)
    a = a.triu() if upper else a.tril()
    check(lambda a: torch.linalg.cholesky_ex(a, upper=upper), a, rtol=1e-5, atol=1e-5)


def test_large_matrices_are_factored_by_halves() -> None:
    a = numbers(300, 300)
    definite = a @ a.mT / 300 + torch.eye(300)
    singular, indefinite = a.clone(), definite.clone()
    singular[:, 200], indefinite[220, 220] = 0, -1
    for function, arguments in (
        (torch.linalg.lu_factor_ex, (a, numbers(250, 300))),
        (torch.linalg.cholesky_ex, (definite,)),
        (lambda x: torch.linalg.lu_factor_ex(x)[2], (singular,)),
        (lambda x: torch.linalg.cholesky_ex(x)[1], (indefinite,)),
    ):
        for argument in arguments:
            graph = check(function, argument, rtol=1e-3, atol=1e-3)
            assert factorizations(graph) == 2
    graph = lower_checked(
        capture(torch.linalg.lu_factor_ex, a),
        allow_host=True,
        target=replace(TARGET, software=True),
    )
    assert [type(node) for node in graph.nodes] == [HostCall]


def test_symbolic_sizes_are_left_to_one_workgroup_up_to_its_limit() -> None:
    graph = check(torch.linalg.lu_factor_ex, numbers(6, 6), dynamic=True, rtol=1e-5, atol=1e-5)
    assert factorizations(graph) == 1
    captured = capture(torch.linalg.lu_factor_ex, numbers(300, 300), dynamic=True)
    graph = lower_checked(captured, allow_host=True)
    assert [type(node) for node in graph.nodes] == [HostCall]


def test_nan_stays() -> None:
    a = np.eye(4, dtype=np.float32)
    a[2, 2] = np.nan
    check(torch.linalg.lu_factor_ex, torch.from_numpy(a))
