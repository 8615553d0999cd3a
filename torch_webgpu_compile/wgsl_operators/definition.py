"""The common part of operators in WGSL: their definition in PyTorch, and their CPU fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError
from ..lowering.registry import LoweringFunction, lowers_again
from ..torch_ops import written
from ..torch_private import OpOverload

_DEVICE = "webgpu"


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    lowering: LoweringFunction,
    *,
    pointwise: bool = False,
) -> OpOverload:
    """Defines an operator that this package's device and backend compute.

    It replaces an operator of that name that was defined before. CPU tensors of an eager call go to
    the GPU, and the results come back.

    Args:
        name: ``namespace::name``.
        schema: without the name.
        fake: gives results without contents, and raises what is wrong with arguments.
        lowering: see `lowering.registry.lowers`.
        pointwise: whether each element of a result is one of a function of elements.
    """

    def compute(*arguments: Any) -> Any:
        return _on_gpu(name, overload, arguments)

    definition = torch.library.custom_op(
        name, compute, mutates_args=(), device_types="cpu", schema=schema
    )
    definition.register_fake(fake)
    overload: OpOverload = definition._opoverload
    lowers_again(overload, lowering)
    written.add(overload, pointwise)
    return overload


def results_schema(count: int) -> str:
    """So many tensors as results in a schema."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _on_gpu(name: str, overload: OpOverload, arguments: Sequence[Any]) -> Any:
    try:
        device = torch.device(_DEVICE)
    except RuntimeError as error:
        raise AdapterError(
            f"{name} is computed on a GPU, and PyTorch does not know the device 'webgpu' here; "
            "call torch_webgpu_compile.register_device(), or compile the function"
        ) from error
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    results = overload(*moved)
    if isinstance(results, Tensor):
        return results.cpu()
    return tuple(result.cpu() for result in results)


class Operator:
    """An operator in WGSL; call it with tensors.

    Attributes:
        name: ``namespace::name``.
        overload: what graphs call: ``torch.ops.namespace.name.default``.
    """

    def __init__(self, name: str, overload: OpOverload) -> None:
        self.name = name
        self.overload = overload

    def __repr__(self) -> str:
        return f"<operator {self.overload._schema}>"

    def register_autograd(
        self,
        backward: Callable[..., Any],
        /,
        *,
        setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    ) -> None:
        """``torch.library.register_autograd`` of the operator: the gradient as PyTorch wants it."""
        torch.library.register_autograd(self.overload, backward, setup_context=setup_context)

    def register_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.library.register_vmap`` of the operator, which may be a decorator."""
        torch.library.register_vmap(self.overload, function)
        return function
