"""Scatters that combine what falls on the same element."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare_eager_and_compiled

pytestmark = [
    pytest.mark.rotates(9),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]

aten = torch.ops.aten


def bools(*sizes, share=0.3):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.rand(sizes, generator=generator) < share


def places(size, *sizes):
    return torch.randint(0, size, sizes, generator=torch.Generator().manual_seed(size))


def test_bools_accumulate_to_their_logical_or():
    def f(x, source, row, index, values, flat):
        return (
            x.index_add(0, row, source),
            x.mT.index_add(1, row, source.mT, alpha=True),
            x.index_add(0, row, source, alpha=False),
            x.index_add(0, row[:0], source[:0]),
            x[0, 0].index_add(0, row[:1] * 0, source[0, 0]),
            x.put(flat, values, accumulate=True),
            x.put(flat[:0], values[:0], accumulate=True),
            x.index_put((row,), source, accumulate=True),
            x.index_put((row, row), values[:9], accumulate=True),
            x.index_put((x,), source[0, 0], accumulate=True),
            aten._unsafe_index_put(x, [None, row], source[:7, :9], True),
            x.scatter_add(0, index, source),
            x[0, 0].scatter_add(0, row[0] * 0, source[0, 0]),
        )

    compare_eager_and_compiled(
        f,
        bools(7, 11),
        bools(9, 11),
        places(7, 9),
        places(7, 9, 11),
        bools(40, share=0.6),
        places(77, 40) - 77,
    )


@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_scatter_of_bools(reduce):
    def f(x, index, source):
        return (
            x.scatter(0, index, source, reduce=reduce),
            x.scatter(1, index[:, :5], True, reduce=reduce),
            x.scatter(1, index[:, :5], False, reduce=reduce),
            x[0, 0].scatter(0, index[0, 0] * 0, source[0, 0], reduce=reduce),
        )

    compare_eager_and_compiled(f, bools(7, 11), places(7, 7, 11), bools(8, 11, share=0.8))


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [False, True])
def test_scatter_reduce_of_bools(reduce, include_self):
    def f(x, index, source):
        return (
            x.scatter_reduce(0, index, source, reduce, include_self=include_self),
            x.mT.scatter_reduce(1, index.mT, source.mT, reduce, include_self=include_self),
            x.scatter_reduce(0, index[:0], source, reduce, include_self=include_self),
            x[0, 0].scatter_reduce(0, index[0, 0] * 0, source[0, 0], reduce),
        )

    compare_eager_and_compiled(f, bools(7, 11), places(7, 7, 11), bools(8, 11, share=0.8))
