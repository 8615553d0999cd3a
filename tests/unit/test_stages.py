"""Stages of a first call, what listens to them, and what a person reads of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from torch_webgpu_compile import progress, stages
from torch_webgpu_compile.inspection.compile_time import compile_time_of
from torch_webgpu_compile.stages import Stage, Sums, telling


class _Clock:
    """Stands still but for `pass_time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def during(self, kind: str, name: str, *inside: float | Callable[[], None]) -> None:
        """A stage in which so many seconds pass, and other things are done."""
        with Stage(kind, name):
            for step in inside:
                if isinstance(step, float):
                    self.now += step
                else:
                    step()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(stages, "clock", made)
    return made


def _first_call(clock: _Clock) -> None:
    def render() -> None:
        clock.during("pass", "wgsl", 0.5)

    def fuse() -> None:
        clock.during("pass", "fuse", 2.0)

    def pipelines() -> None:
        clock.during("wait", "", lambda: clock.during("pipeline", "k1", 4.0), 1.0)

    def executor() -> None:
        clock.during("executor", "", 0.25, pipelines)

    def trace() -> None:
        clock.during("autograd", "", 3.0, fuse, fuse, render, executor, 1.0)

    clock.during("dynamo", "", 1.0, lambda: clock.during("backend", "", 0.25, trace), 0.5)


def test_seconds_are_told_apart(clock: _Clock) -> None:
    sums = Sums()
    with telling(sums):
        _first_call(clock)
    found = compile_time_of(sums, clock.now - 100 + 2)
    assert found.dynamo == 1.5
    assert found.aot_autograd == 4
    assert found.passes == {"fuse": 4}
    assert found.rendering == 0.5
    assert found.waiting == 5
    assert found.pipelines == {"k1": 4}
    assert found.setup == 0.5
    assert found.rest == pytest.approx(2)
    _first_call(clock)  # nobody is told
    assert sums.seconds["wait", ""] == 5
    first, passes, pipelines = str(found).splitlines()
    assert "took 17.50 s: opening the GPU 0.00, Dynamo 1.50, AOTAutograd 4.00" in first
    assert passes == "  passes: fuse 4.00"
    assert "1 kernels, 4.00 s summed over threads: k1 4.00" in pipelines


def test_stages_of_other_threads_are_summed_and_not_nested(clock: _Clock) -> None:
    sums = Sums()

    def compile_one() -> None:
        with Stage("pipeline", "k1"):
            pass

    with telling(sums), Stage("wait") as waiting:
        clock.now += 1.0
        threads = [threading.Thread(target=compile_one) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
    assert waiting.own_seconds == waiting.seconds == 1
    assert sums.own("pipeline") == {"k1": 0}


def test_an_exception_ends_a_stage(clock: _Clock) -> None:
    sums = Sums()
    with pytest.raises(KeyError), telling(sums), Stage("autograd"):
        clock.during("pass", "fuse", 2.0, lambda: {}["x"])
    assert sums.own_seconds == {("pass", "fuse"): 2, ("autograd", ""): 0}
    with Stage("pass", "fuse") as after:
        pass
    assert after.own_seconds == 0


def test_an_estimate_follows_from_what_is_behind(clock: _Clock) -> None:
    way, shown = progress.Way(clock), list[tuple[str, float | None]]()

    def look(done: int = 0, known: int = 0) -> None:
        left = way.seconds_left(done, known)
        shown.append((way.text, left and round(left, 1)))

    def fuse() -> None:
        clock.during("pass", "fuse", 2.0, look)

    def wait() -> None:
        clock.during("wait", "", look, 4.0, lambda: look(10, 40))

    with telling(way):
        look()
        clock.during("autograd", "", 10.0, look, fuse, wait)
        look()
    assert shown == [
        ("", None),
        ("AOTAutograd", 5 + 15 * 0.8),
        ("fuse", 10 * 0.6 - 2 + 2),
        ("pipelines", round(12 / 1.6 * 0.2, 1)),
        ("pipelines", 12),
        ("", None),
    ]
