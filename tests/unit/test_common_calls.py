"""Equal calls of a joint graph, and what is not loaded for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.faults import ROOT
from torch_webgpu_compile.capture.graph.common_calls import merge_common_calls

aten = torch.ops.aten


def left_of(function, *arguments, mode="fake"):
    """What remains of a function's calls, and the function that they make."""
    module = make_fx(function, tracing_mode=mode)(*arguments)
    merge_common_calls(module)
    module.graph.lint()
    return [n.target for n in module.graph.nodes if n.op == "call_function"], module


def test_equal_calls_are_one():
    def function(x):
        values, indices = x.sort(-1)
        again, others = x.sort(-1)
        return values + again.exp() + again.exp(), indices * others

    x = torch.randn(3, 4)
    left, module = left_of(function, x)
    assert left.count(aten.sort.default) == left.count(aten.exp.default) == 1
    torch.testing.assert_close(module(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.exp(), x.exp()),  # results that the caller may change
        lambda x: (x.exp().view(-1), x.exp().view(-1)),
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: x * 1.0 + x * 1,  # of another type of number
        lambda x: x.add(0.0) * x.add(-0.0),
        lambda x: x.exp() + (x.clone().copy_(x), x.exp())[1],  # one may have changed x
    ],
)
def test_what_stays_apart(function):
    x = torch.randn(3, 4)
    before = make_fx(function, tracing_mode="fake")(x)
    count = sum(node.op == "call_function" for node in before.graph.nodes)
    assert len(left_of(function, x)[0]) == count


def test_sizes_of_data_stay_apart():
    def function(x):
        return x.nonzero().sum() + x.nonzero().sum()

    left, _ = left_of(function, torch.ones(3), mode="symbolic")
    assert left.count(aten.nonzero.default) == 2


@pytest.mark.rotates(3)
def test_training_does_not_load_inductor():
    code = """
import sys, torch
from tests.unit.test_recompute import graphs_of_training
assert len(graphs_of_training(torch.sigmoid, torch.ones(3, requires_grad=True))) == 2
heavy = {f"torch._inductor.{name}" for name in ("ir", "lowering", "scheduler", "compile_fx")}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
