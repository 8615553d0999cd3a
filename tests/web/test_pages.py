"""The demonstration pages, clicked as a person would, on a phone and on a desktop."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.web.conftest import QuietHandler
from web.build import build, build_generate, checkpoint, digits, digits_network
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
    page.click("#train")
    page.click("#reset")  # in the middle of steps, whose losses come later
    until(lambda: "nothing" in page.text_content("#status"))
    page.wait_for_timeout(200)
    assert (page.text_content("#steps"), page.text_content("#train")) == ("0", "Train")
    assert accuracy.get_attribute("data-value") is None
    with page.expect_file_chooser() as chooser:
        page.locator("#load").press("Enter")
    chooser.value.set_files(saved)
    until(lambda: "Took the weights" in page.text_content("#status"))
    assert accuracy.get_attribute("data-value") == shown
    assert page.text_content("#answer") == "1"


def write(page, prompt, least):
    """What the page writes after a prompt, without chance, when it was stopped after some tokens."""
    page.fill("#prompt", prompt)
    page.locator("#temperature").fill("0")
    page.click("#go")
    until(lambda: len(page.text_content("#text")) >= len(prompt) + least)
    page.click("#stop")
    page.wait_for_selector("#go:enabled")
    assert "a second" in page.text_content("#status")
    return page.text_content("#text")


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
        assert len(numbers) == len(prompt) + 20
        assert write(page, prompt, 20).startswith(tokenizer.decode(numbers))


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
