"""Models are loaded tensor by tensor: what is uploaded, and what memory it takes on the device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_webgpu_compile import counters
from torch_webgpu_compile.backend import webgpu
from torch_webgpu_compile.tensors import devices

transformers: Any = pytest.importorskip("transformers")

# An embedding of 5 MB in bf16: more than is converted on the host.
_WIDTH, _VOCABULARY = 256, 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16, in several files, with tied weights."""
    config = transformers.LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2MB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_checkpoint_is_on_the_device_once(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(folder, dtype=dtype)
    parameters = dict(expected.named_parameters())
    nbytes = {name: parameter.nbytes for name, parameter in parameters.items()}
    gc.collect()
    torch.webgpu.empty_cache()  # type: ignore[attr-defined]
    torch.webgpu.reset_peak_memory_stats()  # type: ignore[attr-defined]
    device = devices.get_device(0)
    before, uploaded = torch.webgpu.memory_reserved(), counters.bytes_uploaded  # type: ignore[attr-defined]
    # As with a model larger than any buffer may be.
    monkeypatch.setattr(device.pool, "_max_nbytes", sum(nbytes.values()) * 3 // 4)

    model = load(folder, dtype=dtype, device_map={"": "webgpu"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        assert parameter.device == torch.device("webgpu:0")
        assert torch.equal(parameter.cpu(), parameters[name]), name
    # The embedding goes there as it is stored; what is small is converted before.
    embedding = "model.embed_tokens.weight"
    stored = nbytes | {embedding: _WIDTH * _VOCABULARY * 2}
    assert counters.bytes_uploaded - uploaded < sum(stored.values()) + 4096  # and buffers
    torch.webgpu.empty_cache()  # type: ignore[attr-defined]
    taken = torch.webgpu.memory_reserved() - before  # type: ignore[attr-defined]
    assert taken < 1.2 * sum(nbytes.values())


def test_generate_compiles_without_inductor(folder: Path) -> None:
    model = load(folder)
    assert model._default_compile_config() == transformers.CompileConfig()
    config = model.to("webgpu")._default_compile_config()
    assert (config.backend, config.mode) == (webgpu, None)


def test_a_conversion_leaves_nothing_behind() -> None:
    x = torch.ones(1 << 20, device="webgpu")
    before = torch.webgpu.memory_allocated()  # type: ignore[attr-defined]
    assert int(x.to(torch.bfloat16).sum()) == 1 << 20
    assert torch.webgpu.memory_allocated() - before < 1 << 20  # type: ignore[attr-defined]


def test_floats_are_converted_as_on_the_host() -> None:
    numbers = torch.randn(3 << 20) * 2.0 ** torch.randint(-30, 18, (3 << 20,))
    for source in (numbers, numbers.to(torch.float16), numbers.to(torch.bfloat16)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            before = counters.bytes_uploaded
            converted = source.view(1024, -1).to("webgpu", dtype)
            assert counters.bytes_uploaded - before == source.nbytes
            assert torch.equal(converted.cpu().view(-1), source.to(dtype))
    transposed = numbers.view(1024, -1).t()
    assert torch.equal(transposed.to("webgpu", torch.float16).cpu(), transposed.half())
