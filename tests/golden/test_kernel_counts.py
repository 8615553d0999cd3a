"""How many kernels a function becomes. No adapter: the target is plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_webgpu_compile.backend import compile_graph, native_operators
from torch_webgpu_compile.capture import aot
from torch_webgpu_compile.captured import CapturedGraph
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan.model import Dispatch
from torch_webgpu_compile.target import Target

DESKTOP = Target(
    name="desktop",
    max_binding_nbytes=(2 << 30) - 4,
    max_buffer_nbytes=4 << 30,
    max_workgroup_invocations=1024,
    max_workgroup_nbytes=48 << 10,
)
BROWSER = Target(name="browser", features=frozenset())


def kernels_of(
    function: Callable[..., Any], *inputs: Tensor, target: Target = DESKTOP
) -> list[str]:
    """Names of the kernels in the order of their dispatches; a host call fails."""
    found: list[str] = []

    def compile_captured(captured: CapturedGraph, phase: aot.Phase) -> Callable[..., Any]:
        plan = compile_graph(captured, phase, target, CompileOptions(fallback="error")).plan
        dispatches = [step for step in plan.steps if isinstance(step, Dispatch)]
        assert len(dispatches) == len(plan.steps)
        found.extend(plan.kernels[step.kernel].name for step in dispatches)

        def run(arguments: list[Any]) -> Any:
            return captured.module(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        return aot.capture(module, examples, compile_captured, native_operators())

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return found


def mean_squared_error(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def several_outputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.exp(x) * y
    return z, torch.sin(z) + x, (z > y).to(torch.int32)


def root_mean_square_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight


WIDE = torch.randn(64, 512)
ROW = torch.randn(512)

COUNTS: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], int]] = [
    ("pointwise chain", lambda x: torch.relu(x * 2 + 1).sigmoid() - x, (WIDE,), 1),
    ("pointwise tree", several_outputs, (WIDE, WIDE), 1),
    ("views are free", lambda x: x.t().reshape(8, 64, 64)[:, 3:, ::2] * 2, (WIDE,), 1),
    (
        "gelu(x @ w + b)",
        lambda x, w, b: F.gelu(x @ w + b),
        (WIDE, torch.randn(512, 256), ROW[:256]),
        1,
    ),
    ("linear with residual", lambda x, w: x + F.linear(x, w), (WIDE, torch.randn(512, 512)), 1),
    ("softmax", lambda x: torch.softmax(x, -1), (WIDE,), 1),
    ("log softmax", lambda x: torch.log_softmax(x, -1), (WIDE,), 1),
    ("layer norm", lambda x, w, b: F.layer_norm(x, (512,), w, b), (WIDE, ROW, ROW), 1),
    (
        "softmax of layer norm",
        lambda x, w, b: torch.softmax(F.layer_norm(x, (512,), w, b), -1),
        (WIDE, ROW, ROW),
        1,
    ),
    ("RMS norm", root_mean_square_norm, (WIDE, ROW), 1),
    ("reduction of a chain", lambda x: (x * 2).exp().sum(dim=1).sqrt(), (WIDE,), 1),
    ("two reductions", lambda x: (x.sum(dim=1), x.amax(dim=1)), (WIDE,), 1),
]


@pytest.mark.parametrize(
    ("function", "inputs", "count"), [row[1:] for row in COUNTS], ids=[row[0] for row in COUNTS]
)
@pytest.mark.parametrize("target", [DESKTOP, BROWSER], ids=lambda target: target.name)
def test_kernel_count(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], count: int, target: Target
) -> None:
    assert len(kernels_of(function, *inputs, target=target)) == count


def test_mean_squared_error() -> None:
    x = torch.randn(1 << 20)
    assert len(kernels_of(mean_squared_error, x, x)) <= 2


def test_batch_norm_and_relu_join_the_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).eval()
    assert len(kernels_of(model, torch.randn(2, 16, 20, 20))) == 1


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, features: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, features = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.output(attention.transpose(1, 2).reshape(rows, tokens, features))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def test_transformer_block() -> None:
    kernels = kernels_of(Block().eval(), torch.randn(2, 64, 256))
    assert len(kernels) <= 9, kernels


def test_layers_share_kernels() -> None:
    model = nn.Sequential(*[Block() for _ in range(4)]).eval()
    kernels = kernels_of(model, torch.randn(2, 64, 256))
    assert len(set(kernels)) <= len(kernels_of(Block().eval(), torch.randn(2, 64, 256))) + 2, (
        kernels
    )
