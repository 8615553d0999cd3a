"""Writes into a part of a storage with a kernel that touches nothing but that part.

The kernel is the second half of ``as_strided_scatter``, which copies a buffer and then updates the
copy: here the update is made in the buffer itself. Elements are moved as integers of their size.
Those of less than 4 bytes share words with others, which the kernel leaves as they are.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule

from .. import devices
from ..captured import CapturedGraph, Phase
from ..compilation import compile_graph
from ..counters import counters
from ..errors import UnsupportedOp
from ..options import resolve
from ..plan.model import Dispatch, Plan
from ..runtime.executor import Executor
from ..runtime.launcher import Launcher
from ..storages import ALIGNMENT, buffer_of, data_ptr, offset_at, span

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_LAUNCHERS = 1 << 12

_lock = threading.Lock()
_launchers: dict[tuple[Any, ...], tuple[Launcher, int] | None] = {}


def write(target: Tensor, value: Tensor) -> bool:
    """Writes ``value`` (same shape and dtype, other memory) into ``target``; whether it could."""
    itemsize = target.element_size()
    start = offset_at(data_ptr(target))
    binding = start // ALIGNMENT * ALIGNMENT
    offset = (start - binding) // itemsize
    index = target.get_device()
    key = (index, itemsize, target.shape, target.stride(), value.stride(), offset)
    known = _launchers.get(key)
    if known is None:
        if key in _launchers:
            return False
        known = _prepare(key)
        if known is None:
            return False
    launcher, first = known
    source, memory = buffer_of(value), buffer_of(target)
    if offset_at(data_ptr(value)):
        return False
    bound = memory.slice(binding) if binding else memory
    launcher([source, bound] if first == 0 else [bound, source])
    counters.add_call(launcher.dispatch_count, 0, 0)
    return True


def _prepare(key: tuple[Any, ...]) -> tuple[Launcher, int] | None:
    """A launcher, and the position of the value among its buffers; None without a kernel."""
    with _lock:
        if key not in _launchers:
            if len(_launchers) >= _MAX_LAUNCHERS:
                _launchers.clear()
            try:
                _launchers[key] = _compile(*key)
            except UnsupportedOp:
                _launchers[key] = None
        return _launchers[key]


def _compile(
    index: int,
    itemsize: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    offset: int,
) -> tuple[Launcher, int] | None:
    unit = _UNITS.get(itemsize)
    if unit is None:
        return None
    device = devices.get_device(index)
    captured = _captured(unit, sizes, strides, value_strides, offset)
    options = resolve(options={"fallback": "error"})
    plan = compile_graph(captured, Phase("inference"), device.target, options).plan
    written, value = _without_copy(plan)
    before = device.kernels_compiled
    launcher = Executor(written, device).launcher()
    counters.add(kernels_compiled=device.kernels_compiled - before)
    return launcher, launcher.names.index(value)


def _captured(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    offset: int,
) -> CapturedGraph:
    """``as_strided_scatter`` of all memory up to the last element."""
    mode, cpu = FakeTensorMode(), torch.device("cpu")

    def fake(shape: tuple[int, ...], stride: tuple[int, ...]) -> FakeTensor:
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, meta, cpu)

    graph = Graph()
    memory, value = graph.placeholder("memory"), graph.placeholder("value")
    memory.meta["val"] = fake((offset + span(sizes, strides),), (1,))
    value.meta["val"] = fake(sizes, value_strides)
    scatter = torch.ops.aten.as_strided_scatter.default
    arguments = (memory, value, list(sizes), list(strides), offset)
    result = graph.call_function(scatter, arguments)
    result.meta["val"] = fake((offset + span(sizes, strides),), (1,))
    graph.output((result,))
    return CapturedGraph("write", GraphModule({}, graph), frozenset())


def _without_copy(plan: Plan) -> tuple[Plan, str]:
    """The plan without its first step, the copy of its first input; the name of the other input."""
    memory, value = (entry.buffer for entry in plan.inputs)
    assert memory is not None
    assert value is not None
    copy, *rest = plan.steps
    uses = [
        any(b.buffer == memory for b in step.bindings)
        for step in plan.steps
        if isinstance(step, Dispatch)
    ]
    assert isinstance(copy, Dispatch)
    assert uses == [True] + [False] * len(rest), "a scatter starts with a copy"
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name != memory}
    steps = tuple(
        replace(step, kernel=step.kernel - 1) if isinstance(step, Dispatch) else step
        for step in rest
    )
    assert copy.kernel == 0
    inputs = plan.inputs[1:]
    return replace(
        plan, kernels=plan.kernels[1:], buffers=buffers, steps=steps, inputs=inputs
    ), value
