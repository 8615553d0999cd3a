"""DLPack: how tensors on devices other than the first come to be, and what is not possible.

PyTorch gives Python one way to make a plain tensor on a PrivateUse1 device of any index: to import
it from DLPack, whose ``kDLExtDev`` means PrivateUse1. The other direction does not exist: a webgpu
tensor has no address that another library could read.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from .. import devices

_EXT_DEV = 12  # kDLExtDev of dlpack.h
_UINT = 1  # kDLUInt

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_view = torch.ops.aten.view.dtype._handle.redispatch_boxed


class _Tensor(ctypes.Structure):
    """``DLManagedTensor`` of dlpack.h, version 0."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_lock = threading.Lock()
_made: dict[int, tuple[Any, Tensor]] = {}  # by index; PyTorch keeps a pointer to the first part


def empty_tensor(dtype: torch.dtype, index: int) -> Tensor:
    """A tensor of shape (0,) without memory on ``webgpu:index``."""
    with _lock:
        if index not in _made:
            devices.prepare_several()
            _made[index] = _make(index)
        empty = _made[index][1]
    tensor: Tensor = _view(_CPU, empty, dtype)
    return tensor


def _make(index: int) -> tuple[Any, Tensor]:
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
    structure = _Tensor(None, _EXT_DEV, index, 1, _UINT, 8, 1, shape, strides, 0, None, None)
    capsule = new_capsule(ctypes.addressof(structure), b"dltensor", None)
    return (structure, shape, strides), torch._C._from_dlpack(capsule)
