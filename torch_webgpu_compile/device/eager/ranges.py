"""``arange`` and its kin, which fill an ``out=`` of as many elements in whatever shape it has.

Source: ATen ``native/RangeFactories.cpp``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload
from .dispatch import run

aten = torch.ops.aten

_OTHER_NUMBER = (
    "The number of elements in the out tensor of shape {} is {} which does not match the computed "
    "number of elements {}. Note that this may occur as a result of rounding error. The out tensor "
    "will be resized to a tensor of shape ({},)."
)


def _filled(make: OpOverload, warns: bool, *arguments: Any, out: Tensor) -> Tensor:
    """The kernel with ``out=`` of an operator ``make``.

    Args:
        warns: of another number of elements, which may depend on rounding.
    """
    values: Tensor = run(make, *arguments, dtype=out.dtype, device=out.device)
    found, wanted = out.numel(), values.numel()
    if found != wanted:
        if warns and found:
            text = _OTHER_NUMBER.format(list(out.shape), found, wanted, wanted)
            warnings.warn(text, stacklevel=2)
        out.resize_(values.shape)
    return out.copy_(values.view(out.shape))


def _overloads() -> Iterator[tuple[str, str, OpOverload]]:
    """(name of an overload with ``out=``, name without, the latter overload) of each operator."""
    yield "arange.start_out", "arange.start_step", aten.arange.start_step
    yield "range.out", "range.step", aten.range.step
    for name in ("linspace", "logspace"):
        packet = getattr(aten, name)
        yield f"{name}.out", name, packet.default
        for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"):
            yield f"{name}.{kind}_out", f"{name}.{kind}", getattr(packet, kind)


def kernels() -> dict[str, Callable[..., Any]]:
    """Kernels by name.

    Those without ``out=``, too: PyTorch would make an ``out`` for them.
    """
    found: dict[str, Callable[..., Any]] = {}
    for with_out, without, make in _overloads():
        warns = make in (aten.arange.start_step, aten.range.step)
        found[with_out] = partial(_filled, make, warns)
        found[without] = partial(run, make)
    return found
