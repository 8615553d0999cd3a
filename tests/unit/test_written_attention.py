"""Attention written out in plain operators, found in Dynamo's graph; lowered and interpreted."""

from __future__ import annotations

import math

import pytest
import torch

from tests import written_forms
from tests.harness import backend_of, interpreting_backend
from tests.written_forms import ADDED, FORMS, KEPT, LOWEST, padding
from torch_webgpu_compile.capture import patterns

ATTENTION = torch.ops.webgpu.attention.default


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def interpreted(f, **keywords):
    """A function compiled for the interpreter, after what capture does with Dynamo's graph."""
    inner = interpreting_backend()

    def backend(module, inputs):
        patterns.rewrite(module)
        return inner(module, inputs)

    return torch.compile(f, backend=backend, fullgraph=True, **keywords)


def calls(f, *arguments, **keywords):
    """The operators of the first captured graph."""
    found = []

    def make(captured):
        found.append([n.target for n in captured.module.graph.nodes if n.op == "call_function"])
        return captured.module.forward

    def backend(module, inputs):
        patterns.rewrite(module)
        return backend_of(make)(module, inputs)

    torch._dynamo.reset()
    torch.compile(f, backend=backend, fullgraph=True, **keywords)(*arguments)
    return found[0]


def count(f, *arguments, **keywords):
    """How many attentions are found; nothing is left of scores."""
    found = calls(f, *arguments, **keywords)
    number = found.count(ATTENTION)
    if number:
        assert torch.ops.aten._softmax.default not in found
    return number


def check(f, *arguments):
    """Results and gradients as eager's, NaN where it has NaN."""
    leaves = [t for t in arguments if t.requires_grad]
    wanted = f(*arguments)
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    got = interpreted(f)(*arguments)
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted, equal_nan=True)
    found = torch.autograd.grad(got, leaves, grad)
    torch.testing.assert_close(found, gradients, equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    arguments = written_forms.tensors(name)
    assert count(FORMS[name], *arguments) == 1
    check(FORMS[name], *arguments)


@pytest.mark.parametrize("value", [-math.inf, LOWEST, -1e9, -1e4])
@pytest.mark.parametrize("name", ADDED)
def test_added_masks(name, value):
    arguments = written_forms.tensors(name)
    mask = torch.where(padding(), 0.0, value)
    assert count(ADDED[name], *arguments, mask) == 1
    check(ADDED[name], *arguments, mask)


@pytest.mark.parametrize("name", KEPT)
def test_masks_that_replace(name):
    arguments = written_forms.tensors(name)
    assert count(KEPT[name], *arguments, padding()) == 1
    check(KEPT[name], *arguments, padding())


@pytest.mark.parametrize("name", [*FORMS, *ADDED, *KEPT])
def test_symbolic_sizes(name):
    form = (FORMS | ADDED | KEPT)[name]
    arguments = written_forms.tensors(name)
    if name in ADDED:
        arguments.append(torch.zeros(2, 1, 5, 7))
    if name in KEPT:
        arguments.append(padding())
    assert count(form, *arguments, dynamic=True) == 1
