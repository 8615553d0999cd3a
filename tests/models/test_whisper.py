"""Whisper's encoder: 1-d convolutions and a transformer over 1,500 frames of audio."""

from __future__ import annotations

import pytest
import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whisper_encoder(dtype: torch.dtype) -> None:
    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=80,
        max_source_positions=150,
    )
    check_forward(WhisperEncoder(config).eval().to(dtype), torch.randn(1, 80, 300, dtype=dtype))


def test_whisper_encoder_full_length() -> None:
    """30 seconds of audio, as the pretrained models take it; the width of whisper-tiny."""
    config = WhisperConfig(
        d_model=384, encoder_layers=1, encoder_attention_heads=6, encoder_ffn_dim=1536
    )
    check_forward(WhisperEncoder(config).eval(), torch.randn(1, 80, 3000), calls=1)
