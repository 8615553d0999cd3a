"""What browsers keep of bundles: enough for a visit without a network, and nothing for ever."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from torch import nn

from tests.web.conftest import WEB
from tests.web.test_robust import CAUGHT
from torch_webgpu_compile import export

pytestmark = pytest.mark.rotates(2)

VISIT = """
const model = await runtime.load("offline");
const result = Array.from(await (await model.run("forward", {input: [[1, 2, 3]]})).output.read());
model.destroy();
const kept = (await runtime.storage()).map(({url, nbytes, used}) => [new URL(url).pathname, nbytes, Date.now() - used < 60000]);
return {result, kept, keys: (await (await caches.open("torch-webgpu")).keys()).length};
"""


@pytest.fixture
def release(site):
    """Exports a model under an address, in place of the last one; the bytes of its files."""

    def write(model: nn.Module) -> int:
        shutil.rmtree(site[0] / "offline", ignore_errors=True)
        folder = export(model, (torch.zeros(1, 3),), site[0] / "offline")
        for path in (folder / "weights").iterdir():
            os.utime(path, (1e9, 1e9))  # the browser cannot see from it that a file is another
        files = json.loads((folder / "manifest.json").read_text())["files"]
        return sum(file["nbytes"] for file in files.values())

    return write


def test_a_visit_without_a_network(release, in_page, context, site):
    """The page and the runtime from a service worker, the bundle from what the runtime keeps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    nbytes = release(model)
    worker = (WEB / "examples" / "service-worker.js").read_text()
    worker = worker.replace("model/", "offline/").replace("page.js", 'page.js", "torch-webgpu.js')
    (site[0] / "service-worker.js").write_text(worker)
    page = in_page.page
    first = in_page(
        """
await navigator.serviceWorker.register("service-worker.js");
await navigator.serviceWorker.ready;
"""
        + VISIT
    )
    assert first["kept"] == [["/offline/", nbytes, True]]
    context.set_offline(True)
    page.reload()
    page.wait_for_function("window.runtime")
    beside = f"const runtime = await import('/offline/torch-webgpu.js'); {VISIT}"
    assert in_page(beside, noisy=True) == first  # the console says that there is no network
    found = in_page(
        CAUGHT
        + """
await runtime.clear("offline");
return [await caught(runtime.load("offline")), await runtime.storage(), (await (await caches.open("torch-webgpu")).keys()).length];
""",
        noisy=True,
    )
    assert found[0]["kind"] == "TypeError"
    assert found[1:] == [[], 0]
    context.set_offline(False)
    assert in_page(VISIT) == first
    with torch.no_grad():
        wanted = model(torch.tensor([[1.0, 2, 3]])).flatten().tolist()
    assert first["result"] == pytest.approx(wanted)


def test_releases_replace_each_other(release, in_page, site):
    """Files that both have are not fetched again; other bundles stay; half a download does, too."""
    torch.manual_seed(0)
    release(nn.Linear(3, 2))
    export(nn.Linear(5, 2), (torch.zeros(1, 5),), site[0] / "other")
    first = in_page(f"await runtime.load('other'); {VISIT}")
    nbytes = release(nn.Linear(3, 2))
    second = in_page(VISIT)
    assert second["keys"] == first["keys"]
    assert dict(kept[:2] for kept in second["kept"])["/offline/"] <= nbytes
    assert second["result"] != first["result"]
    found = in_page(
        CAUGHT
        + """
await runtime.clear();
const failing = async (url, init) => {
  if (String(url).includes("weights")) throw new DOMException("no more", "AbortError");
  return fetch(url, init);
};
const error = await caught(runtime.load("offline", {fetch: failing}));
const keys = async () => (await (await caches.open("torch-webgpu")).keys()).length;
const half = await keys();
const {headers} = await fetch("other/manifest.json");
const encoding = headers.get("content-encoding");
await runtime.load("other");
return [error.kind, half, (await runtime.storage()).length, await keys() > half, encoding];
"""
    )
    assert found[0] == "AbortError"
    assert found[1] > 0
    assert found[2:] == [1, True, "gzip"]
