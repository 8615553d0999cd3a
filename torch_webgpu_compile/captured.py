"""What capture gives and lowering takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CapturedGraph:
    """A functional graph of core ATen operators with fake-tensor metadata on every node.

    Attributes:
        name: unique in the process, e.g. ``graph0_forward``.
        module: the FX graph. Placeholders are tensors or symbolic integers, in the order of the
            call's arguments; ``node.meta["val"]`` holds fake tensors and SymInts; trailing
            ``aten.copy_(placeholder, value)`` nodes are the mutations of inputs.
        static_inputs: positions of parameters and buffers: the same tensors at every call.
    """

    name: str
    module: torch.fx.GraphModule
    static_inputs: frozenset[int]
