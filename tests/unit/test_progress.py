"""What a terminal shows of a compilation that takes long."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import pytest

from torch_webgpu_compile import progress
from torch_webgpu_compile.stages import Stage


class _Terminal(io.StringIO):
    """Says what is written, and when something was."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


@pytest.fixture
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "ESTIMATE_SECONDS", 0.0)


@pytest.mark.usefixtures("immediate")
def test_a_long_compilation_counts_its_kernels() -> None:
    terminal = _Terminal()
    waiting = threading.Event()

    def counts() -> tuple[int, int]:
        assert waiting.wait(60)
        return 3, 40

    with (
        redirect_stderr(terminal),
        Stage("autograd"),  # is not of this compilation
        progress.shown("graph0", counts),
        Stage("wait"),
    ):
        waiting.set()
        assert terminal.written.wait(60)
        with progress.shown("inside", lambda: (0, 0)):
            pass
    first, last = terminal.getvalue().split("\rtorch_webgpu_compile: ")[1:]
    assert first == "compiling graph0, pipelines, 3 of 40 kernels, about 1 s more"
    assert last.startswith("compiled graph0 in ")
    assert last.endswith("\n")


def test_a_short_one_says_nothing() -> None:
    terminal = _Terminal()
    with redirect_stderr(terminal), progress.shown("graph0", lambda: (3, 40)):
        pass
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("immediate")
def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    with redirect_stderr(terminal), progress.shown("graph0", lambda: (3, 40), "0"):
        assert not terminal.written.wait(0.05)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with redirect_stderr(terminal), progress.shown("graph0", lambda: (3, 40), "auto"):
        assert not terminal.written.wait(0.05)
    with redirect_stderr(terminal), progress.shown("graph0", lambda: (3, 40), "1"):
        assert terminal.written.wait(60)
    assert "\r" not in terminal.getvalue()


@pytest.mark.usefixtures("immediate")
def test_it_ends_with_an_exception() -> None:
    with (
        redirect_stderr(_Terminal()),
        pytest.raises(KeyboardInterrupt),
        progress.shown("graph0", lambda: (0, 0)),
    ):
        raise KeyboardInterrupt
    assert not any(t.name == "torch-webgpu-progress" for t in threading.enumerate())
