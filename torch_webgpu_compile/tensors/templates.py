"""What new tensors on the device are made of, and why they can exchange data with the CPU's.

``parameter.data = tensor`` and ``module.to(device)`` give a tensor other data, and leave it the
same object. PyTorch's C++ code allows that between tensors of one kind, and between dense tensors
of its own devices, which it knows by a bit in their dispatch keys; PrivateUse1's is not one of
these. So tensors on the device have the CPU's bit beside their own. It decides nothing else: of
several devices' bits the dispatcher follows PrivateUse1's, as where an operator has tensors of
both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_private import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _DisableTorchDispatch,
    _make_wrapper_subclass,
)
from . import devices

_CPU = DispatchKeySet(DispatchKey.CPU)


class _Wrapper(Tensor):
    """A tensor of which Python chooses the keys, which is possible with ``__torch_dispatch__``."""

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError


class Templates(dict[tuple[torch.dtype, int, bool], Tensor]):
    """Tensors of shape (0,) without memory, by dtype, device and whether in inference mode.

    ``.data`` of one is a new tensor: the fastest way to one that Python has.
    """

    def __missing__(self, key: tuple[torch.dtype, int, bool]) -> Tensor:
        dtype, index, inference = key
        if index:
            devices.prepare_several()
        make: Any = _make_wrapper_subclass
        place = devices.torch_device(index)
        with (
            DisableTorchFunction(),
            _DisableTorchDispatch(),
            torch.inference_mode(inference),
        ):
            wrapper = make(_Wrapper, (0,), dtype=dtype, device=place, _extra_dispatch_keys=_CPU)
            template = torch.empty((0,), dtype=dtype, device="cpu")
            template.data = wrapper
        self[key] = template
        return template
