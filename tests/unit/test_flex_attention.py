"""``flex_attention``: users' functions are read, and are a part of attention's kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

from tests.compilations import compile_function
from tests.flex_functions import HEADS, KINDS, LENGTH, READ, Kind
from tests.harness import check
from torch_webgpu_compile.capture.attention import flex
from torch_webgpu_compile.capture.attention.score_mods import modified_scores
from torch_webgpu_compile.ir.attention_nodes import Attention, AttentionGradient
from torch_webgpu_compile.torch_ops.elementwise import NotElementwise, Reference, Step
from torch_webgpu_compile.torch_ops.score_functions import ScoreFunction, parsed

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def inputs(key_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (HEADS, key_heads, key_heads)
    return [torch.randn(2, n, LENGTH, 16, requires_grad=True) for n in heads]


def arguments(kind: Kind) -> tuple:
    """What the operator takes behind query, key and value."""
    identity = kind.score_mod or (lambda s, *position: s)
    block_mask = (LENGTH, LENGTH, kind.mask_mod or noop_mask)
    return identity, block_mask, 0.25, {}, tuple(kind.captured()), tuple(kind.masked_by())


@pytest.mark.parametrize("name", KINDS)
def test_the_operator_is_pytorchs_definition_of_it(name):
    q, k, v = inputs()
    rest = arguments(KINDS[name])
    wanted = math_attention(q, k, v, *rest)
    got = flex.flex_attention(q, k, v, *rest)
    torch.testing.assert_close(got, wanted)
    cotangents = [torch.randn_like(result) for result in wanted[:2]]
    rows = wanted[1] > -math.inf  # no gradient goes into the logsumexp of others
    cotangents[1] = cotangents[1].where(rows, 0.0)
    for g, w in zip(
        torch.autograd.grad(got[:2], (q, k, v), cotangents),
        torch.autograd.grad(wanted[:2], (q, k, v), cotangents),
        strict=True,
    ):
        torch.testing.assert_close(g.nan_to_num(), w.nan_to_num())


@pytest.mark.parametrize("name", READ)
def test_only_what_is_more_than_a_sum_is_a_function_of_scores(name):
    kind = READ[name]
    score_mod, _, _, _, captured, _ = arguments(kind)
    like = torch.empty(())
    found = modified_scores(score_mod, captured, (2, HEADS, LENGTH, LENGTH), like)
    assert (found.function is not None) == kind.function


@pytest.mark.parametrize("name", ["soft cap of alibi, on documents", "replaced scores"])
def test_lowered_score_functions(name):
    """Forward and gradients, on the interpreter."""
    q, k, v = inputs()
    rest = arguments(KINDS[name])

    def run(q, k, v, cotangent):
        output, logsumexp, _ = flex.flex_attention(q, k, v, *rest)
        return output, logsumexp, *torch.autograd.grad(output, (q, k, v), cotangent)

    graph = check(run, q, k, v, torch.randn(2, HEADS, LENGTH, 16))
    gradients = [node for node in graph.nodes if isinstance(node, AttentionGradient)]
    assert [node.score_grad is not None for node in gradients] == [True, True]


CAUSAL = {"causal", "soft cap", "a temperature for each head"}  # and nothing else


@pytest.mark.rotates(6)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", READ)
def test_one_kernel(name, dynamic):
    """Whatever the functions say; and a causal mask is known as one."""
    q, k, v = (tensor.detach() for tensor in inputs(HEADS))
    kind = READ[name]
    score_mod, mask_mod = kind.bound(*kind.captured(), *kind.masked_by())
    mask = mask_mod and create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "cpu")

    def run(q, k, v):
        return flex_attention(q, k, v, score_mod, mask)

    state = compile_function(run, q, k, v, dynamic=dynamic)
    assert [call.kernel.kind for call in state.calls] == ["attention"]
    (node,) = (n for n in state.schedule.graph.nodes if isinstance(n, Attention))
    if name in CAUSAL:
        assert node.causal
        assert node.bias is node.replaced is None


def test_a_functions_text_is_the_function():
    steps = (
        Step("gt.Scalar", (Reference("score"), 0), "bool"),
        Step("where.self", (Reference("step", 0), Reference("operand", 0), -math.inf), "float32"),
    )
    function = ScoreFunction(steps, ("float32",))
    assert parsed(function.text) == function


def test_a_function_that_lowering_does_not_know_is_refused_when_it_is_read():
    def score_mod(score, b, h, q, k, table):
        return score + table[q, k, :].sum()

    table = torch.randn(LENGTH, LENGTH, 3)
    with pytest.raises(NotElementwise):
        modified_scores(score_mod, [table], (2, HEADS, LENGTH, LENGTH), table)
