"""torchao's quantized weights and PyTorch's quantized graphs on the device, against the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torchao.quantization import (
    FqnToConfig,
    Int4PlainInt32Tensor,
    Int4Tensor,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer
from torchao.quantization.quant_primitives import MappingType

from tests.models.model_checks import compiled, no_fallbacks
from torch_webgpu_compile.device import autoload

pytestmark = pytest.mark.rotates(10)

autoload.register()

INT4 = {"weight_dtype": torch.int4, "granularity": PerGroup(32)}
CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(),
    "int8_groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8_activations": lambda: Int8DynamicActivationInt8WeightConfig(),
    "intx8": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "intx4": lambda: IntxWeightOnlyConfig(**INT4),
    "intx4_asymmetric": lambda: IntxWeightOnlyConfig(**INT4, mapping_type=MappingType.ASYMMETRIC),
    "int4": lambda: Int4WeightOnlyConfig(group_size=32),
    "int4_words": lambda: Int4WeightOnlyConfig(group_size=32, int4_packing_format="plain_int32"),
}
ON_DEVICE_ALONE = {"int4_words"}


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32, bias=False)).to(dtype)


def dequantized(weight: Tensor) -> Tensor:
    """(N, K), of what torchao keeps; its int4 tensors do not say it themselves."""
    if not isinstance(weight, (Int4Tensor, Int4PlainInt32Tensor)):
        return weight.dequantize()
    q, group = weight.qdata.cpu(), weight.block_size[1]
    levels = ((q[..., None] >> torch.arange(0, 8 * q.dtype.itemsize, 4)) & 15).flatten(1)
    scale, zero = (
        t.cpu().float().t().repeat_interleave(group, 1) for t in (weight.scale, weight.zero_point)
    )
    plain = isinstance(weight, Int4Tensor)
    whole = ((levels ^ 8) - 8) * scale + zero if plain else (levels - zero) * scale
    return whole.to(weight.dtype)


def twin(model: nn.Module) -> nn.Module:
    """The same on the CPU, with weights that are not quantized any more."""
    plain = network(model[0].bias.dtype)
    for own, other in zip(plain.parameters(), model.parameters(), strict=True):
        whole = dequantized(other) if hasattr(other, "qdata") else other
        own.data = whole.detach().cpu()
    return plain


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CONFIGS]
    + [(name, torch.bfloat16) for name in ("int8", "int8_activations", "int4")],
    ids=str,
)
def test_linear_layers(name, dtype):
    """Quantized here, and on the CPU and moved, as its twin; the packed weights stay packed."""
    original = network(dtype)
    x = torch.randn(5, 64).to(dtype)
    models = [copy.deepcopy(original).to("webgpu")]
    with no_fallbacks():
        quantize_(models[0], CONFIGS[name]())
    if name not in ON_DEVICE_ALONE:
        on_cpu = copy.deepcopy(original)
        quantize_(on_cpu, CONFIGS[name]())
        models.append(on_cpu.to("webgpu"))
    for model in models:
        assert model[0].weight.qdata.dtype in (torch.int8, torch.int32)
        plain = twin(model)
        # Levels of the weights: a sixteenth or less of the range of a group.
        torch.testing.assert_close(plain[0].weight, original[0].weight, atol=0.01, rtol=0)
        # Products of activations in int8 differ from the twin's by half a level of each.
        atol = 0.02 if name == "int8_activations" else 1e-5 if dtype is torch.float32 else 1e-2
        with torch.no_grad(), no_fallbacks():
            wanted = plain(x)
            for function in (model, compiled(model, dynamic=False)):
                got = function(x.to("webgpu")).cpu()
                torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_other_weights_after_a_call(name):
    """The parts of a weight are read at each call, without AOTAutograd's wrappers."""
    models = [network(torch.float32).to("webgpu") for _ in range(2)]
    with torch.no_grad():
        models[1][0].weight.neg_()
    for model in models:
        quantize_(model, CONFIGS[name]())
    x = torch.randn(3, 64).to("webgpu")
    with torch.no_grad(), no_fallbacks():
        function = compiled(models[0], dynamic=False)
        function(x)
        models[0][0].weight = models[1][0].weight  # another tensor
        torch.testing.assert_close(function(x), models[0](x))
        models[0][2].weight.scale.mul_(2)  # a part, in place
        torch.testing.assert_close(function(x), models[0](x))
        models[0][2].weight.scale = models[1][2].weight.scale * 3  # another part
        torch.testing.assert_close(function(x), models[0](x))


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_ask_no_weight_for_its_parts(name, monkeypatch):
    """Graphs take the parts as they take any tensors; guards of a tensor subclass ask at each call.

    What models read of their weights is in the graph, too.
    """
    model = network(torch.bfloat16).to("webgpu")
    quantize_(model, CONFIGS[name]())
    kind = type(model[0].weight)

    def read(x: Tensor) -> Tensor:
        weight = model[0].weight
        facts = weight.size(1) + weight.numel() * weight.dim() + weight.shape[0]
        return x.to(weight.device) * (facts if weight.is_floating_point() else 0)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x.to(model[0].weight.dtype)), read(x)

    x = torch.randn(3, 64).to("webgpu")
    with torch.no_grad(), no_fallbacks():
        function = compiled(step, dynamic=False)
        function(x)
        asked = []
        flatten = kind.__tensor_flatten__
        monkeypatch.setattr(kind, "__tensor_flatten__", lambda w: asked.append(w) or flatten(w))
        got = function(x)
    assert not asked
    assert got[1].equal(x * (64 + 96 * 64 * 2 + 96))


def test_int4_of_another_format_is_refused():
    for packing in ("tile_packed_to_4d", "preshuffled"):
        model = network(torch.bfloat16).to("webgpu")
        config = Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing)
        with pytest.raises((NotImplementedError, ImportError), match=r"plain|mslk"):
            quantize_(model, config)


def test_a_batch_of_int4_weights():
    """As experts have them: one tensor, which `torch.bmm` takes whole."""
    weight = torch.randn(3, 32, 64)
    holder = nn.Module()
    holder.weight = nn.Parameter(weight.to("webgpu"))
    config = FqnToConfig({"weight": Int4WeightOnlyConfig(group_size=32)})
    quantize_(holder, config, filter_fn=None)
    x = torch.randn(3, 2, 64)
    got = torch.bmm(x.to("webgpu"), holder.weight).cpu()
    # 64 terms that are off by a thirtieth of the range of a group at most.
    torch.testing.assert_close(got, torch.bmm(x, weight.mT), atol=4, rtol=0)
    assert (got - torch.bmm(x, weight.mT)).std() < 1.5


def test_saving_and_loading(tmp_path: Path):
    model = network(torch.float32).to("webgpu")
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    x = torch.randn(2, 64, device="webgpu")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for place in (None, "cpu"):
        other = network(torch.float32).to("webgpu")
        loaded = torch.load(tmp_path / "model.pt", weights_only=True, map_location=place)
        other.load_state_dict(loaded, assign=True)
        assert other.to("webgpu")(x).equal(model(x))


def pretrained(folder: Path) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=160,
        eos_token_id=None,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["int4", "int8", "int8_activations"])
def test_generate(name, tmp_path: Path):
    on_cpu = pretrained(tmp_path / "float")
    quantize_(
        on_cpu, CONFIGS[name](), lambda m, where: isinstance(m, nn.Linear) and where != "lm_head"
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = transformers.TorchAoConfig(CONFIGS[name]())
    model = load(tmp_path / "float", quantization_config=config, device_map="webgpu")
    ids = torch.randint(2, 160, (1, 9))

    def generate(model, **keywords) -> Tensor:
        keywords |= {"max_new_tokens": 12, "do_sample": False}
        return model.generate(ids.to(model.device), **keywords).cpu()

    wanted = generate(on_cpu)
    dynamo_counters.clear()
    with no_fallbacks():
        assert generate(model, cache_implementation="static").equal(wanted)
    assert dynamo_counters["stats"]["unique_graphs"] == 1
    assert not dynamo_counters["graph_break"]
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", device_map="webgpu")
    weight = again.model.layers[0].mlp.up_proj.weight
    assert type(weight) is type(model.model.layers[0].mlp.up_proj.weight)
    assert generate(again).equal(wanted)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)).flatten(1))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_exported_graphs(is_dynamic):
    quantizer = x86_inductor_quantizer.X86InductorQuantizer()
    choose = x86_inductor_quantizer.get_default_x86_inductor_quantization_config
    quantizer.set_global(choose(is_dynamic=is_dynamic))
    x = torch.randn(2, 3, 6, 6)
    prepared = prepare_pt2e(torch.export.export(Convolutional().eval(), (x,)).module(), quantizer)
    prepared(x)
    model = convert_pt2e(prepared)
    assert "quantized_decomposed" in model.code
    with torch.no_grad(), no_fallbacks():
        wanted = model(x)
        torch.testing.assert_close(compiled(model)(x), wanted)
        moved = copy.deepcopy(model).to("webgpu")
        for function in (moved, compiled(moved)):
            torch.testing.assert_close(function(x.to("webgpu")).cpu(), wanted)
