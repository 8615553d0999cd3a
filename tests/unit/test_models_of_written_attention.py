"""Models of transformers whose attention is written out: the kernels of the fused operator."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.compilations import compile_function

pytestmark = pytest.mark.rotates(3)

TOKENS = torch.arange(32).reshape(2, 16)
PADDED = (torch.arange(16) >= torch.tensor([[4], [0]])).long()
LAYERS = 2


def gpt2(attention):
    config = transformers.GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=64,
        n_layer=LAYERS,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return transformers.GPT2Model(config)


def bert(attention):
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        attn_implementation=attention,
    )
    return transformers.BertModel(config)


def llama(attention):
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    return transformers.LlamaModel(config)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("build", [gpt2, bert, llama])
def test_as_many_kernels_as_of_the_fused_operator(build, mask):
    counts = []
    for attention in ("sdpa", "eager"):
        model = build(attention).eval()

        def run(tokens, mask, model=model):
            return model(tokens, attention_mask=mask)[0]

        plan = compile_function(run, TOKENS, mask).plan
        assert sum(kernel.kind == "attention" for kernel in plan.kernels) > 0
        counts.append(plan.dispatch_count)
    assert counts[0] == counts[1]
