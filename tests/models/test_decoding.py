"""Decoding token by token with transformers' static cache, which every call changes in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache

import torch_webgpu_compile
from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload

pytestmark = pytest.mark.rotates(6)

POSITIONS = 96
PROMPT = 5
LAYERS = 2


@pytest.fixture(autouse=True)
def _device() -> None:
    autoload.register()


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def model_on(device: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config()).eval().to(device)


def cache_on(device: str) -> StaticCache:
    cache = StaticCache(config=config(), max_cache_len=POSITIONS)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device(device))
    return cache


def greedy(
    model: nn.Module, step: object, cache: StaticCache, device: str
) -> tuple[list[int], Tensor]:
    """16 tokens after a prompt, and the logits of each."""
    assert callable(step)
    prompt = torch.arange(3, 3 + PROMPT).reshape(1, PROMPT).to(device)
    tokens, all_logits = [], []
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache).logits[:, -1]
        for number in range(16):
            token = logits.argmax(-1, keepdim=True)
            tokens.append(int(token))
            position = torch.tensor([[PROMPT + number]]).to(device)
            logits = step(token, past_key_values=cache, position_ids=position).logits[:, -1]
            all_logits.append(logits.cpu())
    return tokens, torch.cat(all_logits)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_greedy_decoding(device: str) -> None:
    eager = model_on("cpu")
    expected_cache = cache_on("cpu")
    expected, expected_logits = greedy(eager, eager, expected_cache, "cpu")
    model, cache = model_on(device), cache_on(device)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    step = torch.compile(model, backend="webgpu", fullgraph=True, dynamic=False)
    counters.reset()
    tokens, logits = greedy(model, step, cache, device)
    compiled = counters.plans_compiled + counters.plan_cache_hits
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    for layer, other in zip(cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(layer.keys.cpu(), other.keys)
        torch.testing.assert_close(layer.values.cpu(), other.values)
        assert int(layer.cumulative_length) == int(other.cumulative_length)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    if device == "cpu":  # on the device, eager operators compile plans of their own
        assert compiled == 1
    assert not counters.fallbacks


def test_one_layer_is_six_kernels_and_writes_one_position() -> None:
    """The work of a step beyond the weights: no copy of the cache, no kernel per norm."""
    model, cache = model_on("cpu"), cache_on("cpu")
    with torch.no_grad():
        report = torch_webgpu_compile.explain(
            lambda token, position: (
                model(token, past_key_values=cache, position_ids=position).logits
            ),
            torch.tensor([[7]]),
            torch.tensor([[0]]),
        )
    scatters = [kernel for kernel in report.kernels if "aten.index_copy.default" in kernel.ops]
    # Keys and values of two heads of 16, and what attention gives for eight heads.
    assert [kernel.bytes_written for kernel in scatters] == [(2 * 2 + 8) * 16 * 4] * LAYERS
    assert len(report.kernels) <= 6 * LAYERS + 4
    cache_nbytes = 2 * POSITIONS * 16 * 4
    assert sum(k.bytes_written >= cache_nbytes for k in report.kernels) == 0


class Counting(nn.Module):
    """A buffer that a call changes a row of."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64, 8))

    def forward(self, row: Tensor, at: Tensor) -> Tensor:
        self.table.index_copy_(0, at, row)
        return self.table.sum(0)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_module_s_buffer_is_changed_in_place(device: str) -> None:
    eager, module = Counting(), Counting().to(device)
    compiled = torch.compile(module, backend="webgpu", fullgraph=True)
    for number in (3, 9, 9, 0):
        row, at = torch.randn(1, 8), torch.tensor([number])
        result = compiled(row.to(device), at.to(device))
        torch.testing.assert_close(result.cpu(), eager(row, at))
        torch.testing.assert_close(module.table.cpu(), eager.table)
    module.table.mul_(2)  # a change outside of the graph is seen by the next call
    eager.table.mul_(2)
    result = compiled(row.to(device), at.to(device))
    torch.testing.assert_close(result.cpu(), eager(row, at))
