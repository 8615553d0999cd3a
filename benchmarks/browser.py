"""Bundles in headless Chromium beside onnxruntime-web, on the same models, in one run.

    python -m benchmarks.browser [--output benchmarks/results/FILE.json] [--large MB]

It needs Debian's Chromium, playwright, npm, and ``onnx`` with ``onnxscript`` for the other side. On
a machine without a GPU the adapter is SwiftShader, for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.sentence_embeddings import SENTENCES, load_encoder, model_folder, tokenize
from tests.gpu.test_export import Decoder
from torch_webgpu_compile import EntryPoint, export
from web.build import build_runtime, npm_environment
from web.serve import Handler, serving

PEER = Path(__file__).parent / "onnxruntime_web"
FLAGS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox")
PAGE = """<!doctype html><link rel="icon" href="data:,"><script type="module">
import * as runtime from "./torch-webgpu.js"; window.runtime = runtime;
window.loadPeer = async () => {
  const ort = await import("./ort/ort.webgpu.min.mjs");
  ort.env.wasm.wasmPaths = new URL("./ort/", location.href).href;
  return ort;
};
</script>"""


class Isolated(Handler):
    """With the headers that let the other runtime use threads, and without a content policy."""

    quiet = True

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Security-Policy":
            super().send_header(keyword, value)

    def end_headers(self) -> None:
        super().send_header("Cross-Origin-Opener-Policy", "same-origin")
        super().send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[*FLAGS],
            ignore_default_args=["--disable-gpu"],
        )
        yield browser
        browser.close()


class Chain(nn.Module):
    """Small products, one after the other: a dispatch each."""

    def __init__(self, count: int = 300) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.eye(8) * 0.99)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x @ self.factor
        return x


class Large(nn.Module):
    """So many megabytes that do not compress."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        parts = [torch.randn(16 << 18) for _ in range(megabytes // 16)]
        self.parts = nn.ParameterList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part[-1]
        return x


def build(folder: Path, megabytes: int) -> None:
    shutil.copy(build_runtime(), folder / "torch-webgpu.js")
    (folder / "index.html").write_text(PAGE)
    if not (PEER / "node_modules").exists():
        subprocess.run(["npm", "ci", "--silent"], cwd=PEER, check=True, env=npm_environment())
    (folder / "ort").symlink_to(PEER / "node_modules" / "onnxruntime-web" / "dist")
    source = model_folder()
    encoder, example = load_encoder(source), tokenize(source, SENTENCES)
    decoder = Decoder(length=80).eval()
    ids, position = torch.zeros((1, 7), dtype=torch.int64), torch.arange(7)
    with torch.no_grad():
        export(encoder, example, folder / "minilm")
        names = ["input_ids", "attention_mask"]
        torch.onnx.export(
            encoder,
            example,
            folder / "minilm.onnx",
            input_names=names,
            output_names=["output"],
            external_data=False,
            dynamo=True,
            verbose=False,
        )
        export(Chain(), (torch.randn(8, 8),), folder / "chain")
        entries = {
            "prefill": EntryPoint(decoder, (ids, position)),
            "decode": EntryPoint(decoder, (ids[:, :1], position[:1])),
        }
        export(entries, folder / "decoder")
        export(Large(megabytes), (torch.zeros(1),), folder / "large")
        (folder / "minilm.json").write_text(
            json.dumps([*(part.tolist() for part in example), encoder(*example).flatten().tolist()])
        )


OURS = """async ({calls}) => {
  const [input_ids, attention_mask, wanted] = await (await fetch("minilm.json")).json();
  const begun = performance.now();
  const model = await runtime.load("minilm");
  const inputs = {input_ids, attention_mask};
  let data = await (await model.run("forward", inputs)).output.read();
  const first = performance.now() - begun;
  const times = [];
  for (let k = 0; k < calls; k++) {
    const start = performance.now();
    data = await (await model.run("forward", inputs)).output.read();
    times.push(performance.now() - start);
  }
  const error = data.reduce((most, x, k) => Math.max(most, Math.abs(x - wanted[k])), 0);
  const {dispatches, calls: made} = model.statistics;
  model.destroy();
  return {first, times, error, dispatches: dispatches / made};
}"""
THEIRS = """async ({calls}) => {
  const [ids, mask, wanted] = await (await fetch("minilm.json")).json();
  const begun = performance.now();
  const ort = await loadPeer();
  const cache = await caches.open("peer");
  let file = await cache.match("minilm.onnx");
  if (!file) { await cache.add("minilm.onnx"); file = await cache.match("minilm.onnx"); }
  const session = await ort.InferenceSession.create(new Uint8Array(await file.arrayBuffer()), {executionProviders: ["webgpu"]});
  const tensor = rows => new ort.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
  const inputs = {input_ids: tensor(ids), attention_mask: tensor(mask)};
  let data = (await session.run(inputs)).output.data;
  const first = performance.now() - begun;
  const times = [];
  for (let k = 0; k < calls; k++) {
    const start = performance.now();
    data = (await session.run(inputs)).output.data;
    times.push(performance.now() - start);
  }
  const error = data.reduce((most, x, k) => Math.max(most, Math.abs(x - wanted[k])), 0);
  const bytes = performance.getEntriesByType("resource").filter(r => r.name.includes("/ort/"))
    .reduce((sum, r) => sum + r.decodedBodySize, 0);
  return {first, times, error, bytes, webgpu: !!ort.env.webgpu?.device};
}"""
PER_DISPATCH = """async () => {
  const model = await runtime.load("chain");
  const inputs = {x: new Float32Array(64)};
  const times = [];
  for (let k = 0; k < 140; k++) {
    const start = performance.now();
    const results = model.run("forward", inputs);
    times.push(performance.now() - start);
    const {output} = await results;
    await output.read();
  }
  const {dispatches, calls} = model.statistics;
  return {times: times.slice(40), dispatches: dispatches / calls};
}"""
DECODE = """async () => {
  const model = await runtime.load("decoder");
  let {0: id, 1: at} = await model.run("prefill", {ids: [1, 2, 3, 4, 5, 6, 7], position: [0, 1, 2, 3, 4, 5, 6]});
  ({0: id, 1: at} = await model.run("decode", {ids: id, position: at}));
  await id.read({keep: true});
  const copied = [];
  for (let k = 0; k < 60; k++) {
    const before = model.statistics.copiedBytes;
    ({0: id, 1: at} = await model.run("decode", {ids: id, position: at}));
    await id.read({keep: true});
    copied.push(model.statistics.copiedBytes - before);
  }
  return copied;
}"""


def heap_while_loading(page: Any) -> dict[str, float]:
    """Most bytes of JavaScript's heap, and of buffers outside of it, while the bundle loads."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    start = session.send("Runtime.getHeapUsage")
    page.evaluate(
        "() => { window.loading = runtime.load('large', {cache: false}).then("
        "model => (window.done = model.statistics.gpuBytes), error => (window.done = String(error))); }"
    )
    most = {"usedSize": 0.0, "backingStorageSize": 0.0, "together": 0.0}
    begun = time.monotonic()
    while not page.evaluate("window.done ?? null"):
        now = session.send("Runtime.getHeapUsage")
        grown = {
            key: now.get(key, 0) - start.get(key, 0) for key in ("usedSize", "backingStorageSize")
        }
        for key, value in (*grown.items(), ("together", sum(grown.values()))):
            most[key] = max(most[key], value)
        time.sleep(0.02)
    loaded = page.evaluate("window.done")
    if not isinstance(loaded, int):
        raise RuntimeError(f"the bundle did not load: {loaded}")
    return {**most, "seconds": time.monotonic() - begun, "loaded": loaded}


def measure(megabytes: int, calls: int) -> dict[str, Any]:
    """All rows; times in milliseconds."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        build(folder, megabytes)
        rows: dict[str, Any] = {"runtime_bytes": (folder / "torch-webgpu.js").stat().st_size}
        with serving(folder, handler=Isolated) as server, chromium() as browser:
            context = browser.new_context()

            def page() -> Any:
                opened = context.new_page()
                opened.goto(f"http://localhost:{server.server_port}/")
                opened.wait_for_function("window.runtime")
                return opened

            for name, script in (("ours", OURS), ("onnxruntime_web", THEIRS)):
                for state in ("cold", "cached"):
                    opened = page()
                    found = opened.evaluate(script, {"calls": calls if state == "cached" else 1})
                    opened.close()
                    found["median"] = statistics.median(found["times"])
                    rows[f"{name}_{state}"] = found
                    print(f"{name} {state}: {found}", file=sys.stderr, flush=True)
            opened = page()
            rows["chain"] = opened.evaluate(PER_DISPATCH)
            rows["copied_per_token"] = opened.evaluate(DECODE)
            opened.close()
            rows["heap"] = heap_while_loading(page())
            rows["browser"] = browser.version
    return rows


def summary(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for, what it is, and whether it is reached."""
    ours, theirs = rows["ours_cached"], rows["onnxruntime_web_cached"]
    chain = rows["chain"]
    per_dispatch = 1000 * statistics.median(chain["times"]) / chain["dispatches"]
    copied = statistics.median(rows["copied_per_token"])
    table = [
        ("bytes of runtime, of the peer's", rows["runtime_bytes"] / theirs["bytes"], 1 / 100),
        ("MiniLM, 8 sentences, of the peer's time", ours["median"] / theirs["median"], 0.5),
        ("µs of JavaScript for a dispatch", per_dispatch, 2),
        ("MB of heap while 1 GB is loaded", rows["heap"]["together"] / 1e6, 64),
        ("bytes copied for a token", copied, 8),
        ("cached bundle to first result, of the peer's time", ours["first"] / theirs["first"], 0.5),
    ]
    return [
        {"what": what, "is": value, "must": most, "reached": value <= most}
        for what, value, most in table
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--large", type=int, default=1024, help="MB of the large bundle")
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    rows = measure(options.large, options.calls)
    found = {"summary": summary(rows), **rows}
    for row in found["summary"]:
        print(f"{row['what']:52} {row['is']:10.4g}  at most {row['must']:<6g} {row['reached']}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
