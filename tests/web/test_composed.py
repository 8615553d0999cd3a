"""Composed plans in Chromium: equal to the same bundle in Python, and errors that change nothing."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree

from tests.deciding import deciding, turn
from tests.web.test_runtime import RUN, assert_equal
from torch_webgpu_compile import export

pytestmark = pytest.mark.rotates(3)


@pytest.fixture(scope="module")
def exported(site):
    """A bundle, its model, and calls."""
    model, calls = deciding()
    with torch.no_grad():
        return export(model.entries(), site[0] / "deciding"), model, calls


def test_data_decide_what_runs(in_page, in_python, exported):
    folder, model, calls = exported
    names = {"halve": ("x", "limit"), "choose": ("x",), "find": ("x",), "steps": ("rows",)}
    given = [
        [entry, {n: x.tolist() for n, x in zip(names[entry], inputs, strict=True)}]
        for entry, inputs in calls
    ]
    found = in_page(RUN, {"bundle": "deciding", "calls": given})
    assert_equal(found, in_python(folder, given))
    with torch.no_grad():
        for got, (entry, inputs) in zip(found, calls, strict=True):
            wanted = _pytree.tree_leaves(getattr(model, entry)(*inputs))
            for values, tensor in zip(got.values(), wanted, strict=True):
                close = torch.tensor(values, dtype=torch.float64), tensor.double().flatten()
                torch.testing.assert_close(*close, atol=1e-5, rtol=1e-5)


def test_errors_change_nothing_and_memory_is_used_again(in_page, exported):
    x = torch.randn(3, 3)
    found = in_page(
        """
const model = await runtime.load("deciding", {seed: 0});
const full = (value) => ({data: Array(12).fill(value), shape: [3, 4]});
const failure = (call) => call.then(() => "none", (error) => `${error.name}: ${error.message}`);
const {output} = await model.run("turned", {x: given});
const turned = Array.from(await output.read());
const seen = async () => Array.from(await model.readState("seen"));
const halve = async (limit, signal) => {
  const results = await model.run("halve", {x: full(0.3), limit}, {signal});
  const turns = await results["0"].item();
  Object.values(results).forEach((tensor) => tensor.dispose());
  return turns;
};
const problems = [await failure(model.run("find", {x: full(1)}))];
const ending = new AbortController();
const ended = failure(halve(-1, ending.signal)); // it never ends by itself
const waits = halve(0.01);
setTimeout(() => ending.abort(), 300);
problems.push(await ended);
const turns = [await waits, ...await Promise.all([halve(0.01), halve(1e9)])];
const state = await seen();
for (let k = 0; k < 6; k++) await halve(0.001);
const before = model.statistics.gpuBytes;
for (let k = 0; k < 12; k++) await halve(0.001);
const {gpuBytes, calls} = model.statistics;
model.destroy();
return {turned, problems, turns, state, calls, grown: gpuBytes - before};
""",
        x.tolist(),
    )
    torch.testing.assert_close(torch.tensor(found["turned"]), turn(turn(turn(x))).flatten())
    assert "u0 <= 7 does not hold, at deciding.py:" in found["problems"][0]
    assert found["problems"][0].startswith("InputError: ")
    assert found["problems"][1].startswith("AbortError: ")
    first, second, none = found["turns"]
    assert first == second > 0 == none
    assert found["state"] == [first + second] * 4
    assert found["calls"] == 22
    assert found["grown"] == 0
