"""Diffusion UNets: group norm, SiLU, skip connections, up- and downsampling, attention."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel

from tests.models.model_checks import check_forward

pytestmark = pytest.mark.rotates(6)


def test_unet() -> None:
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).eval()
    check_forward(model, torch.randn(2, 3, 16, 16), torch.tensor([3, 500]), return_dict=False)


def test_unet_with_cross_attention() -> None:
    model = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=48,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()
    text = torch.randn(2, 7, 48)
    sample, step = torch.randn(2, 4, 16, 16), torch.tensor(10)
    check_forward(model, sample, step, text, return_dict=False)
