"""Real architectures at tiny sizes, with their inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Case = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def tokens(*sizes: int) -> torch.Tensor:
    return torch.randint(0, 100, sizes)


def gpt2() -> Case:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=64,
        n_head=2,
        vocab_size=100,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config), (tokens(1, 16),)


def bert() -> Case:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=128,
        vocab_size=100,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertModel(config), (tokens(2, 16), torch.ones(2, 16, dtype=torch.long))


def _decoder(prefix: str) -> Case:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=100,
    )
    return getattr(transformers, f"{prefix}ForCausalLM")(config), (tokens(1, 16),)


def llama() -> Case:
    return _decoder("Llama")


def qwen2() -> Case:
    return _decoder("Qwen2")


def vit() -> Case:
    import transformers

    config = transformers.ViTConfig(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTModel(config), (torch.randn(2, 3, 32, 32),)


def whisper() -> Case:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=50,
        dropout=0,
    )
    return WhisperEncoder(config), (torch.randn(1, 16, 100),)


def unet() -> Case:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        dropout=0,
    )
    return model, (torch.randn(1, 3, 16, 16), torch.tensor([5]))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 16, batch_first=True, num_layers=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x)


def lstm() -> Case:
    return Recurrent(), (torch.randn(2, 5, 8),)


def convnet() -> Case:
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.AvgPool2d(2),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.ConvTranspose2d(8, 4, 2, 2),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3),
        torch.nn.LogSoftmax(-1),
    )
    return layers, (torch.randn(2, 3, 16, 16),)


MODELS: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (gpt2, bert, llama, qwen2, vit, whisper, unet, lstm, convnet)
}
