"""Dynamo graphs become clean functional graphs: no CPU-only operators, no graph breaks."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import Phase

pytestmark = pytest.mark.rotates(9)

transformers = pytest.importorskip("transformers")

aten = torch.ops.aten
NATIVE = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.addmm.default,
    aten.gelu.default,
    aten._to_copy.default,
    aten.cat.default,
    aten.embedding.default,
    aten.var_mean.correction,
)
CPU_ONLY = ("mkldnn", "flash_attention", "_native_multi_head", "_transformer_encoder", "prims.")


class Recorder:
    """A backend that runs captured graphs as they are and counts their operators."""

    def __init__(self) -> None:
        self.graphs: list[tuple[Phase, aot.CapturedGraph]] = []
        self.calls = 0

    def __call__(self, module, inputs, **_):
        self.calls += 1
        return aot.capture(module, inputs, self.compile, NATIVE)

    def compile(self, captured, phase):
        self.graphs.append((phase, captured))

        def run(arguments):
            values = list(arguments)
            arguments.clear()
            if phase.seeds:
                values.append(torch.empty(phase.seeds, 2, dtype=torch.int32).random_())
            results = list(captured.module(*values))
            for output, argument in phase.forwarded:
                results[output] = values[argument]
            return results

        return run

    def ops(self, phase=None):
        return collections.Counter(
            str(node.target)
            for found, captured in self.graphs
            if phase is None or found.name == phase
            for node in captured.module.graph.nodes
            if node.op == "call_function"
        )


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(8, 16, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cell(x)[0]


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=128,
        vocab_size=100,
    )  # fmt: skip
    inputs = (torch.randint(0, 100, (2, 16)), torch.ones(2, 16, dtype=torch.long))
    return transformers.BertModel(config), inputs


def gpt2():
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, 100, (1, 16)),)


def _decoder(config, model):
    built = config(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=100,
    )  # fmt: skip
    return model(built), (torch.randint(0, 100, (1, 16)),)


def llama():
    return _decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM)


def qwen2():
    return _decoder(transformers.Qwen2Config, transformers.Qwen2ForCausalLM)


def vit():
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return transformers.ViTModel(config), (torch.randn(2, 3, 32, 32),)


def whisper():
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=128,
        num_mel_bins=16, max_source_positions=50,
    )  # fmt: skip
    return WhisperEncoder(config), (torch.randn(1, 16, 100),)


def unet():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(32, 64),
        layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    return model, (torch.randn(2, 3, 16, 16), torch.tensor([5]))


def convnet():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 3),
    )
    return model, (torch.randn(2, 3, 16, 16),)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(2, 6, 16),)


MODELS = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "qwen2": qwen2, "vit": vit, "whisper": whisper,
    "unet": unet, "convnet": convnet, "encoder": encoder,
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(2, 5, 8),)),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(2, 5, 8),)),
    "rnn": lambda: (Recurrent(nn.RNN), (torch.randn(2, 5, 8),)),
}  # fmt: skip
ATTENTION = {"bert", "gpt2", "llama", "qwen2", "vit", "whisper", "unet", "encoder"}


def tensors(result):
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    from torch_webgpu_compile.capture.patches import dynamo_defaults

    dynamo_defaults.install()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_models_are_captured_whole(name, train):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train(train)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    with torch.set_grad_enabled(train):
        got = tensors(compiled(*inputs))
        if train:
            sum(t.float().sum() for t in got if t.requires_grad).backward()
        else:
            for g, w in zip(got, tensors(model(*inputs)), strict=True):
                torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)
    assert recorder.calls == 1
    assert [phase.name for phase, _ in recorder.graphs] == (
        ["forward", "backward"] if train else ["inference"]
    )
    ops = recorder.ops()
    assert not [op for op in ops if any(part in op for part in CPU_ONLY)]
    if name in ATTENTION and not train:
        assert ops["webgpu.attention.default"]
    if name == "lstm" and not train:
        assert len(recorder.graphs[0][1].static_inputs) == len(list(model.parameters()))


@pytest.mark.slow
def test_attention_in_training_keeps_its_operator():
    model, inputs = gpt2()
    model.eval()  # no dropout
    recorder = Recorder()
    result = torch.compile(model, backend=recorder, fullgraph=True)(*inputs)
    result.logits.sum().backward()
    assert recorder.ops("forward")["webgpu.attention.default"] == 1
    got = model.transformer.h[0].attn.c_attn.weight.grad.clone()
    model.zero_grad()
    model(*inputs).logits.sum().backward()
    wanted = model.transformer.h[0].attn.c_attn.weight.grad
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("train", [False, True])
def test_attention_inside_multi_head_attention_keeps_its_operator(train):
    module = nn.MultiheadAttention(16, 4).train(train)
    x = torch.randn(6, 2, 16)
    recorder = Recorder()
    run = torch.compile(lambda x: module(x, x, x, need_weights=False)[0], backend=recorder)
    torch.testing.assert_close(run(x), module(x, x, x, need_weights=False)[0])
    assert recorder.ops("forward")["webgpu.attention.default"] == 1


def test_a_backward_graph_knows_its_parameters_and_saved_values():
    model, inputs = convnet()
    recorder = Recorder()
    torch.compile(model, backend=recorder)(*inputs).sum().backward()
    (forward, forward_graph), (_, backward_graph) = recorder.graphs
    assert backward_graph.static_inputs
    placeholders = backward_graph.module.graph.find_nodes(op="placeholder")
    for position in backward_graph.static_inputs:
        assert str(placeholders[position].target).startswith("primals_")
    (outputs,) = forward_graph.module.graph.find_nodes(op="output")[0].args
    names = {str(node.target) for node in placeholders}
    assert forward.saved
    assert {outputs[position].name for position in forward.saved} <= names


def test_mutations_are_trailing_copies():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count.add_(x)
            return self.count * 2

    recorder = Recorder()
    with torch.no_grad():
        torch.compile(Counter(), backend=recorder, fullgraph=True)(torch.ones(2))
    assert recorder.ops()["aten.copy_.default"] == 1


def test_dynamic_sizes_are_symbols():
    recorder = Recorder()
    compiled = torch.compile(
        lambda x: torch.softmax(x, -1), backend=recorder, fullgraph=True, dynamic=True
    )
    for rows in (3, 5, 9):
        compiled(torch.randn(rows, 7))
    assert recorder.calls == 1


def test_sizes_that_depend_on_data_break_the_graph_by_default():
    def count(x):
        return (x + 1).nonzero() + 1

    recorder = Recorder()
    x = torch.ones(3)
    assert torch.equal(torch.compile(count, backend=recorder)(x), count(x))
    assert recorder.calls >= 1


def test_other_threads_may_call_compiled_functions_during_a_trace():
    """Each call of a compiled function asks whether somebody traces it with FX."""
    seen = []

    @torch.library.custom_op("webgpu_tests::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @watched.register_fake
    def _(x):
        trace = torch.fx._symbolic_trace
        seen.append((trace._is_fx_tracing_flag, trace.is_fx_symbolic_tracing()))
        return torch.empty_like(x)

    torch.compile(lambda x: watched(x) + 1, backend=Recorder(), fullgraph=True)(torch.ones(3))
    assert (True, False) in seen  # AOTAutograd's trace
    assert (True, True) not in seen
