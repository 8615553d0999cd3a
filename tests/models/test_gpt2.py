"""GPT-2."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(12)


def gpt2(**changes: int) -> GPT2LMHeadModel:
    settings = {"vocab_size": 1000, "n_positions": 128, "n_embd": 128, "n_layer": 3, "n_head": 4}
    config = GPT2Config(**(settings | changes), use_cache=False)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt2(dtype: torch.dtype) -> None:
    check_forward(gpt2().to(dtype), torch.randint(0, 1000, (2, 33)))


def test_gpt2_loss() -> None:
    tokens = torch.randint(0, 1000, (2, 33))
    model = gpt2()
    model.loss_type = "ForCausalLM"  # the default, but then transformers logs, a graph break
    check_forward(model, tokens, labels=tokens)


def test_real_embedding_table() -> None:
    """154 MB: more than the 128 MiB that a small adapter binds at once, and tied to the output."""
    model = gpt2(vocab_size=50257, n_embd=768, n_head=12, n_layer=1)
    check_forward(model, torch.tensor([[0, 50256, 25000, 45000, 43690]]), calls=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_is_written_out(dtype: torch.dtype) -> None:
    config = GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=128,
        n_layer=3,
        n_head=4,
        use_cache=False,
        attn_implementation="eager",
    )
    mask = torch.ones(2, 33, dtype=torch.int64)
    mask[0, :4] = 0
    model = GPT2LMHeadModel(config).eval().to(dtype)
    check_forward(model, torch.randint(0, 1000, (2, 33)), attention_mask=mask)
