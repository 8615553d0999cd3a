"""The demonstration pages, clicked as a person would, on a phone and on a desktop."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.web.conftest import ROOT, QuietHandler
from web.build import Progress, build, build_generate, checkpoint, digits, digits_network
from web.serve import serving

pytestmark = pytest.mark.rotates(12)

VIEWS = {
    "phone": {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark", "has_touch": True},
    "desktop": {"viewport": {"width": 1100, "height": 900}, "color_scheme": "light"},
}
PATIENCE = 90  # seconds


@pytest.fixture(scope="module")
def pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The built site, with a text model that is hardly trained, and its address."""
    shared = tmp_path_factory.getbasetemp().parent
    folder = shared / "pages"
    with (shared / "pages.lock").open("w") as lock:  # one of xdist's workers builds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(folder, quick=True)
    with serving(folder, handler=QuietHandler) as server:
        yield folder, f"http://localhost:{server.server_port}/"


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)
    return found


@pytest.fixture(params=VIEWS)
def visit(request: Any, browser: Any, pages: tuple[Path, str], tmp_path: Path) -> Iterator[Any]:
    """Opens a page and waits for its model; a picture of its end is kept."""
    context = browser.new_context(**VIEWS[request.param], accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None
    )

    def opened(name: str) -> Any:
        page.goto(pages[1] + name)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    kept = Path(os.environ.get("TESTS_SCREENSHOTS", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=kept / f"{request.node.originalname}-{request.param}.png", full_page=True)
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    context.close()
    assert not problems
    assert overflow <= 0


# What the list says of itself while it is compared again, and after that; transitions are over.
COMPARING = """async () => {
  const [list, status] = ["sentences", "status"].map((name) => document.getElementById(name));
  const opacity = () => {
    const number = list.querySelector("data");
    getComputedStyle(number).opacity;
    for (const each of number.getAnimations()) each.finish();
    return Number(getComputedStyle(number).opacity);
  };
  document.getElementById("query").dispatchEvent(new Event("input"));
  const during = [list.ariaBusy, status.textContent, opacity()];
  while (list.ariaBusy === "true") await new Promise(requestAnimationFrame);
  return [during, [list.ariaBusy, opacity()]];
}"""


def test_similarity(visit):
    from examples.sentence_embeddings import SENTENCES, load_encoder, model_folder, tokenize

    folder = model_folder()
    encoder = load_encoder(folder)
    typed = "Borrowing money became more expensive."
    with torch.no_grad():
        query, *vectors = encoder(*tokenize(folder, (typed, *SENTENCES)))
    scores = torch.stack(vectors) @ query
    order = [SENTENCES[k] for k in scores.argsort(descending=True).tolist()]

    page = visit("similarity/")
    page.fill("#query", "")
    page.locator("#query").press_sequentially(typed, delay=5)

    def shown():
        return [
            float(value)
            for value in page.locator("#sentences data").evaluate_all(
                "all => all.map(x => x.value)"
            )
        ]

    until(lambda: shown() == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-4))
    assert (
        page.locator("#sentences li").evaluate_all("all => all.map(x => x.firstChild.data)")
        == order
    )
    assert order[0] in page.text_content("#status")
    assert page.evaluate(COMPARING) == [["true", "Comparing …", 0.35], ["false", 1]]
    until(lambda: order[0] in page.text_content("#status"))
    page.fill("#new", typed)
    page.click("#add button")
    until(lambda: page.locator("#sentences li").first.text_content().startswith(typed))
    assert shown()[0] == pytest.approx(1, abs=1e-4)
    page.fill("#query", "")
    until(lambda: not shown())
    assert page.locator("#sentences li").count() == len(SENTENCES) + 1


def draw_one(page):
    """A 1, with a finger where the screen takes fingers, else with the mouse."""
    box = page.locator("#pad").bounding_box()
    places = [(0.35, 0.3), (0.42, 0.22), (0.5, 0.15), *((0.5, 0.15 + k * 0.1) for k in range(1, 8))]
    path = [
        {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for x, y in places
    ]
    if page.evaluate("navigator.maxTouchPoints"):
        finger = page.context.new_cdp_session(page)
        for kind, points in [
            ("touchStart", path[:1]),
            *(("touchMove", [point]) for point in path[1:]),
            ("touchEnd", []),
        ]:
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        return
    page.mouse.move(**path[0])
    page.mouse.down()
    for point in path[1:]:
        page.mouse.move(**point)
    page.mouse.up()


def check_answer_in_sight(page):
    """However far the pad is scrolled, as long as all of it is there to draw on."""
    height = page.viewport_size["height"]
    for block in ("start", "center", "end"):
        page.locator("#pad").evaluate("(pad, block) => pad.scrollIntoView({block})", block)
        pad, answer = (page.locator(name).bounding_box() for name in ("#pad", "#answer"))
        for box in (pad, answer):
            assert box["width"] > 20
            assert -1 <= box["y"] < box["y"] + box["height"] <= height + 1
        is_above = answer["y"] + answer["height"] <= pad["y"]
        assert is_above or answer["x"] >= pad["x"] + pad["width"]


LABELS = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const ground = light(getComputedStyle(document.querySelector(".card:has(#curve)")).backgroundColor);
  const around = document.getElementById("curve").getBoundingClientRect();
  return [Number(document.getElementById("steps").textContent), [...document.querySelectorAll("#curve text")].map((text) => {
    const color = light(getComputedStyle(text).fill);
    const {left, right, top, bottom} = text.getBoundingClientRect();
    return {
      kind: text.getAttribute("class"),
      text: text.textContent,
      contrast: Math.max(color, ground) / Math.min(color, ground),
      isWithin: around.left <= left + 1 && right <= around.right + 1 && around.top <= top + 1 && bottom <= around.bottom + 1,
    };
  })];
}"""


def check_axes(page):
    """The curve has labels, within the picture, that can be read on its ground (WCAG 2.2, 1.4.3)."""
    taken, labels = page.evaluate(LABELS)
    texts = {label["text"] for label in labels}
    assert {"steps", "loss", "read correctly", "0 %", "100 %"} <= texts
    steps = [
        int(each["text"]) for each in labels if each["kind"] == "step" and each["text"] != "steps"
    ]
    assert steps[0] == 0
    assert taken / 2 < steps[-1] <= taken
    assert [label for label in labels if label["contrast"] < 4.5 or not label["isWithin"]] == []


ENGINEERS = (
    "adam backend backward batch buffer bundle cache checkpoint compile gradient inference kernel "
    "logit optimizer parameter pipeline pytorch runtime shader tensor token vector webgpu weights wgsl"
)


@pytest.mark.parametrize("name", ["", "similarity/", "digits/", "generate/"])
def test_words_are_those_of_visitors(visit, name):
    """What a page shows before somebody asks how it works, or looks at its foot."""
    page = visit(name)
    parts = page.locator("h1, h2, p, label, button, dt, [role=status]")
    said = " ".join(parts.all_inner_texts()).lower()
    assert len(said) > 100
    assert [word for word in ENGINEERS.split() if word in said] == []
    if name:
        page.click("summary")
        assert "PyTorch" in page.inner_text("details")


def test_digits(visit, tmp_path):
    from safetensors.torch import load_file

    page = visit("digits/")
    page.click("#train")
    until(lambda: int(page.text_content("#steps")) >= 120)
    page.click("#train")
    until(lambda: page.text_content("#train") == "Train")
    assert float(page.text_content("#loss")) < 0.5
    accuracy = page.locator("#accuracy")
    until(lambda: float(accuracy.get_attribute("data-value") or 0) > 0.9)
    check_axes(page)
    page.locator("#pad").scroll_into_view_if_needed()
    draw_one(page)
    until(lambda: page.text_content("#answer") == "1")
    check_answer_in_sight(page)
    with page.expect_download() as download:
        page.click("#save")
    saved = tmp_path / "digits.safetensors"
    download.value.save_as(saved)
    model = digits_network().eval()
    model.load_state_dict(load_file(saved))
    images, labels = digits()
    with torch.no_grad():
        right = model(images[-360:]).argmax(-1) == labels[-360:]
    shown = until(lambda: accuracy.get_attribute("data-value"))
    assert float(right.float().mean()) == pytest.approx(float(shown), abs=2e-3)
    page.click("#train")
    page.click("#reset")  # in the middle of steps, whose losses come later
    until(lambda: "nothing" in page.text_content("#status"))
    page.wait_for_timeout(200)
    assert (page.text_content("#steps"), page.text_content("#train")) == ("0", "Train")
    assert accuracy.get_attribute("data-value") is None
    with page.expect_file_chooser() as chooser:
        page.locator("#load").press("Enter")
    chooser.value.set_files(saved)
    until(lambda: "what was saved in digits" in page.text_content("#status"))
    assert accuracy.get_attribute("data-value") == shown
    assert page.text_content("#answer") == "1"


def write(page, prompt, least):
    """What the page writes after a prompt, without chance, when it was stopped after some letters."""
    page.fill("#prompt", prompt)
    page.locator("#temperature").fill("0")
    page.click("#go")
    until(lambda: len(page.text_content("#text")) >= least)
    page.click("#stop")
    page.wait_for_selector("#go:enabled")
    assert "a second" in page.text_content("#status")
    return page.text_content("#text")


def test_options_of_the_script(tmp_path):
    """scripts/web hands them to web.build."""
    script = tmp_path / "scripts" / "web"
    for path in (script, tmp_path / "scripts" / "setup", tmp_path / ".venv" / "bin" / "python"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$@"\n')
        path.chmod(0o755)
    shutil.copy(ROOT / "scripts" / "web", script)
    command = [script, "--build-only", "--checkpoint", tmp_path, "--quick"]
    said = subprocess.check_output(command, text=True).splitlines()
    assert said == ["demo web", f"-m web.build --checkpoint {tmp_path} --quick"]
    assert "--quick" in subprocess.check_output([script, "--help"], text=True)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_of_the_training(is_terminal, capsys, monkeypatch):
    """A line that is rewritten on a terminal, elsewhere one every ten seconds and the last."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    now = iter(range(100))
    with Progress("training", 25, clock=lambda: next(now)) as progress:
        for _ in range(25):
            progress.step()
    said = capsys.readouterr().err
    lines = [f"    training: step {k} of 25, {25 - k} s left" for k in range(1, 26)]
    if is_terminal:
        assert said == "".join(f"\r{line}\033[K" for line in lines) + "\n"
    else:
        assert said.splitlines() == [lines[9], lines[19], lines[24]]


def greedy(model, ids, count):
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    numbers = found[0].tolist()
    assert len(set(numbers[len(ids) :])) > count // 4  # a model that repeats itself shows no fault
    return numbers


def test_generate(visit, pages):
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = pages[0] / "generate" / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    page = visit("generate/")
    for prompt in ("A list is", "The", "x"):  # each begins with an empty cache
        numbers = greedy(model, tokenizer.encode(prompt), 20)
        wanted = tokenizer.decode(numbers)
        assert len(wanted) >= len(prompt) + 20
        assert write(page, prompt, len(wanted)).startswith(wanted)


def test_checkpoint(browser, pages, tmp_path):
    """A folder that `save_pretrained` wrote: layers that see a window, and a tokenizer of bytes."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([__doc__, *VIEWS], vocab_size=300, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=48,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config).eval()
    ids = tokenizer.encode("A person clicked")
    model.generation_config.eos_token_id = greedy(model, ids, 24)[-1]
    model.generation_config.bos_token_id = None
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "checkpoint")
    site = tmp_path / "site"
    shutil.copytree(pages[0], site)
    build_generate(site / "generate", checkpoint(tmp_path / "checkpoint"))
    wanted = greedy(model, ids, 24)
    end = wanted.index(model.generation_config.eos_token_id, len(ids))

    context = browser.new_context()
    page = context.new_page()
    with serving(site, handler=QuietHandler) as server:
        page.goto(f"http://localhost:{server.server_port}/generate/")
        page.wait_for_selector("body[data-ready]")
        page.fill("#prompt", "A person clicked")
        page.locator("#temperature").fill("0")
        page.click("#go")
        page.wait_for_selector("#stop:enabled")
        page.wait_for_selector("#go:enabled")  # it ends by itself
        assert page.text_content("#text") == tokenizer.decode(wanted[:end])
    context.close()


@pytest.mark.parametrize("name", ["", "digits/"])
def test_without_webgpu(browser, pages, name):
    """What the pages say where the browser has none."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'gpu', {value: undefined})")
    page.goto(pages[1] + name)
    page.wait_for_selector("[role=alert]")
    assert "Chrome and Edge" in page.text_content("[role=alert]")
    context.close()


def test_missing_file(browser, pages):
    context = browser.new_context()
    page = context.new_page()
    page.route("**/sentences.json", lambda route: route.fulfill(status=404))
    page.goto(pages[1] + "similarity/")
    page.wait_for_selector("[role=alert]")
    assert "scripts/web" in page.text_content("[role=alert]")
    context.close()
