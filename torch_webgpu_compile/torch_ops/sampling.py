"""``webgpu::draw``: random numbers that take an unknown number of uniform ones each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

SAMPLERS: Mapping[str, Callable[..., Any]] = {
    "gamma": aten._standard_gamma.default,
    "poisson": aten.poisson.default,
    "binomial": aten.binomial.default,
}
"""The distributions, as PyTorch samples them."""


@torch.library.custom_op(
    "webgpu::draw",
    mutates_args=(),
    schema="(Tensor seed, str distribution, Tensor[] parameters) -> Tensor",
)
def draw(seed: Tensor, distribution: str, parameters: Sequence[Tensor]) -> Tensor:
    """A number of a distribution for each element of its parameters, which broadcast.

    Kernels and the CPU draw other numbers from a seed.

    Args:
        seed: int32 (2,).
        distribution: of `SAMPLERS`.
        parameters: float32. Of gamma the shape, finite and at least 1; of poisson the rate, finite
            and at least 0; of binomial the count, finite and at least 0, and the probability, in
            [0, 0.5].
    """
    high, low = (number & 0xFFFFFFFF for number in seed.tolist())
    generator = torch.Generator().manual_seed(high << 32 | low)
    sizes = torch.broadcast_shapes(*(x.shape for x in parameters))  # type: ignore[no-untyped-call]
    given = [parameter.cpu().expand(sizes) for parameter in parameters]
    found: Tensor = SAMPLERS[distribution](*given, generator)
    return found.to(parameters[0].device)


@draw.register_fake
def _(seed: Tensor, distribution: str, parameters: Sequence[Tensor]) -> Tensor:
    sizes = torch.broadcast_shapes(*(x.shape for x in parameters))  # type: ignore[no-untyped-call]
    return parameters[0].new_empty(sizes)
