"""How often kernels of rows read their rows, and in what tilings, without an adapter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import compile_function
from torch_webgpu_compile.target import Target

LONG = 50257


def kernels_of(function, *arguments, **options) -> list[str]:
    return [call.kernel.wgsl for call in compile_function(function, *arguments, **options).calls]


def loops(kernel: str) -> int:
    """Loops over a row."""
    return kernel.count("for (var c = 0")


def written(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x - x.amax(-1, keepdim=True)).sum(-1)


# name: (function, loops over a long row)
ONE_PASS = {
    "logsumexp": (lambda x: torch.logsumexp(x, -1), 1),
    "log of written softmax": (lambda x: torch.log(written(x)), 1),
    "softmax": (lambda x: torch.softmax(x, -1), 2),
    "log_softmax": (lambda x: F.log_softmax(x * 3 + 1, -1), 2),
    "expensive value": (lambda x: torch.softmax(torch.tanh(torch.sin(x)), -1), 2),
    "columns": (lambda x: torch.logsumexp(x.t(), 0), 1),
    # Nothing that one pass could share: another value, or no maximum.
    "another value": (lambda x: (torch.exp(x * 2 - x.amax(-1, keepdim=True))).sum(-1), 2),
    "minimum": (lambda x: (torch.exp(x - x.amin(-1, keepdim=True))).sum(-1), 2),
    "mean": (lambda x: (torch.exp(x - x.mean(-1, keepdim=True))).sum(-1), 2),
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_maximum_and_its_sum_share_a_pass(name):
    function, expected = ONE_PASS[name]
    (kernel,) = kernels_of(function, torch.randn(4, LONG))
    assert loops(kernel) == expected


def test_a_kept_row_is_not_rescaled():
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), torch.randn(64, 1024))
    assert loops(kernel) == 0
    assert "tw_above_ninf" not in kernel


def test_symbolic_rows_share_a_pass():
    (kernel,) = kernels_of(lambda x: torch.logsumexp(x, -1), torch.randn(6, 100), dynamic=True)
    assert loops(kernel) == 1


def test_a_later_shift_waits_for_what_it_needs():
    def function(x):
        top = x.amax(-1, keepdim=True)
        spread = (x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
        return torch.exp(x - (top + spread * 0)).sum(-1)

    # The mean, the maximum and the sum; then the spread, which the shift needs.
    (kernel,) = kernels_of(function, torch.randn(4, LONG))
    assert loops(kernel) == 2


def test_cross_entropy_reads_its_logits_once_and_writes_no_probabilities():
    logits, target = torch.randn(64, LONG), torch.randint(0, LONG, (64,))
    rows, total = kernels_of(F.cross_entropy, logits, target)
    assert loops(rows) == 1
    assert rows.count("store_x") == 2 * 2  # the maximum and the logarithm of each row
    assert loops(total) == 0


def test_an_index_from_data_is_not_put_into_index_arithmetic():
    def function(x, i):
        return (x.flip(0) * 2)[i]

    assert len(kernels_of(function, torch.randn(64), torch.randint(0, 64, (8,)))) == 2


GPU = Target(
    features=frozenset({"subgroup", "shader-f16"}),
    subgroup_sizes=(32, 32),
    max_workgroup_invocations=1024,
)


@pytest.mark.parametrize(("rows", "length", "barriers"), [(8192, 1024, 0), (64, 1024, 2)])
def test_rows_of_one_subgroup_have_no_barriers(rows, length, barriers):
    x = torch.empty(rows, length)
    (kernel,) = kernels_of(lambda x: F.layer_norm(x, (length,)), x, target=GPU)
    assert kernel.count("workgroupBarrier();") == barriers
    assert ("var<workgroup>" in kernel) == (barriers > 0)
    assert kernel.count("load4_x0(g") == length // 4 // (32 if barriers == 0 else 64)


def test_long_rows_exchange_pairs_in_subgroups():
    (kernel,) = kernels_of(lambda x: torch.logsumexp(x, -1), torch.empty(4, LONG), target=GPU)
    assert loops(kernel) == 1
    # 32 subgroups of 32 invocations: within each, then across them.
    assert kernel.count("subgroupShuffleXor(a2") == kernel.count("subgroupShuffleXor(a0") == 9


def test_one_row_of_a_large_table_does_not_turn_a_product():
    def function(x, weight, table, index):
        return x @ weight.t() + table[index]

    tensors = torch.empty(1, 64), torch.empty(64, 64), torch.empty(1000, 64)
    index = torch.tensor([3], dtype=torch.int32)
    (kernel,) = kernels_of(function, *tensors, index, target=GPU)
    assert "load4_x1(g" in kernel  # neighbouring invocations read a row of the weight
