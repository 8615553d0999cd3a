"""Fake quantization, and quantization to integers (``torch.ops.quantized_decomposed``)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.compiling import native
from tests.providers import require_float64
from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(3), pytest.mark.usefixtures("fresh")]

integers = torch.ops.quantized_decomposed
BYTE = (0, 255, torch.uint8)
SIGNED = (-128, 127, torch.int8)


def to_bytes_and_back(x, scale, zero, scales, zeros):
    bytes = integers.quantize_per_tensor(x, 0.1, 3, *BYTE)
    return bytes, integers.dequantize_per_tensor(bytes, 0.1, 3, *BYTE)


def by_tensors(x, scale, zero, scales, zeros):
    bytes = integers.quantize_per_tensor.tensor(x, scale, zero, *BYTE)
    return bytes, integers.dequantize_per_tensor.tensor(bytes, scale, zero, *BYTE)


def by_channels(x, scale, zero, scales, zeros):
    signed = integers.quantize_per_channel(x, scales, zeros, 1, *SIGNED)
    return signed, integers.dequantize_per_channel(signed, scales, zeros, 1, *SIGNED)


def chosen_here(x, scale, zero, scales, zeros):
    chosen = integers.choose_qparams.tensor(x, -128, 127, 1e-7, torch.int8)
    signed = integers.quantize_per_tensor.tensor(x, *chosen, *SIGNED)
    return *chosen, signed, integers.dequantize_per_tensor.tensor(signed, *chosen, *SIGNED)


def chosen_symmetric(x, scale, zero, scales, zeros):
    bytes = integers.choose_qparams_symmetric.tensor(x, *BYTE[:2], 1e-7, torch.uint8)
    return *bytes, *integers.choose_qparams_symmetric.tensor(x, -128, 127, 1e-7, torch.int8)


def chosen_by_token(x, scale, zero, scales, zeros):
    asymmetric = integers.choose_qparams_per_token_asymmetric(x, torch.int8)
    return *asymmetric, *integers.choose_qparams_per_token(x, torch.int8)


def in_groups(x, scale, zero, scales, zeros):
    rows = x.reshape(-1, 6)
    scales = scales[0].expand(len(rows), 2)
    given = scales, torch.ones_like(scales, dtype=torch.int64), -8, 7, torch.int8, 3
    signed = integers.quantize_per_channel_group(rows, *given)
    return signed, integers.dequantize_per_channel_group(signed, *given, torch.float32)


def fake(x, scale, zero, scales, zeros):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 20)


def fake_by_tensors(x, scale, zero, scales, zeros):
    return torch.fake_quantize_per_tensor_affine(x, scale, zero.int(), 0, 20)


def fake_channels(x, scale, zero, scales, zeros):
    return torch.fake_quantize_per_channel_affine(x, scales, zeros.int(), 1, -8, 20)


FUNCTIONS = [to_bytes_and_back, by_tensors, by_channels, fake, fake_by_tensors, fake_channels]
CHOOSING = [chosen_here, chosen_symmetric, chosen_by_token, in_groups]


def arguments(*sizes):
    # Multiples of a power of two: no value lies halfway between two levels by rounding alone.
    scales = torch.tensor([0.25, 0.125, 0.5, 0.25, 1.0, 0.125])
    return (
        torch.randn(*sizes) * 4,
        torch.tensor([0.25]),
        torch.tensor([3]),
        scales,
        torch.tensor([0, 1, -2, 3, 0, 5]),
    )


@pytest.mark.parametrize("sizes", [(4, 6), (2, 6, 3), (0, 6)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_eager(function, sizes):
    given = arguments(*sizes)
    wanted = function(*given)
    torch.testing.assert_close(native(function)(*given), wanted)
    on_device = function(*(t.to("webgpu") for t in given))
    moved = on_device.cpu() if isinstance(on_device, torch.Tensor) else [t.cpu() for t in on_device]
    torch.testing.assert_close(moved, wanted if isinstance(wanted, torch.Tensor) else list(wanted))
    assert not counters.fallbacks


@pytest.mark.parametrize("function", CHOOSING)
def test_parameters_from_the_numbers(function):
    if function is not in_groups:  # scales, or the smallest of them, are float64
        require_float64()

    given = arguments(5, 6)
    wanted = function(*given)
    found = [
        native(function)(*given),
        [t.cpu() for t in function(*(t.to("webgpu") for t in given))],
    ]
    for results in found:
        torch.testing.assert_close(list(results), list(wanted))
    assert not counters.fallbacks


@pytest.mark.parametrize("function", [fake, fake_by_tensors, fake_channels])
def test_gradients(function):
    """1 where a value lies among the levels, otherwise 0."""
    given = arguments(4, 6)
    x, *rest = given
    found = []
    for f, leaf in ((function, x.clone()), (native(function), x.clone())):
        leaf.requires_grad_()
        found.append(torch.autograd.grad(f(leaf, *rest).sum(), leaf)[0])
    assert 0 < found[0].sum() < found[0].numel()
    torch.testing.assert_close(found[1], found[0])


def test_numbers_beyond_all_levels():
    x = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan])
    got = native(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -4, 6))(x)
    torch.testing.assert_close(got, torch.tensor([3.0, -2.0, 3.0, -2.0, -2.0]))


def test_observers_switch_it_off():
    x, scale = torch.randn(5), torch.tensor([0.5])
    zero = torch.zeros(1, dtype=torch.int32)
    operator = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams

    def f(x, enabled):
        return operator(x, scale, zero, enabled, -1, 1)

    for enabled in (torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)):
        torch.testing.assert_close(native(f)(x, enabled), f(x, enabled))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused():
    """By one message, whether they would be made here or moved."""
    x, kind = torch.ones(3), {"dtype": torch.quint8, "device": "webgpu"}
    for make in (
        lambda: torch.empty(3, **kind),
        lambda: torch._empty_affine_quantized([3], scale=1, zero_point=0, **kind),
        lambda: torch.quantize_per_tensor(x.to("webgpu"), 0.1, 0, torch.quint8),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).to("webgpu"),
    ):
        x.to("webgpu") + 1
        with pytest.raises(NotImplementedError, match="quantized_decomposed"):
            make()
