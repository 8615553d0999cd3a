"""A backward pass runs in the thread that asks for it.

Patched: the switch `torch.autograd.set_multithreading_enabled` of the thread that registers the
device, which is the one that imports PyTorch, is off.

Why: autograd has a thread of its own for each device that is not the CPU, so that devices work side
by side. Its kernels here are Python, so that they cannot; the two threads hand over the interpreter
twice in every backward pass, which takes longer than some passes.

Until: the kernels of a backward pass take no interpreter.
"""

from __future__ import annotations

import torch


def install() -> None:
    """Has autograd use the calling thread alone."""
    torch._C._set_multithreading_enabled(False)
