"""The key of a captured graph: what lowering reads is in it, and a plan is found by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import OPTIONS, TARGET, compile_function
from torch_webgpu_compile import counters
from torch_webgpu_compile.captured import Phase
from torch_webgpu_compile.compiler import compile_graph
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.lowering.captured_text import captured_text, verify_plan_of
from torch_webgpu_compile.plan import cache as plan_cache

INFERENCE = Phase("inference")


def function(x):
    y = torch.softmax(x + torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 1)
    return y, y[0], x.sum(0).half()


@pytest.fixture
def captured():
    return compile_function(function, torch.ones(2, 3)).captured


def set_value(name, **changes):
    def change(module):
        node = next(node for node in module.graph.nodes if name in node.name)
        old = node.meta["val"]
        size = changes.get("size", tuple(old.shape))
        dtype = changes.get("dtype", old.dtype)
        stride = changes.get("stride", old.stride())
        with old.fake_mode:
            node.meta["val"] = torch.empty_strided(size, stride, dtype=dtype)

    return change


def set_argument(module):
    node = next(node for node in module.graph.nodes if "softmax" in node.name)
    node.args = (node.args[0], 0, *node.args[2:])


def set_target(module):
    node = next(node for node in module.graph.nodes if "add" in node.name)
    node.target = torch.ops.aten.sub.Tensor


def set_constant(module):
    name = module.graph.find_nodes(op="get_attr")[0].target
    setattr(module, name, torch.full((2, 3), 7.0))


def set_storage(module):
    """The second result has memory of its own, though its layout is the same."""
    nodes = list(module.graph.nodes)
    results = nodes[-1].args[0]
    old = results[1].meta["val"]
    with old.fake_mode:
        memory = torch.empty_strided((old.storage_offset() + 3,), (1,))
        results[1].meta["val"] = memory.as_strided(old.shape, old.stride(), old.storage_offset())


def set_results(module):
    output = module.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)


def set_line(module):
    for node in module.graph.nodes:
        node.meta["stack_trace"] = '  File "/elsewhere/model.py", line 3, in f\n    y = f(x)\n'


CHANGES = [
    *(set_argument, set_target, set_constant, set_storage, set_results, set_line),
    *(set_value("add", dtype=torch.float16), set_value("add", stride=(1, 2))),
    *(set_value("arg", size=(3, 2)), set_value("arg", stride=(1, 2))),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_lowering_reads_is_in_the_text(captured, change):
    before = captured_text(captured, INFERENCE)
    assert before is not None
    assert captured_text(replace(captured, name="other"), INFERENCE) == before
    change(captured.module)
    assert captured_text(captured, INFERENCE) not in (None, before)


def test_what_is_beside_the_graph_is_in_the_text(captured):
    others = [
        (captured, Phase("forward")),
        (replace(captured, static_inputs=frozenset({0})), INFERENCE),
        (replace(captured, offsets={0: 4}), INFERENCE),
    ]
    texts = {captured_text(captured, INFERENCE), *(captured_text(*other) for other in others)}
    torch.set_default_dtype(torch.float64)
    try:
        texts.add(captured_text(captured, INFERENCE))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(texts) == 5


def test_graphs_without_a_key(captured):
    dynamic = compile_function(lambda x: x + 1, torch.ones(4, 3), dynamic=True).captured
    assert captured_text(dynamic, INFERENCE) is None
    assert captured_text(replace(captured, numbers={"z": (0, 0)}), INFERENCE) is None
    host = compile_function(
        torch.linalg.eigvalsh, torch.ones(2, 2), options=replace(OPTIONS, fallback="silent")
    ).captured
    assert captured_text(host, INFERENCE) is None


def test_a_plan_is_found_without_lowering(captured, tmp_path):
    options = replace(OPTIONS, cache=str(tmp_path / "cache"))
    plan_cache.clear()

    def compiled(**changes):
        before = counters.plan_cache_hits
        state = compile_graph(captured, INFERENCE, TARGET, replace(options, **changes))
        plan_cache.clear()
        return state, counters.plan_cache_hits > before

    first, was_found = compiled()
    assert "ir" in first.results
    assert not was_found
    second, was_found = compiled()
    assert "ir" not in second.results
    assert was_found
    assert second.plan == first.plan
    assert second.depends_on_determinism == first.depends_on_determinism
    assert "ir" in compiled(deterministic=True)[0].results
    for path in (tmp_path / "cache").glob("*.graph"):
        path.write_bytes(path.read_bytes()[:-1])
    third, was_found = compiled()
    assert "ir" in third.results
    assert was_found  # by what lowering gave
    assert "ir" not in compiled()[0].results


def test_plans_of_other_graphs_are_refused(captured):
    plan = compile_function(function, torch.ones(2, 3)).plan
    verify_plan_of(captured, plan)
    for other in (
        compile_function(function, torch.ones(2, 4)[:, 1:]).plan,
        compile_function(lambda x: x + 1, torch.ones(2, 3)).plan,
        compile_function(lambda x, y: function(x + y), torch.ones(2, 3), torch.ones(2, 3)).plan,
        compile_function(function, torch.ones(2, 3, dtype=torch.float16)).plan,
    ):
        with pytest.raises(VerificationError):
            verify_plan_of(captured, other)
