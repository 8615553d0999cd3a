"""A device after its loss."""

from __future__ import annotations

import torch

from .. import devices


def reset_device(device: torch.device | str | int | None = None) -> None:
    """Makes a lost device (the current one by default) usable again, for new tensors.

    The memory of its tensors is freed: whatever reads or writes them raises DeviceLostError. What
    was compiled for the device stays and works on new tensors. Does nothing to a device that works,
    so that it may be called after any error.

    Raises:
        ValueError: it is not a ``webgpu`` device.
    """
    from .. import storages  # `import torch` imports this file
    from ..callables import static_copies
    from . import writes

    index = devices.resolve_index(device)
    lost = devices.take_lost(index)
    if lost is None:
        return
    storages.lose(lost, index)
    writes.forget()
    static_copies.drop(lost)
    lost.abandon()
