"""`CompiledGraph`: a plan as a function of torch tensors, wherever these are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from ..host_steps.plan_host import PlanHost
from ..host_steps.step_calls import StepCalls
from ..plan.lru_cache import LruCache
from ..plan.model import Plan, view_at
from ..runtime.buffers import GpuBuffer
from ..runtime.composed import ComposedExecutor, GpuTensor
from ..runtime.device import Device
from ..runtime.executor import Executor, KnownCall
from .signature import Signature, SignatureVariant

PlanAt = Callable[[Mapping[str, int]], Plan]
"""The plan of a graph with symbols at these sizes."""

PlansAt = Mapping[str, PlanAt]
"""The same for nested plans, by their names."""

_MOST_SPECIALIZED = 8


class CompiledGraph(ABC):
    """A function of a list of arguments, which it empties, to a list of results.

    It may be called from several threads.

    A plan with symbols does not run at all sizes (see `plan.demands`). Where it does not, a plan
    without symbols is made of the same graph, and is kept for the sizes that were used last.

    It is pickled by ``reduced``, which who compiled it sets, as a `StoredGraph`.

    Args:
        signature: the plan, and what its inputs and outputs are to PyTorch.
        device: where it runs.
        plan_at: makes the plans for sizes at which this one cannot run; of a composed plan, what
            makes those of nested plans, by their names.

    Raises (when called):
        DeviceError: the GPU refused; the subclass and the message say what.
    """

    _boxed_call = True
    device: Device
    reduced: Callable[[CompiledGraph], tuple[Any, ...]] | None = None

    def __init__(
        self, signature: Signature, device: Device, plan_at: PlanAt | PlansAt | None = None
    ) -> None:
        self.signature = signature
        self.plan = signature.plan
        self.plan_at = plan_at if callable(plan_at) else None
        self.plans_at: PlansAt = {} if plan_at is None or callable(plan_at) else plan_at
        self._specialized: LruCache[Hashable, CompiledGraph] = LruCache(_MOST_SPECIALIZED)
        self._specializing = threading.Lock()
        self._open(device)

    def _open(self, device: Device) -> None:
        """Makes the plan ready on a device: at first, and after the loss of another one."""
        self.executor: Executor | ComposedExecutor
        if self.plan.plans is not None:
            host = PlanHost(device, self._seed_bytes)
            self.executor = ComposedExecutor(self.plan, device, host, self.plans_at)
        else:
            self.executor = Executor(self.plan, device, StepCalls(self.plan, device))
        self._specialized.clear()
        self.device = device
        device.add_reclaimable(self)

    @property
    def opened(self) -> CompiledGraph:
        """Itself: see `AbsentGraph`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reduced is None:
            raise TypeError(f"the plan {self.plan.name} is stored with the graph that it is of")
        return self.reduced(self)

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values = arguments[:]
        arguments.clear()
        return self.run(values)

    def run(self, values: list[Any]) -> list[Any]:
        """A call; ``values`` are its arguments, a list that the call may change."""
        phase = self.signature.phase
        if phase.seeds:
            values.append(self._draw_seeds(phase.seeds))
        if phase.lazy:
            return self.signature.call(self.run_seeded, values)
        return self.run_seeded(values)

    @abstractmethod
    def _draw_seeds(self, count: int) -> Any:
        """Rows of random seeds: the last argument."""

    def _seed_bytes(self, count: int) -> bytes:
        """Rows of random seeds for a step of a composed plan."""
        seeds = self._draw_seeds(count)
        return seeds if isinstance(seeds, bytes) else seeds.numpy().tobytes()

    @abstractmethod
    def run_seeded(self, values: list[Any]) -> list[Any]:
        """The call on a list of arguments, the last of which are the seeds if there are any."""

    def known_call(self) -> KnownCall | None:
        """An earlier call; None before any call of a plan with symbolic sizes, or composed."""
        sizes = self.signature.some_sizes()
        if sizes is None or not isinstance(self.executor, Executor):
            return None
        return self.executor.known_call(sizes, self.given_up)

    @property
    def given_up(self) -> Collection[str] | None:
        """The inputs that the caller has no use for; None where calls are not in sections."""
        return None

    @abstractmethod
    def reclaim(self) -> None:
        """Lets go of what later calls can make again: part of `Device.empty_cache`."""

    @abstractmethod
    def _with(self, signature: Signature) -> CompiledGraph:
        """A graph with another plan, on the same device."""

    def layouts(self, variant: SignatureVariant) -> Sequence[tuple[int, str, GpuTensor]]:
        """The tensors among the arguments of a composed plan: (position, name, without memory)."""
        if variant.resolved is None:
            nothing, buffers = self.device.allocate(0), self.plan.buffers
            variant.resolved = [
                (k, name, GpuTensor(nothing, layout.dtype, *view_at(layout, variant.sizes)))
                for k, name in enumerate(entry.buffer for entry in self.plan.inputs)
                if name is not None and (layout := buffers[name])
            ]
        found: Sequence[tuple[int, str, GpuTensor]] = variant.resolved
        return found

    def run_composed(
        self, variant: SignatureVariant, arguments: Sequence[Any]
    ) -> tuple[SignatureVariant, dict[str, GpuBuffer]]:
        """Runs a composed plan: what its results are, and in which memory."""
        assert isinstance(self.executor, ComposedExecutor)
        return self.signature.composed(variant, arguments, self.executor(arguments))

    def _specialize(self, variant: SignatureVariant) -> CompiledGraph:
        """The graph for sizes at which this one's plan cannot run, made if need be.

        Raises:
            WebGPUCompileError: as compilation does.
        """
        assert self.plan_at is not None
        key = tuple(variant.sizes.items())
        with self._specializing:  # threads compile one after the other
            found = self._specialized.find(key)
            if found is None:
                plan = self.plan_at(variant.sizes)
                signature = self.signature
                found = self._with(Signature(plan, signature.phase, signature.static_inputs))
                self._specialized.keep(key, found)
            return found
