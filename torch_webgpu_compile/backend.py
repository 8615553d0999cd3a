"""Dynamo's entry point: ``torch.compile(..., backend="webgpu")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import is_tensor

from . import fallbacks, patches
from .callables import artifact, saved_on_gpu
from .callables.compiled_graph import CompiledGraph
from .callables.device_graph import DeviceGraph
from .callables.host_graph import HostGraph
from .callables.signature import Signature
from .callables.static_tensors import StaticTensors
from .capture.graph import aot, dynamo
from .captured import CapturedGraph, Phase
from .compiler import (
    Compilation,
    compile_graph,
    host_numbers,
    loops_of,
    native_operators,
)
from .counters import counters
from .device import devices
from .device.determinism import switched
from .errors import DeviceError, DeviceLostError, OutOfMemoryError
from .inspection import progress
from .options import CompileOptions, resolve
from .runtime.device import Device, device_for, opened_devices, reopened
from .torch_private import tree_leaves, versions
from .tuning.autotune import tuner


def device_index(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> int | None:
    """The ``webgpu`` device that a Dynamo graph works on; None for a graph of CPU tensors.

    Raises:
        DeviceError: a tensor is on another kind of device, or tensors are on several GPUs.
    """
    values = [*example_inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    found = {leaf.device for value in values for leaf in tree_leaves(value) if is_tensor(leaf)}
    strange = [str(device) for device in found if device.type not in ("cpu", devices.NAME)]
    places = {devices.index_of(device) for device in found if device.type == devices.NAME}
    if strange or len(places) > 1:
        shown = ", ".join(strange or [f"{devices.NAME}:{place}" for place in sorted(places)])
        raise DeviceError(
            f"backend='webgpu' was given tensors on {shown}; it takes CPU tensors and those of one "
            "webgpu device: move the model and its inputs with .cpu() or .to('webgpu')"
        )
    return next(iter(places), None)


def _place_of(module: torch.fx.GraphModule) -> int | None:
    """The ``webgpu`` device of the tensors of a captured graph; None if they are CPU tensors."""
    for node in module.graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if is_tensor(leaf) and leaf.device.type == devices.NAME:
                return devices.index_of(leaf.device)
    return None


def _host_graph(state: Compilation, device: Device) -> HostGraph:
    signature = Signature(state.plan, state.phase, state.captured.static_inputs)
    loops = loops_of(state)
    try:
        return HostGraph(signature, device, loops)
    except DeviceLostError:
        return HostGraph(signature, reopened(device), loops)


Observer = Callable[[Compilation, CompiledGraph], None]


def compile_module(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    observer: Observer | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; ``observer`` is told of every graph that comes of it."""
    index = device_index(module, example_inputs)
    options = switched(options)  # Dynamo's guards keep it so, and AOTAutograd until the backward
    device = device_for(options) if index is None else devices.get_device(index)

    tune = tuner(device, options.cache) if options.autotune else None

    def showing(what: str) -> AbstractContextManager[None]:
        return progress.shown(what, lambda: device.compile_progress, options.progress)

    def compile_captured(captured: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        with showing(captured.name):  # a backward graph may be compiled long after the others
            return compile_shown(captured, phase)

    def compile_shown(captured: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        cached = observer is None
        place = index if index is not None else _place_of(captured.module)
        try:
            state = compile_graph(captured, phase, device.target, options, cached, tune)
        except OutOfMemoryError as error:
            # Dynamo would wrap it in an error of its own: calls raise it instead.
            return _raising(str(error))
        before = device.kernels_compiled
        compiled: CompiledGraph
        if place is None:
            compiled = _host_graph(state, device)
        else:
            signature = Signature(state.plan, state.phase)
            compiled = DeviceGraph(signature, device, place, loops_of(state))
        counters.add(kernels_compiled=device.kernels_compiled - before)
        if observer is not None:
            observer(state, compiled)
        return compiled

    def gpu() -> StaticTensors | None:
        """The device tensors for the parts of a divided graph of CPU tensors.

        None where PyTorch does not know the device: plain ``webgpu`` tensors are between parts.
        """
        if index is not None:
            return None
        current = devices.current_index()
        is_known = devices.get_device(current) is device
        return StaticTensors(current) if is_known else None

    def keep(compiled: aot.BoxedFunction) -> None:
        name = getattr(module, "_backend_id", None)  # there if PyTorch wants it kept
        if name is not None:
            artifact.keep(name, compiled, options)

    with showing("a graph"):
        return aot.capture(
            *(module, example_inputs, compile_captured, native_operators()),
            aot.Hooks(
                on_host=fallbacks.on_fallback(options.fallback),
                on_whole=keep,
                gpu=gpu,
                host_numbers=host_numbers,
                fill=saved_on_gpu.fill,
                shows=options.shows if observer is None else lambda name: True,
            ),
        )


def _raising(text: str) -> aot.BoxedFunction:
    """A graph that no GPU memory is large enough for."""

    def call(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        raise OutOfMemoryError(text)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def webgpu(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of ``torch.compile(..., backend="webgpu")``.

    Args:
        module: Dynamo's graph.
        example_inputs: its arguments, as fake tensors and sizes.
        mode, options: as given to ``torch.compile``; see `options`.

    Raises:
        OptionError: an unknown mode or option, or an invalid value.
        AdapterError: there is no usable GPU.
        UnsupportedOp: see `compile_graph`.
    """
    return compile_module(module, example_inputs, resolve(mode, options))


def _open_default() -> None:
    """Opens the GPU that CPU tensors are computed on, unless a GPU is open already."""
    if not opened_devices():
        device_for(resolve(None, None))


versions.check(torch.__version__, patches.warn)
patches.install(patches.When.BACKEND)
dynamo.keep_device_guard()
dynamo.on_first_compile(_open_default)
