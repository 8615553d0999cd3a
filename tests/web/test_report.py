"""`report` in a page: which kernels a call has, what is in memory, and why the variant was taken."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from torch_webgpu_compile import export

REPORT = """
const {report} = await import(`/${given.folder}/torch-webgpu-report.js`);
const model = await runtime.load(given.folder, {cache: false, ...given.options});
"""


class Attend(nn.Module):
    """Kernels of several kinds, and a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return torch.softmax(x @ self.weight, -1) @ self.weight + self.calls


def test_report(in_page, site):
    model = Attend().eval().requires_grad_(False)
    export(model, (torch.randn(5, 8),), site[0] / "report")
    found = in_page(
        REPORT
        + """
const input = {x: new Float32Array(40)};
const before = model.statistics;
const idle = await report(model);
const found = await report(model, "forward", input, {calls: 4});
const {dispatches, calls} = model.statistics;
const made = await model.run("forward", input);
return {
  found, idle, calls: calls - before.calls, perCall: (dispatches - before.dispatches) / (calls - before.calls),
  counted: Array.from(await model.readState("calls")), first: (await made.output.read())[0], hasTimestamps: model.device.features.has("timestamp-query"),
  isItself: !Object.hasOwn(model.device, "createCommandEncoder"),
};
""",
        {"folder": "report"},
    )
    report = found["found"]
    assert found["calls"] == 9  # one before, four alone, four with timestamps
    assert found["counted"] == [10]
    assert found["isItself"]
    assert found["first"] == pytest.approx(float(model(torch.zeros(5, 8))[0, 0]) + 9, rel=1e-5)
    assert sum(kernel["dispatches"] for kernel in report["kernels"]) == found["perCall"]
    plan = json.loads((site[0] / "report" / "plans" / "float32-forward.json").read_text())
    assert {kernel["name"] for kernel in report["kernels"]} == {k["name"] for k in plan["kernels"]}
    assert report["milliseconds"] > 0
    times = [kernel["milliseconds"] for kernel in report["kernels"]]
    if found["hasTimestamps"]:
        assert report["timing"].startswith("timestamps of the GPU")
        assert times == sorted(times, reverse=True)
    else:
        assert "has no timestamp-query" in report["timing"]
        assert set(times) == {None}
    memory = report["gpuMemory"]
    assert memory["ofStates"] == 4 * (64 + 1)
    assert memory["nbytes"] == memory["ofStates"] + memory["ofOthers"]
    first = {"name": "weight", "kind": "parameter", "dtype": "float32", "nbytes": 256}
    assert memory["byState"][0] == first
    assert [state["name"] for state in memory["byState"]] == ["weight", "calls"]
    assert report["entries"] == {"forward": "plain"}
    assert found["idle"]["kernels"] == []
    assert found["idle"]["milliseconds"] is None


def test_why_a_variant_was_taken(in_page, site):
    both = ("float32", "float16")
    export(nn.Linear(3, 2), (torch.randn(4, 3),), site[0] / "reasons", precision=both)
    body = REPORT + "return (await report(model)).variant;"
    hidden = f"""
const {{prototype}} = GPUSupportedFeatures;
const {{has}} = prototype;
prototype.has = function (name) {{ return name !== "shader-f16" && has.call(this, name); }};
try {{ {body} }} finally {{ prototype.has = has; }}
"""
    given = {"folder": "reasons", "options": {}}
    assert in_page(hidden, given) == {
        "name": "float32",
        "reason": "float16 needs shader-f16; it is the first of float16, float32 that this GPU can run",
    }
    asked = in_page(body, given | {"options": {"variant": "float32"}})
    assert asked == {"name": "float32", "reason": "load was asked for it"}


def test_composed_plans_and_devices_without_timestamps(in_page, site):
    def turns(x, count):
        def again(k, x):
            return k < count

        def step(k, x):
            return k + 1, x * 2

        return torch.while_loop(again, step, (torch.tensor(0), x))[1]

    export({"turns": (turns, (torch.ones(3), torch.tensor(2)))}, site[0] / "turns")
    found = in_page(
        """
const device = await (await navigator.gpu.requestAdapter()).requestDevice();
given.options = {device};
"""
        + REPORT
        + """return await report(model, "turns", {x: [1, 2, 3], count: 3}, {calls: 2});""",
        {"folder": "turns"},
    )
    assert found["entries"] == {"turns": "composed"}
    assert found["variant"]["reason"] == "the bundle has no other"
    assert "has no timestamp-query" in found["timing"]
    assert max(kernel["dispatches"] for kernel in found["kernels"]) >= 3
    assert {kernel["milliseconds"] for kernel in found["kernels"]} == {None}
