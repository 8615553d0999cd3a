"""Matrix products, convolutions, attention, pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import capture, check, lower_checked
from torch_webgpu_compile.ir.depthwise_nodes import DepthwiseConvolution
from torch_webgpu_compile.ir.nodes import Contraction, Pointwise, Reduction
from torch_webgpu_compile.symbolic.sizes import product

F = torch.nn.functional


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_matrix_products(dtype: torch.dtype, dynamic: bool) -> None:
    a, b = floats(4, 6).to(dtype), floats(6, 5).to(dtype)
    tolerance = {} if dtype is torch.float32 else {"atol": 4e-2, "rtol": 1e-2}
    check(torch.mm, a, b, dynamic=dynamic, **tolerance)
    check(lambda a, b: b.t() @ a.t(), a, b, dynamic=dynamic, **tolerance)
    check(torch.bmm, a.expand(3, 4, 6), b.expand(3, 6, 5), dynamic=dynamic, **tolerance)
    bias = floats(5).to(dtype)
    check(torch.addmm, bias, a, b, dynamic=dynamic, **tolerance)
    check(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), bias, a, b, **tolerance)
    check(F.linear, floats(2, 3, 6).to(dtype), b.t().contiguous(), bias, **tolerance)


def test_one_row_is_a_reduction() -> None:
    graph = lower_checked(capture(lambda a, b: a @ b, floats(1, 6), floats(6, 5)))
    assert [type(node) for node in graph.nodes] == [Reduction]
    for m, k, n in ((1, 6, 5), (4, 6, 1), (1, 6, 1), (4, 1, 5), (0, 3, 2), (2, 0, 3)):
        check(torch.mm, floats(m, k), floats(k, n))
    check(torch.mv, floats(4, 6), floats(6))
    check(torch.dot, floats(6), floats(6))
    check(lambda a, b: torch.addmm(a[:1, :5], a[:1], b), floats(4, 6), floats(6, 5))


def test_integer_products() -> None:
    a, b = torch.randint(-99, 99, (3, 4)), torch.randint(-99, 99, (4, 5))
    graph = check(torch.mm, a, b)
    assert [type(node) for node in graph.nodes] == [Reduction]
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        graph = check(torch.mm, a.to(dtype), b.to(dtype))
        assert isinstance(graph.nodes[0], Contraction)


@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_int8_accumulate_in_int32(dynamic: bool) -> None:
    a = torch.full((6, 300), -128, dtype=torch.int8)
    graph = check(torch._int_mm, a, a.t(), dynamic=dynamic)
    assert [type(node) for node in graph.nodes] == [Contraction]


def test_products_of_views() -> None:
    check(lambda a, b: a[:, ::2] @ b.flip(0), floats(4, 6), floats(3, 5))
    check(lambda a: torch.einsum("bik,bjk->bij", a, a), floats(2, 3, 4))
    check(lambda a: a.permute(2, 0, 1).reshape(4, 6) @ a.reshape(6, 4), floats(2, 3, 4))
    check(torch.addbmm, floats(3, 5), floats(2, 3, 4), floats(2, 4, 5))
    check(torch.cdist, floats(2, 3, 4), floats(2, 5, 4), atol=1e-4, rtol=1e-4)


CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "1d": (F.conv1d, (2, 3, 20), (4, 3, 3)),
    "2d": (F.conv2d, (2, 3, 9, 8), (4, 3, 3, 3)),
    "3d": (F.conv3d, (1, 2, 5, 6, 7), (3, 2, 2, 3, 2)),
    "one image": (F.conv2d, (1, 3, 9, 8), (4, 3, 3, 3)),
    "many positions": (F.conv2d, (2, 3, 20, 20), (4, 3, 3, 3)),
    "1x1": (F.conv2d, (2, 3, 9, 8), (4, 3, 1, 1)),
    "padding": (lambda x, w: F.conv2d(x, w, padding=(1, 2)), (2, 3, 9, 8), (4, 3, 3, 3)),
    "stride": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (2, 3, 9, 8), (4, 3, 3, 3)),
    "dilation": (lambda x, w: F.conv2d(x, w, dilation=(2, 1)), (2, 3, 9, 8), (4, 3, 3, 3)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 9, 8), (6, 2, 3, 3)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), (2, 4, 20, 20), (4, 1, 3, 3)),
    "depthwise stride": (
        lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=1, dilation=(1, 2), groups=4),
        (2, 4, 9, 8),
        (8, 1, 3, 3),
    ),
    "depthwise 1d": (lambda x, w: F.conv1d(x, w, padding=3, groups=4), (2, 4, 9), (4, 1, 4)),
    "depthwise transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=4),
        (2, 4, 5, 6),
        (4, 2, 3, 3),
    ),
    "depthwise far": (
        lambda x, w: F.conv2d(x, w, dilation=40, groups=4),
        (1, 4, 90, 90),
        (4, 1, 3, 3),
    ),
    "same": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 3, 9, 8), (4, 3, 5, 3)),
    "transposed": (F.conv_transpose2d, (2, 3, 5, 6), (3, 4, 3, 3)),
    "transposed stride": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (2, 3, 5, 6),
        (3, 4, 3, 3),
    ),
    "transposed groups": (
        lambda x, w: F.conv_transpose2d(x, w, stride=3, dilation=2, groups=2),
        (1, 4, 5, 6),
        (4, 3, 3, 3),
    ),
    "transposed dilation": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=(1, 3), dilation=(2, 3)),
        (2, 4, 5, 6),
        (4, 3, 3, 4),
    ),
    "fewer taps than strides": (
        lambda x, w: F.conv2d(x, w, stride=(2, 4), padding=(0, 1)),
        (2, 4, 9, 8),
        (3, 4, 1, 2),
    ),
    "few channels of many": (
        lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(1, 3), dilation=(1, 2)),
        (2, 3, 9, 11),
        (16, 3, 3, 4),
    ),
    "transposed to few channels": (
        lambda x, w: F.conv_transpose2d(x, w, padding=1),
        (2, 16, 5, 6),
        (16, 3, 3, 2),
    ),
    "transposed 1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 3, 7), (3, 2, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    fn, x, w = CONVOLUTIONS[name]
    check(fn, floats(*x), floats(*w), atol=1e-4, rtol=1e-4)
    check(fn, floats(*x), floats(*w), atol=1e-4, rtol=1e-4, dynamic=name == "2d")


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions(name: str) -> None:
    fn, x_sizes, w_sizes = CONVOLUTIONS[name]

    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        out = fn(x, w)
        return torch.autograd.grad(out, (x, w), out.cos())

    x, w = floats(*x_sizes).requires_grad_(), floats(*w_sizes).requires_grad_()
    check(gradients, x, w, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("kernel", "products"), [(1, 1), (2, 4), (3, 16), (4, 16)])
def test_strided_transposed_convolutions_leave_out_what_is_zero(kernel: int, products: int) -> None:
    """Of kernel² taps for each of 16 × 16 results a quarter; odd ones are filled up with a tap."""
    x, w = floats(2, 4, 8, 8), floats(4, 8, kernel, kernel)
    padding = (kernel - 1) // 2
    lowered = lower_checked(
        capture(lambda x, w: F.conv_transpose2d(x, w, None, 2, padding, kernel % 2), x, w)
    )
    (node,) = (node for node in lowered.nodes if isinstance(node, Contraction))
    sizes = (*node.batch, *node.rows, *node.columns, *node.inner)
    assert math.prod(map(int, sizes)) == 2 * 8 * 4 * 8 * 8 * products


@pytest.mark.parametrize("stride", [1, 2])
def test_few_channels_of_many_have_a_row_for_each_tap(stride: int) -> None:
    """Three rows of a tile would leave most of it empty, and strides leave out most taps."""
    x, w = floats(2, 64, 8, 8), floats(64, 3, 7, 7)
    lowered = lower_checked(capture(lambda x, w: F.conv_transpose2d(x, w, None, stride, 3), x, w))
    (node,) = (node for node in lowered.nodes if isinstance(node, Contraction))
    assert int(product(node.rows)) == 3 * 7 * 7
    assert math.prod(map(int, (*node.batch, *node.columns))) == 2 * 8 * 8
    assert int(product(node.inner)) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_convolutions_are_not_contractions(dtype: torch.dtype) -> None:
    x, w = floats(2, 4, 9, 8).to(dtype), floats(8, 1, 3, 3).to(dtype)
    graph = check(lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=4), x, w)
    assert isinstance(graph.nodes[0], DepthwiseConvolution)
    # Windows that reach too far for a tile are sums over taps.
    far = check(lambda x, w: F.conv2d(x, w, padding=64, dilation=64, groups=4), x, w)
    node = far.nodes[0]
    assert isinstance(node, Reduction)
    assert [int(size) for size in node.reduce_ranges] == [3, 3]


def test_bias_is_an_epilogue() -> None:
    graph = lower_checked(
        capture(
            F.conv2d,
            floats(1, 3, 8, 8).bfloat16(),
            floats(4, 3, 3, 3).bfloat16(),
            floats(4).bfloat16(),
        )
    )
    assert [type(node) for node in graph.nodes] == [Contraction, Pointwise]


POOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max with indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max dilated": lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2),
    "max ceil": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "max 1d": lambda x: F.max_pool1d(x[0], 3),
    "average": lambda x: F.avg_pool2d(x, 2),
    "average padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average of the inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive to 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive 1d": lambda x: F.adaptive_avg_pool1d(x[0], 4),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest odd": lambda x: F.interpolate(x, size=(13, 5), mode="nearest"),
    "nearest exact": lambda x: F.interpolate(x, size=(13, 5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear aligned": lambda x: F.interpolate(
        x, size=(4, 17), mode="bilinear", align_corners=True
    ),
    "bicubic": lambda x: F.interpolate(x, size=(12, 5), mode="bicubic"),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    check(POOLS[name], floats(2, 3, 9, 7), atol=1e-5, rtol=1e-4)
    check(POOLS[name], floats(2, 3, 9, 7).bfloat16(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_pools(name: str) -> None:
    def gradient(x: torch.Tensor) -> Any:
        out = POOLS[name](x)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, x, out.cos())

    host = name in ("adaptive max",)
    x = floats(2, 3, 9, 7).requires_grad_()
    check(gradient, x, atol=1e-4, rtol=1e-4, allow_host=host)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k, v = floats(2, 3, 5, 4), floats(2, 3, 5, 4) * 2, floats(2, 3, 5, 4) + 1

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def gradients(*qkv: torch.Tensor) -> Any:
        out = attention(*qkv)
        return torch.autograd.grad(out, qkv, out.cos())

    check(attention, q, k, v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    check(gradients, *leaves, atol=1e-4, rtol=1e-4)
