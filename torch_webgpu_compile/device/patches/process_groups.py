"""Which backends of ``torch.distributed`` serve the device: those that serve the host.

Patched: ``Backend.backend_capability`` and ``Backend.default_device_backend_map``, which get the
device, ``BackendConfig.__init__``, and ``ProcessGroup.barrier``.

Why: PyTorch asks these, when a process group is made, whether its backend serves ``webgpu``, and
which one to take where the user names none. The kernels in `distributed` run all collectives on the
host. Without the last change, a group made without a name would serve the accelerator alone, and no
longer the CPU tensors for which it was made. And ``barrier(device_ids=[rank])`` would ask for as
many devices of "the" accelerator as there are processes, also where all train on the CPU.

Until: as `distributed`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around

_HOST = "cpu"
_DEFAULT = "gloo"


def install() -> None:
    """Does nothing where there is no ``c10d``."""
    if not torch.distributed.is_available():
        return
    around("torch.distributed.distributed_c10d:BackendConfig.__init__")(_serve)
    around("torch.distributed.distributed_c10d:ProcessGroup.barrier")(_barrier)
    c10d: Any = torch.distributed.distributed_c10d
    for served in c10d.Backend.backend_capability.values():
        if _HOST in served and devices.NAME not in served:
            served.append(devices.NAME)
    c10d.Backend.default_device_backend_map.setdefault(devices.NAME, _DEFAULT)


def _serve(original: Any, self: Any, backend: Any) -> None:
    original(self, backend)
    served = self.device_backend_map
    if list(served) == [devices.NAME] and served[devices.NAME] == _DEFAULT:
        # The accelerator's alone: collectives of CPU tensors worked before it had a name.
        self.device_backend_map = {_HOST: served[devices.NAME]} | served


def _barrier(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    for options in (*arguments, *keywords.values()):
        device = getattr(options, "device", None)
        if device is None or device.type != devices.NAME:
            continue
        if torch.device(_HOST) in self._device_types:
            options.device = torch.device(_HOST)
    return original(self, *arguments, **keywords)
