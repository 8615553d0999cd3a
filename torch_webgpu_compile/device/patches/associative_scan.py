"""``associative_scan`` in its default mode, on tensors of the device.

Patched: ``torch._higher_order_ops.associative_scan.associative_scan``, also as the package has it.

Why: ``combine_mode="pointwise"``, the default, is refused for all but CUDA and XPU tensors before a
backend is asked. While Dynamo traces, its operator is called all the same. Otherwise the mode
``"generic"``, which takes every function that it takes, gives the same.

Until: PyTorch asks the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...tensors import devices
from ..import_hooks import around


def _are_valid(leaves: Sequence[Any], dim: Any) -> bool:
    """Whether PyTorch takes them; what is wrong, it says in the other mode."""
    return isinstance(dim, int) and all(
        isinstance(x, torch.Tensor) and -x.ndim <= dim < x.ndim and x.shape[dim] > 0 for x in leaves
    )


def _traced(
    combine_fn: Any, leaves: Sequence[torch.Tensor], dim: int, reverse: bool
) -> list[torch.Tensor]:
    """The operator, which scans along the first dimension."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    xs = [x.movedim(dim, 0) for x in leaves]
    if reverse:
        xs = [x.flip([0]) for x in xs]
    made = tree_leaves(associative_scan_op(combine_fn, xs, additional_inputs=()))
    if reverse:
        made = [x.flip([0]) for x in made]
    return [x.movedim(0, dim) for x in made]


@around(
    "torch._higher_order_ops.associative_scan:associative_scan",
    "torch._higher_order_ops:associative_scan",
)
def associative_scan(
    original: Any,
    combine_fn: Any,
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    leaves, spec = tree_flatten(xs)
    if combine_mode == "pointwise" and any(
        isinstance(x, torch.Tensor) and x.device.type == devices.NAME for x in leaves
    ):
        combine_mode = "generic"
        if torch.compiler.is_dynamo_compiling() and _are_valid(leaves, dim):
            from torch._higher_order_ops.associative_scan import wrap_combine_fn_flat

            flat = partial(
                wrap_combine_fn_flat, combine_fn=combine_fn, spec=spec, num_leaves=len(leaves)
            )
            return tree_unflatten(_traced(flat, leaves, dim, reverse), spec)
    return original(combine_fn, xs, dim, reverse, combine_mode)
