"""Depthwise convolutions and both of their gradients, against eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compiling import native

Tensors = tuple[torch.Tensor, ...]

# name: (channels, space, kernel, options); the weight has options["multiplier"] results per channel
CASES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "7x7": (8, (14, 14), (7, 7), {"padding": 3}),
    "7x7 of few positions": (16, (7, 7), (7, 7), {"padding": 3}),
    "odd sizes": (5, (19, 23), (5, 3), {"padding": (0, 1)}),
    "several tiles": (2, (70, 130), (3, 3), {"padding": 1}),
    "stride": (8, (17, 16), (3, 3), {"padding": 1, "stride": 2}),
    "strides and dilation": (6, (23, 20), (3, 2), {"stride": (3, 1), "dilation": (2, 3)}),
    "multiplier": (3, (9, 12), (3, 3), {"padding": 2, "multiplier": 3}),
    "causal": (12, (50,), (4,), {"padding": 3}),
    "long": (3, (3000,), (9,), {"padding": 4, "stride": 2}),
    "transposed": (6, (9, 7), (4, 3), {"padding": 1, "stride": 2, "transposed": True}),
    "transposed multiplier": (
        *(4, (6, 5), (3, 3)),
        {"stride": (4, 1), "multiplier": 2, "transposed": True},
    ),
}


def convolution(name: str) -> tuple[Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]:
    """(function of an image and a weight, their sizes)."""
    channels, space, kernel, options = CASES[name]
    options = {"groups": channels, **options}
    multiplier, transposed = options.pop("multiplier", 1), options.pop("transposed", False)
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{len(space)}d")
    outer = (channels, multiplier) if transposed else (channels * multiplier, 1)
    return lambda x, w: function(x, w, **options), (2, channels, *space), (*outer, *kernel)


def results(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """The convolution and its gradients for a gradient of its result that differs everywhere."""
    if not x.requires_grad:
        x, w = (t.detach().requires_grad_() for t in (x, w))
    y = function(x, w)
    numbers = torch.arange(y.numel(), dtype=torch.float32).reshape(y.shape)
    grad = numbers.cos().to(y.dtype).to(y.device)
    return y.detach(), *torch.autograd.grad(y, (x, w), grad)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def check(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> None:
    torch._dynamo.reset()
    wide = results(function, x.float(), w.float())
    got = results(native(function), x.to("webgpu"), w.to("webgpu"))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[x.dtype]
    for found, wanted in zip(got, wide, strict=True):
        assert found.dtype is x.dtype
        # Of sums: relative to the largest of their terms' sums.
        scale = float(wanted.abs().max()) if wanted.isfinite().all() else 1.0
        torch.testing.assert_close(
            found.cpu().float(), wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    function, image, weight = convolution(name)
    check(function, torch.randn(image), torch.randn(weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["odd sizes", "stride"])
def test_narrow_floats(name: str, dtype: torch.dtype) -> None:
    function, image, weight = convolution(name)
    check(function, torch.randn(image).to(dtype), torch.randn(weight).to(dtype))


@pytest.mark.parametrize("name", ["7x7", "stride", "multiplier"])
def test_channels_last(name: str) -> None:
    function, image, weight = convolution(name)
    x = torch.randn(image).to(memory_format=torch.channels_last)
    check(function, x, torch.randn(weight))
    # As in ConvNeXt: one operand of the weight's gradient is channels-last, the other is not.
    check(lambda x, w: function(x.contiguous(), w) * 1.5, x, torch.randn(weight))


def test_special_values() -> None:
    function, image, weight = convolution("odd sizes")
    x = torch.randn(image)
    x[0, 0, 3, 4], x[1, 2, 18, 22], x[1, 3, 9, 9] = math.inf, -math.inf, math.nan
    check(function, x, torch.randn(weight))


def test_no_images() -> None:
    function, image, weight = convolution("7x7")
    y, x_grad, w_grad = results(
        native(function), torch.randn(0, *image[1:]).to("webgpu"), torch.randn(weight).to("webgpu")
    )
    assert y.shape == x_grad.shape == (0, *image[1:])
    assert not w_grad.cpu().any()


def test_symbolic_sizes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, stride=2, padding=1, groups=8)

    fast = native(function)
    w = torch.randn(8, 1, 3, 3)
    for sizes in ((3, 8, 17, 16), (2, 8, 33, 21), (4, 8, 6, 40)):
        x = torch.randn(sizes)
        x[0, 3, 5, sizes[3] - 1] = math.inf
        device, weight = (t.to("webgpu").requires_grad_() for t in (x, w))
        for dim in (0, 2, 3):
            torch._dynamo.mark_dynamic(device, dim)
        got = results(fast, device, weight)
        for found, wanted in zip(got, results(function, x, w), strict=True):
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_surrounds_it() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(F.pad(x, (1, 2, 0, 1)) * 2, w, b, padding=1, groups=8)
        return F.silu(y).permute(0, 2, 3, 1) + x.mean()

    given = torch.randn(2, 8, 10, 12), torch.randn(8, 1, 3, 3), torch.randn(8)
    got = native(block)(*(t.to("webgpu") for t in given))
    torch.testing.assert_close(got.cpu(), block(*given), rtol=1e-4, atol=1e-5)
