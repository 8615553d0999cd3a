"""Interpolation of uint8 images: the same integers as on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.device_checks import compare
from torch_webgpu_compile.fallbacks import FallbackWarning

pytestmark = pytest.mark.rotates(9)


def images(*sizes, channels_last=False):
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)
    return made.to(memory_format=torch.channels_last) if channels_last else made


SIZES = [
    {"size": (3, 4)},
    {"size": (16, 21)},  # one dimension stays
    {"size": (1, 40), "align_corners": True},
    {"scale_factor": (1.3, 2.5)},
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolate(mode, antialias, channels_last):
    def f(device):
        x = images(2, 5, 16, 9, channels_last=channels_last).to(device)
        return [F.interpolate(x, mode=mode, antialias=antialias, **sizes) for sizes in SIZES]

    compare(f)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_compiled_interpolate(mode, antialias):
    # Without antialiasing Dynamo decomposes: it rounds once, the CPU after each dimension.
    atol = 0 if antialias else 1
    x = images(2, 5, 16, 9)
    torch._dynamo.reset()

    def f(x):
        return [F.interpolate(x, mode=mode, antialias=antialias, **sizes) for sizes in SIZES[:3:2]]

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        got = torch.compile(f, backend="webgpu", fullgraph=True)(x)
    torch.testing.assert_close(got, f(x), rtol=0, atol=atol)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_layouts_and_empty_batches(mode):
    def f(device):
        x = images(2, 3, 8, 10, channels_last=True).to(device)
        return (
            F.interpolate(x, size=(5, 5), mode=mode),
            F.interpolate(x[:0], size=(5, 5), mode=mode),
            F.interpolate(x[..., 1::2, ::3], size=(5, 5), mode=mode),
            F.interpolate(x[:, :, :1, :1], size=(4, 4), mode=mode),
        )

    compare(f)
