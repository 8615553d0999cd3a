"""BERT with padding."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(9)

CONFIG = BertConfig(
    vocab_size=1000,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=64,
)


def padded_batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random tokens; row i has i tokens of padding."""
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    for row in range(rows):
        mask[row, tokens - row :] = 0
    return {"input_ids": torch.randint(0, 1000, (rows, tokens)), "attention_mask": mask}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bert(dtype: torch.dtype) -> None:
    check_forward(BertModel(CONFIG).eval().to(dtype), **padded_batch(3, 24))


def test_bert_without_mask() -> None:
    check_forward(BertModel(CONFIG).eval(), torch.randint(0, 1000, (2, 17)))


def test_bert_classifier_with_token_types() -> None:
    model = BertForSequenceClassification(CONFIG).eval()
    batch = padded_batch(2, 16)
    check_forward(model, **batch, token_type_ids=torch.randint(0, 2, (2, 16)))


def test_bert_of_attention_that_is_written_out() -> None:
    model = BertModel(BertConfig(**{**CONFIG.to_dict(), "attn_implementation": "eager"}))
    check_forward(model.eval(), **padded_batch(3, 24))
