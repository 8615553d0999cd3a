"""Products of few rows, and of packed weights: each element is read once, as it is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]


def bytes_and_scales(rows: int, length: int) -> tuple[Tensor, ...]:
    return torch.randint(-128, 128, (rows, length), dtype=torch.int8), torch.rand(rows, 1) / 64


def of_bytes(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale


def words_and_groups(rows: int, length: int) -> tuple[Tensor, ...]:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, length // 8), dtype=torch.int32)
    return words, *torch.rand(2, rows, length // 16, 1)


def of_words(words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    levels = ((words[..., None] >> shifts) & 15).reshape(*scale.shape[:2], -1)
    return (levels.float() * scale.float() - zero.float()).flatten(1)


def pairs_and_groups(rows: int, length: int) -> tuple[Tensor, ...]:
    pairs = torch.randint(-128, 128, (rows, length // 2), dtype=torch.int8)
    return pairs, torch.rand(length // 16, rows)


def of_pairs(pairs: Tensor, scale: Tensor) -> Tensor:
    """With scales whose neighbours are of other rows."""
    shifts = torch.arange(28, 20, -4, dtype=torch.int32, device=pairs.device)
    levels = ((pairs[..., None].to(torch.int32) << shifts) >> 28).reshape(len(pairs), -1, 16)
    return (levels.float() * scale.t()[..., None]).flatten(1)


PACKED: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "bytes": (bytes_and_scales, of_bytes),
    "words": (words_and_groups, of_words),
    "pairs": (pairs_and_groups, of_pairs),
}


def check(function: Callable[..., Tensor], *arguments: Tensor, dispatches: int = 1) -> None:
    compiled = torch.compile(function, backend="webgpu", dynamic=False)
    compiled(*arguments)
    before = counters.dispatches
    got = compiled(*arguments)
    assert counters.dispatches - before == dispatches
    wanted = function(*(a.double() if a.is_floating_point() else a for a in arguments))
    length = arguments[0].shape[-1]
    # Of sums in float32, whose errors grow as a random walk; 16 bits round the result as well.
    eps = 1e-2 if got.dtype.itemsize == 2 else 1e-5
    assert_close(got.double(), wanted.double(), rtol=eps, atol=eps * length**0.5)


# Rows of one loop and its rest, of one access only, and of none that is whole.
@pytest.mark.parametrize("length", [48, 1040, 9248])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", PACKED)
def test_packed(kind: str, rows: int, length: int) -> None:
    make, dequantize = PACKED[kind]

    def function(x: Tensor, *weight: Tensor) -> Tensor:
        return F.linear(x, dequantize(*weight).to(x.dtype))

    check(function, torch.randn(rows, length), *make(37, length))


@pytest.mark.parametrize("rows", [1, 3])
def test_scales_of_half_precision(rows: int) -> None:
    """One access has several of them."""

    def function(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return F.linear(x, of_words(words, scale, zero).to(x.dtype))

    words, _, _ = words_and_groups(24, 512)
    scales = torch.rand(2, 24, 128, 1)  # groups of four
    for dtype in (torch.float16, torch.bfloat16):
        check(function, torch.randn(rows, 512), words, *(s.to(dtype) for s in scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 7, 8, 16])
def test_few_rows(rows: int, dtype: torch.dtype) -> None:
    """Alone, as a pair whose product is wanted, and as siblings of different widths."""
    x, gate, up = (torch.randn(n, 136).to(dtype) for n in (rows, 70, 70))
    check(F.linear, x, gate)
    check(lambda x, w: (x @ w.t()).relu() + 1, x, gate[:64])
    pair = F.linear(x.double(), gate.double()), F.linear(x.double(), up.double())
    compiled = torch.compile(
        lambda x, w, v: (F.silu(F.linear(x, w)) * F.linear(x, v), F.linear(x, w[:33])),
        backend="webgpu",
        dynamic=False,
    )
    both, part = compiled(x, gate, up)
    # With 16 bits, each of the products is rounded.
    eps = 5e-2 if dtype.itemsize == 2 else 1e-4
    assert_close(both.double(), F.silu(pair[0]) * pair[1], rtol=eps, atol=10 * eps)
    assert_close(part.double(), pair[0][:, :33], rtol=eps, atol=10 * eps)


@pytest.mark.parametrize("inner", [1, 4, 12, 33])
def test_few_rows_of_few_terms(inner: int) -> None:
    """Sums that one invocation has alone, or a few."""
    check(F.linear, torch.randn(8, inner), torch.randn(6, inner))
    check(F.linear, torch.randn(5, inner), torch.randn(40, inner))
    gated = torch.randn(3, inner), torch.randn(12, inner), torch.randn(12, inner)
    check(lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), *gated)


def test_few_rows_of_batches_and_integers() -> None:
    check(lambda x, w: torch.bmm(x, w.mT), torch.randn(3, 5, 64), torch.randn(3, 40, 64))
    x, w = (torch.randint(-9, 9, (n, 64), dtype=torch.int32) for n in (7, 40))
    assert torch.equal(torch.compile(lambda x, w: x @ w.t(), backend="webgpu")(x, w), x @ w.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_few_rows_of_chosen_matrices(dtype: torch.dtype) -> None:
    """Accesses that several elements share are at a place that an index tensor says."""
    x, matrices = torch.randn(3, 4, 128), (4 * torch.randn(5, 40, 128)).to(dtype)
    x = x.to(torch.float32 if dtype is torch.int8 else dtype)
    chosen = torch.tensor([4, 0, -2])
    check(lambda x, w, i: torch.bmm(x, w[i].mT.to(x.dtype)), x, matrices, chosen)
    check(lambda x, w, i: torch.bmm(x[:, :1], w[i].mT.to(x.dtype)), x, matrices, chosen)
