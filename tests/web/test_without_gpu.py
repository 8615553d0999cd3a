"""The tests of `web/tests`, which node runs: numbers, inputs, manifests and plans."""

from __future__ import annotations

import subprocess

import pytest

from web.build import WEB, build_runtime, has_npm, npm_environment


def test_in_node():
    if not has_npm():
        pytest.skip("there is no npm to build the runtime with")
    build_runtime()  # installs what the tests bundle the modules with
    tests = sorted(str(path) for path in (WEB / "tests").glob("*.test.mjs"))
    ran = subprocess.run(
        ["node", "--test", *tests],
        cwd=WEB,
        env=npm_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert tests
    assert ran.returncode == 0, ran.stdout + ran.stderr
