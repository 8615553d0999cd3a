"""Headless Chromium on SwiftShader, and the runtime of `web/` in a page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.python_runtime import PythonRuntime, Results
from web.build import build_runtime, has_npm
from web.serve import Handler, serving

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 90_000  # milliseconds
FLAGS = (
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a microphone
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; scripts/setup test installs it on Debian")
    if not has_npm():
        pytest.skip("there is no npm to build the runtime with")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS], ignore_default_args=["--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def python_runtime() -> Iterator[PythonRuntime]:
    runtime = PythonRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def in_python(python_runtime: PythonRuntime) -> Callable[..., Results]:
    """Results of calls of a bundle in Python; see `PythonRuntime.run`."""
    return python_runtime.run


InPage = Callable[..., Any]


class QuietHandler(Handler):
    quiet = True


@pytest.fixture(scope="session")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder that is served, with the runtime in it, and its address."""
    folder = tmp_path_factory.mktemp("site")
    for module in build_runtime().parent.glob("torch-webgpu*.js"):
        shutil.copy(module, folder)
    (folder / "index.html").write_text(
        '<!doctype html><link rel="icon" href="data:,"><script type="module" src="page.js"></script>'
    )
    (folder / "page.js").write_text(
        'import * as runtime from "./torch-webgpu.js"; Object.assign(window, {runtime});'
    )
    with serving(folder, handler=QuietHandler) as server:
        yield folder, f"http://localhost:{server.server_port}/"


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A browser without a history."""
    made = browser.new_context()
    yield made
    made.close()


@pytest.fixture
def in_page(context: Any, site: tuple[Path, str]) -> InPage:
    """Runs the body of an async function of ``runtime`` and ``given`` in a page; its JSON.

    Errors that the page does not catch fail the test; those of the body are raised.
    """
    return _opened(context, site)


@pytest.fixture(scope="session")
def in_one_page(browser: Any, site: tuple[Path, str]) -> Iterator[InPage]:
    """`in_page` in a page that many tests share, as they leave nothing in it."""
    made = browser.new_context()
    yield _opened(made, site)
    made.close()


def _opened(context: Any, site: tuple[Path, str]) -> InPage:
    page = context.new_page()
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.goto(site[1])
    page.wait_for_function("window.runtime")

    def run(body: str, given: Any = None, *, noisy: bool = False) -> Any:
        text = page.evaluate(
            f"""async given => JSON.stringify(await Promise.race([
              (async () => {{ {body} }})(),
              new Promise((_, reject) => setTimeout(() => reject(new Error("no answer")), {PATIENCE})),
            ]) ?? null)""",
            given,
        )
        seen = [*problems]
        problems.clear()
        if not noisy:
            assert not seen
        return json.loads(text)

    run.page = page  # type: ignore[attr-defined]
    return run
