"""Graphs of symbolic sizes are tiled for those that they were traced with, and right at others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilations import compile_function
from torch_webgpu_compile import counters

SIZES = ((5, 7), (64, 48), (33, 2500))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "mm": (torch.mm, lambda n, m: (randn(n, m), randn(m, n + 3))),
    "long mm": (torch.mm, lambda n, m: (randn(7, n * m // 4), randn(n * m // 4, 9))),
    "row": (torch.mm, lambda n, m: (randn(1, m), randn(m, n))),
    "softmax": (lambda x: x.softmax(-1), lambda n, m: (randn(n, m),)),
    "sum": (lambda x: x.sum(0), lambda n, m: (randn(m, n),)),
    "norm": (lambda x: F.layer_norm(x, x.shape[-1:]), lambda n, m: (randn(n, m),)),
    "cumsum": (lambda x: x.cumsum(-1), lambda n, m: (randn(n, m),)),
    "transpose": (lambda x: x.t().contiguous(), lambda n, m: (randn(n, m),)),
    "sort": (lambda x: x.sort(-1).values, lambda n, m: (randn(n, m),)),
    "attention": (
        F.scaled_dot_product_attention,
        lambda n, m: (randn(2, 2, n, 16), randn(2, 2, m, 16), randn(2, 2, m, 16)),
    ),
}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("first", range(len(SIZES)))
def test_other_magnitudes_than_those_traced_with(name: str, first: int) -> None:
    function, inputs = FUNCTIONS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="webgpu", dynamic=True)
    compiled(*inputs(*SIZES[first]))
    counters.reset()
    for sizes in SIZES:
        arguments = inputs(*sizes)
        expected = function(*(x.double() for x in arguments)).float()
        # Sums of up to 20,000 terms, compared with exact ones: they cancel to far less than terms.
        atol = 1e-5 * (1 + float(expected.abs().max()))
        torch.testing.assert_close(compiled(*arguments), expected, atol=atol, rtol=1e-4)
    assert counters.kernels_compiled == 0


def test_a_product_is_divided_as_with_static_sizes() -> None:
    def kinds(rows: int, inner: int, columns: int, dynamic: bool) -> list[str]:
        arguments = (torch.empty(rows, inner), torch.empty(inner, columns))
        plan = compile_function(torch.mm, *arguments, dynamic=dynamic).plan
        return [kernel.kind for kernel in plan.kernels]

    assert kinds(1, 4096, 4096, True) == kinds(1, 4096, 4096, False) == ["reduction", "reduction"]
    assert kinds(8, 8, 8, True) == kinds(8, 8, 8, False) == ["matmul"]
