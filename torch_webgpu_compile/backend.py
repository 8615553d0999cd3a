"""Dynamo's entry point: ``torch.compile(..., backend="webgpu")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import is_tensor

from . import debug, fallbacks, patches, progress
from .bundle.targets import target_of
from .callables import saved_on_gpu
from .callables.artifact import Storing, is_kept
from .callables.compiled_graph import CompiledGraph, PlanAt, PlansAt
from .callables.device_graph import DeviceGraph
from .callables.host_graph import HostGraph
from .callables.signature import Signature
from .callables.stored import AbsentGraph, Origin, StoredGraph
from .capture.graph import aot, dynamo
from .capture.graph.wrappers import BoxedFunction
from .captured import CapturedGraph, Phase
from .compiler import (
    Compilation,
    compile_graph,
    host_numbers,
    loops_of,
    native_operators,
)
from .dynamo_plans import DynamoPlans
from .errors import DeviceError, DeviceLostError
from .options import CompileOptions, resolve
from .plan.model import Kernel, Plan
from .plan.verify import verify_plan
from .runtime.composed import ComposedExecutor
from .runtime.device import Device, device_for, opened_devices, reopened
from .runtime.executor import KnownCall
from .stages import Stage
from .tensors import devices
from .tensors.determinism import switched
from .torch_private import compiled_autograd, tree_leaves, versions
from .tuning.autotune import tuner
from .tuning.machines import measured_target


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


def _host_graph(
    signature: Signature, device: Device, plan_at: PlanAt | PlansAt | None
) -> HostGraph:
    try:
        return HostGraph(signature, device, plan_at)
    except DeviceLostError:
        return HostGraph(signature, reopened(device), plan_at)


Observer = Callable[[Compilation, Device, Callable[[], KnownCall | None]], None]
"""Told of a graph that was compiled, for which device, and where to find a call of it."""


@contextmanager
def _no_pipelines() -> Iterator[Callable[[Kernel], None]]:
    """`PipelineCache.ahead` for a GPU that is not here."""
    yield lambda kernel: None


def compile_module(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    observer: Observer | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; ``observer`` is told of every graph that comes of it."""
    index = device_index(module, example_inputs)
    options = switched(options)  # Dynamo's guards keep it so, and AOTAutograd until the backward
    if options.target is None:
        with Stage("device"):
            device = _device_at(index, options)
        target, counts = device.target, lambda: device.pipelines.progress
        tune = tuner(device, options.cache) if options.autotune else None
        ahead = device.pipelines.ahead
    else:
        target, counts, tune = target_of(options.target), lambda: (0, 0), None
        ahead = _no_pipelines
    origin = Origin(measured_target(target, options), options, index, is_kept())

    def showing(what: str) -> AbstractContextManager[None]:
        return progress.shown(what, counts, options.progress)

    nested: dict[str, PlanAt] = {}  # of graphs that are divided, by the names of their parts
    around: list[CompiledGraph | AbsentGraph] = []  # these graphs

    def compile_captured(captured: CapturedGraph, phase: Phase) -> BoxedFunction:
        # A backward graph may be compiled long after the others.
        with showing(captured.name), ahead() as start:
            state = compilation(captured, phase, start)
            static = frozenset() if index is not None else captured.static_inputs
            compiled = callable_of(Signature(state.plan, state.phase, static), loops_of(state))
        known.offer(compiled, state, static)
        if observer is not None:
            opened = compiled.opened
            observer(state, opened.device, opened.known_call)
        return compiled

    def plan(captured: CapturedGraph, phase: Phase) -> Plan:
        with showing(captured.name), ahead() as start:
            state = compilation(captured, phase, start)
        loops = loops_of(state)
        if loops is not None:
            nested[state.plan.name] = loops
        if observer is not None:
            here = _device_at(index, options)
            observer(state, here, lambda: _known_call(state.plan.name, around))
        return state.plan

    def composed(plan: Plan, phase: Phase, static: frozenset[int]) -> BoxedFunction:
        verify_plan(plan)
        show = debug.Shower(plan.name, options)
        show("plan", partial(debug.plan_text, plan))
        show.write_kernels(plan)
        signature = Signature(plan, phase, frozenset() if index is not None else static)
        names = {part.name for part in plan.all_plans}
        plan_at = {name: loops for name, loops in nested.items() if name in names}
        around.append(callable_of(signature, plan_at))
        return around[-1]

    def compilation(
        captured: CapturedGraph, phase: Phase, start: Callable[[Kernel], None]
    ) -> Compilation:
        given = captured, phase, target, options
        return compile_graph(*given, observer is None, tune, on_kernel=start)

    def callable_of(
        signature: Signature, plan_at: PlanAt | PlansAt | None
    ) -> CompiledGraph | AbsentGraph:
        if options.target is not None:
            return AbsentGraph(StoredGraph.of(signature, plan_at, origin))
        compiled: CompiledGraph
        with Stage("executor"):
            if index is None:
                compiled = _host_graph(signature, device, plan_at)
            else:
                compiled = DeviceGraph(signature, device, index, plan_at)
        compiled.reduced = origin.reduced
        return compiled

    name = getattr(module, "_backend_id", None)  # there if PyTorch wants the graph stored
    is_looked_for = name is None and observer is None and options.target is None
    with showing("a graph"):
        known = DynamoPlans(module, example_inputs, origin.target, options, is_looked_for)
        found = known.find(module)
        if found is not None:
            graphs = [callable_of(signature, None) for signature in found.signatures]
            return aot.assembled(module, graphs, found.function)
        return aot.capture(
            *(module, example_inputs, compile_captured, native_operators()),
            aot.Hooks(
                on_host=fallbacks.on_fallback(options.fallback),
                storing=None if name is None else Storing(name),
                on_traced=known.keep,
                on_gradients=known.keep_gradients,
                plan=plan,
                composed=composed,
                host_numbers=host_numbers,
                fill=saved_on_gpu.fill,
                shows=options.shows if observer is None else lambda name: True,
            ),
        )


def _filled(call: Callable[..., Any]) -> Callable[..., Any]:
    """A graph of compiled autograd, whose arguments are what forward graphs saved."""

    def filled(*arguments: Any) -> Any:
        saved_on_gpu.fill(tree_leaves(arguments))
        return call(*arguments)

    return filled


def _device_at(index: int | None, options: CompileOptions) -> Device:
    return device_for(options) if index is None else devices.get_device(index)


def _known_call(name: str, graphs: Sequence[CompiledGraph | AbsentGraph]) -> KnownCall | None:
    """An earlier call of a nested plan."""
    executors = [graph.opened.executor for graph in graphs]
    found = (e.known_call(name) for e in executors if isinstance(e, ComposedExecutor))
    return next((call for call in found if call is not None), None)


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
    compiled = compile_module(module, example_inputs, resolve(mode, options))
    return _filled(compiled) if compiled_autograd.in_compiled_autograd_region else compiled


def _open_default() -> None:
    """Opens the GPU that CPU tensors are computed on, unless a GPU is open already."""
    if not opened_devices():
        device_for(resolve(None, None))


versions.check(torch.__version__, patches.warn)
patches.install(patches.When.BACKEND)
dynamo.keep_device_guard()
dynamo.on_first_compile(_open_default)
