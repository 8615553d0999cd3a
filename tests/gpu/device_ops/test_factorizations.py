"""Parts of matrix factorisations, and triangular systems."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare_eager_and_compiled


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
