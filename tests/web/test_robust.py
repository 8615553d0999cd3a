"""What a page survives: lost devices, broken downloads, bundles that were tampered with."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.web.conftest import QuietHandler
from torch_webgpu_compile import export
from web.serve import serving

pytestmark = pytest.mark.rotates(2)

CAUGHT = """
const caught = async promise => {
  try { await promise; return null; } catch (error) { return {kind: error.name, text: error.message}; }
};
"""


class Counter(nn.Module):
    """A state that calls change, and an index that may be wrong."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.table = nn.Embedding(6, 4)

    def forward(self, index):
        self.total += self.table(index).sum(0)
        return self.total.clone()


@pytest.fixture(scope="module")
def counter(site) -> Path:
    torch.manual_seed(0)
    return export(Counter(), (torch.tensor([1, 2]),), site[0] / "counter")


@pytest.mark.parametrize("crashes", [False, True])
def test_a_lost_device(crashes, counter, in_page, browser):
    """Also where the browser's GPU process ends, with all devices of all pages."""
    in_page(
        """
const told = [];
const model = await runtime.load("counter", {onLost: error => told.push(error.name)});
const call = async () => Array.from(await (await model.run("forward", {index: [1, 2]})).output.read());
await call();
await model.checkpoint();
await call();
Object.assign(window, {told, model, call});
"""
    )
    if crashes:
        session = browser.new_browser_cdp_session()
        processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
        (gpu,) = (process["id"] for process in processes if process["type"] == "GPU")
        os.kill(gpu, signal.SIGKILL)
    found = in_page(
        CAUGHT
        + ("" if crashes else "model.device.destroy();")
        + """
await model.device.lost;
const pending = await caught(call());
const wanted = (await model.restore(), await call());
return {pending, told, wanted};
""",
        noisy=True,
    )
    assert found["pending"]["kind"] == "DeviceLostError"
    assert "model.restore()" in found["pending"]["text"]
    assert found["told"] == ["DeviceLostError"]
    torch.manual_seed(0)
    model = Counter()
    with torch.no_grad():
        model(torch.tensor([1, 2]))
        wanted = model(torch.tensor([1, 2]))
    torch.testing.assert_close(torch.tensor(found["wanted"]), wanted)


def test_calls_that_do_not_fit(counter, in_page):
    found = in_page(
        CAUGHT
        + """
const model = await runtime.load("counter");
const run = async (...call) => caught((async () => (await model.run(...call)).output.read())());
const tensor = (await model.run("forward", {index: [0, 0]})).output;
await tensor.read();
return [
  await run("backward", {}), await run("forward", {}), await run("forward", {index: [1, 2], x: 1}),
  await run("forward", {index: [1, 2, 3]}), await run("forward", {index: [0.5, 1]}),
  await run("forward", {index: tensor}), await caught(tensor.read()),
  (await run("forward", {index: [1, 9]}), await caught(model.check())), await run("forward", {index: [1, 2]}),
  await caught(model.run("forward", {index: [1, 2]}, {signal: AbortSignal.abort()})),
  (model.destroy(), await run("forward", {index: [1, 2]})),
];
"""
    )
    kinds = [None if row is None else row["kind"] for row in found]
    assert kinds == [*["InputError"] * 7, "IndexOutOfRangeError", None, "AbortError", "InputError"]
    texts = [row["text"] for row in found if row]
    assert "restore the state that the call has changed" in texts[7]
    assert "there is no entry backward; there are forward" in texts[0]
    assert "needs the input index: int64" in texts[1]
    assert "index 9 is out of bounds for dimension 0 with size 6" in texts[7]
    assert "test_robust.py" in texts[7]


TAMPERED = {
    "of no bundle": "m.format = 'zip'",
    "version 9": "m.version = 9",
    "no path inside": "m.files['../up.json'] = m.files[m.variants[0].kernels]",
    "not among the files": "m.variants[0].kernels = 'kernels/none.json'",
    "is no SHA-256": "Object.values(m.files)[0].sha256 = 7",
    "not as many": "Object.values(m.files)[0].chunks = []",
    "too large": "Object.values(m.variants[0].state)[0].sizes = [2 ** 52, 2 ** 52]",
    "outside of its file": "m.variants[0].state['table.weight'].offset = 1e9",
    "is no dtype": "m.variants[0].state.total.dtype = '__proto__'",
    "is no list": "m.variants[0].entries.forward.arguments = {}",
    "takes other arguments": "m.variants[0].entries.forward.arguments.pop()",
    "an argument 0 of another dtype or size": "m.variants[0].entries.forward.inputs.index.sizes = [3]",
    "which does not change": "m.variants[0].state.total.changes = false",
    "no output for the result output": "m.variants[0].entries.forward.results.output.output = 5",
    "is no dimension": "m.variants[0].entries.forward.sizes.s0 = {name: 'n', low: 1, high: 2, input: 'index', dim: 0}",
    "damaged": "Object.values(m.files).forEach(file => file.chunks = file.chunks.map(() => '0'.repeat(64)))",
    "none of shader-f16": "m.variants[0].features = ['time-travel']",
    "maxStorageBuffersPerShaderStage 99 (it has": "m.variants[0].limits = {maxStorageBuffersPerShaderStage: 99}",
}
PLANS = {
    "steps[0].kernel is no size": "p.steps[0].Dispatch.kernel = -1",
    "steps[0] is no object": "p.steps[0] = {HostStep: {}}",
    "has no module of the kernel": "p.kernels[0].wgsl = 1e6",
    "has no buffer constructor": "p.steps[0].Dispatch.bindings[0].buffer = 'constructor'",
    "does not fit its kernel": "p.steps[0].Dispatch.bindings.length = 0",
    "grid[0] is no object": "p.steps[0].Dispatch.grid[0] = '1e99'",
    "the size s7 of no input": "p.steps[0].Dispatch.grid[0] = {c: 0, t: [[1, ['s7', 0]]]}",
    "grid[0][0] is no list": "p.steps[0].Dispatch.grid[0] = {c: 0, t: [7]}",
    "nested too deeply": "let e = 1; for (let k = 0; k < 99; k++) e = {c: 0, t: [[1, ['//', e, 2]]]}; p.steps[0].Dispatch.grid[0] = e",
    "workgroups, more than 65535": "p.steps[0].Dispatch.grid[0] = 1e6",
}


def test_bundles_that_were_tampered_with(counter, in_page):
    """None of them is let near the GPU."""
    found = in_page(
        CAUGHT
        + """
const sha = async data => Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", data)),
  byte => byte.toString(16).padStart(2, "0")).join("");
const load = (changeManifest, changePlan) => caught((async () => {
  const other = {};
  const manifest = await (await fetch("counter/manifest.json")).json();
  if (changePlan) {
    const path = manifest.variants[0].entries.forward.plan;
    const p = await (await fetch("counter/" + path)).json();
    changePlan(p);
    const data = new TextEncoder().encode(JSON.stringify(p));
    other[path] = data;
    const hash = await sha(data);
    manifest.files[path] = {nbytes: data.length, sha256: hash, chunks: [hash]};
  }
  changeManifest(manifest);
  other["manifest.json"] = new TextEncoder().encode(JSON.stringify(manifest));
  const model = await runtime.load("counter", {cache: false, fetch: async (url, init) => {
    const path = new URL(url).pathname.replace("/counter/", "");
    return path in other ? new Response(other[path]) : fetch(url, init);
  }});
  model.destroy();
})());
const changes = {
"""
        + "".join(
            f"{json.dumps(text)}: [m => {{ {code} }}, null],\n" for text, code in TAMPERED.items()
        )
        + "".join(
            f"{json.dumps(text)}: [() => 0, p => {{ {code} }}],\n" for text, code in PLANS.items()
        )
        + """};
const found = {unchanged: await load(() => 0, null)};
for (const [text, [m, p]] of Object.entries(changes)) found[text] = await load(m, p);
return found;
"""
    )
    assert found.pop("unchanged") is None
    for text, error in found.items():
        assert error is not None, text
        kind = "WebGPUUnavailableError" if "it has" in text else "BundleError"
        assert error["kind"] == kind, (text, error)
        assert text in error["text"], (text, error)


@pytest.fixture(scope="module")
def large(site) -> Path:
    """13 MB in four chunks and two files, with tensors that end inside of words."""
    torch.manual_seed(0)

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(1_300_001))
            self.b = nn.Parameter(torch.randn(1_900_003))
            self.register_buffer("c", torch.randint(0, 255, (1_000_003,), dtype=torch.uint8))
            self.register_buffer("d", torch.arange(5, dtype=torch.uint8))
            self.register_buffer("zeros", torch.zeros(3))

        def forward(self, x):
            return x + self.a[-1] + self.b[-1] + self.c[-1] + self.d[-1] + self.zeros.sum()

    model = Large().eval()
    return export(model, (torch.zeros(2),), site[0] / "large", shard_nbytes=8 << 20)


class Breaking(QuietHandler):
    """Ends every third response with weights in its middle; knows no ranges if so told."""

    count = 0
    ranges = True
    sent = 0

    def send_head(self):
        if not type(self).ranges:
            del self.headers["Range"]
        return super().send_head()

    def copyfile(self, source, outputfile):
        kind = type(self)
        if not self.path.endswith(".safetensors"):
            return super().copyfile(source, outputfile)
        kind.count += 1
        data = source.read()
        if kind.count % 3 == 1:
            data = data[: len(data) // 2]
            self.close_connection = True
        kind.sent += len(data)
        outputfile.write(data)
        return None


@pytest.mark.parametrize("ranges", [True, False])
def test_downloads_that_break(ranges, large, in_page, site):
    class Here(Breaking):
        pass

    Here.ranges = ranges
    with serving(site[0], handler=Here) as server:
        page = in_page.page
        page.goto(f"http://localhost:{server.server_port}/")
        page.wait_for_function("window.runtime")
        found = in_page(
            """
const seen = [];
const model = await runtime.load("large", {progress: p => seen.push([p.loadedBytes, p.totalBytes])});
const {output} = await model.run("forward", {x: [0, 1]});
const states = {};
for (const name of "abcd") {
  const data = await model.readState(name);
  states[name] = [data.length, data.at(-1), data.at(0), data.reduce((a, b) => a + b, 0)];
}
model.destroy();
return {output: Array.from(await (async () => output.read())().catch(() => [])), states, last: seen.at(-1), count: seen.length};
""",
            noisy=True,
        )
        sent = Here.sent
        again = in_page(
            "const model = await runtime.load('large'); return Array.from(await (await model.run('forward', {x: [0, 1]})).output.read());",
            noisy=True,
        )
    torch.manual_seed(0)
    a, b = torch.randn(1_300_001), torch.randn(1_900_003)
    c = torch.randint(0, 255, (1_000_003,), dtype=torch.uint8)
    for name, wanted in (("a", a), ("b", b), ("c", c), ("d", torch.arange(5))):
        length, last, first, total = found["states"][name]
        assert (length, last, first) == (
            len(wanted),
            pytest.approx(float(wanted[-1])),
            pytest.approx(float(wanted[0])),
        )
        assert total == pytest.approx(float(wanted.double().sum()), rel=1e-4, abs=1)
    assert found["last"][0] == found["last"][1]
    assert Here.sent == sent  # the second time all is in the browser's cache
    assert again[1] - again[0] == pytest.approx(1)


def test_loading_is_aborted(large, in_page):
    found = in_page(
        CAUGHT
        + """
const control = new AbortController();
return caught(runtime.load("large", {cache: false, signal: control.signal, progress: () => control.abort()}));
"""
    )
    assert found["kind"] == "AbortError"


def test_memory_that_is_not_there(site, in_page, tmp_path):
    """A manifest of more than the device has: refused before a byte of it is fetched."""
    folder = export(nn.Linear(2, 2), (torch.zeros(1, 2),), site[0] / "huge")
    manifest = json.loads((folder / "manifest.json").read_text())
    for state in manifest["variants"][0]["state"].values():
        state["file"] = None
    manifest["variants"][0]["state"]["more"] = {
        "kind": "tensor",
        "dtype": "float32",
        "sizes": [1 << 34],
        "changes": False,
        "file": None,
        "offset": 0,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = in_page(CAUGHT + 'return caught(runtime.load("huge"));', noisy=True)
    assert found["kind"] == "OutOfMemoryError", found
    shutil.rmtree(folder)


def test_symbolic_sizes(site, in_page):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    export(
        model, (torch.zeros(4, 3),), site[0] / "sizes", dynamic_shapes=({0: Dim("rows", max=9)},)
    )
    found = in_page(
        CAUGHT
        + """
const model = await runtime.load("sizes");
const rows = [];
for (const input of [[[1, 2, 3]], new Float32Array(27), {data: [1, 2, 3, 4, 5, 6], shape: [2, 3]}, [0, 0, 0, 0, 0, 0]]) {
  const {output} = await model.run("forward", {input});
  rows.push([output.shape, Array.from(await output.read())]);
}
return {rows, wrong: [await caught(model.run("forward", {input: new Float32Array(30)})),
  await caught(model.run("forward", {input: [[1, 2]]})), await caught(model.run("forward", {input: [[1, 2, 3], [4]]}))]};
"""
    )
    assert [shape for shape, _ in found["rows"]] == [[1, 2], [9, 2], [2, 2], [2, 2]]
    wanted = model(torch.tensor([[1.0, 2, 3], [4, 5, 6]])).detach().flatten()
    np.testing.assert_allclose(found["rows"][2][1], wanted, rtol=1e-5)
    texts = [row["text"] for row in found["wrong"]]
    assert "rows is 10 (dimension 0 of input), it has to be 1 to 9" in texts[0]
    assert "has the sizes [1,2], it has to have [1,3]" in texts[1]
    assert "rows of several lengths" in texts[2]
