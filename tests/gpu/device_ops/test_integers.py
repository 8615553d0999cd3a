"""Convolution and average pooling of integers: exact, and wrapping around as on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.device_checks import compare_eager_and_compiled

pytestmark = pytest.mark.rotates(3)

LARGE = 1 << 62


def integers(*sizes, high=LARGE):
    """Numbers whose products leave 64 bits."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randint(-high, high, sizes, generator=generator)


def test_convolutions():
    def f(images, weight, bias, grouped, depthwise, narrow, block):
        return (
            F.conv2d(images, weight),
            F.conv2d(images.mT, weight, bias, stride=2, padding=(1, 2), dilation=(1, 2)),
            F.conv2d(images, grouped, groups=2, padding=1),
            F.conv2d(images, depthwise, groups=4),
            F.conv1d(images[0], narrow, padding=1),
            F.conv3d(images[None], block),
            F.conv2d(images[:0], weight),
            F.conv2d(images[0], weight),
        )

    compare_eager_and_compiled(
        f,
        integers(2, 4, 6, 5),
        integers(6, 4, 3, 2),
        integers(6),
        integers(6, 2, 2, 3),
        integers(8, 1, 3, 3),
        integers(2, 6, 3),
        integers(3, 2, 2, 2, 2),
    )


def test_transposed_convolutions():
    def f(images, weight, bias, grouped, depthwise, narrow, block):
        return (
            F.conv_transpose2d(images, weight),
            F.conv_transpose2d(images.mT, weight, bias, 2, 1, output_padding=1),
            F.conv_transpose2d(images, grouped, groups=2, padding=1, dilation=2),
            F.conv_transpose2d(images, depthwise, groups=4, stride=3),
            F.conv_transpose1d(images[0], narrow, stride=2),
            F.conv_transpose3d(images[None], block),
        )

    compare_eager_and_compiled(
        f,
        integers(2, 4, 3, 5),
        integers(4, 6, 3, 2),
        integers(6),
        integers(4, 3, 2, 3),
        integers(4, 1, 3, 3),
        integers(3, 2, 3),
        integers(2, 3, 2, 2, 2),
    )


@pytest.mark.parametrize("high", [100, LARGE])
def test_average_pools(high):
    def f(images):
        return (
            F.avg_pool1d(images[0], 3),
            F.avg_pool2d(images, 3, stride=2, padding=1),
            F.avg_pool2d(images.mT, (2, 3), ceil_mode=True, count_include_pad=False, padding=1),
            F.avg_pool2d(images, 2, divisor_override=-3),
            F.avg_pool3d(images, (2, 3, 2), stride=1),
            F.avg_pool2d(images[:0], 2),
        )

    compare_eager_and_compiled(f, integers(2, 4, 6, 5, high=high))


def test_local_response_norm():
    compare_eager_and_compiled(
        lambda x: (F.local_response_norm(x, 3), F.local_response_norm(x[0], 2)),
        integers(2, 4, 6, 5, high=100),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_shifts_by_positions(dtype):
    def f(x):
        places = torch.arange(22, dtype=dtype, device=x.device)
        return 1 << places, x << places, x << -places, 1000 >> places, x >> (places - 3)

    compare_eager_and_compiled(f, torch.arange(22).to(dtype) * 5)
