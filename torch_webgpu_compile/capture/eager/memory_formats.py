"""Strides of results that tracing has otherwise than PyTorch's kernels for the CPU.

A result's strides are those that it has where the call is traced, on tensors without contents. For
most operators that is as good as a kernel's; of some the kernels ask for a memory format instead.
What views and copies come after such a call relies on it: ``view`` needs strides that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload, suggest_memory_format, tree_map_only

aten = torch.ops.aten

_PADS = ("reflection", "replication")

# The argument in whose memory format results are: contiguous, or one of ``channels_last``.
_LIKE_ARGUMENT: dict[OpOverload, int] = {
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.max_unpool2d.default: 0,
    aten.adaptive_max_pool2d_backward.default: 1,
    aten.max_pool3d_with_indices.default: 0,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.roll.default: 0,
    **{getattr(aten, f"{mode}_pad{rank}d").default: 0 for mode in _PADS for rank in (2, 3)},
    **{
        getattr(aten, f"{mode}_pad{rank}d_backward").default: 1 for mode in _PADS for rank in (2, 3)
    },
}
# Without a batch, results of these are in ``channels_last_3d`` if the first argument is.
_VOLUMES = frozenset(
    {aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default}
)
_CONTIGUOUS = frozenset(
    {
        aten.bernoulli.default,
        aten.bernoulli.p,
        aten.log_sigmoid_forward.default,
        aten.poisson.default,
        aten.rrelu_with_noise.default,
    }
)


def laid_out(op: OpOverload, arguments: Sequence[Any], results: Any) -> Any:
    """The results of a traced call in the memory format that a kernel gives them.

    Args:
        op: changes none of its arguments that are among the results.
    """
    if op in _CONTIGUOUS:
        return tree_map_only(Tensor, Tensor.contiguous, results)
    like = _LIKE_ARGUMENT.get(op)
    if like is None:
        return results
    argument = arguments[like]
    if op in _VOLUMES and argument.dim() == 4:
        return tree_map_only(Tensor, lambda result: _as_volume(result, arguments[0]), results)
    wanted = suggest_memory_format(argument)

    def convert(result: Tensor) -> Tensor:
        return result.contiguous(memory_format=wanted) if result.dim() == argument.dim() else result

    return tree_map_only(Tensor, convert, results)


def _as_volume(result: Tensor, argument: Tensor) -> Tensor:
    if not argument.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d):
        return result.contiguous()
    return result.unsqueeze(0).contiguous(memory_format=torch.channels_last_3d).squeeze(0)
