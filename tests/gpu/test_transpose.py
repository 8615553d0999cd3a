"""Kernels between two memory orders, against eager PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.providers import require_float64
from torch_webgpu_compile.ir import transposition
from torch_webgpu_compile.ir.transposition import TransposeTiling
from torch_webgpu_compile.plan import cache as plan_cache

pytestmark = pytest.mark.rotates(6)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    torch.manual_seed(0)
    original = transposition.choose_transpose_tiling

    def choose(inner, outer, numel, nbytes, target, lanes):
        return original(inner, outer, numel, nbytes, replace(target, software=False), lanes)

    # Software adapters, which have no tiles of their own, test them all the same. Plans are
    # remembered by what they compute, not by a patched choice.
    monkeypatch.setattr(transposition, "choose_transpose_tiling", choose)
    plan_cache.clear()
    yield
    plan_cache.clear()


def filled(sizes, dtype=torch.float32) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(sizes) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 100, sizes).to(dtype)
    x = torch.randn(sizes).to(dtype)
    x.view(-1)[::97] = math.nan
    x.view(-1)[::131] = -math.inf
    return x


def check(function, *arguments):
    """Compares values and strides with eager PyTorch."""
    compiled = torch.compile(function, backend="webgpu", dynamic=False, fullgraph=True)
    got, wanted = compiled(*arguments), function(*arguments)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        assert g.stride() == w.stride()


FUNCTIONS = {
    "plain": lambda x, y: x.transpose(-1, -2).contiguous(),
    "with the order of the output": lambda x, y: (x.transpose(-1, -2) * 2 + y).contiguous(),
    "both orders of one": lambda x, y: (x[..., :64, :64] + x[..., :64, :64].mT).contiguous(),
    "two outputs": lambda x, y: ((x.mT + 1).contiguous(), x.mT * y),
    "several inputs": lambda x, y: ((x + 1) * (x * y.mT)).mT.contiguous() - y,
    "of a slice": lambda x, y: x[..., 3:, 1:].mT.contiguous(),
    "steps": lambda x, y: x[..., ::2, ::3].mT.contiguous(),
    "masked": lambda x, y: torch.nn.functional.pad(x.mT, (1, 2, 3, 4)).contiguous(),
    "broadcast": lambda x, y: (x.mT + x[..., 0].unsqueeze(-2) + x[..., 0, :].unsqueeze(-1)) * 2,
}


@pytest.mark.parametrize(
    "sizes", [(256, 192), (203, 331), (4, 100, 132), (2, 1, 3, 97, 65)], ids=str
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_dimensions(name, sizes):
    *batch, rows, columns = sizes
    x, y = filled(sizes), filled((*batch, columns, rows))
    check(FUNCTIONS[name], x, y)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float64,
        torch.int16,
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(256, 192), (203, 331)], ids=str)
def test_dtypes(dtype, sizes):
    if dtype is torch.float64:
        require_float64()
    x = filled(sizes, dtype)
    check(lambda x: x.t().contiguous(), x)
    check(lambda x: (x.t().contiguous(), x.t() != 0), x)


@pytest.mark.parametrize(
    "order", [(0, 2, 1, 3), (3, 2, 1, 0), (0, 2, 3, 1), (1, 0, 3, 2), (3, 0, 1, 2)], ids=str
)
def test_permutations(order):
    check(lambda x: x.permute(order).contiguous(), filled((8, 20, 36, 24)))
    check(lambda x: torch.relu(x.permute(order)).contiguous(), filled((7, 19, 33, 21)))


@pytest.mark.parametrize("sizes", [(2, 64, 28, 28), (3, 33, 30, 17)], ids=str)
def test_memory_formats(sizes):
    x = filled(sizes)
    check(lambda x: x.to(memory_format=torch.channels_last), x)
    last = x.to(memory_format=torch.channels_last)
    check(lambda x: (x + 1).to(memory_format=torch.contiguous_format), last)
    bias = torch.randn(sizes[1])
    check(
        lambda x, b: torch.relu(x + b.view(1, -1, 1, 1)).to(memory_format=torch.channels_last),
        x,
        bias,
    )


@pytest.mark.parametrize(
    "tiling",
    [
        TransposeTiling(64, 64, 256, 4, 4),
        TransposeTiling(64, 64, 256, 1, 1),
        TransposeTiling(32, 64, 128, 1, 4),
        TransposeTiling(64, 32, 256, 4, 1),
        TransposeTiling(16, 16, 64, 1, 1),
    ],
    ids=str,
)
def test_tilings(tiling, monkeypatch):
    monkeypatch.setattr(transposition, "choose_transpose_tiling", lambda *_: tiling)
    for sizes in ((132, 68), (3, 36, 100), (64, 128)):
        plan_cache.clear()
        torch._dynamo.reset()
        check(lambda x: torch.relu(x).mT.contiguous(), filled(sizes))


def test_a_wrong_size_is_left_alone():
    check(lambda x: x.t().contiguous(), torch.zeros(0, 64))
    check(lambda x: x.t().contiguous(), filled((3, 40_000)))


def test_symbolic_sizes():
    compiled = torch.compile(lambda x: x.t().contiguous(), backend="webgpu", dynamic=True)
    for sizes in ((200, 300), (64, 1024)):
        x = filled(sizes)
        torch.testing.assert_close(compiled(x), x.t().contiguous(), equal_nan=True)
