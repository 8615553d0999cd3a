"""Bundles in Chromium: equal to PyTorch, and to the same bundle in Python on the same adapter."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.gpu.test_export import Decoder
from tests.gpu.test_export_weights import language_model, with_packed
from torch_webgpu_compile import EntryPoint, export, load_bundle

RUN = """
const model = await runtime.load(given.bundle, {seed: 0});
const found = [];
for (const [entry, inputs] of given.calls) {
  const results = {};
  for (const [name, tensor] of Object.entries(await model.run(entry, inputs))) {
    results[name] = Array.from(await tensor.read(), (x) => (Number.isFinite(Number(x)) ? Number(x) : String(x)));
  }
  found.push(results);
}
model.destroy();
return found;
"""


def assert_equal(found, wanted):
    """Within 1e-6 of the largest value: one adapter, two programs around it."""
    assert len(found) == len(wanted)
    for got, other in zip(found, wanted, strict=True):
        assert got.keys() == other.keys()
        for name in got:
            values, same = (np.array(list(map(float, x))) for x in (got[name], other[name]))
            scale = np.abs(same[np.isfinite(same)]).max(initial=1e-30)
            np.testing.assert_allclose(values, same, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.rotates(6)
def test_fifty_training_steps(in_page, site, in_python):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(144, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    x, y = torch.randn(12, 1, 8, 8), torch.randint(0, 3, (12,))
    folder = export(step, (x, y), site[0] / "training")
    calls = [["forward", {"x": x.tolist(), "y": y.tolist()}]] * 50
    found = in_page(RUN, {"bundle": "training", "calls": calls})
    assert found[-1]["loss"][0] < 0.5 * found[0]["loss"][0]
    assert_equal(found, in_python(folder, calls))


def test_sixty_four_tokens(in_page, site):
    torch.manual_seed(0)
    model = Decoder(length=80).eval()
    ids, position = torch.randint(0, 50, (1, 7)), torch.arange(7)
    with torch.no_grad():
        entries = {
            "prefill": EntryPoint(model, (ids, position)),
            "decode": EntryPoint(model, (ids[:, :1], position[:1])),
        }
        export(entries, site[0] / "decoding")
        found = in_page(
            """
const model = await runtime.load("decoding");
let {0: id, 1: at} = await model.run("prefill", given);
const tokens = [];
await model.check();
const before = model.statistics;
for (let k = 0; k < 64; k++) {
  tokens.push(Number((await id.read({keep: true}))[0]));
  ({0: id, 1: at} = await model.run("decode", {ids: id, position: at}));
}
return {tokens, bytes: model.statistics.copiedBytes - before.copiedBytes, gpu: model.statistics.gpuBytes - before.gpuBytes};
""",
            {"ids": ids.tolist(), "position": position.tolist()},
        )
        wanted = []
        token, at = model(ids, position)
        for _ in range(64):
            wanted.append(int(token))
            token, at = model(token, at)
    assert found["tokens"] == wanted
    # The first calls of an entry have their checks read, and then one a second.
    assert 64 * 8 <= found["bytes"] <= 64 * 8 + 32 * 10
    assert found["gpu"] < 4096


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 3),
        nn.AvgPool2d(2),
    ), (torch.randn(2, 3, 17, 17),)


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 9, 32),)


def recurrent():
    return nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), (torch.randn(2, 5, 8),)


def integers():
    def function(x, y):
        big = x * 3_000_000_019 + y
        return {"sum": big.sum(), "shifted": big >> 3, "sorted": y.sort().values, "mask": x > y}

    return function, (torch.arange(-8, 8), torch.randint(-(2**40), 2**40, (16,)))


def halves():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16(), (
        torch.randn(3, 16).bfloat16(),
    )


@pytest.mark.rotates(10)
@pytest.mark.parametrize("make", [convnet, transformer, recurrent, integers, halves])
def test_models(make, in_page, site, in_python):
    torch.manual_seed(0)
    function, inputs = make()
    if isinstance(function, nn.Module):
        function.eval()
    with torch.no_grad():
        folder = export(function, inputs, site[0] / make.__name__)
        eager = function(*inputs)
    names = list(
        json.loads((folder / "manifest.json").read_text())["variants"][0]["entries"]["forward"][
            "inputs"
        ]
    )
    calls = [["forward", {n: x.tolist() for n, x in zip(names, inputs, strict=True)}]]
    found = in_page(RUN, {"bundle": make.__name__, "calls": calls})
    assert_equal(found, in_python(folder, calls))
    leaves = torch.utils._pytree.tree_leaves(eager)
    for got, wanted in zip(found[0].values(), leaves, strict=True):
        close = torch.tensor(got, dtype=torch.float64), wanted.double().flatten()
        tolerance = 1e-2 if wanted.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(*close, atol=tolerance, rtol=tolerance)


@pytest.mark.rotates(2)
def test_what_was_trained_is_saved_and_loaded(in_page, site, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    x = torch.randn(4, 3)
    export({"step": (step, (x,)), "predict": (model, (x,))}, site[0] / "saving")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = in_page(
        """
const model = await runtime.load("saving");
await model.run("step", {x: given});
const saved = await model.save();
await model.run("step", {x: given});
const twice = Array.from(await model.readState("weight"));
model.loadState(saved);
const once = Array.from(await model.readState("weight"));
await model.resetState();
return {saved: Array.from(saved), twice, once, first: Array.from(await model.readState("weight"))};
""",
        x.tolist(),
    )
    from safetensors.torch import load

    model.load_state_dict(before)
    model.load_state_dict(load(bytes(found["saved"])))
    torch.testing.assert_close(model.weight.detach().flatten(), torch.tensor(found["once"]))
    torch.testing.assert_close(torch.tensor(found["first"]), before["weight"].flatten())
    assert found["twice"] != found["once"] != found["first"]


def test_in_a_worker(in_page, site):
    export(nn.Linear(3, 2), (torch.randn(4, 3),), site[0] / "worker")
    (site[0] / "worker.js").write_text(
        """import {load} from "./torch-webgpu.js";
onmessage = async ({data}) => {
  const model = await load("worker", {cache: false});
  const {output} = await model.run("forward", {input: data});
  postMessage(Array.from(await output.read()));
};"""
    )
    found = in_page(
        """
const worker = new Worker("worker.js", {type: "module"});
return await new Promise((resolve, reject) => {
  worker.onmessage = ({data}) => resolve(data);
  worker.onerror = reject;
  worker.postMessage(new Float32Array(12));
});"""
    )
    assert len(found) == 8


@pytest.mark.rotates(2)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights(weights, in_page, site, in_python):
    model, ids = language_model(), [[3, 299, 3, 17]]
    folder = export(model, (torch.tensor(ids),), site[0] / weights, weights=weights)
    found = in_page(RUN, {"bundle": weights, "calls": [["forward", {"ids": ids}]]})
    assert_equal(found, in_python(folder, [["forward", {"ids": ids}]]))
    with_packed(model, load_bundle(folder))
    wanted = model(torch.tensor(ids)).detach().flatten().tolist()
    np.testing.assert_allclose(found[0]["output"], wanted, rtol=1e-4, atol=1e-5)
    said = in_page(
        "return (await (await fetch(`${given}/manifest.json`)).json()).weights;", weights
    )
    assert said["format"] == weights
    assert 0 < said["error"] < 0.1
