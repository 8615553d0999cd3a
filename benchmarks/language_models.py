"""Language models with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_webgpu_compile.device.packed_modules import PackedLinear
from torch_webgpu_compile.torch_ops import gguf


@dataclass(frozen=True)
class Geometry:
    """Of a model. ``kind``: a model type of transformers."""

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    def config(self) -> Any:
        """For transformers."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.kind,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=1 << 16,
            pad_token_id=None,
        )


LLAMA_1B = Geometry("llama", 2048, 16, 32, 8, 8192, 32000)
"""Llama 3.2 1B, with a vocabulary of 32,000."""

QWEN_HALF_B = Geometry("qwen2", 896, 24, 14, 2, 4864, 151_936, tied=True)
"""Qwen2.5 0.5B."""


def language_model(geometry: Geometry, dtype: torch.dtype, weights: str | None, device: str) -> Any:
    """transformers' model, for inference; its ``generate`` stops at no token.

    Args:
        weights: of linear layers, "int8" (per channel) or "int4" (groups of 32), by torchao, or a
            format of GGUF files; None: as ``dtype`` says.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(geometry.config(), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    if weights is not None:
        quantize(model, weights)
    return model


def quantize(model: nn.Module, weights: str) -> None:
    """Makes the weights of linear layers what `language_model` says."""
    if weights in gguf.FORMATS:
        pack(model, gguf.FORMATS[weights])
        return
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if weights == "int8" else Int4WeightOnlyConfig(group_size=32)
    quantize_(model, config)


def pack(model: nn.Module, form: gguf.Format) -> None:
    """Puts layers with random weights of a GGUF file's format where there are linear ones."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear):
            sizes = module.in_features, module.out_features
            made = PackedLinear(*sizes, form.number, False)
            words = torch.randint(-(1 << 31), 1 << 31, made.weight.shape, dtype=torch.int32)
            *others, _, _ = form.words(module.in_features)
            words[:, sum(others) :] = _SCALES
            made.weight.data, made.bias = words.to(module.weight.device), module.bias
            model.set_submodule(name, made)


_SCALES = 0x0C000C00  # two half floats of 2 ** -12
