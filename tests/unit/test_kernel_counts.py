"""How many kernels common compositions become, without an adapter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compilations import compile_function

pytestmark = pytest.mark.rotates(6)

# (batch, dtype, whether sizes are symbolic): not the whole grid, which takes minutes
VARIANTS = [
    pytest.param(1, torch.float32, None, id="one"),
    pytest.param(2, torch.float32, True, id="dynamic", marks=pytest.mark.slow),
    pytest.param(2, torch.bfloat16, None, id="bf16", marks=pytest.mark.slow),
]


def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, dtype=dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def standardize(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def written_softmax(x: torch.Tensor) -> torch.Tensor:
    grown = torch.exp(x - x.amax(-1, keepdim=True))
    return grown / grown.sum(-1, keepdim=True)


def several_outputs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.exp(x) * y
    return z, torch.sin(z) + x, (z > y).to(torch.int32)


# name: (function, sizes of its arguments for a batch, kernels at most)
ROWS = {
    "pointwise_chain": (lambda x: torch.relu(x * 2 + 1).sigmoid() - x, lambda n: [(n, 8, 64)], 1),
    "several_outputs": (several_outputs, lambda n: [(n, 8, 64), (n, 8, 64)], 1),
    "views": (lambda x: x.transpose(0, 1)[3:, :, ::2] * 2, lambda n: [(n, 8, 64)], 1),
    "reduction_of_a_chain": (
        lambda x: (x * 2).exp().sum(dim=-1).sqrt(),
        lambda n: [(n, 8, 64)],
        1,
    ),
    "two_reductions": (lambda x: (x.sum(-1), x.amax(-1)), lambda n: [(n, 8, 64)], 1),
    "gelu_linear": (lambda x, w, b: F.gelu(x @ w + b), lambda n: [(n, 8, 16), (16, 32), (32,)], 1),
    "gelu_linear_2d": (
        lambda x, w, b: F.gelu(x @ w + b),
        lambda n: [(n * 7, 16), (16, 9), (9,)],
        1,
    ),
    "tanh_gelu_linear_odd": (
        lambda x, w, b: F.gelu(x @ w + b, approximate="tanh"),
        lambda n: [(n, 7, 13), (13, 17), (17,)],
        1,
    ),
    "linear_residual": (
        lambda x, w, y: y + F.linear(x, w),
        lambda n: [(n, 8, 16), (32, 16), (n, 8, 32)],
        1,
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        lambda n: [(n, 8, 64), (64,), (64,)],
        1,
    ),
    "layer_norm_odd": (lambda x: F.layer_norm(x, (37,)), lambda n: [(n, 5, 37)], 1),
    "layer_norm_long": (lambda x: F.layer_norm(x, (4096,)), lambda n: [(n * 5, 4096)], 1),
    "layer_norm_of_two": (lambda x: F.layer_norm(x, (8, 64)), lambda n: [(n, 8, 64)], 1),
    "standardize": (standardize, lambda n: [(n, 8, 64)], 1),
    "softmax": (lambda x: torch.softmax(x, -1), lambda n: [(n, 8, 64)], 1),
    "softmax_odd": (lambda x: torch.softmax(x, -1), lambda n: [(n, 77)], 1),
    "softmax_columns": (lambda x: torch.softmax(x, 1), lambda n: [(n, 8, 64)], 1),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), lambda n: [(n, 8, 64)], 1),
    "written_softmax": (written_softmax, lambda n: [(n, 8, 64)], 1),
    "softmax_of_layer_norm": (
        lambda x, w, b: torch.softmax(F.layer_norm(x, (64,), w, b), -1),
        lambda n: [(n, 8, 64), (64,), (64,)],
        1,
    ),
    "softmax_of_layer_norm_odd": (
        lambda x: torch.softmax(F.layer_norm(x, (33,)), -1),
        lambda n: [(n, 33)],
        1,
    ),
    "rms_norm": (rms_norm, lambda n: [(n, 8, 64), (64,)], 1),
    "rms_norm_of_pytorch": (lambda x, w: F.rms_norm(x, (64,), w), lambda n: [(n, 8, 64), (64,)], 1),
    "mean_square": (F.mse_loss, lambda n: [(n, 8, 64), (n, 8, 64)], 2),
    "mean_square_large": (
        lambda x, y: ((x - y) ** 2).mean(),
        lambda n: [(n, 512, 1024), (n, 512, 1024)],
        2,
    ),
    "mean_square_keepdim": (
        lambda x, y: ((x - y) ** 2).mean((0, 1, 2), keepdim=True),
        lambda n: [(n, 8, 64), (n, 8, 64)],
        2,
    ),
}


@pytest.mark.parametrize(("batch", "dtype", "dynamic"), VARIANTS)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, batch, dtype, dynamic):
    function, sizes_of, limit = ROWS[name]
    arguments = [randn(*sizes, dtype=dtype) for sizes in sizes_of(batch)]
    state = compile_function(function, *arguments, dynamic=dynamic)
    names = [kernel.name for kernel in state.plan.kernels]
    assert state.plan.dispatch_count <= limit, names


class ConvNormReLU(nn.Module):
    def __init__(self, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize(("batch", "dtype", "dynamic"), VARIANTS)
@pytest.mark.parametrize("groups", [1, 4])
def test_batch_norm_and_relu_join_the_convolution(batch, groups, dtype, dynamic):
    module = ConvNormReLU(groups).eval().to(dtype)
    state = compile_function(module, randn(batch, 4, 8, 8, dtype=dtype), dynamic=dynamic)
    assert state.plan.dispatch_count == 1, state.plan.kernels


class Block(nn.Module):
    """A pre-norm transformer block; subclasses choose the projections of attention."""

    def __init__(self, size=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.packed = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def split(self, x):
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def projections(self, x):
        return self.query(x), self.key(x), self.value(x)

    def attend(self, x):
        q, k, v = map(self.split, self.projections(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PackedBlock(Block):
    def projections(self, x):
        return self.packed(x).chunk(3, -1)


class MultiheadBlock(Block):
    def __init__(self, size=64, heads=4):
        super().__init__(size, heads)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)

    def attend(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class WrittenBlock(Block):
    """As nanoGPT and minGPT write attention out."""

    def __init__(self, size=64, heads=4):
        super().__init__(size, heads)
        self.register_buffer("mask", torch.ones(1, 1, 16, 16).tril())

    def attend(self, x):
        q, k, v = map(self.split, self.projections(x))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        length = x.size(1)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(x.shape))


@pytest.mark.parametrize(
    ("batch", "dtype", "dynamic"),
    [
        VARIANTS[0],
        pytest.param(2, torch.float32, True, id="dynamic", marks=pytest.mark.slow),
        VARIANTS[2],
    ],
)
@pytest.mark.parametrize("shape", [(8, 64), (7, 48)])
@pytest.mark.parametrize("kind", [Block, PackedBlock, MultiheadBlock, WrittenBlock])
def test_transformer_block(kind, shape, batch, dtype, dynamic):
    module = kind(shape[-1]).eval().to(dtype)
    state = compile_function(module, randn(batch, *shape, dtype=dtype), dynamic=dynamic)
    names = [kernel.name for kernel in state.plan.kernels]
    assert state.plan.dispatch_count <= 8, names


def test_identical_layers_share_their_kernels():
    layers = nn.Sequential(*(Block() for _ in range(4))).eval()
    state = compile_function(layers, randn(2, 8, 64))
    one = compile_function(Block().eval(), randn(2, 8, 64))
    assert len(state.plan.kernels) <= len(one.plan.kernels) + 2
    assert state.plan.dispatch_count <= 4 * one.plan.dispatch_count
