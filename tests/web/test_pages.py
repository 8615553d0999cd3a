"""The demonstration pages, clicked as a person would, on a phone and on a desktop."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.web.conftest import QuietHandler
from web.build import build, digits, digits_network
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


def test_similarity(visit):
    from examples.sentence_embeddings import SENTENCES, load_encoder, model_folder, tokenize

    page = visit("similarity/")
    typed = "Borrowing money became more expensive."
    page.fill("#query", "")
    page.locator("#query").press_sequentially(typed, delay=5)
    first = page.locator("#sentences li").first
    until(lambda: "bank" in (first.text_content() or ""))
    until(lambda: "Compared" in page.text_content("#status"))
    folder = model_folder()
    encoder = load_encoder(folder)

    def embedded(text):
        return encoder(*tokenize(folder, (text,)))[0]

    with torch.no_grad():
        wanted = {text: float(embedded(typed) @ embedded(text)) for text in SENTENCES}
    best = max(wanted, key=wanted.get)
    assert best in first.text_content()
    score = float(first.locator("output").get_attribute("data-score"))
    assert score == pytest.approx(wanted[best], abs=1e-4)
    page.fill("#new", typed)
    page.click("#add button")
    until(lambda: first.text_content().startswith(typed))
    assert float(first.locator("output").get_attribute("data-score")) == pytest.approx(1, abs=1e-4)


def draw_one(page):
    box = page.locator("#pad").bounding_box()
    x, y, side = box["x"], box["y"], box["width"]
    page.mouse.move(x + 0.35 * side, y + 0.3 * side)
    page.mouse.down()
    page.mouse.move(x + 0.5 * side, y + 0.15 * side, steps=4)
    page.mouse.move(x + 0.5 * side, y + 0.85 * side, steps=10)
    page.mouse.up()


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
    page.locator("#pad").scroll_into_view_if_needed()
    draw_one(page)
    until(lambda: page.text_content("#answer") == "1")
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
    page.click("#reset")
    until(lambda: page.text_content("#steps") == "0")
    page.set_input_files("#file", saved)
    until(lambda: "Took the weights" in page.text_content("#status"))
    assert accuracy.get_attribute("data-value") == shown


def test_generate(visit, pages):
    from transformers import LlamaForCausalLM

    folder = pages[0] / "generate"
    about = json.loads((folder / "about.json").read_text())
    page = visit("generate/")
    page.fill("#prompt", "A list is")
    page.locator("#temperature").fill("0")
    page.click("#go")
    text = page.locator("#text")
    until(lambda: len(text.text_content()) >= len("A list is") + 40)
    page.click("#stop")
    page.wait_for_selector("body[data-written]")
    assert "a second" in page.text_content("#status")
    model = LlamaForCausalLM.from_pretrained(folder / "checkpoint").eval()
    ids = torch.tensor([[about["alphabet"].index(letter) for letter in "A list is"]])
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    expected = "".join(about["alphabet"][k] for k in wanted[0].tolist())
    assert text.text_content().startswith(expected)
    page.evaluate("document.body.removeAttribute('data-written')")  # again, from an empty cache
    page.click("#go")
    until(lambda: len(text.text_content()) >= len(expected))
    page.click("#stop")
    page.wait_for_selector("body[data-written]")
    assert text.text_content().startswith(expected)


def test_without_webgpu(browser, pages):
    """What the page says where the browser has none."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'gpu', {value: undefined})")
    page.goto(pages[1] + "digits/")
    page.wait_for_selector("[role=alert]")
    assert "Chrome and Edge" in page.text_content("[role=alert]")
    context.close()
