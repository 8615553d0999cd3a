"""``flex_attention`` on the device, compiled and eager, against PyTorch's definition on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
    noop_mask,
)

from tests.compiling import native
from tests.flex_functions import HEADS, KINDS, LENGTH
from tests.providers import require_quick_compiler
from torch_webgpu_compile import counters

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, LENGTH, 16).to(dtype) for n in (HEADS, 2, 2)]


def definition(kind, q, k, v, captured, masked_by):
    """The result and the logsumexp, of scores that are all in memory."""
    score_mod = kind.score_mod or (lambda s, *position: s)
    block_mask = (LENGTH, LENGTH, kind.mask_mod or noop_mask)
    rest = score_mod, block_mask, 0.25, {}, tuple(captured), tuple(masked_by)
    output, logsumexp, _ = math_attention(q, k, v, *rest)
    return output, logsumexp * torch.log(torch.tensor(2.0))


def device_function(kind, captured, masked_by):
    """Of query, key, value and what the score_mod captures, on the device."""
    masked_by = [tensor.to("webgpu") for tensor in masked_by]
    _, mask_mod = kind.bound(*captured, *masked_by)
    mask = mask_mod and create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "webgpu")

    def run(q, k, v, *captured):
        score_mod, _ = kind.bound(*captured, *masked_by)
        aux = AuxRequest(lse=True)
        output, found = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=aux)
        return output, found.lse

    return run


@pytest.mark.rotates(4)
@pytest.mark.parametrize("name", KINDS)
def test_forward_and_gradients(name):
    """Also those of what a score_mod captures, and of the logsumexp."""
    if name == "sliding window":
        require_quick_compiler()
    kind = KINDS[name]
    masked_by = kind.masked_by()
    learned = "product" not in name  # PyTorch gives elements of captured tensors gradients only
    given = [t.requires_grad_() for t in inputs()]
    given += [t.requires_grad_(learned) for t in kind.captured()]
    wanted = definition(kind, *given[:3], given[3:], masked_by)
    # A row without a key has a logsumexp of -inf, and no gradient.
    kept = wanted[1] > float("-inf")
    cotangents = [torch.randn_like(wanted[0]) * kept.unsqueeze(-1), torch.randn_like(kept.float())]
    cotangents[1] *= kept
    leaves = [t for t in given if t.requires_grad]
    gradients = torch.autograd.grad(wanted, leaves, cotangents)

    on_device = [t.detach().to("webgpu").requires_grad_(t.requires_grad) for t in given]
    run = native(device_function(kind, on_device[3:], masked_by))
    got = run(*on_device)
    torch.testing.assert_close([t.cpu() for t in got], list(wanted))
    found = torch.autograd.grad(got, on_device[: len(leaves)], [t.to("webgpu") for t in cotangents])
    torch.testing.assert_close(
        [t.cpu().nan_to_num() for t in found], [g.nan_to_num() for g in gradients]
    )


@pytest.mark.parametrize("name", ["documents", "soft cap"])
def test_eager(name):
    kind = KINDS[name]
    given = inputs()
    wanted = definition(kind, *given, kind.captured(), kind.masked_by())
    got = device_function(kind, [], kind.masked_by())(*(t.to("webgpu") for t in given))
    torch.testing.assert_close([t.cpu() for t in got], list(wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    given = inputs(dtype)
    wanted = definition(KINDS["soft cap"], *(t.float() for t in given), [], [])
    got = native(device_function(KINDS["soft cap"], [], []))(*(t.to("webgpu") for t in given))
    torch.testing.assert_close(got[0].cpu().float(), wanted[0], atol=1e-2, rtol=1e-2)


def test_lengths_share_a_plan():
    """CPU tensors, a symbolic number of queries and keys, a captured tensor of that size."""

    def run(q, k, v, of):
        def score_mod(score, b, h, q, k):
            return torch.where(of[q] == of[k], score - 0.1 * (q - k).abs(), float("-inf"))

        return flex_attention(q, k, v, score_mod)

    compiled = native(run, dynamic=True)
    for length in (40, 64, 97):
        given = [torch.randn(2, 2, length, 16) for _ in range(3)]
        given.append(torch.arange(length) // 13)
        torch.testing.assert_close(compiled(*given), run(*given))
    assert counters.plans_compiled == 1


def test_one_query_of_many_keys():
    """Parts of the keys in workgroups of their own, which apply the score_mod each."""
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 700, 16), torch.randn(1, 2, 700, 16)

    def run(q, k, v):
        return flex_attention(q, k, v, KINDS["soft cap"].score_mod)

    torch.testing.assert_close(native(run)(q, k, v), run(q, k, v))
