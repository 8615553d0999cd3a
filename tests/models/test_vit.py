"""Vision Transformer."""

from __future__ import annotations

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(3)

CONFIG = ViTConfig(
    image_size=64,
    patch_size=16,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    num_labels=10,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vit(dtype: torch.dtype) -> None:
    images = torch.randn(2, 3, 64, 64, dtype=dtype)
    check_forward(ViTForImageClassification(CONFIG).eval().to(dtype), images)
