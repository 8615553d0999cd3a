"""A pytest plugin: runs a share of a suite, each test with a time limit, and notes each one's end.

`tests.judges.running` starts pytest with it; ``JUDGE`` names a JSON file that says what to do:
``results``, the JSON lines to write; ``chosen``, which names are run, or ``count`` of them by
``seed``; ``known``, those that have been; ``match``, what pytest's names and ``neutral``, what
those without the device must match; ``limit_s``, of one test; ``seconds``, of all.

The folder of this file is on the path, not the project: other suites have a package ``tests``, too.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TASK = json.loads(Path(os.environ["JUDGE"]).read_text())
_RESULTS = Path(_TASK["results"])
_LIMIT_S = int(_TASK["limit_s"])
_END = time.monotonic() + _TASK["seconds"]

# What compiled calls have left in a process grows: a larger one is replaced.
_MOST_NBYTES = 5 << 30
# A test that no exception ends: it does not return from native code.
_GRACE_S = 30


class TooLong(BaseException):
    """The time limit; tests catch Exception."""


def neutral(node_id: str) -> str:
    """A test's name without its device, so that both devices run the same share."""
    name = re.sub(r"^.*?([^/]+\.py)", r"\1", node_id)
    return re.sub(r"(?i)privateuse1|webgpu(?::0)?|cpu|gpu", "DEV", name)


def _order(name: str) -> str:
    return hashlib.sha1(f"{_TASK['seed']}{name}".encode()).hexdigest()


def _write(**row: Any) -> None:
    with _RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


class _State:
    left = 0
    outcome = ("none", "")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of the share that were not run before."""
    named: dict[str, pytest.Item] = {}
    for item in items:
        name = neutral(item.nodeid)
        if re.search(_TASK["match"], item.nodeid) and re.search(_TASK["neutral"], name):
            named.setdefault(name, item)
    _write(total=len(named))
    if _TASK["chosen"] is None:
        chosen = sorted(named, key=_order)[: _TASK["count"]]
    else:
        chosen = [name for name in _TASK["chosen"] if name in named]
    known = set(_TASK["known"])
    items[:] = [named[name] for name in chosen if name not in known]
    _State.left = len(items)


def pytest_sessionfinish() -> None:
    """Says whether something is left to another process, and where this one ran."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "webgpu") and torch.webgpu.is_initialized():
        version, gpu = torch.__version__.partition("+")[0], torch.webgpu.get_device_name()
        _write(where=f"PyTorch {version}, {gpu}")
    _write(left=_State.left)


def _too_long(*_: object) -> None:
    raise TooLong(f"not done after {_LIMIT_S} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes the test before and after: one that is only begun has ended the process."""
    if time.monotonic() > _END or _nbytes() > _MOST_NBYTES:
        item.session.shouldstop = "judges: enough for one process"
    name, start = neutral(item.nodeid), time.monotonic()
    _State.outcome = ("none", "")
    _write(name=name, outcome="begun")
    faulthandler.dump_traceback_later(_LIMIT_S + _GRACE_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    outcome, message = _State.outcome
    try:
        _wait()
    except Exception as error:  # indices are checked when the host waits: not in the next test
        message = f"{message}\nE   later: {error}"
    _State.left -= 1
    _write(name=name, outcome=outcome, message=message, s=round(time.monotonic() - start, 2))


def _wait() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "webgpu") and torch.webgpu.is_initialized():
        torch.webgpu.synchronize()


def _nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Ends a test after its time."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _short(message: str) -> str:
    # Where an operator is missing, PyTorch lists a hundred kernels for other devices.
    lines = [line for line in message.splitlines() if " registered at /" not in line]
    text = "\n".join(lines)
    return text if len(text) < 4000 else f"{text[:1000]}\n[...]\n{text[-3000:]}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Takes the outcome of the call, or of the first phase that failed."""
    report = (yield).get_result()  # type: ignore[misc]
    if report.when != "call" and report.outcome == "passed":
        return
    if _State.outcome[0] not in ("none", "passed"):
        return
    message = "" if report.outcome == "passed" else _short(str(report.longrepr))
    outcome = "expected failure" if hasattr(report, "wasxfail") else report.outcome
    if call.excinfo is not None and call.excinfo.errisinstance(TooLong):
        report.outcome, outcome = "failed", "too long"
    _State.outcome = (outcome, message)
