"""Small graphs, one for each kind of kernel: their texts are committed beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_webgpu_compile import wgsl_op
from torch_webgpu_compile.torch_ops import int4

randn = torch.randn


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale * weight


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mixing(nn.Module):
    """Its softmax is computed once, not in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ F.softmax(self.weight, -1)


def queries_and_keys(
    x: torch.Tensor, norm: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y = rms_norm(x, norm)
    return F.linear(y, q), F.linear(y, k)


def attention_over_a_cache(
    keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, new: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    keys.index_copy_(2, at, new)
    values.index_copy_(2, at, torch.cat([-new[..., 8:], new[..., :8]], -1))
    return F.scaled_dot_product_attention(q, keys, values)


def attention_in_training(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dropout = True, 0.25, seed, 0.1
    output, logsumexp = torch.ops.webgpu.attention(q, k, v, None, *dropout)
    delta = (grad * output).sum(-1)
    inputs = grad, q, k, v, None, logsumexp, delta
    return output, *torch.ops.webgpu.attention_backward(*inputs, *dropout)


def depthwise_gradients(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    options = [2, 2], [1, 0], [1, 1], False, [0, 0], 2, [True, True, False]
    made = torch.ops.aten.convolution_backward(grad, x, w, None, *options)
    return made[0], made[1]


GATE = """
const low = 0.1;
fn gate(x: f32, y: f32) -> vec2f { return vec2f(select(low, x, x > low), x * y); }
"""
MIRROR = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> count: u32;
@compute @workgroup_size(64)
fn mirror(@builtin(global_invocation_id) id: vec3u) {
  if (id.x < count) { y[id.x] = x[count - 1 - id.x]; }
}
"""
gate = wgsl_op("golden::gate", GATE)
mirror = wgsl_op(
    "golden::mirror",
    MIRROR,
    outputs=lambda x: x.shape,
    grid=lambda x: -(-x.shape[0] // 64),
    uniforms=lambda x: {"count": x.shape[0]},
)


def user_operators(x: torch.Tensor) -> torch.Tensor:
    first, second = gate(x * 2, 3)
    return mirror(torch.relu(first) + second)


# name: (function, arguments, whether sizes are symbolic)
GRAPHS: dict[str, tuple[Callable[..., Any], list[torch.Tensor], bool]] = {
    "pointwise_of_several_outputs": (
        lambda x, y: (torch.relu(x + y), (x - y).to(torch.bfloat16)),
        [randn(5, 12), randn(12)],
        False,
    ),
    "foreach": (
        lambda x, y, z: tuple(torch.relu(t) * 2 for t in (x, y, z)),
        [randn(40, 100), randn(7), randn(40, 6)[:, ::2]],
        False,
    ),
    "packed_and_masked": (
        lambda x: F.pad(torch.cat([x, x[:, 1:]], 1), (1, 2)) > 1,
        [torch.zeros(3, 5, dtype=torch.uint8)],
        False,
    ),
    "packed_weight": (
        int4.linear,
        [
            torch.zeros(1, 256, dtype=torch.bfloat16),
            torch.zeros(260, 128, dtype=torch.int8),
            *torch.zeros(2, 8, 260, dtype=torch.bfloat16),
        ],
        False,
    ),
    "user_operators": (user_operators, [randn(10)], True),
    "softmax": (lambda x: torch.softmax(x, -1), [randn(6, 100)], False),
    "transpose": (
        lambda x, y: x.mT.contiguous() + y,
        [randn(2, 132, 130), randn(2, 130, 132)],
        False,
    ),
    "long_softmax": (lambda x: torch.softmax(x, -1), [randn(2, 40964)], False),
    "column_sum": (lambda x: x.sum(0), [randn(300, 8)], False),
    "split_mean_square": (F.mse_loss, [randn(512, 1024), randn(512, 1024)], False),
    "gelu_linear": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        [randn(20, 16), randn(24, 16), randn(24)],
        False,
    ),
    "sibling_linears": (
        lambda x, q, k, b: (F.linear(x, q, b), torch.relu(F.linear(x, k))),
        [randn(20, 16), randn(24, 16), randn(8, 16), randn(24)],
        False,
    ),
    "linear_of_bytes": (
        lambda x, w, scale: torch._int_mm(x, w.t()) * scale,
        [
            torch.ones(64, 48, dtype=torch.int8),
            torch.ones(32, 48, dtype=torch.int8),
            torch.ones(64, 1),
        ],
        False,
    ),
    "gated_linear": (
        lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
        [randn(20, 16), randn(24, 16), randn(24, 16)],
        False,
    ),
    "convolution": (
        lambda x, w: torch.relu(F.conv2d(x, w, stride=2, padding=1)),
        [randn(1, 3, 9, 9), randn(4, 3, 3, 3)],
        False,
    ),
    "depthwise_convolution": (
        lambda x, w: torch.relu(F.conv2d(x, w, padding=1, groups=2)),
        [randn(1, 2, 6, 8), randn(2, 1, 3, 3)],
        False,
    ),
    "depthwise_gradients": (
        depthwise_gradients,
        [randn(2, 2, 4, 3), randn(2, 2, 8, 6), randn(2, 1, 3, 2)],
        False,
    ),
    "channels_last_convolutions": (
        lambda x, w, v: F.conv2d(F.relu(F.conv2d(x, w)), v, padding=1).sum((2, 3)),
        [randn(2, 4, 14, 14), randn(8, 4, 3, 3), randn(8, 8, 3, 3)],
        False,
    ),
    "attention": (attention, [randn(1, 2, 8, 16) for _ in range(3)], False),
    "attention_in_training": (
        attention_in_training,
        [*(randn(1, 2, 8, 16) for _ in range(4)), torch.tensor([3, 5], dtype=torch.int32)],
        False,
    ),
    "gather": (
        lambda table, i: F.embedding(i, table) * 2,
        [randn(10, 8), torch.zeros(3, 4, dtype=torch.int64)],
        False,
    ),
    "prepared_weight": (Mixing(), [randn(3, 16)], False),
    "joint_products": (
        queries_and_keys,
        [randn(1, 1, 64), randn(64), randn(48, 64), randn(24, 64)],
        False,
    ),
    "attention_over_a_cache": (
        attention_over_a_cache,
        [
            *(randn(1, 2, 130, 16) for _ in range(2)),
            *(randn(1, 2, 1, 16) for _ in range(2)),
            torch.tensor([5]),
        ],
        False,
    ),
    "factors": (
        lambda x: (torch.linalg.lu_factor_ex(x * 2), torch.linalg.cholesky_ex(x)),
        [randn(3, 5, 5)],
        False,
    ),
    "windowed_fourier_transform": (
        lambda x, window: torch.ops.webgpu.rfft(x * window, [1], 1.0),
        [randn(5, 20), randn(20)],
        False,
    ),
    "symbolic_rms_norm": (rms_norm, [randn(4, 6, 32), randn(32)], True),
}
