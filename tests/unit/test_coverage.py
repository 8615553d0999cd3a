"""The page of operators: what a run's results become, and that it is what its data say."""

from __future__ import annotations

import pytest
import torch

from tests.coverage import DATA, DTYPES, KINDS, PAGE, Coverage, page, render, state_of
from tests.device_samples import OPERATORS

RUN = {
    "adapter": "an adapter",
    "torch": "2.13.0",
    "limit": None,
    "operators": [],
    "kinds": ["forward", "backward"],
    "dtypes": ["float32"],
    "outcomes": {"passed": 14, "wrong": 1},
    "seconds": 119,
    "workers": 2,
}
AGAIN = {
    **RUN,
    "limit": 8,
    "operators": ["add"],
    "kinds": [],
    "dtypes": [],
    "outcomes": {"passed": 3},
}


def result(fallbacks=(), **outcomes):
    return {"outcomes": outcomes, "fallbacks": dict.fromkeys(fallbacks, 1)}


def request(op, dtype="float32", kind="forward"):
    return {"op": op, "dtype": dtype, "kind": kind}


def some():
    """Two native entries, one on the host, one factorisation there, one wrong."""
    found = Coverage([RUN, AGAIN])
    found.add(request("add"), result(passed=3))
    found.add(request("add", kind="dynamic"), result(passed=1, recompiled=1))
    found.add(request("add", kind="backward"), result(skipped=2))
    found.add(request("airy"), result(["aten.airy.default"], passed=2))
    found.add(request("qr"), result(["aten.linalg_qr.default", "aten.mm.default"], passed=2))
    found.add(request("bad"), result(passed=5, wrong=1))
    return found


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (result(passed=1, skipped=4), "native"),
        (result(passed=1, recompiled=1), "recompiled"),
        (result(["aten.x.default"], passed=1, recompiled=1), "host"),
        (result(["aten.x.default"], passed=1, error=1), "failed"),
        (result(crash=1), "failed"),
        (result(skipped=4), None),
        (result(), None),
    ],
)
def test_an_entry_is_its_worst_sample(outcome, state):
    assert state_of(outcome) == state


def test_shares():
    found = some()
    assert found.share("float32", "forward") == (1, 3)  # qr is not counted
    assert found.share("float32", "dynamic") == (1, 1)
    assert found.share("float32", "backward") == (0, 0)
    assert found.is_native("add", "float32", "dynamic")
    assert not found.is_native("airy", "float32", "forward")
    assert not found.is_native("add", "float32", "backward")


def test_a_native_entry_of_a_factorisation_counts():
    found = some()
    found.add(request("qr", "float16"), result(passed=1))
    assert found.share("float16", "forward") == (1, 1)


def test_only_what_runs_again_is_forgotten():
    found = some()
    found.forget("add", ["forward"], ["float32"])
    found.forget("qr", list(KINDS), list(DTYPES))
    assert not found.is_native("add", "float32", "forward")
    assert found.is_native("add", "float32", "dynamic")
    assert "qr" not in found.hosted
    assert "airy" in found.hosted


def test_a_run_takes_the_place_of_one_of_the_same_share():
    found = some()
    first, other = found.runs
    again = {**first, "outcomes": {"passed": 15}, "seconds": 60}
    found.add_run(again)
    assert found.runs == [other, again]


def test_it_is_read_back(tmp_path):
    found, path = some(), tmp_path / "operators.json"
    found.save(path)
    again = Coverage.load(path)
    assert (again.runs, again.entries, again.hosted) == (found.runs, found.entries, found.hosted)
    assert render(again) == render(found)


def test_what_the_page_shows():
    page = render(some())
    assert "- an adapter; PyTorch 2.13.0; samples, only forward, backward of float32: 14" in page
    assert "14 passed, 1 wrong in 2 minutes with 2 processes." in page
    assert "samples of these operators again: `add`, at most 8 of each entry: 3 passed" in page
    assert "| `add` | F *d* |" in page
    assert "| `airy` | f |" in page
    assert "| `bad` | ! |" in page
    assert "| float32 | 1 of 3 (33.3%) |  | 1 of 1 (100.0%) |" in page
    assert "Dense factorisations and what is built on them: `qr`." in page
    assert "| `airy` | `aten.airy.default` |" in page


def test_what_the_page_shows_of_another_provider():
    other = Coverage([{**RUN, "adapter": "another adapter"}])
    other.add(request("add"), result(["aten.add.Tensor"], passed=3))
    other.add(request("airy"), result(["aten.airy.default"], passed=2))
    page = render(some(), {"wgpudawn": other})
    assert "| wgpu | an adapter | 18 | 1 | 2 of 4 (50.0%) |" in page
    assert "| wgpudawn | another adapter | 15 | 0 | 0 of 2 (0.0%) |" in page
    _, differing = page.split("Native on wgpu, but not on wgpudawn:")
    rows = differing.split("## On the host")[0]
    assert "| `add` | f |" in rows
    assert "airy" not in rows


def test_the_page_is_what_its_data_say():
    assert PAGE.read_text() == page(), "python -m tests.coverage --render"


def test_the_page_has_every_operator_and_dtype():
    found = Coverage.load(DATA)
    supported = {
        (name, dtype)
        for name, info in OPERATORS.items()
        for dtype in DTYPES
        if getattr(torch, dtype) in info.supported_dtypes("cpu")
    }
    shown = {(op, dtype) for op, by_dtype in found.entries.items() for dtype in by_dtype}
    # A few have no sample that says anything (PyTorch refuses it, or it holds no results), and
    # versions of PyTorch differ a little.
    missing = supported - shown
    assert len(missing) < 0.02 * len(supported), sorted(missing)
    assert len(shown - supported) < 0.02 * len(shown), sorted(shown - supported)


def test_nothing_on_the_page_failed():
    entries = Coverage.load(DATA).entries
    failed = [
        (op, dtype, kind)
        for op, by_dtype in entries.items()
        for dtype, states in by_dtype.items()
        for kind, state in states.items()
        if state == "failed"
    ]
    assert not failed


def test_most_of_the_page_is_native():
    """What the project promises: of float32 98 % forward, 95 % backward, of others 95 %."""
    found = Coverage.load(DATA)
    for dtype in DTYPES:
        for kind in KINDS:
            native, total = found.share(dtype, kind)
            if total and kind != "dynamic" and dtype != "complex64":
                least = 0.98 if (dtype, kind) == ("float32", "forward") else 0.95
                assert native >= least * total, (dtype, kind, native, total)
