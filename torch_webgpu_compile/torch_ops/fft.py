"""``webgpu::fft``, ``webgpu::rfft`` and ``webgpu::irfft``: Fourier transforms of real tensors.

Complex numbers are pairs of real and imaginary part in the last dimension, as
``torch.view_as_real`` gives them. The operators are defined here in plain ATen operators; lowering
makes them kernels for lengths that are known while compiling. Graphs have them after autograd, so
that they have no gradients.

``dims`` count the dimensions of the complex tensor: of pairs of shape (a, b, 2), dim 1 and dim -1
are both the one of size b. Transforms are unnormalised and then multiplied by ``scale``. Results
are contiguous and float32 (float64 of float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def plain_fft(pairs: Tensor, dims: Sequence[int], forward: bool, scale: float) -> Tensor:
    """X[k] = scale · Σ over j of x[j] · exp(∓2πi · jk/n) along each of ``dims``.

    Args:
        pairs: (…, 2), any floating dtype.
        forward: the sign of the exponent is negative.

    Returns:
        The shape of ``pairs``.
    """
    if pairs.numel() == 0:  # MKL takes no empty batches
        return pairs.new_zeros(pairs.shape, dtype=_dtype(pairs))
    result = aten._fft_c2c(_complex(pairs), _positive(pairs.dim() - 1, dims), 0, forward)
    return _pairs(result, scale)


def plain_rfft(x: Tensor, dims: Sequence[int], scale: float) -> Tensor:
    """The forward transform of a real tensor, the first half of the last of ``dims``.

    Args:
        x: any floating dtype.
        dims: at least one; the others are transformed after the last.

    Returns:
        The shape of ``x`` with n // 2 + 1 in place of the last of ``dims``, and 2 at the end.
    """
    if x.numel() == 0:
        return x.new_zeros(_rfft_sizes(x, dims), dtype=_dtype(x))
    real = x.to(_dtype(x))
    return _pairs(aten._fft_r2c(real, _positive(x.dim(), dims), 0, True), scale)


def plain_irfft(pairs: Tensor, dims: Sequence[int], n: int, scale: float) -> Tensor:
    """The inverse transform to a real tensor of which ``pairs`` has the first half.

    Imaginary parts that those of a real tensor's transform cannot have, of the first number and
    for even ``n`` of the last one along the last of ``dims``, are not looked at.

    Args:
        pairs: (…, 2), any floating dtype, n // 2 + 1 numbers along the last of ``dims``.
        dims: at least one; the others are transformed before the last.
        n: length of the result along the last of ``dims``, at least 1.
    """
    if pairs.numel() == 0:
        return pairs.new_zeros(_irfft_sizes(pairs, dims, n), dtype=_dtype(pairs))
    result = aten._fft_c2r(_complex(pairs), _positive(pairs.dim() - 1, dims), 0, n)
    scaled: Tensor = (result * scale).contiguous()
    return scaled


fft = torch.library.custom_op(
    "webgpu::fft",
    plain_fft,
    mutates_args=(),
    schema="(Tensor pairs, int[] dims, bool forward, float scale) -> Tensor",
)
rfft = torch.library.custom_op(
    "webgpu::rfft",
    plain_rfft,
    mutates_args=(),
    schema="(Tensor x, int[] dims, float scale) -> Tensor",
)
irfft = torch.library.custom_op(
    "webgpu::irfft",
    plain_irfft,
    mutates_args=(),
    schema="(Tensor pairs, int[] dims, SymInt n, float scale) -> Tensor",
)


@fft.register_fake
def _(pairs: Tensor, dims: Sequence[int], forward: bool, scale: float) -> Tensor:
    return pairs.new_empty(pairs.shape, dtype=_dtype(pairs))


@rfft.register_fake
def _(x: Tensor, dims: Sequence[int], scale: float) -> Tensor:
    return x.new_empty(_rfft_sizes(x, dims), dtype=_dtype(x))


@irfft.register_fake
def _(pairs: Tensor, dims: Sequence[int], n: int, scale: float) -> Tensor:
    return pairs.new_empty(_irfft_sizes(pairs, dims, n), dtype=_dtype(pairs))


def _rfft_sizes(x: Tensor, dims: Sequence[int]) -> list[int]:
    sizes = list(x.shape)
    sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    return [*sizes, 2]


def _irfft_sizes(pairs: Tensor, dims: Sequence[int], n: int) -> list[int]:
    sizes = list(pairs.shape[:-1])
    sizes[dims[-1]] = n
    return sizes


def _positive(rank: int, dims: Sequence[int]) -> list[int]:
    return [dim % rank for dim in dims]


def _dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.to(_dtype(pairs)).contiguous())


def _pairs(result: Tensor, scale: float) -> Tensor:
    return torch.view_as_real(result.contiguous()) * scale
