"""Products that share a dispatch, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.providers import device_in_use, require_quick_compiler
from torch_webgpu_compile import explain
from torch_webgpu_compile.codegen.tilings import contraction
from torch_webgpu_compile.codegen.tilings.matmul import MatmulTiling, fits
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.tuning import autotune

pytestmark = [pytest.mark.rotates(12), pytest.mark.usefixtures("fresh")]

randn = torch.randn


def check(function, *arguments, products=None, **options):
    got = torch.compile(function, backend="webgpu", fullgraph=True, **options)(*arguments)
    torch.testing.assert_close(got, function(*arguments))
    if products is not None:
        torch._dynamo.reset()
        kernels = explain(function, *arguments).kernels
        assert sum(kernel.kind == "matmul" for kernel in kernels) == products


def linears(x, weights, biases):
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def operands(widths, inner, dtype=torch.float32, bias=True):
    weights = [randn(n, inner, dtype=dtype) / inner**0.5 for n in widths]
    return weights, [randn(n, dtype=dtype) if bias else None for n in widths]


@pytest.mark.parametrize(
    ("sizes", "widths", "dtype"),
    [
        ((70, 48), (48, 48, 48), torch.float32),
        ((2, 9, 48), (40, 36, 100), torch.float32),
        ((3, 30), (64, 16, 16), torch.float32),
        ((2, 35, 30), (33, 7, 50), torch.bfloat16),
        ((3, 48), (40, 36, 100), torch.bfloat16),
        ((70, 48), (33, 8, 50), torch.float16),
    ],
)
def test_linears(sizes, widths, dtype):
    check(linears, randn(sizes, dtype=dtype), *operands(widths, sizes[-1], dtype))


@pytest.mark.parametrize("widths", [(48, 48, 48), (64, 16, 16)])
def test_they_are_one_dispatch(widths):
    check(linears, randn(2, 35, 48), *operands(widths, 48, bias=False), products=1)


def test_strided_operands():
    x = randn(60, 100)[::2, 3:51]
    weights = [randn(48, 64).t(), randn(64, 96)[:, ::2], randn(64, 48)]
    check(linears, x, weights, [None, randn(128)[::2], None])


def test_a_dynamic_batch():
    function = torch.compile(linears, backend="webgpu", dynamic=True)
    weights, biases = operands((64, 16, 24), 32)
    for rows in (40, 17, 70, 3):
        x = randn(rows, 32)
        torch.testing.assert_close(function(x, weights, biases), linears(x, weights, biases))


def test_one_feeds_another_and_is_returned():
    def function(x, u, v):
        y = x @ u
        return y, torch.relu(x @ v), (x + y) @ v, y.sum(0)

    check(function, randn(32, 32), randn(32, 32) / 6, randn(32, 32) / 6)


def test_a_tied_weight():
    def function(x, w, b):
        return F.linear(x, w), F.gelu(F.linear(x, w, b))

    check(function, randn(33, 32), randn(20, 32) / 6, randn(20), products=1)


def test_heads_of_different_counts():
    def function(x, q, k, v):
        split = [F.linear(x, w).view(2, 10, -1, 8).transpose(1, 2) for w in (q, k, v)]
        return F.scaled_dot_product_attention(*split, enable_gqa=True)

    check(function, randn(2, 10, 32), randn(64, 32) / 6, randn(16, 32) / 6, randn(16, 32) / 6)


def test_batches():
    def function(x, u, v):
        return torch.bmm(x, u), torch.bmm(x, v)

    check(function, randn(3, 20, 16), randn(3, 16, 40), randn(3, 16, 24), products=1)


# ---- pairs


def swiglu(x, gate, up, b=None, c=None):
    return F.silu(F.linear(x, gate, b)) * F.linear(x, up, c)


@pytest.mark.parametrize(
    ("sizes", "columns", "dtype"),
    [
        ((70, 48), 64, torch.float32),
        ((2, 9, 48), 100, torch.float32),
        ((3, 30), 33, torch.float32),
        ((40, 33), 9, torch.float32),
        ((2, 35, 48), 40, torch.bfloat16),
        ((3, 48), 64, torch.float16),
    ],
)
def test_swiglu(sizes, columns, dtype):
    weights, biases = operands((columns, columns), sizes[-1], dtype)
    arguments = randn(sizes, dtype=dtype), *weights, *biases
    got = torch.compile(swiglu, backend="webgpu", fullgraph=True)(*arguments)
    # Eager PyTorch rounds every intermediate of 16 bits, which adds up to more than its tolerance.
    wanted = swiglu(*(argument.float() for argument in arguments)).to(dtype)
    torch.testing.assert_close(got, wanted)


def test_a_pair_of_different_layouts():
    check(swiglu, randn(40, 48), randn(64, 48) / 7, randn(48, 64).t() / 7, products=1)


@pytest.mark.rotates(1)
def test_a_pair_of_which_both_are_returned():
    def function(x, gate, up):
        g, u = F.linear(x, gate), F.linear(x, up)
        return g, F.gelu(g) * u + x, u

    check(function, randn(40, 48), randn(48, 48) / 7, randn(48, 48) / 7, products=1)


def test_a_batched_pair():
    def function(x, p, q):
        return (torch.bmm(x, p) - torch.bmm(x, q)).transpose(1, 2)

    check(function, randn(3, 20, 16), randn(3, 16, 36), randn(3, 16, 36), products=1)


@pytest.mark.parametrize(
    "tiling",
    [
        MatmulTiling(32, 64, 8, 8, 8, True, 8, slices=4),
        MatmulTiling(32, 64, 16, 8, 8, False, 8, slices=4),
        MatmulTiling(16, 128, 8, 4, 8, True, 8, slices=2),
        MatmulTiling(16, 64, 8, 4, 16, True, 8),
    ],
    ids=str,
)
def test_pairs_in_tilings(tiling, monkeypatch):
    require_quick_compiler()  # each element chooses from which of the two products it is loaded
    if not fits(tiling, 4, ("scalar_inner", "scalar_inner"), device_in_use().target):
        pytest.skip("the adapter's workgroups are smaller")
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    monkeypatch.setattr(contraction, "choose_matmul_tiling", lambda *_: tiling)
    for rows, inner, columns in ((64, 64, 64), (70, 33, 50), (100, 12, 44)):
        for w in (randn(inner, columns), randn(columns, inner).t()):
            plan_cache.clear()
            torch._dynamo.reset()
            check(lambda x, w: (x @ w) * (x @ w.flip(1)), randn(rows, inner), w / inner**0.5)
    plan_cache.clear()


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        x = x + torch.cat([k * q[..., :16], v.sigmoid()], -1)
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("rows", [3, 40])
def test_training(rows):
    module = Projections()
    x = randn(2, rows, 32)

    def gradients(function):
        module.zero_grad()
        inputs = x.clone().requires_grad_()
        loss = function(inputs).square().mean()
        loss.backward()
        return [loss.detach(), inputs.grad, *(p.grad.clone() for p in module.parameters())]

    wanted = gradients(module)
    got = gradients(torch.compile(module, backend="webgpu", fullgraph=True))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("strips", [0, 1, 2])
def test_measured_together(strips, tmp_path, monkeypatch):
    """max-autotune measures the products of a dispatch as one problem."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_measured", {})
    tiling = MatmulTiling(32, 32, 16, 8, 4, True, 8, strips=strips)
    monkeypatch.setattr(autotune, "matmul_candidates", lambda *_: [tiling])
    plan_cache.clear()  # the plan of another tiling
    x, (weights, biases) = randn(24, 32), operands((40, 20), 32)
    function = torch.compile(linears, backend="webgpu", mode="max-autotune")
    torch.testing.assert_close(function(x, weights, biases), linears(x, weights, biases))
    (path,) = (tmp_path / "tunings").iterdir()
    assert '"32-bit 1x24x40+24x20x32 inner inner"' in path.read_text()
