"""docs/browser.md, followed: its blocks are read from the page and run in the order of a reader.

Only what a reader has before is given: a model, a processor or a tokenizer, a picture, an array.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load
from torch import nn

import torch_webgpu_compile
from tests.web.conftest import ROOT
from tests.web.test_pipelines import classifier, language_model, listener, picture
from tests.web.test_without_gpu import check_types

pytestmark = pytest.mark.rotates(2)

GUIDE = (ROOT / "docs" / "browser.md").read_text()
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[2], textwrap.dedent(match[3])) for match in FENCED.finditer(GUIDE)]

# What the blocks are, in their order. Each is run by a test below.
NAMES = {
    "export": "python",
    "training step": "python",
    "page": "html",
    "server": "bash",
    "types": "ts",
    "report": "js",
    "export of an image classifier": "python",
    "image classifier": "js",
    "export of a language model": "python",
    "language model": "js",
    "export of a speech recognizer": "python",
    "speech recognizer": "js",
    "bundle in Python": "python",
}
INPUTS = [[0.5, -1.0], [1.0, 2.0]]  # the page's


def block(name: str) -> str:
    """The text of a block of the guide."""
    return BLOCKS[[*NAMES].index(name)][1]


def execute(name: str, given: dict[str, Any]) -> Any:
    """Runs a block of Python with names, which it may add to; the value of a last expression."""
    module = ast.parse(block(name))
    last = module.body.pop() if isinstance(module.body[-1], ast.Expr) else None
    exec(compile(module, f"browser.md, {name}", "exec"), given)
    return eval(ast.unparse(last), given) if last else None


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a reader of the guide works."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


@pytest.fixture
def exported(reader: Path) -> dict[str, Any]:
    """The names after the first block."""
    names: dict[str, Any] = {}
    execute("export", names)
    return names


@pytest.fixture
def address(reader: Path) -> Iterator[str]:
    """What the guide's command serves, on a port that is free."""
    python, *arguments = block("server").partition("#")[0].split()
    assert python == "python"
    (reader / "site").mkdir(exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, *arguments, "--bind", "127.0.0.1", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert server.stdout is not None
    found = re.search(r"http://[\d.:]+/", server.stdout.readline())
    assert found
    yield found[0]
    server.terminate()
    server.communicate()


Open = Callable[[str, str], Any]


@pytest.fixture
def opened(reader: Path, address: str, context: Any) -> Open:
    """Saves a page as index.html and opens it; the value that a JavaScript expression comes to."""

    def run(text: str, wanted: str) -> Any:
        (reader / "site" / "index.html").write_text(text)
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        end = time.monotonic() + 60
        while (found := page.evaluate(wanted)) is None:
            assert not problems
            assert time.monotonic() < end, "the page takes too long"
            page.wait_for_timeout(20)
        page.close()
        return found

    return run


def module(before: str, name: str, after: str) -> str:
    """A page whose script is a block, with what it needs before it, and what is looked at later."""
    return f"""<!doctype html>
<img src="picture.png">
<p id="output"></p>
<script type="module">
{before}
{block(name)}
{after}
</script>"""


def test_all_blocks_are_known() -> None:
    """A new block gets a name, and a test that runs it."""
    assert [language for language, _ in BLOCKS] == [*NAMES.values()]


def test_page(reader: Path, exported: dict[str, Any], opened: Open) -> None:
    model = exported["model"]
    shown = opened(
        block("page"),
        """(text => text.startsWith("Loading") ? null : text)(document.getElementById("out").textContent)""",
    )
    wanted = model(torch.tensor(INPUTS)).flatten().tolist()
    assert [float(value) for value in shown.split(",")] == pytest.approx(wanted, rel=1e-5)

    # The block of `report` goes on in the page's script.
    looked = (
        "window.found = {kernels, gpuMemory, variant, weights: Array.from(await model.save())};"
    )
    page = block("page").replace("</script>", f"{block('report')}{looked}\n</script>")
    found = opened(page, "window.found ?? null")
    said = re.findall(r"console\.table\(\S+\); +// ([\w, ]+)", block("report"))
    of_kernel, of_state = (line.split(", ") for line in said)
    assert [set(of_kernel)] == [each.keys() for each in found["kernels"][:1]]
    assert all(state.keys() == set(of_state) for state in found["gpuMemory"]["byState"])
    assert [state["name"] for state in found["gpuMemory"]["byState"]] == [*model.state_dict()]
    assert found["gpuMemory"]["ofStates"] == sum(4 * w.numel() for w in model.parameters())
    assert found["variant"]["reason"] == "the bundle has no other"
    weights = load(bytes(found["weights"]))
    assert weights.keys() == model.state_dict().keys()
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.usefixtures("exported", "site")  # `site` has installed TypeScript
def test_types(reader: Path) -> None:
    (reader / "site" / "page.ts").write_text(block("types"))
    options = {"module": "esnext", "moduleResolution": "bundler"}
    check_types(reader / "site", "page.ts", noEmit=True, **options)


def test_bundle_in_python(exported: dict[str, Any]) -> None:
    array = np.array(INPUTS, np.float32)
    output = execute("bundle in Python", {**exported, "numpy_array": array})
    with torch.no_grad():
        np.testing.assert_allclose(output, exported["model"](torch.tensor(array)), rtol=1e-5)


def test_training_step(reader: Path, exported: dict[str, Any]) -> None:
    """What the optimizer keeps stays in the bundle from call to call."""
    optimizer = torch.optim.Adam(exported["model"].parameters(), lr=0.1)
    names = {**exported, "optimizer": optimizer}
    execute("training step", names)
    x = torch.randn(16, 2)
    step, batch = names["train_step"], (x, x.sum(1, keepdim=True))
    torch_webgpu_compile.export({"train_step": (step, batch)}, reader / "site" / "training")
    bundle = torch_webgpu_compile.load_bundle(reader / "site" / "training")
    x, y = (part.numpy() for part in batch)
    found = [float(bundle.run("train_step", x=x, y=y)["loss"]) for _ in range(5)]
    wanted = [step(*batch)["loss"].item() for _ in range(5)]
    assert wanted[-1] < 0.5 * wanted[0]
    assert found == pytest.approx(wanted, rel=1e-4)


def test_names_of_inputs_and_results(reader: Path) -> None:
    """Inputs: the function's parameters. Results: `output`, "0" and "1", or a dictionary's keys."""
    for sentence in ("`output` for one tensor", '`"0"`, `"1"` for a', "keys for a dictionary"):
        assert sentence in GUIDE

    entries = {
        "one": (lambda first: first + 1, (torch.ones(2),)),
        "tuple": (lambda first, second: (first, second * 2), (torch.ones(2), torch.ones(2))),
        "dictionary": (lambda first: {"mean": first.mean()}, (torch.ones(2),)),
    }
    bundle = torch_webgpu_compile.load_bundle(
        torch_webgpu_compile.export(entries, reader / "names")
    )
    array = np.ones(2, np.float32)
    assert bundle.run("one", first=array).keys() == {"output"}
    assert bundle.run("tuple", first=array, second=array).keys() == {"0", "1"}
    assert bundle.run("dictionary", first=array).keys() == {"mean"}


def of_transformers(**names: Any) -> dict[str, Any]:
    return {"torch_webgpu_compile": torch_webgpu_compile, **names}


def test_image_classifier(reader: Path, opened: Open) -> None:
    model, processor = classifier()
    name = reader / "checkpoint"
    processor.save_pretrained(name)
    AutoImageProcessor = transformers.AutoImageProcessor
    execute("export of an image classifier", of_transformers(**locals()))

    given = picture(120, 90)
    Image.fromarray(given).save(reader / "site" / "picture.png")
    found = opened(
        module(
            "await document.querySelector('img').decode();",
            "image classifier",
            "window.found = {label, score};",
        ),
        "window.found ?? null",
    )
    with torch.no_grad():
        pixels = processor(images=[given], return_tensors="pt")
        scores = model.eval()(**pixels).logits[0].softmax(-1)
    assert found["label"] == model.config.id2label[int(scores.argmax())]
    assert found["score"] == pytest.approx(float(scores.max()), abs=0.01)


def in_four_bits(model: nn.Module) -> None:
    """Replaces matrices by some that ``weights="int4"`` holds exactly: all levels of each group."""
    for weight in model.parameters():
        if weight.dim() == 2:
            levels = torch.randint(-8, 8, weight.shape)
            levels[:, ::32], levels[:, 1::32] = -8, 7
            weight.data = levels / 16


def test_language_model(reader: Path, opened: Open) -> None:
    """What the block writes last, the answer in the chat, is without chance."""
    model, tokenizer = language_model()
    in_four_bits(model)
    model.config.max_position_embeddings = 80
    name = reader / "checkpoint"
    tokenizer.save_pretrained(name)
    AutoTokenizer = transformers.AutoTokenizer
    execute("export of a language model", of_transformers(**locals()))
    manifest = json.loads((reader / "site" / "model" / "manifest.json").read_text())
    assert manifest["weights"]["error"] == 0

    found = opened(
        module(
            "const output = document.getElementById('output'), {signal} = new AbortController();",
            "language model",
            "window.found = output.textContent;",
        ),
        "window.found ?? null",
    )
    asked = re.search(r'content: "(.*?)"', block("language model"))
    assert asked
    chat = [{"role": "user", "content": asked[1]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    written = model.generate(ids, max_length=80, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(answer) > 20
    assert found.endswith(answer)


def test_speech_recognizer(reader: Path, opened: Open) -> None:
    """It hears the browser's own test tone, of which only the recorder knows the samples."""
    whisper, processor = listener()
    name = reader / "checkpoint"
    processor.save_pretrained(name)
    WhisperProcessor = transformers.WhisperProcessor
    execute("export of a speech recognizer", of_transformers(**locals()))
    found = opened(
        module(
            "const output = document.getElementById('output'), button = document.createElement('button');",
            "speech recognizer",
            "setTimeout(() => button.click(), 500);",
        ),
        "document.getElementById('output').textContent || null",
    )
    assert found
