"""Operators that only devices have, fused optimizers and random numbers, as captured calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.eager_calls import check_call, describe, run_call
from torch_webgpu_compile.capture.eager.calls import CapturedCall
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import native_operators
from torch_webgpu_compile.torch_ops import custom_ops

aten = torch.ops.aten


def run(op: Any, *args: Any, **kwargs: Any) -> tuple[CapturedCall, Any]:
    call = capture_call(op, *describe((args, kwargs)), native_operators())
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return call, run_call(call, leaves)


def close(actual: Any, expected: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(actual, expected, **tolerance)


# ---- operators that only devices have


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 3 if transposed else 4, 3, 3)
    bias = torch.randn(3 if transposed else 4)
    geometry = [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1
    _, y = run(aten.convolution_overrideable.default, x, w, bias, *geometry)
    expected = aten.convolution.default(x, w, bias, *geometry)
    close(y, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(expected)
    masks = [True, True, True]
    _, found = run(aten.convolution_backward_overrideable.default, grad, x, w, *geometry, masks)
    sizes = [bias.shape[0]]
    wanted = aten.convolution_backward.default(grad, x, w, sizes, *geometry, masks)
    close(found, wanted, rtol=1e-4, atol=1e-4)


def test_convolution_backward_of_some_arguments() -> None:
    x, w, grad = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(2, 4, 3, 3)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    masks = [False, True, False]
    _, found = run(aten.convolution_backward_overrideable.default, grad, x, w, *geometry, masks)
    assert found[0] is None
    assert found[2] is None


@pytest.mark.parametrize(("images", "channels"), [(2, 0), (0, 3), (0, 0)])
def test_gradients_of_a_convolution_without_elements(images: int, channels: int) -> None:
    x, w = torch.randn(images, channels, 5), torch.randn(4, channels, 3)
    geometry = [1], [0], [1], False, [0], 1
    y = aten.convolution.default(x, w, torch.randn(4), *geometry)
    arguments = torch.ones_like(y), x, w, [4], *geometry, [True, True, True]
    _, found = run(aten.convolution_backward.default, *arguments)
    close(found, aten.convolution_backward.default(*arguments))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_of_embeddings_with_narrower_offsets(mode: int) -> None:
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    arguments = torch.randn(10, 4), torch.tensor([1, 4, 4, 9]), offsets, False, mode
    _, found = run(aten._embedding_bag.default, *arguments)
    close(found[0], aten._embedding_bag.default(*arguments)[0])
    assert {result.dtype for result in found[1:]} == {torch.int64}


@pytest.mark.parametrize("beta", [0, 0.5])
def test_sums_of_products_in_a_wider_dtype(beta: float) -> None:
    x, a, b = (torch.randn(2, *sizes).half() for sizes in ((3, 5), (3, 4), (4, 5)))
    x = torch.full_like(x, torch.nan) if beta == 0 else x
    _, found = run(aten.baddbmm.dtype, x, a, b, torch.float32, beta=beta, alpha=2)
    close(found, torch.baddbmm(x.float(), a.float(), b.float(), beta=beta, alpha=2))


@pytest.mark.parametrize("number", [torch.inf, 2, True])
def test_copies_of_numbers(number: float) -> None:
    for dtype in (torch.float32, torch.int32 if number == 2 else torch.complex64):
        _, found = run(aten.copy.default, torch.zeros(2, 3, dtype=dtype), number)
        close(found, torch.full((2, 3), number, dtype=dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, biased: bool) -> None:
    query, key, value = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 5, 5, requires_grad=True) if biased else None
    op = aten._scaled_dot_product_fused_attention_overrideable.default
    inputs = [t if t is None else t.detach() for t in (query, key, value, bias)]
    _, results = run(op, *inputs, 0.0, causal)
    mask = bias if bias is not None else torch.zeros(5, 5)
    if causal:
        mask = mask + torch.full((5, 5), float("-inf")).triu(1)
    weights = (query @ key.transpose(-2, -1) / 8**0.5 + mask).softmax(-1)
    expected = weights @ value
    close(results[0], expected.detach(), rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(
        expected, [t for t in (query, key, value, bias) if t is not None], grad
    )
    _, found = run(
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        grad,
        *inputs,
        [True, True, True, biased],
        results[0],
        *results[1:6],
        0.0,
        causal,
        *results[6:8],
    )
    close([t for t in found if t is not None], list(wanted), rtol=1e-4, atol=1e-5)


def test_attention_with_dropout_repeats_its_mask() -> None:
    query, key, value = (torch.randn(2, 3, 4, 8, requires_grad=True) for _ in range(3))
    seed = torch.tensor([5, 7], dtype=torch.int32)
    kept = (custom_ops.uniform(seed, [2, 3, 4, 4]) >= 0.5) * 2.0
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    scores = query @ key.transpose(-2, -1) / 8**0.5
    output = scores.softmax(-1) * kept @ value
    logsumexp = scores.logsumexp(-1).detach()
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, (query, key, value), grad)
    op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    inputs = [t.detach() for t in (query, key, value)]
    masks = [True, True, True, False]
    rest = logsumexp, None, None, 4, 4, 0.5, False, seed, None
    _, found = run(op, grad, *inputs, None, masks, output.detach(), *rest)
    close(found[:3], expected, rtol=1e-4, atol=1e-5)


def test_attention_with_dropout_takes_a_seed() -> None:
    query = torch.randn(2, 3, 4, 8)
    op = aten._scaled_dot_product_fused_attention_overrideable.default
    call = capture_call(op, *describe(((query, query, query, None, 0.5), {})), native_operators())
    assert call.phase.seeds == 1


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lstm_cell(dtype: torch.dtype, biased: bool) -> None:
    gates = [torch.randn(3, 16, requires_grad=True) for _ in range(2)]
    biases = [torch.randn(16, requires_grad=True) for _ in range(2)] if biased else []
    cx = torch.randn(3, 4, requires_grad=True)
    i, f, g, o = sum([*gates, *biases]).chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    hy = o.sigmoid() * cy.tanh()
    inputs = [t.detach().to(dtype) for t in (*gates, cx, *biases)]
    _, (h, c, workspace) = run(aten._thnn_fused_lstm_cell.default, *inputs)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {}
    close([h, c], [hy.detach().to(dtype), cy.detach().to(dtype)], **tolerance)
    grads = torch.randn_like(hy), torch.randn_like(cy)
    wanted = torch.autograd.grad((hy, cy), (gates[0], cx, *biases[:1]), grads)
    op = aten._thnn_fused_lstm_cell_backward_impl.default
    wide = [t.to(dtype) for t in grads]
    _, found = run(op, *wide, inputs[2], c, workspace, biased)
    close([t for t in found if t is not None], [t.to(dtype) for t in wanted], **tolerance)


def test_lstm_cell_backward_of_one_gradient() -> None:
    op = aten._thnn_fused_lstm_cell_backward_impl.default
    cx, cy, workspace = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 16)
    _, alone = run(op, torch.ones(3, 4), None, cx, cy, workspace, False)
    _, both = run(op, torch.ones(3, 4), torch.zeros(3, 4), cx, cy, workspace, False)
    close(alone[:2], both[:2])


def test_gru_cell() -> None:
    cell = torch.nn.GRUCell(5, 4)
    x, hx = torch.randn(3, 5), torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        gates = x @ cell.weight_ih.t(), hx @ cell.weight_hh.t()
    gates = tuple(g.requires_grad_() for g in gates)
    ir, iz, in_ = (gates[0] + cell.bias_ih).chunk(3, 1)
    hr, hz, hn = (gates[1] + cell.bias_hh).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    hy = n + z * (hx - n)
    inputs = [t.detach() for t in (*gates, hx, cell.bias_ih, cell.bias_hh)]
    _, (h, workspace) = run(aten._thnn_fused_gru_cell.default, *inputs)
    close(h, cell(x, hx).detach())
    grad = torch.randn_like(hy)
    wanted = torch.autograd.grad(hy, (*gates, hx, cell.bias_ih, cell.bias_hh), grad)
    _, found = run(aten._thnn_fused_gru_cell_backward.default, grad, workspace, True)
    close(found, wanted)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_changes_its_statistics(training: bool) -> None:
    statistics = torch.randn(4), torch.rand(4)
    x, weight, bias = torch.randn(3, 4, 5), torch.randn(4), torch.randn(4)
    args = x, weight, bias, *statistics, training, 0.1, 1e-5
    call = check_call(aten.native_batch_norm.default, *args)
    assert call.mutated == ((3, 4) if training else ())
    check_call(aten.native_batch_norm.default, x, weight, None, None, None, True, 0.1, 1e-5)


def test_helpers_of_cummax_and_cummin() -> None:
    x = torch.randn(3, 4)
    for op in (aten._cummax_helper.default, aten._cummin_helper.default):
        check_call(op, x, torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int64), 1)


def test_a_number_that_must_be_a_tensor() -> None:
    x = torch.arange(7)
    out = torch.empty(7, dtype=torch.int64)
    _, found = run(aten.remainder.Tensor_out, x, 5, out=out)
    close(found, x % 5)
    _, found = run(aten.pow.Tensor_Tensor, torch.tensor(3.0), 2.5)
    close(found, torch.tensor(3.0) ** 2.5)


# ---- optimizers


def states(count: int, sizes: tuple[tuple[int, ...], ...] = ((3, 4), (5,))) -> Any:
    return [[torch.rand(size) for size in sizes] for _ in range(count)]


def check_optimizer(op: Any, lists: list[list[Tensor]], **kwargs: Any) -> None:
    """Against PyTorch's own fused kernel on the CPU."""
    check_call(op, *lists, **kwargs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("op", [aten._fused_adam_.default, aten._fused_adamw_.default])
def test_fused_adam(op: Any, maximize: bool, amsgrad: bool) -> None:
    steps = [torch.tensor(1.0), torch.tensor(7.0)]
    lists = [*states(5), steps] if amsgrad else [*states(4), [], steps]
    check_optimizer(
        op,
        lists,
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=amsgrad,
        maximize=maximize,
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd(nesterov: bool, momentum: float, first: bool) -> None:
    lists = states(3) if momentum else [*states(2), []]
    check_optimizer(
        aten._fused_sgd_.default,
        lists,
        weight_decay=0.1,
        momentum=momentum,
        lr=0.01,
        dampening=0.0 if nesterov else 0.1,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first,
    )


def test_fused_adagrad() -> None:
    lists = [*states(3), [torch.tensor(1.0), torch.tensor(7.0)]]
    settings = {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}
    check_optimizer(aten._fused_adagrad_.default, lists, **settings, maximize=False)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_adam_with_a_gradient_scaler(found: float) -> None:
    lists = [*states(4), [], [torch.tensor(2.0), torch.tensor(2.0)]]
    before = copy.deepcopy(lists)
    settings: dict[str, Any] = {
        "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8,
        "amsgrad": False, "maximize": False,
    }  # fmt: skip
    scale, found_inf = torch.tensor(4.0), torch.tensor(found)
    run(aten._fused_adam_.default, *lists, **settings, grad_scale=scale, found_inf=found_inf)
    if found:
        close(lists, before)
        return
    before[1] = [grad / 4 for grad in before[1]]
    aten._fused_adam_.default(*before, **settings)
    close(lists, before)


def test_learning_rate_as_a_tensor() -> None:
    lists = [*states(2), []]
    settings: dict[str, Any] = {
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False,
        "maximize": False, "is_first_step": False,
    }  # fmt: skip
    check_call(aten._fused_sgd_.tensor_lr, *lists, lr=torch.tensor(0.1), **settings)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscaling_finds_infinities(bad: float | None) -> None:
    grads = [torch.randn(3, 4), torch.randn(5)]
    if bad is not None:
        grads[1][2] = bad
    check_call(
        aten._amp_foreach_non_finite_check_and_unscale_.default,
        grads,
        torch.zeros(1),
        torch.full((1,), 0.25),
    )


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 2])
def test_update_of_the_scale(steps: int, found: float) -> None:
    scale = torch.tensor([8.0])
    tracker, infinite = torch.tensor([steps], dtype=torch.int32), torch.tensor([found])
    _, result = run(aten._amp_update_scale_.default, scale, tracker, infinite, 2.0, 0.5, 3)
    assert result is scale
    assert scale.item() == (4.0 if found else 16.0 if steps == 2 else 8.0)
    assert tracker.item() == (0 if found or steps == 2 else steps + 1)


# ---- random numbers


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("normal_.default", (0.0, 1.0)),
        ("uniform_.default", (0.0, 1.0)),
        ("bernoulli_.float", (0.5,)),
        ("bernoulli_.Tensor", (torch.rand(100),)),
        ("random_.default", ()),
        ("random_.to", (10,)),
        ("random_.from", (-5, 10)),
        ("random_.from", (-5, 1 << 40)),
        ("exponential_.default", (1.0,)),
        ("geometric_.default", (0.5,)),
        ("log_normal_.default", (0.0, 1.0)),
        ("cauchy_.default", (0.0, 1.0)),
        ("native_dropout.default", (0.5, True)),
        ("_fused_dropout.default", (0.5,)),
        ("rand_like.generator", ()),
        ("randn_like.default", ()),
        ("randint_like.default", (5,)),
        ("normal.Tensor_float", (1.0,)),
    ],
)
def test_random_operators(name: str, args: Any) -> None:
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    named = {"generator": torch.Generator()} if "generator" in str(op._schema) else {}
    call = capture_call(op, *describe(((torch.rand(100), *args), named)), native_operators())
    assert call.phase.seeds >= 1
    leaves = [torch.rand(100), *args, *named.values()]
    run_call(call, leaves)


@pytest.mark.parametrize("name", ["rand", "randn", "normal.float_float", "randint.generator"])
def test_random_factories(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    args: Any = [4, 5]
    if name.startswith("normal"):
        args = 0.0, 1.0, [4, 5]
    elif name.startswith("randint"):
        args = 10, [4, 5]
    else:
        args = ([4, 5],)
    named = {"device": torch.device("meta"), "pin_memory": False}
    if "generator" in name:
        named["generator"] = None
    _, found = run(op, *args, **named)
    assert found.shape == (4, 5)
    assert len(found.unique()) > 1
