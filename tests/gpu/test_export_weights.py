"""``export(…, weights=…)``: bundles with packed weights, beside PyTorch with the same weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from torch_webgpu_compile import UnsupportedOp, export, load_bundle
from torch_webgpu_compile.bundle.targets import BROWSER
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime.device import device_for

TOKENS, WIDTH = 300, 768


class LanguageModel(nn.Module):
    """An embedding that is the head, too, a layer with a hidden width, and a norm."""

    def __init__(self, tokens=TOKENS, width=WIDTH, hidden=256):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def language_model(**sizes):
    torch.manual_seed(0)
    return LanguageModel(**sizes).eval()


def numbers(plane, width):
    """The numbers of so many bits in words of 32, the first in the lowest bits."""
    shifts = np.arange(0, 32, width, dtype=np.uint32)
    return ((plane[..., None] >> shifts) & ((1 << width) - 1)).reshape(len(plane), -1)


def dequantized(words, blocks, columns):
    """A packed state as docs/bundle.md describes it, by other means than the package's."""
    words = words.view(np.uint32)
    block, level, scale, halves = {
        "Q8_0": (32, 8, 0, 1),
        "Q4_1": (32, 4, 0, 2),
        "Q4_K": (256, 4, 2, 2),
    }[blocks]
    filled = -(-columns // block) * block
    bits = [level * filled, *[8 * filled // 32] * scale, 16 * halves * filled // block]
    ends = np.cumsum([-(-count // 32) for count in bits])
    levels, *scales, units = np.split(words[:, : ends[-1]], ends[:-1], 1)
    levels = numbers(levels, level)[:, :filled]
    units = numbers(units, 16)[:, : halves * filled // block].astype(np.uint16).view(np.float16)
    units = units.astype(np.float32).reshape(len(words), -1, halves)
    if blocks == "Q8_0":
        levels = levels.astype(np.uint8).view(np.int8)
    of_groups = [numbers(plane, 8)[:, : filled // 32] for plane in scales] or [1, 1]
    parts = [
        np.repeat(np.repeat(units[..., k], block // 32, 1) * of_groups[k], 32, 1)
        for k in range(halves)
    ]
    offset = 0 if halves == 1 else parts[1] if blocks == "Q4_1" else -parts[1]
    return torch.from_numpy((levels * parts[0] + offset)[:, :columns].astype(np.float32))


def with_packed(model, bundle):
    """The model with the weights that the bundle has, in place; their names."""
    packed = bundle.manifest.weights.states
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, state in packed.items():
            found = dequantized(bundle.state(name), state.blocks, state.sizes[1])
            before = parameters[name].double()
            parameters[name].copy_(found)
            error = (parameters[name] - before).norm() / before.norm()
            assert float(error) == pytest.approx(state.error, rel=1e-6)
    return set(packed)


def same(got, wanted, **tolerances):
    torch.testing.assert_close(torch.from_numpy(got), wanted.detach(), **tolerances)


@pytest.mark.parametrize(
    ("weights", "error", "nbytes"), [("int8", 0.006, 1.07), ("int4", 0.08, 0.6)]
)
def test_a_language_model(weights, error, nbytes, tmp_path):
    model, ids = language_model(), torch.tensor([[3, 299, 3, 17]])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    floats = model(ids).detach()
    bundle = load_bundle(export(model, (ids,), tmp_path / "b", weights=weights))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])

    found = json.loads((tmp_path / "b" / "manifest.json").read_text())["weights"]
    assert (found["format"], found["group"]) == (weights, 32)
    assert 0 < found["error"] < error
    # The head is the embedding: one state, whose rows are read and multiplied with.
    assert with_packed(model, bundle) == {"embedding.weight", "up.weight", "down.weight"}
    numel = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert found["original_nbytes"] == 4 * numel
    assert found["nbytes"] <= nbytes * numel
    files = [p.stat().st_size for p in (tmp_path / "b" / "weights").iterdir()]
    assert sum(files) < found["nbytes"] + 16_000  # biases and the norm
    got = bundle.run("forward", ids=ids.numpy())["output"]
    same(got, model(ids))
    assert float((torch.from_numpy(got) - floats).norm() / floats.norm()) < 3 * error


@pytest.mark.rotates(2)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_that_are_no_whole_blocks(weights, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3, bias=False)).bfloat16()
    x = torch.randn(5, 100).bfloat16()
    bundle = load_bundle(export(model, (x,), tmp_path / "b", weights=weights))
    assert with_packed(model, bundle)
    got = bundle.run("forward", input=x.float().numpy())["output"]
    same(got, model(x).float(), atol=2e-2, rtol=2e-2)


def test_a_model_on_the_device_with_sizes_that_calls_choose(tmp_path):
    model = language_model(width=64, hidden=64)
    ids = torch.tensor([[3, 299, 3, 17]])
    folder = export(
        copy.deepcopy(model).to("webgpu"),
        (ids.to("webgpu"),),
        tmp_path / "b",
        dynamic_shapes=({1: Dim("length", max=40)},),
        weights="int8",
    )
    bundle = load_bundle(folder)
    with_packed(model, bundle)
    for length in (1, 4, 40):
        ids = torch.arange(length)[None]
        same(bundle.run("forward", ids=ids.numpy())["output"], model(ids))


def test_a_weight_of_which_no_binding_reaches_a_copy(tmp_path):
    model, ids = language_model(), torch.tensor([[3, 299, 3, 17]])
    target = replace(BROWSER, max_binding_nbytes=1 << 19, max_buffer_nbytes=1 << 19)
    options = {"dynamic_shapes": ({1: Dim("length", max=40)},), "target": target}
    with pytest.raises(UnsupportedOp, match="bytes"):
        export(model, (ids,), tmp_path / "b", **options)
    bundle = load_bundle(export(model, (ids,), tmp_path / "b", weights="int4", **options))
    with_packed(model, bundle)
    for length in (4, 40):
        ids = torch.arange(length)[None]
        same(bundle.run("forward", ids=ids.numpy())["output"], model(ids))


def test_weights_of_attention(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True).eval()
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
    bundle = load_bundle(export(layer, (x, memory), tmp_path / "b", weights="int8"))
    wanted = {name for name, p in layer.named_parameters() if p.dim() == 2}
    assert with_packed(layer, bundle) == wanted
    got = bundle.run("forward", tgt=x.numpy(), memory=memory.numpy())["output"]
    same(got, layer(x, memory), atol=1e-5, rtol=1e-4)


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[0, 0], lambda x: x.transpose(0, 1)], ids=["", "row", "turned"]
)
def test_products_in_other_layouts(view, tmp_path):
    layer, x = nn.Linear(64, 48, bias=False), torch.randn(2, 5, 64)
    bundle = load_bundle(export(lambda x: layer(view(x)), (x,), tmp_path / "b", weights="int8"))
    assert with_packed(layer, bundle) == {"weight"}
    same(bundle.run("forward", x=x.numpy())["output"], layer(view(x)))


def test_half_precision_beside_single(tmp_path):
    if not device_for(from_environment()).target.has_float16:
        pytest.skip("this adapter has no shader-f16")
    model, ids = language_model(), torch.tensor([[3, 299, 3, 17]])
    precision = "float32", "float16"
    folder = export(model, (ids,), tmp_path / "b", precision=precision, weights="int4")
    bundles = [load_bundle(folder, variant=name) for name in precision]
    words = [bundle.state("up.weight") for bundle in bundles]
    np.testing.assert_array_equal(*words)
    with_packed(model, bundles[0])
    single, half = (b.run("forward", ids=ids.numpy())["output"] for b in bundles)
    same(single, model(ids))
    scale = np.abs(single).max()
    np.testing.assert_allclose(half.astype(np.float32), single, atol=2e-2 * scale)


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank, the only thing that is trained."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.inner.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x):
        return torch.tanh(self.inner(torch.tanh(self.inner(x) + self.up(self.down(x)))))


def test_what_is_trained_stays_as_it_is(tmp_path):
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(4, 64)
    entries = {"step": (step, (x,)), "predict": (model.forward, (x,))}
    bundle = load_bundle(export(entries, tmp_path / "b", weights="int4"))
    assert with_packed(model, bundle) == {"inner.weight"}
    for _ in range(3):
        same(bundle.run("step", x=x.numpy())["output"], step(x))
    same(bundle.run("predict", x=x.numpy())["output"], model(x))
    same(bundle.state("up.weight"), model.up.weight)

    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    model.inner.requires_grad_()
    optimizer = everything
    with pytest.raises(UnsupportedOp, match=r"inner\.weight: an entry changes it"):
        export(step, (x,), tmp_path / "c", weights="int4")
    assert not (tmp_path / "c").exists()
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_weight_with_other_uses(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)

    def function(x):
        return {"y": layer(x), "norm": layer.weight.norm(dim=1), "weight": layer.weight}

    x = torch.randn(3, 64)
    bundle = load_bundle(export(function, (x,), tmp_path / "b", weights="int8"))
    assert with_packed(layer, bundle) == {"weight"}
    got = bundle.run("forward", x=x.numpy())
    for name, wanted in function(x).items():
        same(got[name], wanted)


def test_weights_that_scales_cannot_hold_stay(tmp_path):
    torch.manual_seed(0)
    tiny, large, plain = (nn.Linear(64, 64, bias=False) for _ in range(3))
    with torch.no_grad():
        tiny.weight.mul_(1e-9)
        large.weight.mul_(1e9)
    model, x = nn.Sequential(tiny, large, plain), torch.randn(2, 64)
    bundle = load_bundle(export(model, (x,), tmp_path / "b", weights="int4"))
    assert with_packed(model, bundle) == {"2.weight"}
    same(bundle.run("forward", input=x.numpy())["output"], model(x))


def test_what_cannot_be_packed_is_refused(tmp_path):
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"'int3' is not valid; use int8 or int4"):
        export(nn.Linear(8, 8), (x,), tmp_path / "b", weights="int3")
    with pytest.raises(UnsupportedOp, match=r"the entries have none.*leave weights out"):
        export(nn.Conv2d(3, 4, 3), (x,), tmp_path / "b", weights="int4")
    with pytest.raises(UnsupportedOp, match=r"weight: it would not be smaller"):
        export(nn.Linear(8, 2), (x,), tmp_path / "b", weights="int8")
    assert not (tmp_path / "b").exists()


def test_without_weights_nothing_is_said(tmp_path):
    export(nn.Linear(8, 8), (torch.randn(2, 8),), tmp_path / "b")
    assert "weights" not in json.loads((tmp_path / "b" / "manifest.json").read_text())
