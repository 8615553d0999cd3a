"""Models that are restored, shared, aborted and called with many sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.web.test_robust import CAUGHT
from torch_webgpu_compile import export

pytestmark = pytest.mark.rotates(4)


class Mixed(nn.Module):
    """A weight of which a part is prepared by several kernels, a state, and rows of any number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)
        self.register_buffer("total", torch.zeros(24))

    def forward(self, x):
        prepared = (self.weight.cumsum(0) * 3).softmax(-1).cumsum(1)
        found = (x @ prepared).cumsum(-1).softmax(-1).cumsum(-1)
        self.total += found.sum(0)
        return found


@pytest.fixture(scope="module")
def mixed(site):
    torch.manual_seed(0)
    model = Mixed()
    rows = Dim("rows", max=4096)
    with torch.no_grad():
        export(model, (torch.zeros(7, 24),), site[0] / "mixed", dynamic_shapes=({0: rows},))
    return model


def test_prepared_weights_and_many_sizes(mixed, in_page):
    """What preparation leaves in shared memory is not needed after it; memory does not add up."""
    found = in_page(
        """
const model = await runtime.load("mixed");
const call = async rows => (await (await model.run("forward", {x: new Float32Array(24 * rows).fill(1)})).output.read()).length / 24;
const x = Float32Array.from({length: 24 * 80}, (_, k) => Math.sin(k));
const first = Array.from(await (await model.run("forward", {x})).output.read());
const total = Array.from(await model.readState("total"));
const lengths = [];
let after;
for (let k = 0; k < 150; k++) {
  const rows = 50 + (k * 37) % 71;
  lengths.push(await call(rows) === rows);
  if (k === 74) after = model.statistics.gpuBytes;
}
// Another weight has it prepared again.
model.writeState("weight", new Float32Array(24 * 24).fill(0.5));
await model.resetState();
const again = Array.from(await (await model.run("forward", {x})).output.read());
return {first, again, total, right: lengths.every(Boolean), growth: model.statistics.gpuBytes / after};
"""
    )
    x = torch.arange(24.0 * 80).sin().reshape(80, 24)
    with torch.no_grad():
        wanted = mixed(x)
    torch.testing.assert_close(torch.tensor(found["first"]).reshape(80, 24), wanted)
    torch.testing.assert_close(torch.tensor(found["total"]), wanted.sum(0))
    assert found["again"] == found["first"]
    assert found["right"]
    assert found["growth"] < 1.3


def test_what_the_page_wrote_is_restored(mixed, in_page):
    """Also where the signal of `load` has ended long ago; only a loss is told of."""
    found = in_page(
        CAUGHT
        + """
const control = new AbortController();
const told = [];
const model = await runtime.load("mixed", {signal: control.signal, seed: 7, onLost: error => told.push(error.name)});
control.abort();
const x = new Float32Array(24).fill(1);
const call = async () => Array.from(await (await model.run("forward", {x})).output.read());
const weight = Float32Array.from({length: 576}, (_, k) => Math.sin(k));
model.writeState("weight", weight);
const {output: kept} = await model.run("forward", {x});
await model.checkpoint();
const before = await call();
await model.restore();
const told_of_restore = told.length;
const after = [await call(), Array.from(await model.readState("weight"))];
const old = [await caught(kept.read({keep: true})), await caught(model.run("forward", {x: kept}))];
const still = await call();
model.device.destroy();
await model.device.lost;
const late = await caught(call());
await Promise.all([model.restore(), model.restore()]);
await model.resetState();
const first = Array.from(await model.readState("total"));
const ending = model.restore();
model.destroy();
await caught(ending);
return {before, after, old, still, told, told_of_restore, late, first, seed: String(model.seed), weight: Array.from(weight),
  ended: await caught(model.run("forward", {x})), restored: await caught((async () => model.restore())())};
""",
        noisy=True,
    )
    assert found["after"] == [found["before"], found["weight"]]
    assert [row["kind"] for row in found["old"]] == ["DeviceLostError", "InputError"]
    assert "another device" in found["old"][1]["text"]
    assert found["still"] == found["before"]
    assert (found["told"], found["told_of_restore"]) == (["DeviceLostError"], 0)
    assert found["late"]["kind"] == "DeviceLostError"
    assert found["first"] == [0] * 24
    assert found["seed"] == "7"
    for key in ("ended", "restored"):
        assert "the model was destroyed" in found[key]["text"]


def test_a_lost_device_is_replaced_by_itself(mixed, in_page):
    found = in_page(
        """
const told = [];
const model = await runtime.load("mixed", {autoRestore: true, onLost: error => told.push(error.name)});
const x = new Float32Array(24).fill(1);
const call = async () => Array.from(await (await model.run("forward", {x})).output.read());
const before = await call();
for (let k = 0; k < 2; k++) {
  const {device} = model;
  device.destroy();
  await device.lost;
  before.push(...await call());
}
return {before, told};
""",
        noisy=True,
    )
    assert found["before"] == found["before"][:24] * 3
    assert found["told"] == ["DeviceLostError"] * 2


def test_two_models_on_the_page_s_own_device(mixed, in_page):
    """Results of one are inputs of the other; the device stays when they go."""
    found = in_page(
        """
const adapter = await navigator.gpu.requestAdapter();
const device = await adapter.requestDevice();
const told = [];
const options = {device, onLost: error => told.push(error.name)};
const [a, b] = await Promise.all([runtime.load("mixed", options), runtime.load("mixed", options)]);
b.writeState("weight", new Float32Array(576).fill(0.25));
const x = Float32Array.from({length: 24}, (_, k) => k / 24);
const rows = [];
for (let k = 0; k < 3; k++) {
  const {output} = await a.run("forward", {x});
  const next = (await b.run("forward", {x: output})).output;
  const flat = await b.run("forward", {x: {data: output, shape: [1, 24]}});
  rows.push([...await next.read(), ...await flat.output.read()], [...await output.read()]);
}
a.destroy();
rows.push([...await (await b.run("forward", {x})).output.read()]);
b.destroy();
const buffer = device.createBuffer({size: 16, usage: GPUBufferUsage.COPY_DST});
device.queue.writeBuffer(buffer, 0, new Float32Array(4));
await device.queue.onSubmittedWorkDone();
return {rows, told};
"""
    )
    model = Mixed()
    model.load_state_dict(mixed.state_dict())
    x = torch.arange(24.0)[None] / 24
    with torch.no_grad():
        first = model(x)
        model.weight.fill_(0.25)
        second = model(first)
    for k in range(3):
        torch.testing.assert_close(torch.tensor(found["rows"][2 * k + 1]), first[0])
        torch.testing.assert_close(
            torch.tensor(found["rows"][2 * k]), torch.cat([second[0], second[0]])
        )
    assert found["told"] == []


def test_memory_that_ends(mixed, in_page):
    """While it is loaded everything is released; in a call the model says so, and is restored."""
    found = in_page(
        CAUGHT
        + """
const real = GPUDevice.prototype.popErrorScope;
let left = Infinity;
const made = new Set();
GPUDevice.prototype.popErrorScope = async function () {
  const error = await real.call(this);
  return left-- === 0 ? new GPUOutOfMemoryError("there is none") : error;
};
const create = GPUDevice.prototype.createBuffer, destroy = GPUBuffer.prototype.destroy;
GPUDevice.prototype.createBuffer = function (what) { const buffer = create.call(this, what); made.add(buffer); return buffer; };
GPUBuffer.prototype.destroy = function () { made.delete(this); return destroy.call(this); };
left = 2;
const told = [];
const loading = await caught(runtime.load("mixed", {onLost: error => told.push(error)}));
const leaked = made.size;
left = Infinity;
const model = await runtime.load("mixed");
const call = async () => Array.from(await (await model.run("forward", {x: new Float32Array(24).fill(1)})).output.read());
left = 0;
const calling = [await caught(call()), await caught(call())];
left = Infinity;
await model.restore();
Object.assign(GPUDevice.prototype, {popErrorScope: real, createBuffer: create});
return {loading, leaked, told: told.length, calling, right: (await call()).length};
"""
    )
    assert found["loading"]["kind"] == "OutOfMemoryError"
    assert "the GPU has no memory for" in found["loading"]["text"]
    assert (found["leaked"], found["told"]) == (0, 0)
    assert [row["kind"] for row in found["calling"]] == ["OutOfMemoryError"] * 2
    assert "model.restore()" in found["calling"][0]["text"]
    assert found["right"] == 24


def test_loading_is_aborted_at_any_time(mixed, in_page):
    """At once, also while kernels compile; the device goes back."""
    found = in_page(
        CAUGHT
        + """
const real = GPUDevice.prototype.createComputePipelineAsync;
const request = GPUAdapter.prototype.requestDevice;
const devices = [];
GPUAdapter.prototype.requestDevice = async function (...args) { const device = await request.apply(this, args); devices.push(device); return device; };
GPUDevice.prototype.createComputePipelineAsync = () => new Promise(() => undefined);
const control = new AbortController();
const loading = caught(runtime.load("mixed", {signal: control.signal}));
setTimeout(() => control.abort(), 300);
const compiling = await loading;
Object.assign(GPUDevice.prototype, {createComputePipelineAsync: real});
GPUAdapter.prototype.requestDevice = request;
const lost = await Promise.all(devices.map(async device => (await device.lost).reason));
const before = await caught(runtime.load("mixed", {signal: AbortSignal.abort()}));
return {compiling, lost, before};
"""
    )
    assert found["compiling"]["kind"] == found["before"]["kind"] == "AbortError"
    assert found["lost"] == ["destroyed"]


def test_damage_on_the_way(mixed, in_page):
    """A damaged chunk in the cache is fetched again; what the server sends has no second chance."""
    found = in_page(
        CAUGHT
        + """
const x = Float32Array.from({length: 24}, (_, k) => k / 24);
const call = async model => Array.from(await (await model.run("forward", {x})).output.read());
const fetched = [];
const counting = (url, init) => { fetched.push(String(url)); return fetch(url, init); };
const first = await runtime.load("mixed", {fetch: counting});
const rows = [await call(first)];
const cold = fetched.length;
first.destroy();
const cache = await caches.open("torch-webgpu");
const keys = await cache.keys();
for (const [k, key] of keys.entries()) await cache.put(key, new Response(k % 2 ? "short" : new Uint8Array(5 << 20)));
fetched.length = 0;
const second = await runtime.load("mixed", {fetch: counting});
rows.push(await call(second));
second.destroy();
const again = fetched.length;
fetched.length = 0;
(await runtime.load("mixed", {fetch: counting})).destroy();
const warm = fetched.length;

const changed = (change, path) => caught(runtime.load("mixed", {cache: false, fetch: async (url, init) => {
  const response = await fetch(url, init);
  return path.test(String(url)) ? new Response(change(new Uint8Array(await response.arrayBuffer())), response) : response;
}}));
const flipped = await changed(data => (data[data.length - 1] ^= 1, data), /safetensors/);
const wgsl = new TextEncoder().encode(JSON.stringify(Array(20).fill("@compute fn main() { oops }")));
const hash = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", wgsl)), byte => byte.toString(16).padStart(2, "0")).join("");
const kernels = await changed(data => {
  if (data[0] === 91) return wgsl; // a list: the kernels
  const manifest = JSON.parse(new TextDecoder().decode(data));
  manifest.files[manifest.variants[0].kernels] = {nbytes: wgsl.length, sha256: hash, chunks: [hash]};
  return JSON.stringify(manifest);
}, /manifest|kernels/);
const offline = await caught(runtime.load("mixed", {cache: false, fetch: (url, init) =>
  /safetensors/.test(String(url)) ? Promise.reject(new TypeError("there is no network")) : fetch(url, init)}));
return {rows, cold, again, warm, flipped, kernels, offline};
""",
        noisy=True,
    )
    assert found["rows"][0] == found["rows"][1]
    assert found["again"] == found["cold"] > found["warm"] == 1
    assert {found[key]["kind"] for key in ("flipped", "kernels", "offline")} == {"BundleError"}
    assert "damaged: chunk 0 has another SHA-256" in found["flipped"]["text"]
    assert "was refused" in found["kernels"]["text"]
    assert "there is no network; load again later" in found["offline"]["text"]
