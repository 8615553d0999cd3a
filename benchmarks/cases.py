"""What is measured: functions or models with random weights, and their inputs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Build = Callable[[bool], tuple[Callable[..., Any], tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
        name: on the command line and in results.
        build: (small) → (function or module, CPU inputs).
        nbytes: (small) → bytes that any implementation must read and write; 0: not of interest.
        flops: (small) → floating-point operations; 0: not of interest.
        goal: what the project wants of it.
        extra: another measurement of this case, by name: see `webgpu.EXTRAS`.
    """

    name: str
    build: Build
    nbytes: Callable[[bool], int] = lambda small: 0
    flops: Callable[[bool], int] = lambda small: 0
    goal: str = ""
    extra: str = ""


def _rows(small: bool) -> int:
    """Rows of 4,096 f32: 256 MiB, or 4 MiB."""
    return 256 if small else 16384


def pointwise_chain(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def chain(x: Tensor) -> Tensor:
        y = torch.relu(x * 1.5 + 0.25)
        return y * torch.sigmoid(y) - x.abs()

    return chain, (torch.randn(_rows(small), 4096),)


def softmax(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda x: torch.softmax(x, dim=-1), (torch.randn(_rows(small), 4096),)


def layer_norm_softmax(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    weight, bias = torch.randn(1024), torch.randn(1024)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(F.layer_norm(x, (1024,), weight, bias), dim=-1)

    return function, (torch.randn(512 if small else 32768, 1024), weight, bias)


def _matmul_size(small: bool) -> int:
    return 512 if small else 4096


def matmul(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    n = _matmul_size(small)
    return torch.matmul, (torch.randn(n, n), torch.randn(n, n))


def mlp(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    layers = [
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    ]
    return nn.Sequential(*layers).eval(), (torch.rand(8 if small else 64, 784),)


class Logits(nn.Module):
    """A language model as tokens → logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def gpt2(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The 124M model, 12 layers also when small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = Logits(GPT2LMHeadModel(GPT2Config())).eval()
    return model, (torch.randint(0, 50257, (1, 32 if small else 512)),)


class Hidden(nn.Module):
    """An encoder as tokens → hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).last_hidden_state


def bert(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=2 if small else 12)
    model = Hidden(BertModel(config, add_pooling_layer=False)).eval()
    return model, (torch.randint(0, 30000, (1 if small else 8, 128)),)


class Classifier(nn.Module):
    """An image classifier as images → logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def resnet50(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    side, batch = (64, 1) if small else (224, 8)
    images = torch.randn(batch, 3, side, side)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(images)  # statistics of real activations, so that they keep their scale
    return Classifier(model).eval(), (images,)


def dispatch_chain(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """200 matrix products of 16×16 that nothing can fuse: only the cost of dispatches."""

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(200):
            x = x @ w
        return x

    return chain, (torch.randn(16, 16), torch.randn(16, 16) / 4)


def tiny_call(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A model with 10 parameters: only the cost of a call."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
    return model.eval(), (torch.randn(4, 16),)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "pointwise_chain",
            pointwise_chain,
            nbytes=lambda small: 2 * 4 * 4096 * _rows(small),
            goal="≥ 85 % of copy bandwidth",
        ),
        Case(
            "softmax",
            softmax,
            nbytes=lambda small: 2 * 4 * 4096 * _rows(small),
            goal="≥ 85 % of copy bandwidth",
        ),
        Case(
            "layer_norm_softmax",
            layer_norm_softmax,
            nbytes=lambda small: 2 * 4 * 1024 * (512 if small else 32768),
        ),
        Case(
            "matmul",
            matmul,
            flops=lambda small: 2 * _matmul_size(small) ** 3,
            goal="≥ 60 % of cuBLAS, f32",
        ),
        Case("dispatch_chain", dispatch_chain, goal="≤ 2 µs of host time per dispatch"),
        Case("tiny_call", tiny_call, goal="≤ 30 µs above Dynamo's floor", extra="call_overhead"),
        Case("mlp", mlp),
        Case("gpt2", gpt2, goal="5 × faster than ONNX Runtime WebGPU"),
        Case("bert", bert),
        Case("resnet50", resnet50),
    )
}
