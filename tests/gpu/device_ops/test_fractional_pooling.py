"""Pooling over windows at random places, which are given."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare, compare_eager_and_compiled

pytestmark = pytest.mark.rotates(3)

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_max_pool(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn([2, 3, 9, 7, 8][: rank + 2], generator=generator).to(dtype)
    x[0, 0, 3:5, 2] = float("nan")
    x[1, 1] = float("-inf")
    samples = torch.rand([2, 3, rank], generator=generator).to(dtype)
    name = f"fractional_max_pool{rank}d"
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    kernel, result, whole = [2, 3, 2][:rank], [5, 3, 4][:rank], [1, 1, 1][:rank]

    def f(x, samples, grad):
        values, indices = forward(x, kernel, result, samples)
        plain = x[1].nan_to_num(0, 1, -1)
        places = forward(x.nan_to_num(0, 1, -1), kernel, result, samples)[1]
        return (
            values,
            indices[1:],  # of several NaN the CPU gives the last
            forward(plain, kernel, result, samples[:1]),
            forward(x[1:].transpose(-1, -2), kernel, result, samples[1:]),
            forward(plain, kernel, whole, samples[:1]),
            forward(x[:0], kernel, result, samples[:0]),
            backward(grad, x, kernel, result, places),
            backward(grad[0], x[0], kernel, result, places[0]),
        )

    grad = torch.randn([2, 3, *result], generator=generator).to(dtype)
    compare_eager_and_compiled(f, x, samples, grad)


def test_gradients():
    x, samples = torch.randn(2, 3, 12, 11), torch.rand(2, 3, 2)

    def f(device):
        leaf = x.to(device).requires_grad_()
        pooled = torch.nn.functional.fractional_max_pool2d(
            leaf, 3, output_ratio=(0.5, 0.6), _random_samples=samples.to(device)
        )
        return torch.autograd.grad(pooled.square().sum(), leaf)

    compare(f)
