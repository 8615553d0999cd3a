"""``torch.compile(optimizer.step)`` counts the steps on the device, as on CUDA.

Patched: when it is imported, ``OptimizerVariable._set_capturable`` in
``torch._dynamo.variables.optimizer``.

Why: Dynamo makes an optimizer capturable where all parameters are on CUDA or XPU and it has not
made a step yet. Otherwise each parameter has its own counter on the CPU, which a compiled step
reads and writes: it waits for the GPU at every call.

Until: Dynamo asks ``torch.optim.optimizer._get_capturable_supported_devices``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...tensors import devices
from ..import_hooks import around


@around("torch._dynamo.variables.optimizer:OptimizerVariable._set_capturable")
def set_capturable(original: Any, self: Any, *arguments: Any) -> None:
    optimizer = self.value
    for group in optimizer.param_groups:
        if "capturable" in group and _is_new_and_here(group, optimizer.state):
            group["capturable"] = True
    original(self, *arguments)


def _is_new_and_here(group: Mapping[str, Any], state: Mapping[Any, Any]) -> bool:
    """Whether all parameters of a group are on the device, and none has made a step."""
    params = group["params"]
    return all(p.device.type == devices.NAME and p not in state for p in params)
