"""``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` in evaluation: PyTorch's fast path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from torch_webgpu_compile import counters

pytestmark = [
    pytest.mark.rotates(9),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

PADDING = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
GAPS = PADDING.clone()
GAPS[1, 0] = True
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


def encoder(batch_first: bool = True, activation: str = "relu", **keywords) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=batch_first, activation=activation, norm_first=not batch_first
    )
    nested = {"enable_nested_tensor": batch_first} | keywords
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), **nested).eval()


def check(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5, **masks) -> None:
    """The module gives on the device what it gives on the CPU, with kernels of its own."""
    here = copy.deepcopy(module).to("webgpu")
    there = {k: v.to("webgpu") if isinstance(v, Tensor) else v for k, v in masks.items()}
    devices = {id(x): x.to("webgpu") for x in inputs}  # the same tensor twice stays that
    counters.reset()
    with torch.no_grad():
        wanted = module(*inputs, **masks)
        got = here(*(devices[id(x)] for x in inputs), **there)
    assert not counters.fallbacks
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
    for g, w in pairs:
        assert (g is None) == (w is None)
        if g is not None:
            torch.testing.assert_close(g.cpu(), w, rtol=tolerance, atol=tolerance)


ENCODER_MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},  # PyTorch makes a nested tensor of these
    "padding, floats": {"src_key_padding_mask": floats(PADDING)},
    "gaps": {"src_key_padding_mask": GAPS},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ENCODER_MASKS.values(), ids=ENCODER_MASKS)
def test_an_encoder_with_masks(masks, batch_first):
    x = torch.randn(3, 5, 16)
    check(encoder(batch_first), x if batch_first else x.transpose(0, 1), **masks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_encoder_in_16_bits(dtype):
    model = encoder(activation="gelu").to(dtype)
    check(model, torch.randn(3, 5, 16).to(dtype), tolerance=6e-2, src_key_padding_mask=PADDING)


def test_an_encoder_that_does_not_check_its_mask():
    check(encoder(mask_check=False), torch.randn(3, 5, 16), src_key_padding_mask=PADDING)


def test_an_encoder_under_autocast_and_inference_mode():
    model = encoder()
    x = torch.randn(3, 5, 16)
    with torch.inference_mode():
        wanted = model(x, src_key_padding_mask=PADDING)
        model.to("webgpu")
        with torch.autocast("webgpu", torch.float16):
            got = model(x.to("webgpu"), src_key_padding_mask=PADDING.to("webgpu")).cpu()
    torch.testing.assert_close(got[~PADDING], wanted[~PADDING], rtol=2e-2, atol=2e-2)


ATTENTION_MASKS = {
    "none": {},
    "each head's weights": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding, floats": {"key_padding_mask": floats(PADDING), "need_weights": False},
    "each head's": {"attn_mask": CAUSAL.repeat(12, 1, 1)},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
}


@pytest.mark.parametrize("masks", ATTENTION_MASKS.values(), ids=ATTENTION_MASKS)
def test_attention_with_masks(masks):
    x = torch.randn(3, 5, 16)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    check(model, x, x, x, **masks)
    check(model, x, x + 1, x * 2, **masks)


def test_the_fused_operator_of_different_tensors():
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(3, 5, 16)

    def call(device: str) -> Tensor:
        weights = (model.in_proj_weight, model.in_proj_bias, *model.out_proj.parameters())
        here = [t.detach().to(device) for t in (x, x + 1, x * 2, *weights)]
        return torch._native_multi_head_attention(*here[:3], 16, 4, *here[3:])[0]

    torch.testing.assert_close(call("webgpu").cpu(), call("cpu"))


def test_other_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device="webgpu")
    with pytest.raises(NotImplementedError, match=r"aten.add.*layout=torch.jagged"):
        nested + 1
