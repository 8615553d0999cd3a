"""Copies: between the host and the device, between devices, and between layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..counters import counters
from ..symbolic.sizes import storage_span
from ..torch_private import _neg_view
from . import devices, storages
from .storages import data_ptr, fills_storage, is_dense, offset_at

# A kernel's conversions between these are the host's, bit for bit but for NaN.
_CONVERTED = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FEW = 1 << 18  # values; fewer are converted on the host in less time than a kernel takes to start
_PART = 16 << 20  # bytes; one staging buffer


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor is on a ``webgpu`` device."""
    return tensor.device.type == devices.NAME


def to_host(tensor: Tensor, through_kernels: bool = True) -> Tensor:
    """A CPU tensor with the values and, where they are dense, the strides of a webgpu tensor.

    ``through_kernels``: let the GPU gather values that lie far apart, rather than download what
    lies between them.
    """
    sizes, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
    count = tensor.numel()
    if count == 0 or tensor.is_contiguous():
        result = torch.empty_strided(sizes, strides, dtype=dtype)
        _read(tensor, count * dtype.itemsize, result)
    else:
        length = storage_span(sizes, strides)
        if through_kernels and length > 2 * count:
            return to_host(tensor.clone(memory_format=torch.contiguous_format))
        flat = torch.empty(length, dtype=dtype)
        _read(tensor, length * dtype.itemsize, flat)
        result = flat.as_strided(sizes, strides)
    if tensor.is_conj():
        result = result.conj()
    return _neg_view(result) if tensor.is_neg() else result


def _read(source: Tensor, nbytes: int, target: Tensor) -> None:
    """Downloads the memory of a tensor, from its first element on, to that of a CPU tensor."""
    if nbytes:
        start = offset_at(data_ptr(source))
        device = devices.get_device(source.get_device())
        device.download_many([(storages.buffer_of(source), start, nbytes, data_ptr(target))])
        counters.bytes_downloaded += nbytes  # without a call in between: no lock


def start_to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Submits the download of contiguous tensors of one ``webgpu`` device, without waiting.

    Returns:
        What waits for it, once, and gives CPU tensors with the values of now. It raises what
        `to_host` would.

    Raises:
        DeviceError: pending commands were refused, or the device is lost.
    """
    device = devices.get_device(tensors[0].get_device())
    results = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    ranges = [
        (storages.buffer_of(tensor), offset_at(data_ptr(tensor)), result.nbytes)
        for tensor, result in zip(tensors, results, strict=True)
    ]
    download = device.start_download(ranges)
    counters.add(bytes_downloaded=sum([nbytes for _, _, nbytes in ranges]))

    def finish() -> list[Tensor]:
        download.finish([result.data_ptr() for result in results])
        return results

    return finish


def to_device(tensor: Tensor, index: int) -> Tensor:
    """A tensor on ``webgpu:index`` with the values of a contiguous CPU tensor."""
    nbytes = tensor.nbytes
    device = devices.get_device(index)
    buffer = device.allocate(nbytes)
    device.upload(buffer, (data_ptr(tensor), nbytes))
    counters.bytes_uploaded += nbytes  # without a call in between: no lock
    storage = storages.new_storage(nbytes, index, buffer)
    strides = storages.given_strides(tensor.shape, tensor.stride())
    return storages.new_tensor(storage, tensor.dtype, tensor.shape, strides, 0, index)


def from_host(source: Tensor, target: Tensor) -> None:
    """Writes the values of a CPU tensor, converted and broadcast, into a webgpu tensor."""
    if target.numel() == 0:
        return
    if not (_same(source, target) and target.is_contiguous()):
        if _is_converted_here(source, target):
            _upload_converted(source.detach(), target)
            return
        value = source.detach().to(target.dtype).expand(target.shape)
        if not is_dense(target) or target.is_conj() or target.is_neg():
            temporary = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            from_host(value, temporary)
            target.copy_(temporary)
            return
        if value.stride() != target.stride() or value.is_conj() or value.is_neg():
            value = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            value.copy_(source.detach())
        source = value
    address = data_ptr(target)
    nbytes = source.nbytes
    device = devices.get_device(target.get_device())
    device.upload(storages.buffer_of(target), (data_ptr(source), nbytes), offset_at(address))
    counters.add(bytes_uploaded=nbytes)


def _is_converted_here(source: Tensor, target: Tensor) -> bool:
    """Whether values are uploaded as they are, and converted on the device."""
    return (
        source.dtype is not target.dtype
        and {source.dtype, target.dtype} <= _CONVERTED
        and source.numel() >= _FEW
        and source.shape == target.shape
        and source.stride() == target.stride()
        and not (target.is_neg() or source.is_neg())
        and is_dense(target)
    )


def _upload_converted(source: Tensor, target: Tensor) -> None:
    """Uploads a dense tensor in parts: the device has room for one of them beside the result.

    Converting on the host would write all values to memory once more before they are uploaded.
    """
    count = target.numel()
    values = source.as_strided((count,), (1,))
    converted = target.as_strided((count,), (1,))
    step = _PART // source.element_size()
    for start in range(0, count, step):
        converted[start : start + step].copy_(values[start : start + step].to(target.device))


def copy_between_devices(source: Tensor, target: Tensor) -> None:
    """Copies, converts and broadcasts; at most one of the two is not on a ``webgpu`` device."""
    if not is_here(target):
        if target.device.type != "cpu" or not _download(source, target):
            target.copy_(to_host(source))
    elif not is_here(source):
        from_host(source if source.is_cpu else source.cpu(), target)
    else:
        from_host(to_host(source), target)


def _download(source: Tensor, target: Tensor) -> bool:
    """Fills a CPU tensor directly if it has the layout of ``source``; whether it has."""
    if not _same(source, target) or not storages.is_dense(target):
        return False
    _read(source, target.nbytes, target)
    return True


def copy_bytes(source: Tensor, target: Tensor) -> bool:
    """Copies ``source`` to ``target`` within a device if a copy of bytes does; whether it did.

    It does for equal dtypes and layouts. Otherwise nothing is done, and a kernel has to convert.
    """
    if not _same(source, target):
        return False
    if target.numel() == 0 or data_ptr(source) == data_ptr(target):
        return True
    if not is_dense(target):
        return False
    return _copy_bytes(source, target, target.numel() * target.element_size())


def _same(source: Tensor, target: Tensor) -> bool:
    """Whether both have the same dtype and layout, so that a copy of bytes is a copy of values."""
    return (
        source.dtype is target.dtype
        and source.shape == target.shape
        and source.stride() == target.stride()
        and source.is_conj() == target.is_conj()
        and source.is_neg() == target.is_neg()
    )


def _copy_bytes(source: Tensor, target: Tensor, nbytes: int) -> bool:
    """Copies bytes from buffer to buffer, if WebGPU can: whole words, between two buffers."""
    start, end = offset_at(data_ptr(source)), offset_at(data_ptr(target))
    read, written = storages.buffer_of(source), storages.buffer_of(target)
    if nbytes % 4 and fills_storage(target):
        nbytes += -nbytes % 4  # the storage's memory is a multiple of 16 bytes
    if nbytes % 4 or start % 4 or end % 4 or read.serial == written.serial:
        return False
    devices.get_device(target.get_device()).copy(read, start, written, end, nbytes)
    return True


def write_on_host(target: Tensor, value: Tensor) -> None:
    """Writes CPU values into a part of a storage without any kernel, by way of the host."""
    storage = target.untyped_storage()
    nbytes, index = storage.nbytes(), target.get_device()
    data = torch.empty(nbytes, dtype=torch.uint8)
    device = devices.get_device(index)
    buffer = storages.buffer_of(target)
    device.download_many([(buffer, 0, nbytes, data.data_ptr())])
    itemsize = target.element_size()
    usable = data[: nbytes // itemsize * itemsize].view(target.dtype)
    usable.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(value)
    device.upload(buffer, (data.data_ptr(), nbytes))
