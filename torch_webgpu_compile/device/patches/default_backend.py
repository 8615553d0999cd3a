"""``torch.compile(f)`` without a backend, of device tensors: PyTorch's default is Inductor.

Patched: ``torch._TorchCompileInductorWrapper.__call__``: graphs with device tensors go to the
``webgpu`` backend, all others to Inductor as ever.

Why: Inductor has no code generator for the device and ends in a KeyError. Much code that uses a
model compiles it without naming a backend (`transformers` does so in ``generate``).

Until: PyTorch lets a device choose the default backend of its graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices
from ..import_hooks import around


@around("torch:_TorchCompileInductorWrapper.__call__")
def call(original: Any, self: Any, model_: Any, inputs_: Any) -> Any:
    if not _is_here(model_, inputs_):
        return original(self, model_, inputs_)
    from ...backend import webgpu  # the compiler, which takes a second

    # Inductor's other options say how it makes its kernels, or CUDA graphs.
    tunes = bool(self.config and self.config.get("max_autotune"))
    return webgpu(model_, inputs_, mode="max-autotune" if tunes else None)


def _is_here(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    values = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(leaf, Tensor) and leaf.device.type == devices.NAME for leaf in leaves)
