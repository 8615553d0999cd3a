"""Real architectures at tiny sizes, forward and backward: lowered and interpreted against eager."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.harness import interpreting_backend

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.rotates(9),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the models' own, and Dynamo's
]

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


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    old = torch._dynamo.config.allow_rnn
    torch._dynamo.config.allow_rnn = True
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.config.allow_rnn = old


def leaves(output: Any) -> list[torch.Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    flat = torch.utils._pytree.tree_leaves(output)
    return [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest element: single ones may be differences of large sums."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.float() - expected.float()).abs().max()
    assert difference <= tolerance * max(1e-2, float(expected.float().abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend=interpreting_backend(), fullgraph=True)
        actual, expected = leaves(compiled(*inputs)), leaves(model(*inputs))
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, 1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_inference_in_bfloat16(name: str) -> None:
    model, inputs = MODELS[name]()
    model.eval().to(torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(model, backend=interpreting_backend(), fullgraph=True)
        actual, expected = leaves(compiled(*inputs)), leaves(model(*inputs))
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, 3e-2)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    model, inputs = MODELS[name]()
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    results = []
    for run in (model, torch.compile(model, backend=interpreting_backend(), fullgraph=True)):
        model.load_state_dict(state)
        model.zero_grad()
        outputs = [t for t in leaves(run(*inputs)) if t.requires_grad]
        sum((t * t.detach().cos()).sum() for t in outputs).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
        results.append([*(t.detach() for t in outputs), *grads, *buffers])
    for wanted, got in zip(*results, strict=True):
        close(got, wanted, 1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "convnet"])
def test_dynamic_sizes(name: str) -> None:
    model, _ = MODELS[name]()
    model.eval()
    backend = interpreting_backend()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for count in (3, 5):
            image = name == "convnet"
            batch = [torch.randn(count, 3, 16, 16) if image else tokens(2, count)]
            for got, wanted in zip(leaves(compiled(*batch)), leaves(model(*batch)), strict=True):
                close(got, wanted, 1e-4)
