"""Attention written out in plain operators, found in Dynamo's graph; lowered and interpreted."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import written_forms
from tests.harness import backend_of, interpreting_backend
from tests.written_forms import ADDED, FORMS, KEPT, LOWEST, padding
from torch_webgpu_compile.capture.graph import patterns

pytestmark = pytest.mark.rotates(12)

ATTENTION = torch.ops.webgpu.attention.default


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def interpreted(f, **keywords):
    """A function compiled for the interpreter, after what capture does with Dynamo's graph."""
    inner = interpreting_backend()

    def backend(module, inputs):
        patterns.replace_attention(module)
        patterns.replace_calls(module)
        return inner(module, inputs)

    return torch.compile(f, backend=backend, fullgraph=True, **keywords)


def calls(f, *arguments, **keywords):
    """The operators of the first captured graph."""
    found = []

    def make(captured):
        found.append([n.target for n in captured.module.graph.nodes if n.op == "call_function"])
        return captured.module.forward

    def backend(module, inputs):
        patterns.replace_attention(module)
        patterns.replace_calls(module)
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


def check(f, *arguments, **tolerance):
    """Results and gradients as eager's, NaN where it has NaN."""
    leaves = [t for t in arguments if t.requires_grad]
    wanted = f(*arguments)
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    got = interpreted(f)(*arguments)
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted, equal_nan=True, **tolerance)
    found = torch.autograd.grad(got, leaves, grad)
    torch.testing.assert_close(found, gradients, equal_nan=True, **tolerance)


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
    # Sums of three terms, the last of them -1e4, are taken in another order: near it numbers are
    # 2⁻¹⁰ apart, and a row without keys has scores there.
    close = {"atol": 2e-3, "rtol": 2e-3} if name == "added_product" and value == -1e4 else {}
    check(ADDED[name], *arguments, mask, **close)


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


def weights_too(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def averaged_weights(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights.mean(1)


def scores_too(q, k, v):
    scores = q @ k.mT
    return (scores * 0.5).softmax(-1) @ v, scores.amax(-1)


def scores_before_a_write(q, k, v):
    scores = q @ k.mT
    highest = scores.amax(-1)
    scores *= 0.5
    return scores.softmax(-1) @ v, highest


def other_dimension(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def transposed_weights(q, k, v):
    return (q @ k.mT).softmax(-1).mT @ v[:, :, : q.shape[2]]


def another_function(q, k, v):
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def larger_bias(q, k, v):
    return ((q @ k.mT)[:1] + torch.zeros(2, 1, 1, 1)).softmax(-1) @ v


def by_heads(q, k, v):
    factors = torch.arange(4.0)[:, None, None]
    return (q @ k.mT * factors).softmax(-1) @ v


def zero_divisor(q, k, v):
    return (q @ k.mT / 0.0).softmax(-1) @ v


def written_value(q, k, v):
    scores = q @ k.mT
    k.mul_(2)
    return scores.softmax(-1) @ v


def autocast_between(q, k, v):
    scores = q @ k.mT
    with torch.autocast("cpu", torch.bfloat16):
        return scores.softmax(-1) @ v


def large_heads(q, k, v):
    q, k = (x.repeat(1, 1, 1, 20) for x in (q, k))
    return (q @ k.mT).softmax(-1) @ v


def in_float64(q, k, v):
    return (q.double() @ k.double().mT).softmax(-1) @ v.double()


def named_letters(q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhji,bhjd->bhid", weights, v[:, :, : q.shape[2]])


OTHERS = (
    *(weights_too, averaged_weights, scores_too, scores_before_a_write, other_dimension),
    *(transposed_weights, another_function, larger_bias, by_heads, written_value),
    *(zero_divisor, autocast_between, large_heads, in_float64, named_letters),
)


@pytest.mark.parametrize("f", OTHERS, ids=lambda f: f.__name__)
def test_what_is_left_as_it_is(f):
    with torch.no_grad():
        assert count(f, *written_forms.tensors("plain")) == 0


def test_results_of_what_is_left_as_it_is():
    q, k, v = (t.detach() for t in written_forms.tensors("plain"))
    for f in (scores_before_a_write, written_value, scores_too):
        wanted = f(q, k.clone(), v)
        got = interpreted(f)(q, k.clone(), v)
        torch.testing.assert_close(got, wanted)


def test_writes_elsewhere_and_modes_are_no_hindrance():
    def f(q, k, v, total):
        total += 1
        scores = q @ k.mT
        size = scores.size(-1)
        with torch.autocast("cpu", enabled=False):
            shifted = scores * size**-0.5
        out = shifted.softmax(-1) @ v
        total *= 2
        return out

    with torch.no_grad():
        # Modes between the products are left alone, even those that say nothing new.
        assert count(f, *written_forms.tensors("plain"), torch.zeros(3)) == 0

    def g(q, k, v, total):
        total += 1
        out = (q @ k.mT).softmax(-1) @ v
        total *= 2
        return out

    with torch.no_grad():
        assert count(g, *written_forms.tensors("plain"), torch.zeros(3)) == 1


def test_autocast_around():
    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return (q @ k.mT * 0.25).softmax(-1) @ v

    q, k, v = (t.detach() for t in written_forms.tensors("plain"))
    assert count(f, q, k, v) == 1
    got, wanted = interpreted(f)(q, k, v), f(q, k, v)
    assert got.dtype is wanted.dtype
    # Eager rounds scores and weights to bfloat16, whose neighbours are 1/128 apart.
    torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "repeated", "einsums"])
def test_16_bit_forms(name, dtype):
    arguments = [t.detach() for t in written_forms.tensors(name, dtype)]
    assert count(FORMS[name], *arguments) == 1
    # Eager rounds scores and weights to 16 bits.
    close = {"atol": 2e-2, "rtol": 2e-2}
    got, exact = interpreted(FORMS[name])(*arguments), FORMS[name](*(t.float() for t in arguments))
    torch.testing.assert_close(got.float(), exact, **close)


@pytest.mark.parametrize("training", [False, True])
def test_dropout(training):
    module = nn.Dropout(0.25).train(training)

    def f(q, k, v):
        return F.dropout(module((q @ k.mT).softmax(-1)), 0.5, training=False) @ v

    found = calls(f, *written_forms.tensors("plain"))
    assert found.count(ATTENTION) == 1
    assert found.count(torch.ops.webgpu.seed.default) == training


def test_dropout_twice_is_left_as_it_is():
    def f(q, k, v):
        return F.dropout(F.dropout((q @ k.mT).softmax(-1), 0.5), 0.5) @ v

    assert count(f, *written_forms.tensors("plain")) == 0


def test_products_that_are_replaced_may_be_nan():
    f = KEPT["filled -1e9"]
    q, k, v = (t.detach() for t in written_forms.tensors("plain"))
    k[:, :, 2] = math.nan
    keep = torch.arange(7).expand(2, 1, 5, 7) != 2
    torch.testing.assert_close(interpreted(f)(q, k, v, keep), f(q, k, v, keep))


def test_a_learned_bias():
    f = ADDED["additive"]
    check(f, *written_forms.tensors("additive"), torch.randn(1, 4, 5, 7, requires_grad=True))


def test_shared_heads_are_not_repeated():
    for name in ("repeated", "interleaved"):
        with torch.no_grad():
            found = calls(FORMS[name], *written_forms.tensors(name))
        assert torch.ops.aten.expand.default not in found
        assert torch.ops.aten.clone.default not in found


@pytest.mark.parametrize(
    "equation", ["i,ij->j", "ij,j->i", "i,i->", "i,j->ij", "ij,i->", "...i,i->...", "ii,i->i"]
)
@pytest.mark.parametrize("softmax", [False, True])
def test_other_einsums_are_left_alone(equation, softmax):
    sizes = [len(term.replace("...", "bc")) for term in equation.split("->")[0].split(",")]
    operands = [torch.randn(*[4] * size) for size in sizes]

    def f(x, y):
        return torch.einsum(equation, x.softmax(-1) if softmax else x, y)

    torch.testing.assert_close(interpreted(f)(*operands), f(*operands))
