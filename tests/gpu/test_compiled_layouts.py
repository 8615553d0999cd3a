"""Convolutional networks on the adapter, whose intermediates are channels-last, against eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.compiling import compiled
from tests.unit.test_layouts import GRAPHS, Block, stem, weight

pytestmark = [pytest.mark.rotates(15), pytest.mark.usefixtures("fresh")]


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    function, x = GRAPHS[name]
    with torch.no_grad():
        got, wanted = compiled(function)(x), function(x)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert got.stride() == wanted.stride()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one image", torch.float16),
        ("concatenated", torch.bfloat16),
        ("transposed", torch.float16),
        ("depthwise", torch.bfloat16),
    ],
)
def test_narrow_floats(name: str, dtype: torch.dtype) -> None:
    function, x = GRAPHS[name]
    module = function if isinstance(function, nn.Module) else None
    with torch.no_grad():
        if module is not None:
            module = copy.deepcopy(module).to(dtype)
            got, wanted = compiled(module)(x.to(dtype)), module(x.to(dtype))
        else:
            with torch.autocast("cpu", dtype):
                got, wanted = compiled(function)(x), function(x)
    # Each layer rounds its result; eager rounds sums in between as well.
    tolerance = 2e-2 if dtype is torch.float16 else 1e-1
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_sizes_that_change() -> None:
    model = stem(nn.MaxPool2d(3, 2, padding=1), Block())
    run = compiled(model, dynamic=True)
    for sizes in ((2, 3, 24, 20), (3, 3, 33, 17)):
        x = torch.randn(sizes)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), atol=1e-4, rtol=1e-4)


def test_additions_whose_addresses_divide_by_a_size() -> None:
    """The sizes of what is added are no indices along which its layout could be fast."""
    depthwise = weight(4, 1, 1, 3)

    def run(x: Tensor) -> Tensor:
        hidden = nn.functional.conv_transpose2d(x, depthwise, stride=2, groups=4)
        columns = nn.functional.unfold(hidden, 3, stride=2, padding=1)
        height, width = hidden.shape[2:]
        return nn.functional.fold(columns, (height, width), 3, stride=2, padding=1)

    fast = compiled(run, dynamic=True)
    for sizes in ((1, 4, 7, 5), (2, 4, 6, 9)):
        x = torch.randn(sizes)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), run(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("depthwise", [False, True])
def test_training(memory_format: torch.memory_format, depthwise: bool) -> None:
    groups = 16 if depthwise else 1
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=groups),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    ).to(memory_format=memory_format)  # type: ignore[call-overload]
    other = copy.deepcopy(model)
    x = torch.randn(2, 4, 16, 12).to(memory_format=memory_format)
    y = x.clone().requires_grad_()
    x.requires_grad_()
    got, wanted = compiled(other)(y), model(x)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    got.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, atol=1e-4, rtol=1e-3)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)
    for a, b in zip(other.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_an_input_that_changes_and_is_convolved() -> None:
    first, second = weight(8, 4, 3, 3), weight(8, 8, 3, 3)

    def run(x: Tensor) -> Tensor:
        x.mul_(2)
        hidden = torch.nn.functional.conv2d(x, first).relu_()
        return torch.nn.functional.conv2d(hidden, second)

    x = torch.randn(2, 4, 12, 12)
    y = x.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(run)(y), run(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(y, x)


def test_no_images() -> None:
    model = stem(Block())
    with torch.no_grad():
        assert compiled(model)(torch.empty(0, 3, 16, 16)).shape == (0, 5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_images_keep_their_format(mode: str) -> None:
    torch._dynamo.reset()

    def resized(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.nn.functional.interpolate(x, size=size, mode=mode, antialias=True)
            for size in ((3, 11), (1, 1))
        )

    x = torch.randn(2, 3, 6, 8).contiguous(memory_format=torch.channels_last)
    expected = resized(x)
    for found in (
        resized(x.to("webgpu")),
        torch.compile(resized, backend="webgpu")(x),
        torch.compile(resized, backend="webgpu")(x.to("webgpu")),
    ):
        for mine, other in zip(found, expected, strict=True):
            assert mine.stride() == other.stride()
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
    x = x.to("webgpu").requires_grad_()
    small = resized(x)[0]
    (gradient,) = torch.autograd.grad(small, x, torch.ones_like(small))
    assert gradient.is_contiguous(memory_format=torch.channels_last) == (mode == "bilinear")
