"""Device tensors that are put into a queue of `multiprocessing`: the receiver gets an error.

Patched: how ``multiprocessing.reduction.ForkingPickler`` pickles tensors and parameters.

Why: WebGPU does not share GPU memory, so a device tensor cannot be sent to another process. But a
queue pickles in a thread of its own, whose errors are printed and nothing more: the receiver would
wait for ever.

Until: a queue hands errors of its thread on to whoever waits for it, or `torch.multiprocessing`
refuses devices whose memory cannot be shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ...tensors import devices

CANNOT_SEND = (
    "webgpu tensors cannot be sent to another process, as WebGPU does not share GPU memory: send "
    "tensor.cpu()"
)
_FEEDER = "QueueFeederThread"  # of `multiprocessing.Queue`, which data loaders' workers use


def _raise(message: str) -> Any:
    raise RuntimeError(message)


def _reduce(tensor: Any, original: Callable[[Any], Any]) -> Any:
    """Makes the receiver raise where the sender's error would only be printed."""
    if tensor.device.type == devices.NAME and threading.current_thread().name == _FEEDER:
        return _raise, (CANNOT_SEND,)
    return original(tensor)


def install() -> None:
    """Has the receiver of a device tensor raise; others are sent as ever."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        original: Any = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        if original is not None:
            ForkingPickler.register(kind, partial(_reduce, original=original))
