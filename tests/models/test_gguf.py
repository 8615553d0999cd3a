"""GGUF files on the device: formats bit for bit, and models that stay packed, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.gguf import dequant

from tests.compiling import native
from tests.models import gguf_files
from torch_webgpu_compile import FallbackWarning, counters
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.device.patches import gguf as files
from torch_webgpu_compile.torch_ops import gguf

autoload.register()

pytestmark = [
    pytest.mark.filterwarnings("error", category=FallbackWarning),
    # Of the package that writes the files, in exponents that it looks at without need.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("name", gguf.FORMATS)
def test_a_format_is_bit_for_bit_what_the_file_says(name: str) -> None:
    """In rows of an odd number of blocks, whose planes do not end with a word."""
    form = gguf.FORMATS[name]
    columns = 3 * form.block
    blocks = gguf_files.random_blocks(name, 20, columns)
    wanted = torch.from_numpy(gguf_files.dequantized(blocks, name))
    packed = gguf.pack(torch.from_numpy(blocks), form.number)
    here = gguf.pack(torch.from_numpy(blocks).to("webgpu"), form.number)
    assert here.cpu().equal(packed)
    indices = torch.arange(20).view(4, 5)
    for weight in (packed, here):
        given = indices.to(weight.device), weight, form.number, columns, torch.float32
        assert gguf.embedding(*given).cpu().equal(wanted.view(4, 5, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "IQ4_XS"])
def test_products(name: str, dtype: torch.dtype) -> None:
    """Eager and compiled: of one row and of many, of a weight and of experts, which share some."""
    number, experts, rows, columns = gguf.FORMATS[name].number, 3, 24, 256
    blocks = gguf_files.random_blocks(name, experts * rows, columns, 2e-3)
    whole = torch.from_numpy(gguf_files.dequantized(blocks, name)).view(experts, rows, -1)
    weight = gguf.pack(torch.from_numpy(blocks).to("webgpu"), number)
    bias = torch.randn(experts * rows).to(dtype)

    def compute(x: Tensor, ids: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        chosen = gguf.experts(x, weight.view(experts, rows, -1), number, ids)
        return gguf.linear(x[None], weight, number, bias), chosen

    compiled = native(compute)
    for count in (1, 2, 30):
        x, ids = torch.randn(count, columns).to(dtype), torch.randint(0, experts, (count, 2))
        exact = x.double() @ whole.flatten(0, 1).double().t() + bias.double()
        of_experts = (whole.double()[ids] @ x.double()[:, None, :, None])[..., 0]
        wanted = exact[None].to(dtype), of_experts.to(dtype)
        # Of sums of 256 terms, some of which are near to 0. Weights are rounded to halves, and for
        # more than 8 rows to bfloat16.
        largest = exact.abs().max().item()
        tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
        for function in (compute, compiled):
            found = function(x.to("webgpu"), ids.to("webgpu"), bias.to("webgpu"))
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, atol=tolerance * largest, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_gradients_of_the_input(kind: str) -> None:
    number, rows, columns = gguf.FORMATS["Q4_K"].number, 24, 256
    blocks = gguf_files.random_blocks("Q4_K", 3 * rows, columns, 2e-3)
    whole = torch.from_numpy(gguf_files.dequantized(blocks, "Q4_K"))
    weight = gguf.pack(torch.from_numpy(blocks).to("webgpu"), number)
    x, ids = torch.randn(5, columns), torch.randint(0, 3, (5, 2))
    here, bias = x.to("webgpu").requires_grad_(), torch.zeros(3 * rows, device="webgpu")
    bias.requires_grad_()
    if kind == "linear":
        result = gguf.linear(here, weight, number, bias)
    else:
        result = gguf.experts(here, weight.view(3, rows, -1), number, ids.to("webgpu"))
    factors = torch.randn(result.shape)
    (result * factors.to("webgpu")).sum().backward()
    if kind == "linear":
        wanted = factors @ whole
        torch.testing.assert_close(bias.grad.cpu(), factors.sum(0))
    else:
        wanted = (factors[..., None, :] @ whole.view(3, rows, -1)[ids]).sum((1, 2))
    torch.testing.assert_close(here.grad.cpu(), wanted, atol=1e-6 * wanted.abs().max(), rtol=1e-5)
    assert not counters.fallbacks


LLAMA = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KEYS: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 256,
    "block_count": 2,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 64,
    "vocab_size": 300,
}
MIXED = {
    "attn_q": "Q4_K",
    "attn_k": "Q6_K",
    "attn_v": "Q5_K",
    "attn_output": "Q8_0",
    "ffn_gate": "Q3_K",
    "ffn_up": "IQ4_XS",
    "ffn_down": "Q5_0",
    "token_embd": "Q2_K",
    "output": "F16",
}


def pairs_side_by_side(name: str, tensor: Tensor) -> Tensor:
    """Rows of queries and keys of a Llama, as llama.cpp has them."""
    for part, heads in (("attn_q.", 4), ("attn_k.", 2)):
        if part in name:
            rows = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
            return rows.transpose(1, 2).reshape(tensor.shape)
    return tensor


def with_one_added(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if "norm.weight" in name else tensor


def unchanged(name: str, tensor: Tensor) -> Tensor:
    return tensor


def of_kind(kinds: dict[str, str]) -> Callable[[str], str]:
    return lambda name: next((kind for part, kind in kinds.items() if part in name), "Q8_0")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
MODELS: dict[str, tuple[str, Any, dict[str, Any], dict[str, str], Any]] = {
    "llama": ("llama", transformers.LlamaConfig(**LLAMA), KEYS, MIXED, pairs_side_by_side),
    "qwen2": (
        "qwen2",
        transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
        KEYS,
        {"attn": "Q4_0", "ffn_gate": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "IQ4_NL"},
        unchanged,
    ),
    "experts": (
        "qwen3moe",
        transformers.Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=64, decoder_sparse_step=1),
        KEYS | EXPERT_KEYS | {"attention.key_length": 64, "attention.value_length": 64},
        {"ffn_gate_inp": "F32", "ffn_down_exps": "MXFP4", "exps": "Q4_K"},
        unchanged,
    ),
    "gemma3": (
        "gemma3",
        transformers.Gemma3TextConfig(**LLAMA, head_dim=64, sliding_window=8),
        KEYS | {"attention.key_length": 64, "attention.sliding_window": 8},
        {"attn": "Q4_0"},
        with_one_added,
    ),
    "lfm2": (  # of which transformers knows how to keep blocks
        "lfm2",
        transformers.Lfm2Config(
            **LLAMA, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]
        ),
        KEYS | {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
        {"shortconv.conv": "F32", "ffn": "Q4_K"},
        lambda name, tensor: tensor[:, 0] if "shortconv.conv" in name else tensor,
    ),
}


def write(path: Path, name: str, **changed: Any) -> None:
    architecture, config, keys, kinds, change = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # weights of norms are alike otherwise
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) / 10
    given = {"keys": keys, "kind": of_kind(kinds), "change": change} | changed
    gguf_files.write_model(path, model, architecture, **given)


def load(folder: Path, **arguments: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, gguf_file="model.gguf", **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_models_stay_packed_and_say_the_same_tokens(name: str, tmp_path: Path) -> None:
    """transformers dequantizes the whole file on the CPU."""
    write(tmp_path / "model.gguf", name)
    plain = load(tmp_path, dtype=torch.float32)
    packed = load(tmp_path, dtype=torch.float32, device_map="webgpu")
    kinds = {type(module).__name__ for module in packed.modules()}
    assert "PackedLinear" in kinds
    assert ("PackedExperts" in kinds) == (name == "experts")
    assert packed.get_memory_footprint() < 0.5 * plain.get_memory_footprint()
    if name == "qwen2":
        assert packed.lm_head.weight is packed.model.embed_tokens.weight
    prompt = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = plain(prompt).logits, packed(prompt.to("webgpu")).logits.cpu()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)  # of 2 layers, up to 100
    search = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = plain.generate(prompt, **search)
    found = packed.generate(prompt.to("webgpu"), cache_implementation="static", **search)
    assert found.cpu().equal(tokens)
    assert not counters.fallbacks


def test_rotations_have_the_factors_of_the_file(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(**LLAMA, rope_parameters=scaling)
    whole = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    given = {"kind": of_kind({}), "further": {"rope_freqs.weight": plain / whole}}
    write(tmp_path / "model.gguf", "llama", **given)
    model = load(tmp_path, device_map="webgpu").model
    torch.testing.assert_close(model.rotary_emb.inv_freq.cpu(), whole)


def test_a_model_may_be_on_two_devices(tmp_path: Path) -> None:
    """`accelerate` brings what is on the host to the device for each call."""
    write(tmp_path / "model.gguf", "llama", kind=of_kind({}))
    here = dict.fromkeys(["model.layers.1", "model.norm", "model.rotary_emb", "lm_head"], "webgpu")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", **here}
    prompt = torch.randint(60, 300, (1, 5))
    found = load(tmp_path, dtype=torch.float32, device_map=places)(prompt).logits
    wanted = load(tmp_path, dtype=torch.float32)(prompt).logits
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_metadata_is_read_again_when_the_file_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for layers in (2, 1):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": layers})
        )
        keys = KEYS | {"block_count": layers}
        gguf_files.write_model(path, model, "llama", keys, of_kind({}), unchanged)
        for _ in range(2):
            config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
            assert config.num_hidden_layers == layers
            config.rope_parameters["rope_theta"] = 1.0  # is the caller's own


def test_another_device_has_what_transformers_loads(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "qwen2")
    assert type(load(tmp_path).lm_head) is torch.nn.Linear


def test_formats_that_transformers_does_not_know_are_as_ours() -> None:
    for name, (number, *block) in files._FORMATS.items():
        form = gguf.FORMATS[name]
        assert (number, *block) == (form.number, form.block, form.nbytes)
        blocks = torch.from_numpy(gguf_files.random_blocks(name, 2, form.block))
        found = dequant.dequantize(blocks.flatten(), number).view(2, -1)
        assert found.equal(torch.from_numpy(gguf_files.dequantized(blocks.numpy(), name)))


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.gguf ends at byte .* download it again"):
        load(tmp_path, device_map="webgpu")


def test_random_blocks_are_as_the_package_writes_them() -> None:
    """What tests draw is in the layout of files: half floats stand where they are written."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        kind = gguf_files.GGMLQuantizationType[name]
        blocks = gguf_files.writing.quants.quantize(x, kind).reshape(4, 2, -1)
        largest = np.abs(x).reshape(4, 2, 32).max(-1)
        start = gguf_files.HALVES[name][0]
        scale = blocks[..., start : start + 2].copy().view(np.float16)[..., 0]
        assert (np.abs(scale) <= largest).all()
