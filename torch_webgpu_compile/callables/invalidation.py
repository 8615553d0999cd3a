"""Changes of parameters that neither PyTorch's version counters nor sampled words show."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import static_buffers


def invalidate(tensor: Tensor | None = None) -> None:
    """Makes the next use of ``tensor`` (None: of every tensor) copy it to the GPU again.

    Needed only after a change of a few elements that PyTorch does not count, as through
    ``tensor.data`` or NumPy. Tensors that share memory with it, as ``tensor.data`` does, are meant
    as well. A tensor without a copy on the GPU needs none of this and is accepted.

    Raises:
        TypeError: it is not a dense tensor.
    """
    if tensor is not None and not (isinstance(tensor, Tensor) and tensor.layout is torch.strided):
        raise TypeError(
            f"invalidate() takes a dense tensor, not {getattr(tensor, 'layout', type(tensor))}; "
            "pass the parameter whose memory was changed, or nothing for all of them"
        )
    static_buffers.invalidate(None if tensor is None else _with_memory(tensor))


def _with_memory(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those that it wraps."""
    if type(tensor) is torch.nn.Parameter or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _with_memory(getattr(tensor, name))]


@cache
def watch_optimizers() -> None:
    """Lets fused optimizers say what they have changed, as their kernels do not count it.

    Of an embedding they may change so few rows that no word that is compared is among them.
    """
    from torch._dynamo.eval_frame import skip_code
    from torch.optim.optimizer import register_optimizer_step_post_hook

    skip_code(_stepped.__code__)
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # a step within a graph is that graph's: it counts
        return
    fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    changed = [param for params in fused for param in params if param.is_cpu]
    if changed:
        static_buffers.invalidate([part for param in changed for part in _with_memory(param)])
