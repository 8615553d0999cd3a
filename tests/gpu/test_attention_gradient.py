"""Attention in training, end to end: gradients and dropout without scores in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiling import native
from tests.providers import device_in_use
from torch_webgpu_compile import counters, explain
from torch_webgpu_compile.codegen.tilings import choose as choice
from torch_webgpu_compile.codegen.tilings.attention_tilings import (
    _GRADIENT_TILINGS,
    AttentionGradientTiling,
)
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.symbolic.sizes import evaluate
from torch_webgpu_compile.torch_ops import custom_ops

pytestmark = [pytest.mark.rotates(15), pytest.mark.usefixtures("fresh")]


def close(got, wanted, dtype=torch.float32):
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)


def wide(tensor):
    """A leaf of the same values in float64; masks as they are."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def check(f, *arguments, run=None):
    """Results and gradients of ``f`` against float64 autograd; the compiled function."""
    run = native(f) if run is None else run
    exact = [wide(t) for t in arguments]
    got, wanted = run(*arguments), f(*exact)
    dtype = got.dtype
    close(got, wanted, dtype)
    cotangent = torch.randn_like(got)
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    found = torch.autograd.grad(got, leaves, cotangent)
    exact_leaves = [t for t in exact if t is not None and t.requires_grad]
    expected = torch.autograd.grad(wanted, exact_leaves, cotangent.double())
    for leaf, g, w in zip(leaves, found, expected, strict=True):
        assert g.dtype is leaf.dtype
        close(g, w, dtype)
    return run


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def attend(causal=False, grouped=False):
    def f(q, k, v, mask=None):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=grouped, scale=0.2
        )

    return f


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 80, 128, 7])
def test_head_sizes(size, dtype):
    q, k, v = leaf(1, 2, 37, size), leaf(1, 2, 45, size), leaf(1, 2, 45, size)
    check(attend(causal=True), *(t.detach().to(dtype).requires_grad_() for t in (q, k, v)))


@pytest.mark.parametrize("sizes", [(8, 24), (33, 12)])
def test_different_head_sizes(sizes):
    size, value_size = sizes
    check(attend(), leaf(1, 2, 9, size), leaf(1, 2, 11, size), leaf(1, 2, 11, value_size))


def test_the_largest_head_size():
    """The gradient alone: software adapters take a minute to compile the forward's kernel."""
    q, k, v, grad = (torch.randn(1, 1, 9, 256) for _ in range(4))
    output, logsumexp = torch.ops.webgpu.attention(q, k, v, None, True, 0.0625)
    rest = None, logsumexp, (grad * output).sum(-1), True, 0.0625
    f = torch.ops.webgpu.attention_backward
    for g, w in zip(native(f)(grad, q, k, v, *rest), f(grad, q, k, v, *rest), strict=True):
        close(g, w)


@pytest.mark.parametrize("lengths", [(1, 40), (40, 1), (64, 64), (70, 33), (33, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, causal):
    queries, keys = lengths
    check(attend(causal), leaf(2, 2, queries, 16), leaf(2, 2, keys, 16), leaf(2, 2, keys, 16))


@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_shared_key_heads(key_heads):
    k, v = leaf(2, key_heads, 21, 16), leaf(2, key_heads, 21, 16)
    check(attend(causal=True, grouped=True), leaf(2, 6, 18, 16), k, v)


MASKS = {
    "rows": (20, 37),
    "padding": (2, 1, 1, 37),
    "heads": (1, 3, 20, 37),
    "full": (2, 3, 20, 37),
}


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "additive", "with a gradient"])
def test_masks(shape, kind):
    mask = torch.randn(MASKS[shape])
    if kind == "bool":
        mask = mask > -0.3
        mask[..., 0, :] = False  # no key at all
    elif kind == "additive":
        mask = mask.masked_fill(mask < -1, float("-inf"))
    else:
        mask.requires_grad_()
    check(attend(), leaf(2, 3, 20, 16), leaf(2, 3, 37, 16), leaf(2, 3, 37, 16), mask)


def test_rows_without_keys_have_no_gradient():
    q, k, v = (leaf(1, 2, 6, 8) for _ in range(3))
    mask = torch.zeros(6, 6)
    mask[2] = float("-inf")
    y = native(attend())(q, k, v, mask)
    assert (y[:, :, 2] == 0).all()
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert (gradients[0][:, :, 2] == 0).all()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9])
def test_rows_of_low_numbers_are_as_in_eagers_fused_kernel(low):
    q, k, v = (leaf(1, 2, 6, 8) for _ in range(3))
    mask = torch.zeros(6, 6)
    mask[2] = low
    f = attend()
    got, wanted = native(f)(q, k, v, mask), f(q, k, v, mask)
    close(got, wanted)
    for g, w in zip(
        torch.autograd.grad(got.sum(), (q, k, v)),
        torch.autograd.grad(wanted.sum(), (q, k, v)),
        strict=True,
    ):
        close(g, w)


def test_views_of_one_tensor():
    def f(x):
        q, k, v = x.view(2, 21, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 21, 64)

    check(f, leaf(2, 21, 192))


def test_one_tensor_for_all():
    check(lambda x: F.scaled_dot_product_attention(x, x, x.flip(3)), leaf(2, 3, 19, 16))


def test_three_dimensions():
    check(attend(), leaf(3, 19, 16), leaf(3, 12, 16), leaf(3, 12, 16))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some(which):
    tensors = [torch.randn(1, 2, 19, 16).requires_grad_(k in which) for k in range(3)]
    check(attend(causal=True), *tensors)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_numbers_spread_as_in_eager(bad):
    q, k, v = (leaf(1, 1, 5, 8) for _ in range(3))
    with torch.no_grad():
        k[0, 0, 3, 2] = bad
    f = attend(causal=True)
    got, wanted = native(f)(q, k, v), f(q, k, v)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    for g, w in zip(
        torch.autograd.grad(got[:, :, :3].sum(), (q, k, v)),
        torch.autograd.grad(wanted[:, :, :3].sum(), (q, k, v)),
        strict=True,
    ):
        assert g[..., :3, :].isfinite().all() == w[..., :3, :].isfinite().all()


def test_dynamic_lengths():
    f = attend(causal=True, grouped=True)
    run = native(f, dynamic=True)
    for length in (5, 40, 67):
        q, k, v = leaf(2, 4, length, 16), leaf(2, 2, length, 16), leaf(2, 2, length, 16)
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
        check(f, q, k, v, run=run)
    counters.reset()
    q, k, v = leaf(2, 4, 51, 16), leaf(2, 2, 51, 16), leaf(2, 2, 51, 16)
    check(f, q, k, v, run=run)
    assert counters.plans_compiled == 0


TILINGS = [
    *_GRADIENT_TILINGS,
    AttentionGradientTiling(16, 32, 4, 64),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tilings(tiling, monkeypatch):
    target = device_in_use().target
    used = []

    def choose(*_):
        used.append(tiling)
        return tiling

    if tiling.workgroup > target.max_workgroup_invocations:
        pytest.skip("the adapter's workgroups are smaller")
    monkeypatch.setattr(choice, "choose_attention_gradient_tiling", choose)
    plan_cache.clear()  # plans are remembered by what they compute, not by a patched choice
    q, k, v = leaf(1, 4, 70, 12), leaf(1, 2, 67, 12), leaf(1, 2, 67, 20)
    check(attend(causal=True, grouped=True), q, k, v)
    check(attend(), leaf(1, 1, 64, 16), leaf(1, 1, 64, 16), leaf(1, 1, 64, 16))
    assert len(used) == 4
    plan_cache.clear()


def test_what_reads_the_logsumexp_runs_after_its_kernel():
    def f(q):
        output, logsumexp = torch.ops.webgpu.attention(q, q, q, None, True, 0.25)
        return output * logsumexp.unsqueeze(-1) + 1

    q = torch.randn(1, 2, 9, 8)
    with torch.no_grad():
        close(native(f)(q), f(q))
        assert explain(f, q).dispatch_count == 2


def test_the_logsumexp_alone():
    def f(q):
        return torch.ops.webgpu.attention(q, q, q, None, False, 0.25)[1] * 2

    q = torch.randn(1, 2, 9, 8)
    close(native(f)(q), f(q))


# -- dropout ---------------------------------------------------------------------------------------


def reference(q, k, v, mask, causal, p, seed):
    """Attention whose dropout is that of a seed."""
    scores = q @ k.transpose(-2, -1) * 0.2
    if mask is not None:
        scores = scores + mask
    if causal:
        lowest = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype)
        scores = scores + lowest.triu(1)
    kept = (custom_ops.uniform(seed, scores.shape) >= p) / (1 - p)
    return scores.softmax(-1) * kept @ v


@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
def test_dropout_is_that_of_its_seed(kind):
    q, k, v = (leaf(2, 3, 37, 16) for _ in range(3))
    mask = torch.randn(37, 37) if kind == "masked" else None
    causal = kind == "causal"

    def f(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask, 0.25, causal, scale=0.2)

    run = native(f)
    run(q, k, v, mask)
    torch.manual_seed(5)
    got = run(q, k, v, mask)
    torch.manual_seed(5)
    seed = torch.empty(2, dtype=torch.int32).random_()
    exact = [wide(t) for t in (q, k, v, mask)]
    wanted = reference(*exact, causal, 0.25, seed)
    close(got, wanted)
    cotangent = torch.randn_like(got)
    for g, w in zip(
        torch.autograd.grad(got, (q, k, v), cotangent),
        torch.autograd.grad(wanted, exact[:3], cotangent.double()),
        strict=True,
    ):
        close(g, w)


def test_dropout_keeps_the_expectation_and_differs_between_calls():
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    v = torch.ones(1, 2, 16, 4)

    def f(q, k, v):
        return F.scaled_dot_product_attention(q * 0, k, v, dropout_p=0.5)

    run = native(f)
    found = torch.stack([run(q, k, v) for _ in range(60)])
    assert not torch.equal(found[0], found[1])
    # Of 16 equal weights each kept one counts 1/8: the number of them is binomial.
    kept = (found[..., 0] * 8).round()
    torch.testing.assert_close(found[..., 0] * 8, kept)
    assert abs(kept.mean().item() - 8) < 0.3
    assert abs(kept.var().item() - 4) < 0.7


@pytest.mark.parametrize("p", [1e-7, 1.0])
def test_dropout_of_nearly_nothing_and_of_everything(p):
    q = leaf(1, 2, 9, 8)
    y = native(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=p))(q)
    (gradient,) = torch.autograd.grad(y.sum(), q)
    if p == 1.0:
        assert (y == 0).all()
        assert (gradient == 0).all()
    else:
        close(y, F.scaled_dot_product_attention(q, q, q))


# -- whole training steps --------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_training_step_stores_no_scores(dropout):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.join = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = self.project(x).view(2, 48, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            return self.join(y.transpose(1, 2).reshape(2, 48, 32))

    model, x = Attention(), torch.randn(2, 48, 32)

    def step(x):
        model(x).square().sum().backward()

    report = explain(step, x)
    assert report.fallbacks == ()
    phases = {graph.phase: graph for graph in report.graphs}
    assert set(phases) >= {"forward", "backward"}
    kinds = {
        phase: [kernel.kind for kernel in graph.kernels].count("attention")
        for phase, graph in phases.items()
    }
    assert kinds["forward"] == 1
    assert kinds["backward"] == 2  # of queries; of keys and values
    scores = 2 * 4 * 48 * 48
    for graph in report.graphs:
        sizes = [evaluate(b.nbytes, {}) // b.dtype.itemsize for b in graph.plan.buffers.values()]
        assert max(sizes) < scores
    if not dropout:
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for g, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad, atol=2e-4, rtol=1e-3)
