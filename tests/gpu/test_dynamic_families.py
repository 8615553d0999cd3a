"""One compiled function for a range of sizes, for every family of operators, forward and backward.

Each function is compiled with symbolic sizes at its first call; other sizes must compile nothing,
send nothing to the host, and give what PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(9)

SIZES = (17, 6, 70, 149)
"""Odd, small, larger than a tile of a matrix product, and than two."""

Function = Callable[..., Any]
Inputs = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class Family:
    """Functions of an operator family, compiled as one.

    Attributes:
        function: gives one or more tensors.
        inputs: the arguments for a size; floating-point ones ask for gradients.
        backward: whether there are gradients.
        sizes: which sizes are run.
        tolerance: relative and absolute, where sums are long.
    """

    function: Function
    inputs: Inputs
    backward: bool = True
    sizes: tuple[int, ...] = SIZES
    tolerance: float = 1e-4


def R(*sizes: int) -> Tensor:
    """Normally distributed numbers: the same for the same sizes."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def I(high: int, *sizes: int) -> Tensor:  # noqa: E743
    """Integers in [0, high)."""
    return torch.randint(high, sizes, generator=torch.Generator().manual_seed(high))


def distinct(*sizes: int) -> Tensor:
    """Different numbers in random order, so that no order depends on ties."""
    count = torch.Size(sizes).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return (order.float() / count - 0.5).reshape(sizes)


def pooled(x: Tensor) -> Any:
    return (
        F.max_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 2, ceil_mode=True),
        F.adaptive_avg_pool2d(x, (3, 2)),
    )


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    attention = F.scaled_dot_product_attention
    return (
        attention(q, k, v, is_causal=True),
        attention(q, k, v, attn_mask=mask),
    )


def normalized(x: Tensor, weight: Tensor) -> Any:
    return (
        F.layer_norm(x, (32,), weight),
        F.group_norm(x.transpose(-1, -2), 4, weight),
        F.batch_norm(x.flatten(0, 1), None, None, weight, training=True),
        F.softmax(x, 1),
        F.log_softmax(x, -1),
    )


def joined(x: Tensor, y: Tensor) -> Any:
    return (
        torch.cat([x, y, x * 2], 1),
        torch.stack([x, x + 1], 1),
        torch.cat([x[:, :2], y[:, 1:]], 1),
    )


def cut(x: Tensor) -> Any:
    n = x.shape[0]
    first, second = x.split([n // 2, n - n // 2])
    return (
        first * 2,
        second.sum(0),
        x.chunk(2, 1)[1] + 1,
        x.unbind(1)[2].exp(),
        x[n // 3 :: 2],
        x.select(0, n - 1),
        x.narrow(0, 1, n - 2).flip(0),
        x[:, -1],
        x.unfold(0, 3, 2),
    )


def padded(x: Tensor) -> Any:
    return (
        F.pad(x, (1, 2, 3, 0)),
        F.pad(x[None], (2, 1, 1, 2), mode="reflect"),
        F.pad(x[None], (2, 1, 1, 2), mode="replicate"),
        F.pad(x[None], (2, 1, 1, 2), mode="circular"),
        x.roll(3, 0),
    )


def created(x: Tensor) -> Any:
    n = x.shape[0]
    return (
        torch.arange(n) * 2,
        torch.arange(1, n, 2).float() / n,
        torch.ones(n, n // 2) * x.sum(),
        torch.linspace(0, 1, 7) + x[0],
        torch.eye(n) * x,
        torch.tril(torch.ones(n, n)),
        torch.full((n, 3), n),
    )


def convolved(x: Tensor, weight: Tensor, other: Tensor) -> Any:
    return (
        F.conv2d(x, weight, padding=1),
        F.conv1d(x[:, :, 0], weight[:, :, 0], stride=2),
        F.conv_transpose2d(x, other, stride=2),
    )


def multiplied(x: Tensor, y: Tensor, batch: Tensor) -> Any:
    return (
        x @ y,
        F.linear(x, y.t()),
        batch @ batch.transpose(1, 2),
        torch.einsum("ij,bkj->bik", x, batch),
        x @ y[:, 0],
    )


def reduced(x: Tensor) -> Any:
    return (
        x.sum(),
        x.mean(0),
        x.amax(1),
        x.var(1),
        x.std(),
        x.norm(dim=0),
        x.logsumexp(1),
        (x * 0.1 + 1).prod(1),
        x.max(1)[0],
        x.cumsum(1),
    )


def located(x: Tensor) -> Any:
    return (
        x.argmax(1),
        x.argmin(),
        (x > 0).any(0),
        (x > -9).all(),
        x.count_nonzero(1),
        x.max(1)[1],
        x.cummax(0)[1],
        torch.aminmax(x, dim=1),
    )


def scanned(x: Tensor) -> Any:
    return x.cumsum(0), x.cummax(1)[0], x.logcumsumexp(1), x.cumsum(1)


def sorted_rows(x: Tensor) -> Any:
    values, places = x.sort(1)
    return values, places, x.topk(3, 1, largest=False)[0]


def middle(x: Tensor) -> Any:
    return x.median(1)[0], x.kthvalue(2, 1)[0]


def diagonals(x: Tensor) -> Any:
    return x.diagonal(1).exp(), x.trace(), torch.diag(x), x.tril(1), x.triu(), torch.diag(x[0])


def gathered(x: Tensor, at: Tensor, table: Tensor) -> Any:
    return (
        x[at],
        x.index_select(0, at),
        x.gather(0, at[:, None].expand(-1, x.shape[1])),
        F.embedding(at, table),
        x.take(at),
        x[:, at % 3],
    )


def scattered(x: Tensor, at: Tensor) -> Any:
    spread = at[:, None].expand_as(x)
    zeros = torch.zeros(x.shape[0] + 3, x.shape[1])
    return (
        zeros.index_add(0, at, x),
        zeros.scatter_add(0, spread, x),
        zeros.index_put((at,), x, accumulate=True),
        zeros.scatter_reduce(0, spread, x, "mean", include_self=False),
    )


def scatter_extremes(x: Tensor, at: Tensor) -> Any:
    spread = at[:, None].expand_as(x)
    zeros = torch.zeros(x.shape[0] + 3, x.shape[1])
    return (
        zeros.scatter_reduce(0, spread, x, "amax", include_self=False),
        zeros.index_reduce(0, at, x, "prod", include_self=False),
    )


def shaped(x: Tensor) -> Any:
    n = x.shape[0]
    return (
        x.reshape(n // 1, 2, 4).transpose(1, 2).flatten(1),
        x.t().contiguous(),
        x[:, None].expand(-1, 3, -1).reshape(-1, 8),
        x.repeat(2, 1),
        x.repeat_interleave(2, 0),
        x.view(-1, 4).sum(0),
    )


def resized(x: Tensor) -> Any:
    return (
        F.interpolate(x, scale_factor=2, mode="nearest"),
        F.interpolate(x, size=(5, 9), mode="bilinear"),
        F.pixel_shuffle(x, 2),
        F.unfold(x, 3),
    )


def lost(x: Tensor, target: Tensor, y: Tensor) -> Any:
    return (
        F.cross_entropy(x, target),
        F.mse_loss(x, y),
        F.smooth_l1_loss(x, y),
        F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        F.cosine_similarity(x, y),
        F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    )


FAMILIES = {
    "pointwise": Family(
        lambda x, y: (F.gelu(x) * y[0], torch.where(x > 0, x, y), x / (y.exp() + 1)),
        lambda n: (R(n, 8), R(n, 8)),
    ),
    "reductions": Family(reduced, lambda n: (distinct(n, 2 * n + 1),)),
    "positions": Family(located, lambda n: (distinct(n, 2 * n + 1),), backward=False),
    "scans": Family(scanned, lambda n: (distinct(n, n + 3),)),
    "matmul": Family(multiplied, lambda n: (R(n, n + 3), R(n + 3, 2 * n), R(2, 5, n + 3))),
    "convolution": Family(
        convolved,
        lambda n: (R(2, 4, n, n + 1), R(5, 4, 3, 3), R(4, 2, 3, 3)),
        sizes=(17, 6, 40, 33),
    ),
    "attention": Family(
        attended, lambda n: (R(2, 3, n, 16), R(2, 3, n, 16), R(2, 3, n, 16), R(n, n))
    ),
    "pooling": Family(pooled, lambda n: (distinct(2, 3, n, n + 2),), sizes=(17, 6, 40, 33)),
    "normalization": Family(normalized, lambda n: (R(3, n, 32), R(32))),
    "joining": Family(joined, lambda n: (R(n, 4), R(n, n))),
    "cutting": Family(cut, lambda n: (R(n, 6),)),
    "padding": Family(padded, lambda n: (R(n, n + 2),)),
    "creation": Family(created, lambda n: (R(n),)),
    "sorting": Family(sorted_rows, lambda n: (distinct(5, n),)),
    "medians": Family(middle, lambda n: (distinct(5, n),)),
    "modes": Family(
        lambda x: (x.mode(1)[0], x.gather(1, x.mode(1, keepdim=True)[1])),
        lambda n: (I(5, 4, n),),
        backward=False,
    ),
    "diagonals": Family(diagonals, lambda n: (R(n, n + 2),)),
    "indexing": Family(gathered, lambda n: (R(n, 5), I(n, 2 * n), R(n, 3))),
    "scatters": Family(scattered, lambda n: (R(n, 5), I(n, n))),
    "scatter extremes": Family(scatter_extremes, lambda n: (distinct(n, 5), I(n, n))),
    "shapes": Family(shaped, lambda n: (R(n, 8),)),
    "resampling": Family(resized, lambda n: (R(1, 4, n, n + 1),), sizes=(17, 6, 40, 33)),
    "losses": Family(lost, lambda n: (R(n, n + 1), I(n, n), R(n, n + 1))),
    "searching": Family(
        lambda edges, x: (
            torch.searchsorted(edges.sort()[0], x),
            torch.histc(x, 8, -1, 1),  # rounds alike where (x + 1) * 8 is one operation
            torch.bucketize(x, edges.sort()[0], right=True),
        ),
        lambda n: (distinct(n), distinct(3, n)),
        backward=False,
    ),
    "bilinear": Family(
        F.bilinear,
        lambda n: (R(n, 4), R(n, 5), R(3, 4, 5)),
    ),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _gradients(function: Function, inputs: tuple[Any, ...], backward: bool) -> list[Any]:
    """The results and, with ``backward``, the gradients of a sum over them with weights."""
    inputs = tree_map_only(Tensor, Tensor.clone, inputs)
    asked = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    for x in asked if backward else ():
        x.requires_grad_()
    results = tree_leaves(function(*inputs))
    if not backward:
        return results
    outputs = [r for r in results if r.requires_grad]
    seeds = [torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape) for r in outputs]
    found = torch.autograd.grad(outputs, asked, seeds, allow_unused=True)
    return [r.detach() for r in results] + [g for g in found if g is not None]


# What PyTorch before 2.13 does not trace for every size.
LATER = {
    "pooling": "the sizes of max_pool2d depend on remainders",
    "diagonals": "the gradient of trace wants known sizes",
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # it is in beta
@pytest.mark.parametrize("name", FAMILIES)
def test_no_recompilation(name: str) -> None:
    """Equal to eager at every size, one compilation, and nothing on the host."""
    if name in LATER and torch.__version__ < (2, 13):
        pytest.skip(LATER[name])
    family = FAMILIES[name]
    compiled = torch.compile(family.function, backend="webgpu", dynamic=True, fullgraph=True)
    counters.reset()
    for k, size in enumerate(family.sizes):
        inputs = family.inputs(size)
        plans = counters.plans_compiled
        wanted = _gradients(family.function, inputs, family.backward)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = _gradients(compiled, inputs, family.backward)
        torch.testing.assert_close(got, wanted, rtol=family.tolerance, atol=family.tolerance)
        assert k == 0 or counters.plans_compiled == plans
    assert not counters.fallbacks
