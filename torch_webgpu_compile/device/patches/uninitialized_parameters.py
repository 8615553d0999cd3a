"""``module.webgpu()`` of modules whose parameters have no sizes yet (``nn.LazyLinear``).

Patched: ``UninitializedTensorMixin._allowed_methods``, which gets ``Tensor.webgpu``.

Why: a parameter without sizes refuses all methods that are not on that list; PyTorch's own
``cuda``, ``to`` and ``cpu`` are.

Until: PyTorch adds the methods that it generates for a PrivateUse1 device.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Allows the method, which `generate_methods_for_privateuse1_backend` has made."""
    parameter: Any = torch.nn.parameter
    tensor: Any = torch.Tensor
    parameter.UninitializedTensorMixin._allowed_methods.append(tensor.webgpu)
