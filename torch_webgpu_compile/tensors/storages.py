"""Memory of ``webgpu`` tensors: PyTorch storages whose addresses stand for GPU buffers.

A tensor on the device is a plain ``torch.Tensor`` with a storage. The storage's address is made up:
its high bits number a slot in a table of GPU buffers, its low bits are an offset in bytes, so that
views need nothing of their own. The buffer of a slot may be replaced by another one (`replace`): an
in-place operation on all of a storage computes into new memory and swaps it in.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import or_
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, DeviceLostError
from ..runtime.buffers import AnyBuffer, EmptiedBuffer, LostBuffer
from ..runtime.device import Device, GpuBuffer
from ..target import BINDING_ALIGNMENT
from ..torch_private import (
    DispatchKey,
    DispatchKeySet,
    StorageBase,
    TensorBase,
    TensorGuards,
    _construct_storage_from_data_pointer,
)
from . import devices
from .deferred import settle
from .templates import Templates

# The largest buffer that any provider allows is 2^40 bytes. 2^22 tensors fit below the sign bit.
_SLOT_BITS = 41
_OFFSET_MASK = (1 << _SLOT_BITS) - 1

CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
_construct_storage = _construct_storage_from_data_pointer
_StorageBase: Any = StorageBase
_whole_nbytes: Callable[[torch.UntypedStorage], int] = _StorageBase.nbytes
_set = torch.ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
_is_inference = torch.is_inference_mode_enabled
_data = TensorBase.data.__get__  # type: ignore[attr-defined]
_templates = Templates()
data_ptr = TensorBase.data_ptr
_stride, _device = TensorBase.stride, TensorBase.device.__get__

_SLOTS = 1 << 22
_slots = itertools.cycle(range(1, _SLOTS))
_torch_device = devices.torch_device


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A storage that is in use, and its memory.

    When the storage dies, C code takes this out of the table: Ctrl-C in a callback of Python code
    would be swallowed, and the memory be lost.
    """

    __slots__ = ("buffer", "nbytes")
    buffer: GpuBuffer
    nbytes: int | None  # other than PyTorch's C++ code believes: see `resize`


_references: dict[int, _StorageReference] = {}
_forget: Any = _references.pop  # as a method of a slot it takes the reference for the default


def new_storage(nbytes: int, index: int, buffer: GpuBuffer | None = None) -> torch.UntypedStorage:
    """A storage of nbytes on ``webgpu:index``.

    Args:
        buffer: its memory; allocated when None.

    Raises:
        OutOfMemoryError: there is not enough GPU memory.
    """
    if buffer is None:
        buffer = devices.get_device(index).allocate(nbytes)
    slot = next(_slots)
    while slot in _references:
        slot = next(_slots)
    storage: Any = _construct_storage(slot << _SLOT_BITS, _torch_device(index), nbytes)
    reference = _StorageReference(storage, MethodType(_forget, slot))
    reference.buffer = buffer
    reference.nbytes = None
    _references[slot] = reference
    return storage  # type: ignore[no-any-return]


def new_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int = 0,
    index: int = 0,
) -> Tensor:
    """A tensor on ``webgpu:index`` over a storage there.

    Args:
        strides: () stands for row-major ones: each number costs a tenth of a microsecond.
        offset: in elements.
    """
    template = _templates[dtype, index, _is_inference()]
    result: Tensor = _set(CPU_KEYS, _data(template), storage, offset, sizes, strides)
    return result


def given_strides(sizes: Sequence[int], strides: Sequence[int]) -> Sequence[int]:
    """The strides as `new_tensor` best takes them: () if they are row-major ones."""
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != step:
            return strides
        step *= max(size, 1)
    return ()


def buffer_of(tensor: Tensor) -> GpuBuffer:
    """The memory of a tensor's whole storage.

    Raises:
        DeviceError: the storage is empty, or has been freed although a tensor still refers to it.
    """
    settle()
    reference = _references.get(data_ptr(tensor) >> _SLOT_BITS)
    if reference is None:
        reference = _references.get(tensor.untyped_storage().data_ptr() >> _SLOT_BITS)
    if reference is None:
        raise DeviceError(
            f"a webgpu tensor of shape {tuple(tensor.shape)} has no GPU memory: its storage was "
            "freed while something outside of PyTorch kept its address; keep the tensor alive"
        )
    return reference.buffer


def buffer_at(address: int) -> GpuBuffer | None:
    """The memory of the storage that an address points into; None for an empty tensor's."""
    settle()
    reference = _references.get(address >> _SLOT_BITS)
    return None if reference is None else reference.buffer


def find_buffer(
    tensor: Tensor, device: torch.device, strides: Sequence[int], offset_nbytes: int
) -> GpuBuffer | None:
    """The memory of a tensor on ``device`` with these strides that begins at this offset in it.

    None for any other tensor. Compiled graphs ask for each argument of each call.
    """
    settle()
    address = data_ptr(tensor)
    reference = _references.get(address >> _SLOT_BITS)
    if (
        reference is not None
        and address & _OFFSET_MASK == offset_nbytes
        and tensor.stride() == strides
        and tensor.device == device  # an address of another device's may look like one of these
    ):
        return reference.buffer
    return None


def find_known(
    tensors: Sequence[Any], places: Iterable[tuple[int, int, int]], buffers: list[Any]
) -> None:
    """Fills in the memory of tensors on the device of which the layouts are known.

    Args:
        places: (position among the tensors, place among the buffers, bytes of an address beyond a
            multiple of the binding alignment).
    """
    settle()
    for position, place, offset_nbytes in places:
        address = data_ptr(tensors[position])
        buffer = _references[address >> _SLOT_BITS].buffer
        start = (address & _OFFSET_MASK) - offset_nbytes
        buffers[place] = buffer.slice(start) if start else buffer


FEWEST_OF_MANY = 8
"""Tensors from which on it pays to look at all of them at once, one property after another."""


class Likeness:
    """The properties of many tensors but their memory, all compared in one call of C++.

    That is their types, dtypes, devices, sizes, strides, keys of dispatch (so that none is lazily
    conjugated or negated unless it was) and whether they require gradients.

    Args:
        tensors: the tensors; they are not kept.
    """

    __slots__ = ("_check",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        guards: Any = TensorGuards
        self._check: Callable[..., bool] = guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many others are like these, each one; False if one of them comes twice."""
        return self._check(*tensors)


def find_buffers(
    tensors: Sequence[Tensor],
    device: torch.device,
    strides: Sequence[tuple[int, ...]],
    offsets_nbytes: Sequence[int],
    known: Likeness | None = None,
) -> list[GpuBuffer] | None:
    """`find_buffer` of many tensors in a third of the time; None if it is None for one of them.

    Args:
        known: of tensors on ``device`` that had these strides.
    """
    settle()
    addresses = list(map(data_ptr, tensors))
    if [address & _OFFSET_MASK for address in addresses] != offsets_nbytes:
        return None
    is_known = known is not None and known.holds(tensors)
    if not is_known and list(map(_stride, tensors)) != strides:
        return None
    if not is_known and {*map(_device, tensors)} != {device}:
        return None
    references = [_references.get(address >> _SLOT_BITS) for address in addresses]
    return [r.buffer for r in references if r is not None] if all(references) else None


Memory = _StorageReference | None
"""The memory of a storage, which stays as long as this is kept; None for an empty tensor's."""


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Start addresses of tensors; a tensor without elements has a number of its own."""
    addresses = tuple(map(data_ptr, tensors))
    if all(addresses):
        return addresses
    return tuple([data_ptr(tensor) or -id(tensor) << _SLOT_BITS for tensor in tensors])


def slots_of(addresses: Sequence[int]) -> list[int]:
    """The storages that addresses point into: equal numbers are equal storages."""
    return [address >> _SLOT_BITS for address in addresses]


def memory_in(slots: Sequence[int]) -> list[Memory]:
    """The memory of storages."""
    return list(map(_references.get, slots))


def residues_of(addresses: Sequence[int]) -> tuple[tuple[int, ...] | int, bool]:
    """Bytes of each address beyond a multiple of `BINDING_ALIGNMENT`; 0 if there are none.

    Also whether any tensor begins beyond the first of these multiples in its storage.
    """
    anywhere = reduce(or_, addresses, 0) & _OFFSET_MASK
    residues = anywhere % BINDING_ALIGNMENT and tuple([a % BINDING_ALIGNMENT for a in addresses])
    return residues, anywhere >= BINDING_ALIGNMENT


def buffers_in(memory: Sequence[Memory], addresses: Sequence[int]) -> list[AnyBuffer | None]:
    """The memory of storages, each from the last multiple of `BINDING_ALIGNMENT` before an address
    on; without addresses, from the start.
    """
    buffers = [None if m is None else m.buffer for m in memory]
    if not addresses:
        return list(buffers)
    starts = [(a & _OFFSET_MASK) // BINDING_ALIGNMENT * BINDING_ALIGNMENT for a in addresses]
    return [
        buffer.slice(start) if start and buffer is not None else buffer
        for buffer, start in zip(buffers, starts, strict=True)
    ]


def tensor_at(
    memory: Memory,
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    index: int,
) -> Tensor:
    """A tensor at an address in memory, whose storage may be gone."""
    storage = None if memory is None else memory()
    if storage is None:
        buffer = None if memory is None else memory.buffer
        storage = new_storage(0 if buffer is None else buffer.nbytes, index, buffer)
    return new_tensor(storage, dtype, sizes, strides, offset_at(address) // dtype.itemsize, index)


def offset_at(address: int) -> int:
    """Bytes from the start of the storage to an address."""
    return address & _OFFSET_MASK


def replace(tensor: Tensor, nbytes: int, buffer: GpuBuffer) -> bool:
    """Gives the storage of ``tensor`` other memory, if all of it is the tensor's; whether it is.

    Args:
        nbytes: of the tensor's elements.

    Raises:
        DeviceLostError: the tensor was lost with its device, so that its other uses raise, too.
    """
    settle()  # what waits needs the memory that there was
    address = data_ptr(tensor)
    reference = _references.get(address >> _SLOT_BITS)
    if reference is None or address & _OFFSET_MASK or not is_dense(tensor):
        return False
    storage = reference()
    if storage is None or _whole_nbytes(storage) != nbytes:
        return False
    if isinstance(lost := reference.buffer, LostBuffer):
        raise lost.error()
    reference.buffer = buffer
    return True


def fill(tensor: Tensor, buffer: GpuBuffer) -> None:
    """Gives the storage of ``tensor``, which was made for this, its memory."""
    reference = _reference_of(tensor.untyped_storage())
    if reference is not None:
        reference.buffer = buffer


def nbytes_of(storage: torch.UntypedStorage) -> int:
    """The size of a ``webgpu`` storage, as `resize` left it."""
    reference = _reference_of(storage)
    if reference is None or reference.nbytes is None:
        return _whole_nbytes(storage)
    return reference.nbytes


def _reference_of(storage: torch.UntypedStorage) -> _StorageReference | None:
    try:
        return _references.get(storage.data_ptr() >> _SLOT_BITS)
    except RuntimeError:  # of a tensor subclass, or fake: it has no address
        return None


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Gives a storage another size, at most the one that it was made with.

    At 0 its memory goes back to the pool, and comes anew, with undefined contents, with the next
    size: so does FSDP with parameters that are gathered for a while. PyTorch's C++ code keeps the
    first size, which nothing in Python can change. Between two other sizes the contents stay.

    Raises:
        NotImplementedError: ``nbytes`` is more than the storage was made with.
        OutOfMemoryError: there is not enough GPU memory.
        DeviceError: the device was lost.
    """
    settle()
    whole, before = _whole_nbytes(storage), nbytes_of(storage)
    if nbytes > whole:
        raise NotImplementedError(
            f"a webgpu storage that was made with {whole} bytes cannot get {nbytes}: use "
            "tensor.resize_(), which gives the tensor another storage where it has to grow"
        )
    reference = _reference_of(storage)
    if reference is None or nbytes == before:
        return
    buffer = reference.buffer
    if nbytes == 0:
        if not isinstance(buffer, LostBuffer):
            message = (
                f"the memory of a webgpu tensor was given back by resize_(0) of its storage of "
                f"{whole} bytes; resize it before the tensor is used"
            )
            reference.buffer = EmptiedBuffer(lambda: DeviceError(message))
    elif isinstance(buffer, EmptiedBuffer):
        reference.buffer = devices.get_device(devices.index_of(storage.device)).allocate(whole)
    elif isinstance(buffer, LostBuffer):
        raise buffer.error()
    reference.nbytes = None if nbytes == whole else nbytes


def lose(device: Device, index: int) -> None:
    """Makes every use of the tensors on a lost device raise DeviceLostError; frees their memory."""
    error = device.lost_error(f"a tensor was on {devices.NAME}:{index}")
    lost = LostBuffer(partial(DeviceLostError, str(error), error.cause))
    for reference in list(_references.values()):
        if reference.buffer.is_of(device.pool):
            reference.buffer = lost


def storage_address(address: int) -> int:
    """The start of the storage that an address points into; 0 for an empty tensor's."""
    return address & ~_OFFSET_MASK


def starts_of(addresses: Sequence[int]) -> list[int]:
    """The starts of the storages that addresses point into, without those of empty tensors."""
    return [address & ~_OFFSET_MASK for address in addresses if address > _OFFSET_MASK]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, each once."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def fills_storage(tensor: Tensor) -> bool:
    """Whether a tensor's elements are all of its storage, each once."""
    if tensor.storage_offset() != 0:
        return False
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes == _whole_nbytes(tensor.untyped_storage()) and is_dense(tensor)
