"""What is measured: functions or models with random weights, and their inputs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import convolution_cases, kernel_cases
from .kernel_cases import Case

_SMALL_ENCODER = {
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "num_attention_heads": 3,
    "intermediate_size": 768,
}


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

    tiny = {"n_embd": 96, "n_head": 3, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**tiny if small else {})
    tokens = torch.randint(0, config.vocab_size, (1, 32 if small else 512))
    return Logits(GPT2LMHeadModel(config)).eval(), (tokens,)


class Hidden(nn.Module):
    """An encoder as tokens → hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).last_hidden_state


def static_cache(config: Any, positions: int, batch: int, dtype: torch.dtype, device: str) -> Any:
    """transformers' static cache of a model, with its memory."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=positions)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, heads, size, dtype, torch.device(device))
    return cache


class Decoder(nn.Module):
    """A language model with a static key-value cache: (token, position) → logits of the next token.

    The call changes the cache in place.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        super().__init__()
        self.model = model
        self.cache = static_cache(model.config, positions, 1, torch.float32, "cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Moves the cache with the module: it is no parameter or buffer."""
        super()._apply(fn, recurse)
        for layer in self.cache.layers:
            for name in ("keys", "values", "cumulative_length"):
                moved = fn(getattr(layer, name))
                torch._dynamo.mark_static_address(moved)  # as transformers does
                setattr(layer, name, moved)
            layer.device = layer.keys.device
        return self

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position)
        positions = position.reshape(1, 1)
        return self.model(token, past_key_values=self.cache, position_ids=positions).logits


def decode(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """One token of a model with the sizes of Qwen2.5-0.5B, in the middle of 1024 positions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=1000 if small else 151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2 if small else 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Decoder(Qwen2ForCausalLM(config), positions=1024).eval()
    return model, (torch.tensor([[7]]), torch.tensor(511))


def bert(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_SMALL_ENCODER if small else {})
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

    # An orthogonal matrix: 200 products with it neither overflow nor vanish.
    return chain, (torch.randn(16, 16), torch.linalg.qr(torch.randn(16, 16)).Q)


def tiny_call(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A model with 10 parameters: only the cost of a call."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
    return model.eval(), (torch.randn(4, 16),)


def vit(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**_SMALL_ENCODER if small else {}), add_pooling_layer=False)
    return Hidden(model).eval(), (torch.randn(1 if small else 8, 3, 224, 224),)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *kernel_cases.cases(),
        *convolution_cases.cases(),
        Case("dispatch_chain", dispatch_chain, goal="≤ 1.2 µs of host time per dispatch"),
        Case("tiny_call", tiny_call, goal="≤ 30 µs above Dynamo's floor", extra="call_overhead"),
        Case("mlp", mlp),
        Case("gpt2", gpt2, goal="≥ 1.0 × Inductor; 5 × faster than ONNX Runtime WebGPU"),
        Case("decode", decode, goal="≥ 55 % of one read of the weights; ≥ 2 × CUDA eager"),
        Case("bert", bert, goal="≥ 1.0 × Inductor"),
        Case("vit", vit, goal="≥ 1.0 × Inductor"),
        Case("resnet50", resnet50, goal="≥ 1.0 × Inductor"),
    )
}
