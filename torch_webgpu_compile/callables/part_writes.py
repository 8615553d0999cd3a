"""Writes into a part of a storage that touch nothing but that part: by copies, or by a kernel.

The kernel is that of ``as_strided_scatter``, whose result takes the place of what it changes.
Sizes, strides and the offset are parameters, so that a few kernels do for all. Elements are moved
as integers of their size; those of less than 4 bytes share words with others, which the kernel
leaves as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from ..captured import CapturedGraph, Phase
from ..compiler import compile_graph
from ..counters import counters
from ..errors import UnsupportedOp
from ..options import resolve
from ..runtime.executor import Executor
from ..runtime.launcher import Launcher
from ..symbolic.sizes import storage_span
from ..target import BINDING_ALIGNMENT, binding_start
from ..tensors import devices
from ..tensors.copying import is_here, to_host, write_on_host
from ..tensors.storages import buffer_of, data_ptr, offset_at
from ..torch_private import ConstantSource, DimDynamic, FakeTensor, FakeTensorMode, ShapeEnv

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_INT = (1 << 31) - 1  # what a kernel's parameter holds
_MAX_LAUNCHERS = 1 << 12
_MAX_RUNS = 64  # a part with more runs of contiguous words than this is written by the kernel


def write_part(target: Tensor, value: Tensor) -> None:
    """Writes ``value`` (same shape, dtype and device) into ``target``, a part of its storage."""
    if not is_here(target):
        target.copy_(to_host(value))
        return
    if not _copy_runs(value, target) and not write(target, value):
        write_on_host(target, to_host(value))


def _copy_runs(value: Tensor, target: Tensor) -> bool:
    """Writes a part that consists of a few runs of contiguous words with copies of bytes."""
    sizes, strides, itemsize = target.shape, target.stride(), target.element_size()
    length, dim = 1, len(sizes)
    while dim and (sizes[dim - 1] == 1 or strides[dim - 1] == length):
        length *= sizes[dim - 1]
        dim -= 1
    words = length * itemsize % 4 == 0 and offset_at(data_ptr(target)) % 4 == 0
    words = words and all(s * itemsize % 4 == 0 for s in strides[:dim])
    if not words or prod(sizes[:dim]) > _MAX_RUNS:
        return False
    value = value.contiguous()
    device = devices.get_device(target.get_device())
    read, written = buffer_of(value), buffer_of(target)
    start, end = offset_at(data_ptr(value)), offset_at(data_ptr(target))
    if start % 4:
        return False
    nbytes = length * itemsize
    for run, place in enumerate(product(*map(range, sizes[:dim]))):
        position = sum(map(mul, place, strides))
        device.copy(read, start + run * nbytes, written, end + position * itemsize, nbytes)
    return True


def write(target: Tensor, value: Tensor) -> bool:
    """Writes ``value`` (same shape and dtype, other memory) into ``target``; whether it could."""
    if target.element_size() == 16:  # complex128
        return write(torch.view_as_real(target), torch.view_as_real(value))
    limit = devices.get_device(target.get_device()).target.max_binding_nbytes
    if (
        storage_span(target.shape, target.stride()) * target.element_size()
        > limit - BINDING_ALIGNMENT
    ):
        return _write_halves(target, value)
    sizes, strides, value = _runs(target, value)
    itemsize = target.element_size()
    start = offset_at(data_ptr(target))
    binding = binding_start(start)
    launch = _launcher(target.get_device(), itemsize, sizes, strides, (start - binding) // itemsize)
    if launch is None:
        return False
    memory = buffer_of(target)
    launch([memory.slice(binding) if binding else memory, buffer_of(value)])
    counters.add_call(launch.dispatch_count, 0, 0)
    return True


def forget() -> None:
    """Drops all compiled kernels, which are compiled again when they are needed."""
    _launcher.cache_clear()
    _kernel.cache_clear()


def _write_halves(target: Tensor, value: Tensor) -> bool:
    """A write into more memory than can be bound at once."""
    reach = [
        stride * (size - 1) for size, stride in zip(target.shape, target.stride(), strict=True)
    ]
    dim = reach.index(max(reach))
    half = target.shape[dim] // 2
    return all(
        write(target.narrow(dim, start, length), value.narrow(dim, start, length))
        for start, length in ((0, half), (half, target.shape[dim] - half))
    )


def _runs(target: Tensor, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Sizes and the target's strides of the dimensions to loop over, and the value in that order.

    None of these dimensions has one element or can be merged with another one. The last is
    innermost in the value, which is contiguous.
    """
    dims = [
        (value.stride(k), k)
        for k, size in enumerate(target.shape)
        if size > 1 and target.stride(k) > 0
    ]
    order = [k for _, k in sorted(dims, reverse=True)]
    if len(order) < value.dim():  # dimensions of size 1, and repetitions of one element
        for k in sorted(set(range(value.dim())) - set(order), reverse=True):
            value = value.select(k, 0)
        kept = sorted(order)
        value = value.permute([kept.index(k) for k in order])
    else:
        value = value.permute(order)
    if not value.is_contiguous() or offset_at(data_ptr(value)):
        value = value.clone(memory_format=torch.contiguous_format)
    sizes: list[int] = []
    strides: list[int] = []
    for k in order:
        size, stride = target.shape[k], target.stride(k)
        if sizes and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    return tuple(sizes), tuple(strides), value


@lru_cache(_MAX_LAUNCHERS)
def _launcher(
    index: int, itemsize: int, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Launcher | None:
    """Writes a value, the second of two buffers, into the first; None where no kernel does."""
    length = offset + storage_span(sizes, strides)
    if itemsize not in _UNITS or length > _MAX_INT:
        return None
    try:
        executor, symbols = _kernel(index, itemsize, len(sizes), bool(strides) and strides[-1] == 1)
    except UnsupportedOp:
        return None
    return executor.launcher(dict(zip(symbols, (length, offset, *sizes, *strides), strict=False)))


@cache
def _kernel(
    index: int, itemsize: int, rank: int, unit_stride: bool
) -> tuple[Executor, tuple[str, ...]]:
    """A compiled write; the names of its length, offset, sizes and strides."""
    device = devices.get_device(index)
    captured, symbols = _captured(_UNITS[itemsize], rank, unit_stride)
    options = resolve(options={"fallback": "error"})
    plan = compile_graph(captured, Phase("inference"), device.target, options).plan
    return Executor(plan, device, max_programs=_MAX_LAUNCHERS), symbols


class _Symbols:
    """Symbolic integers without any assumption but that they are at least 2."""

    def __init__(self) -> None:
        self.environment = ShapeEnv(duck_shape=False)
        self.names: list[str] = []

    def make(self, name: str) -> torch.SymInt:
        hint = 1000 + len(self.names)  # any number that is not special
        source = ConstantSource(name)
        symbol = self.environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.names.append(str(symbol))
        made = self.environment.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made


def _captured(
    dtype: torch.dtype, rank: int, unit_stride: bool
) -> tuple[CapturedGraph, tuple[str, ...]]:
    """``as_strided_scatter`` into all memory up to the last element, and its symbols."""
    symbols = _Symbols()
    length, offset = symbols.make("length"), symbols.make("offset")
    sizes = [symbols.make(f"size{k}") for k in range(rank)]
    strides: list[Any] = [symbols.make(f"stride{k}") for k in range(rank)]
    if unit_stride:
        strides[-1] = 1
    mode, cpu = FakeTensorMode(shape_env=symbols.environment), torch.device("cpu")

    def fake(shape: Sequence[Any]) -> FakeTensor:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), cpu)

    graph = Graph()
    memory, value = graph.placeholder("memory"), graph.placeholder("value")
    memory.meta["val"], value.meta["val"] = fake([length]), fake(sizes)

    def scalar(symbol: Any) -> Any:
        if isinstance(symbol, int):
            return symbol
        node = graph.placeholder(f"scalar_{symbol}")
        node.meta["val"] = symbol
        return node

    layout = [scalar(size) for size in sizes], [scalar(stride) for stride in strides]
    scatter = torch.ops.aten.as_strided_scatter.default
    result = graph.call_function(scatter, (memory, value, *layout, scalar(offset)))
    written = graph.call_function(torch.ops.aten.copy_.default, (memory, result))
    result.meta["val"] = written.meta["val"] = fake([length])
    graph.output(())
    return CapturedGraph("write", GraphModule({}, graph), frozenset()), tuple(symbols.names)
