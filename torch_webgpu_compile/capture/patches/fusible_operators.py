"""What PyTorch's partitioner takes for operators that this package fuses.

Patched: ``get_default_op_list`` of ``torch._functorch.partitioners``, whose lists get the operators
below and all elementwise ones of this package.

Why: the partitioner knows Inductor's operators, and takes others for kernels that nothing is fused
with: what they read is stored for the backward pass, which then takes more memory and time.

Until: a backend can give ``min_cut_rematerialization_partition`` its own lists.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...patches import attempt, replaced
from ...torch_ops.written import POINTWISE

aten = torch.ops.aten

VIEWS = (aten.transpose, aten.detach, aten._reshape_alias, aten.diagonal, aten.unbind)
_OF_ELEMENTS = (
    *(aten.hardshrink_backward, aten.hardswish, aten.leaky_relu_backward, aten._prelu_kernel),
    *(aten.softshrink_backward, aten.floor_divide, aten.fill, aten.ones_like, aten.new_full),
)
# Rows, which are read where they are computed. These are not in forward graphs.
_OF_ROWS = (aten._log_softmax_backward_data, aten._softmax_backward_data)


def install() -> AbstractContextManager[None]:
    """Tells the partitioner what this package fuses, as long as the context."""
    return replaced(__name__, _partitioners, "get_default_op_list", _with_more)


def _partitioners() -> Any:
    from torch._functorch import partitioners

    return partitioners


def _with_more(original: Callable[[], Any]) -> Callable[[], Any]:
    of_elements = (*_OF_ELEMENTS, *(op.overloadpacket for op in POINTWISE))

    def op_list() -> Any:
        types = original()

        def add() -> None:
            types.view_ops.update(VIEWS)
            types.recomputable_ops.update((*VIEWS, *of_elements))
            types.fusible_ops.update((*VIEWS, *of_elements, *_OF_ROWS))

        attempt(__name__, add)
        return types

    return op_list
