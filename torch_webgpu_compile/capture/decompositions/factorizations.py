"""Determinants, inverses and solutions of systems, by LU factors.

Source: ATen ``BatchLinearAlgebra.cpp``. Autograd's formulas go on with the factors, so they are
those of the same matrix here. A call that raises errors itself (``check_errors``) is the host's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.nodes import Factorization

aten = torch.ops.aten


def _is_for_kernels(A: Tensor) -> bool:
    """Whether these are matrices that kernels factor; PyTorch says what is wrong with others."""
    is_real = A.dtype in (torch.float32, torch.float64)
    return is_real and A.dim() >= 2 and bool(A.shape[-2] == A.shape[-1])


def _factors(A: Tensor) -> tuple[Tensor, Tensor]:
    """(LU, pivots) of a matrix with A's determinant: its transpose, if A is contiguous."""
    LU, pivots, _ = aten.linalg_lu_factor_ex.default(A.mT if A.is_contiguous() else A)
    return LU, pivots


def _parity(pivots: Tensor) -> Tensor:
    """1 or -1: the determinant of the exchanges of rows."""
    here = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * (pivots != here).sum(-1).remainder(2)


def det(A: Tensor) -> Any:
    """``_linalg_det``: (determinant, LU, pivots)."""
    if not _is_for_kernels(A):
        return NotImplemented
    LU, pivots = _factors(A)
    return _parity(pivots) * LU.diagonal(0, -2, -1).prod(-1), LU, pivots


def slogdet(A: Tensor) -> Any:
    """``_linalg_slogdet``: (sign, logarithm of the absolute determinant, LU, pivots)."""
    if not _is_for_kernels(A):
        return NotImplemented
    LU, pivots = _factors(A)
    diagonal = LU.diagonal(0, -2, -1)
    return diagonal.sgn().prod(-1) * _parity(pivots), diagonal.abs().log().sum(-1), LU, pivots


def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """``_linalg_solve_ex``: (X with A · X = B, or X · A = B, LU, pivots, info)."""
    if check_errors or not _is_for_kernels(A) or B.dtype is not A.dtype or B.dim() < 1:
        return NotImplemented
    vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    if (vector and not left) or B.shape[-2 if left and not vector else -1] != A.shape[-1]:
        return NotImplemented
    LU, pivots, info = aten.linalg_lu_factor_ex.default(A)
    rhs = B.unsqueeze(-1) if vector else B
    solution = aten.linalg_lu_solve.default(LU, pivots, rhs, left=left)
    if vector:
        solution = solution.squeeze(-1)
        if solution.dim() > 1:  # column-major, too
            solution = solution.mT.clone(memory_format=torch.contiguous_format).mT
    return solution, LU, pivots, info


def inv_ex(A: Tensor, *, check_errors: bool = False) -> Any:
    """``linalg_inv_ex``: (inverse, info)."""
    if check_errors or not _is_for_kernels(A):
        return NotImplemented
    LU, pivots, info = aten.linalg_lu_factor_ex.default(A)
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return aten.linalg_lu_solve.default(LU, pivots, one), info


def lu(A: Tensor, *, pivot: bool = True) -> Any:
    """``linalg_lu``: (P, L, U)."""
    if not pivot or A.dim() < 2 or A.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    LU, pivots, _ = aten.linalg_lu_factor_ex.default(A)
    return aten.lu_unpack.default(LU, pivots)


def within_bounds(A: Tensor, **options: bool) -> Any:
    """Leaves the factors to lowering, which knows by a guard how large symbolic sizes may be."""
    for size in A.shape[-2:]:
        if not isinstance(size, int):
            bool(size <= Factorization.LARGEST)
    return NotImplemented


def cholesky(self: Tensor, upper: bool = False) -> Tensor:
    """``cholesky``, which linalg.cholesky has replaced: as an eager operator, which may wait."""
    factor: Tensor
    factor, info = aten.linalg_cholesky_ex.default(self, upper=upper)
    aten._linalg_check_errors(info, "cholesky", is_matrix=self.dim() == 2)
    return factor


DECOMPOSITIONS = {
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
    aten._linalg_solve_ex.default: solve_ex,
    aten.linalg_inv_ex.default: inv_ex,
    aten.linalg_lu.default: lu,
    aten.linalg_lu_factor_ex.default: within_bounds,
    aten.linalg_cholesky_ex.default: within_bounds,
}
