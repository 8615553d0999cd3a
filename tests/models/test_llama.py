"""Llama and Qwen2: rotary embedding, RMS norm, gated MLP, grouped-query attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(12)

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "use_cache": False,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=8)).eval()


def llama_grouped() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def qwen2() -> nn.Module:
    config = Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [llama, llama_grouped, qwen2])
def test_causal_language_model(build: type[nn.Module], dtype: torch.dtype) -> None:
    check_forward(build().to(dtype), torch.randint(0, 1000, (2, 27)))


def test_left_padding() -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :7] = 0
    tokens = torch.randint(0, 1000, (2, 20))
    check_forward(qwen2(), tokens, attention_mask=mask)


def test_left_padding_of_attention_that_is_written_out() -> None:
    config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="eager")
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :7] = 0
    tokens = torch.randint(0, 1000, (2, 20))
    check_forward(LlamaForCausalLM(config).eval(), tokens, attention_mask=mask)
