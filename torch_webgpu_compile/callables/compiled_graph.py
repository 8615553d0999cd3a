"""`CompiledGraph`: a plan as a function of torch tensors, wherever these are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from ..counters import counters
from ..plan.lru_cache import LruCache
from ..plan.model import Plan
from ..runtime.device import Device
from ..runtime.executor import Executor
from .device_calls import DeviceCalls
from .host_calls import HostCalls
from .signature import Signature, SignatureVariant

PlanAt = Callable[[Mapping[str, int]], Plan]
"""The plan of a graph with symbols at these sizes."""

_MOST_SPECIALIZED = 8


class CompiledGraph(ABC):
    """A function of a list of arguments, which it empties, to a list of results.

    It may be called from several threads.

    A plan with symbols does not run at all sizes. A kernel reaches a buffer beyond the adapter's
    binding limit through several bindings, whose number has to be known when it is compiled: with
    symbols it has one for each buffer whose size it does not know. Some drivers end long loops, and
    numbers may pass the 32 bits that hold them for most sizes. Then a plan without symbols is made
    of the same graph, and is kept for the sizes that were used last.

    Args:
        signature: the plan, and what its inputs and outputs are to PyTorch.
        device: where it runs.
        plan_at: makes the plans for sizes at which this one cannot run.

    Raises (when called):
        DeviceError: the GPU refused; the subclass and the message say what.
    """

    _boxed_call = True
    device: Device
    executor: Executor

    def __init__(self, signature: Signature, device: Device, plan_at: PlanAt | None = None) -> None:
        self.signature = signature
        self.plan = signature.plan
        self.plan_at = plan_at
        self._specialized: LruCache[Hashable, CompiledGraph] = LruCache(_MOST_SPECIALIZED)
        self._specializing = threading.Lock()
        self._open(device)

    def _open(self, device: Device) -> None:
        """Makes the plan ready on a device: at first, and after the loss of another one."""
        on_device = DeviceCalls(self.plan, device)
        self.executor = Executor(self.plan, device, HostCalls(self.plan), device_call=on_device)
        self._specialized.clear()
        self.device = device
        device.add_reclaimable(self)

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

    @abstractmethod
    def run_seeded(self, values: list[Any]) -> list[Any]:
        """The call on a list of arguments, the last of which are the seeds if there are any."""

    @abstractmethod
    def reclaim(self) -> None:
        """Lets go of what later calls can make again: part of `Device.empty_cache`."""

    @abstractmethod
    def _with(self, signature: Signature) -> CompiledGraph:
        """A graph with another plan, on the same device."""

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
                before = self.device.kernels_compiled
                plan = self.plan_at(variant.sizes)
                found = self._with(replace(self.signature, plan=plan))
                counters.add(kernels_compiled=self.device.kernels_compiled - before)
                self._specialized.keep(key, found)
            return found
