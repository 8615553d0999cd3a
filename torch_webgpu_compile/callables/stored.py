"""`StoredGraph`: a compiled graph as data, which other processes and machines make ready again.

A `CompiledGraph` is pickled as one. Unpickling can run anything, so what holds such graphs has to
be as safe as the program. What is checked here is what happens by accident: the data has a
checksum, the plan is verified as plans from a cache folder are, as far as it can be without a
graph, and the GPU has to have what the plan was made for.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ..bundle.targets import lacks_for
from ..errors import AdapterError, WebGPUCompileError
from ..options import CompileOptions, resolve
from ..plan import serialize
from ..plan.cache import sources_digest
from ..plan.cache_folder import digest_of
from ..plan.model import HostStep, Plan
from ..plan.verify import verify_plan
from ..runtime.device import Device, device_for
from ..target import Target
from ..tensors import devices
from ..tuning.machines import measured_target
from .signature import Signature

if TYPE_CHECKING:
    from ..captured import Phase
    from ..compiler import Loops
    from .compiled_graph import CompiledGraph, PlanAt, PlansAt

_OPTIONS = ("fusion", "deterministic", "fill_empty", "checked")
"""Of `CompileOptions`: what decides about code."""


@dataclass(frozen=True)
class Origin:
    """What a graph was compiled for.

    Attributes:
        target, options: as for `compile_graph`.
        index: the device of its tensors, None for CPU tensors.
        is_exact: whether the plan is for this target alone, and not for all that have what it has.
    """

    target: Target
    options: CompileOptions
    index: int | None
    is_exact: bool = False

    def reduced(self, graph: CompiledGraph) -> tuple[Any, ...]:
        """What `CompiledGraph` is pickled as."""
        plan_at = graph.plan_at if graph.plan.plans is None else graph.plans_at
        return StoredGraph.of(graph.signature, plan_at, self).reduced()


@dataclass(frozen=True)
class StoredGraph:
    """A compiled graph as data.

    Attributes:
        package: `sources_digest` of the package that compiled it.
        target, index, is_exact: of its `Origin`.
        options: by name, those that decide about code.
        content: the plan, the rest of its signature, and the lowered graphs of which plans for
            other sizes are made.
        digest: of the content.
    """

    package: str
    target: Target
    index: int | None
    is_exact: bool
    options: Mapping[str, Any]
    content: bytes
    digest: str

    @staticmethod
    def of(signature: Signature, plan_at: PlanAt | PlansAt | None, origin: Origin) -> StoredGraph:
        """Stores what `HostGraph` or `DeviceGraph` takes.

        Args:
            plan_at: `Loops`, or some by the names of nested plans.

        Raises:
            ValueError: the plan has a value that stored plans have no form for.
        """
        from ..compiler import Loops

        plans_at = {signature.plan.name: plan_at} if callable(plan_at) else plan_at or {}
        graphs = {name: loops.graph for name, loops in plans_at.items() if isinstance(loops, Loops)}
        plan = serialize.dumps(signature.plan)
        later = {name: pickle.dumps(graph) for name, graph in graphs.items()}
        content = pickle.dumps((plan, signature.phase, signature.static_inputs, later))
        return StoredGraph(
            sources_digest(),
            origin.target,
            origin.index,
            origin.is_exact,
            {name: getattr(origin.options, name) for name in _OPTIONS},
            content,
            digest_of([content]),
        )

    def reduced(self, _: object = None) -> tuple[Any, ...]:
        """What the graph is pickled as: unpickled, it is ready on the GPU that is there."""
        return StoredGraph.open, (self,)

    def open(self) -> CompiledGraph:
        """Makes the graph ready on the GPU that is here.

        Raises:
            WebGPUCompileError: another version of this package compiled it, or it is damaged.
            AdapterError: there is no GPU, or it lacks something that the plan was made for.
        """
        signature, later = self._checked()
        device, plan = self.device, signature.plan
        target = measured_target(device.target, self._resolved)
        lacks = lacks_for(plan, self.target, target)
        if self.is_exact and target.text != self.target.text:
            lacks.append("its driver and its measured rates")
        if lacks:
            raise AdapterError(
                f"this was compiled for {self.target.name} and needs {', '.join(lacks)}, but the "
                f"GPU here is {device.target.name}: compile it for this one (python -m "
                'torch_webgpu_compile doctor --save-target FILE, options={"target": FILE})'
            )
        plans_at = {name: self._plan_at(graph, target) for name, graph in later.items()}
        plan_at = plans_at if plan.plans is not None else plans_at.get(plan.name)
        if self.index is None:
            from .host_graph import HostGraph

            made: CompiledGraph = HostGraph(signature, device, plan_at)
        else:
            from .device_graph import DeviceGraph

            made = DeviceGraph(signature, device, self.index, plan_at)
        made.reduced = self.reduced
        return made

    def _checked(self) -> tuple[Signature, dict[str, bytes]]:
        if self.package != sources_digest():
            raise WebGPUCompileError(
                "this was compiled by another version of torch-webgpu-compile; compile it again"
            )
        if digest_of([self.content]) != self.digest:
            raise WebGPUCompileError("this is damaged: it has another checksum; compile it again")
        phase: Phase
        text, phase, static_inputs, later = pickle.loads(self.content)
        plan = serialize.loads(text)
        try:
            _verify(plan)
        except ValueError as error:
            raise WebGPUCompileError(f"{error}; import what defines it before this") from error
        return Signature(plan, phase, static_inputs), later

    @property
    def _resolved(self) -> CompileOptions:
        return replace(resolve(None, None), **self.options)

    @property
    def device(self) -> Device:
        """The GPU that is here."""
        return device_for(self._resolved) if self.index is None else devices.get_device(self.index)

    def _plan_at(self, graph: bytes, target: Target) -> PlanAt:
        """Makes plans for other sizes, of a lowered graph that is read for the first of them."""

        @cache
        def loops() -> Loops:
            from ..compiler import Loops

            return Loops(pickle.loads(graph), target, self._resolved)

        return lambda sizes: loops()(sizes)


def _verify(plan: Plan) -> None:
    from ..host_steps.host_calls import find_overload

    verify_plan(plan)
    for part in plan.all_plans:
        for step in part.steps:
            if isinstance(step, HostStep):
                find_overload(step.target)


class AbsentGraph:
    """A graph compiled for a GPU that need not be here: made ready by its first call.

    Raises (when called): what `StoredGraph.open` and `CompiledGraph` do.
    """

    _boxed_call = True

    def __init__(self, stored: StoredGraph) -> None:
        self._stored = stored

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        return self.opened(arguments)

    @cached_property
    def opened(self) -> CompiledGraph:
        """The graph on the GPU that is here."""
        return self._stored.open()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._stored.reduced()
