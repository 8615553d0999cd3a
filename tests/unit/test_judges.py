"""The runner of other suites' tests: shares, time limits, crashes, causes."""

from __future__ import annotations

import re

from tests.judges import report, running
from tests.judges.suites import Side, Suite

TESTS = """
import os, time
HERE = os.environ["SIDE"] == "webgpu"
def test_right(): pass
def test_wrong(): assert not HERE, "differs"
def test_wrong_on_both(): raise ValueError
def test_slow(): time.sleep(30 * HERE)
def test_crash(): HERE and os.abort()
"""


def test_a_crash_or_a_slow_test_ends_only_itself(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(TESTS)
    suite = Suite("", ("test_it.py",), Side({"SIDE": "cpu"}), Side({"SIDE": "webgpu"}))
    monkeypatch.setitem(report.SUITES, "it", suite)
    share = running.Share(count=9, seed=0, limit_s=1, seconds=40)
    running.run_file(tmp_path, tmp_path / "out", "it", suite, "test_it.py", share)
    judged = report.judge(tmp_path / "out", "it", "test_it.py")
    counts = judged.total, judged.tried, judged.on_cpu, judged.on_both, judged.late
    assert counts == (5, 5, 4, 1, 1)

    rows = [report.Cause("differences", re.compile("differs"), "open", "")]
    found = {end.outcome: report.cause_of(n, end, rows).name for n, end in judged.failed.items()}
    assert found == {"failed": "differences", "crash": "unknown"}


def test_every_cause_has_a_reason():
    for cause in report.causes():
        assert len(cause.reason.split()) >= 3, cause.name
