"""Models whose first calls are measured, with random weights: see `compile_worker`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import half, training
from .eager_cases import t5_encoder
from .training import Built, Kind

Run = Callable[[Any, tuple[Tensor, ...], str | None], Callable[[], Any]]
"""(module, inputs, backend or None for eager mode) → the call that is measured."""


@dataclass(frozen=True)
class CompileCase:
    """A model and what is first done with it.

    Attributes:
        build: makes the module and its inputs, on the CPU; of small sizes where that is asked for.
        run: makes the call.
        on_cpu: the call takes CPU tensors also where a GPU computes it.
    """

    build: Callable[[bool], Built]
    run: Run
    on_cpu: bool = False


def compiled(kind: Kind) -> Run:
    """A compiled forward, or a training step whose forward and backward are compiled."""

    def run(module: Any, inputs: tuple[Tensor, ...], backend: str | None) -> Callable[[], Any]:
        case = training.Case(lambda small: (module, inputs), kind)
        call: Callable[[], Any] = training.step_of(case, module, inputs, backend)
        return call

    return run


def _forward(build: Callable[[bool], Built]) -> CompileCase:
    return CompileCase(build, compiled("forward"))


def _step(build: Callable[[bool], Built]) -> CompileCase:
    return CompileCase(build, compiled("step"))


# ---- on a GPU, beside Inductor


class _Recurrent(nn.Module):
    """Two layers of LSTM and a classifier of each step."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, 2 * features, num_layers=2, batch_first=True)
        self.last = nn.Linear(2 * features, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        result: Tensor = self.last(hidden)
        return result


def lstm(small: bool) -> Built:
    """32 sequences of 64 steps."""
    torch._dynamo.config.allow_rnn = True
    sizes = (2, 5, 8) if small else (32, 64, 128)
    return _Recurrent(sizes[-1]), (torch.randn(sizes),)


def _vision(small: bool, name: str, batch: int, side: int = 224, **settings: Any) -> Built:
    """Of torchvision."""
    from torchvision import models

    if small:
        batch, side = 1, 64
    model = models.get_model(name, weights=None, **settings)
    return model, (torch.randn(batch, 3, side, side),)


class _Segmentation(nn.Module):
    """Images → a score of each class for each pixel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.model(images)["out"]
        return result


def deeplab(small: bool) -> Built:
    """DeepLabV3 on ResNet-50."""
    model, images = _vision(small, "deeplabv3_resnet50", 2, 256, weights_backbone=None)
    return _Segmentation(model), images


def swin(small: bool) -> Built:
    """Swin-T."""
    if not small:
        return _vision(small, "swin_t", 8)
    from torchvision.models import SwinTransformer

    model = SwinTransformer([4, 4], 16, [1, 1], [1, 2], [4, 4], num_classes=10)
    return model, (torch.randn(1, 3, 32, 32),)


def resnet50_f16(small: bool) -> Built:
    """ResNet-50 in half precision on 32 images."""
    torch.set_default_dtype(torch.float16)
    try:
        return half.resnet50(small)
    finally:
        torch.set_default_dtype(torch.float32)


def unet(small: bool) -> Built:
    """A diffusion model's denoising network on four 64×64 latents."""
    from .diffusion_unet import DiffusionUNet

    widths, batch, side, stages = ((16, 32), 1, 8, 1) if small else ((128, 256, 512), 4, 64, 2)
    text = torch.randn(batch, 5 if small else 77, 768)
    latents, time = torch.randn(batch, 4, side, side), torch.full((batch,), 500.0)
    return DiffusionUNet(widths=widths, stages=stages), (latents, time, text)


COMPILED = {
    "swin_8": _forward(swin),
    "lstm": _forward(lstm),
    "llama_512": _forward(training.llama),
    "llama_512_f16": _forward(partial(training.llama, dtype=torch.float16)),
    "llama_4x128_bf16": _forward(
        partial(training.llama, dtype=torch.bfloat16, prompts=(4, 128)),
    ),
    "resnet50_32_f16": _forward(resnet50_f16),
    "deeplab_2": _forward(deeplab),
    "efficientnet_8": _forward(partial(_vision, name="efficientnet_b0", batch=8)),
    "convnext_8": _forward(partial(training.convnext, batch=8, trained=False)),
    "unet_4": _forward(unet),
    "t5_4x128": _forward(t5_encoder),
    "gpt2_step": _step(training.gpt2),
    "resnet50_16_step": _step(partial(training.resnet50, batch=16)),
    "vit_8_step": _step(partial(training.vit, batch=8)),
}


# ---- on two cores and a software adapter; these have the sizes that a test takes


def demo(small: bool) -> Built:
    """The model of ``scripts/demo`` on eight sentences."""
    from transformers import BertConfig, BertModel

    from examples.sentence_embeddings import SentenceEncoder

    config = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
    model = SentenceEncoder(BertModel(config, add_pooling_layer=False))
    lengths = torch.tensor([[11], [11], [10], [7], [10], [8], [13], [12]])
    return model, (torch.randint(30_000, (8, 13)), (torch.arange(13) < lengths).long())


class _Noise(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
        result: Tensor = self.model(latents, time, text).sample
        return result


def tiny_unet(small: bool) -> Built:
    """diffusers' network of Stable Diffusion, with 8 and 16 channels."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=2,
    )
    return _Noise(model), (torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 16, 32))


def two_layers(small: bool) -> Built:
    """A small Llama, and a prompt."""
    logits, _ = training.llama(small=True)
    return logits.model, (torch.arange(3, 11)[None],)


def _beam_search(module: Any, inputs: tuple[Tensor, ...], backend: str | None) -> Callable[[], Any]:
    module.generation_config.eos_token_id = None
    mask = torch.ones_like(inputs[0])
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    return lambda: module.eval().generate(inputs[0], attention_mask=mask, **settings)


def classifier(small: bool) -> Built:
    """The model of the README."""
    layers = nn.Linear(784, 256), nn.GELU(), nn.Linear(256, 10)
    return nn.Sequential(*layers), (torch.randn(64, 784),)


def _eager_step(module: Any, inputs: tuple[Tensor, ...], backend: str | None) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> Tensor:
        loss: Tensor = module(*inputs).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


SOFTWARE = {
    "demo": CompileCase(demo, compiled("forward"), on_cpu=True),
    "tiny_unet": CompileCase(tiny_unet, compiled("forward")),
    "generate": CompileCase(two_layers, _beam_search),
    "readme_step": CompileCase(classifier, _eager_step),
}

CASES = COMPILED | SOFTWARE
