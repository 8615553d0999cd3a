"""Graphs that are compiled again for sizes at which their plans with symbols cannot run.

A kernel reaches a buffer beyond the adapter's binding limit through several bindings, whose number
has to be known when it is compiled. A plan with symbols has one for each buffer whose size it does
not know; for sizes at which that is too little, a plan without symbols is made of the same graph.
So it is for sizes at which a kernel's loops are longer than the driver lets them be, or at which
numbers pass the 32 bits that hold them for most sizes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ..counters import counters
from ..plan.model import Plan
from ..runtime.device import Device

PlanAt = Callable[[Mapping[str, int]], Plan]
"""The plan of a graph with symbols at these sizes."""

_Graph = TypeVar("_Graph")


class Specialized(Generic[_Graph]):
    """Graphs by sizes. Safe to call from several threads, which compile one after the other.

    Args:
        plan_at: compiles a plan.
        device: what they run on.
    """

    MOST = 8

    def __init__(self, plan_at: PlanAt, device: Device) -> None:
        self._plan_at = plan_at
        self._device = device
        self._known: OrderedDict[tuple[tuple[str, int], ...], _Graph] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, sizes: Mapping[str, int], make: Callable[[Plan], _Graph]) -> _Graph:
        """The graph for these sizes, made if need be; the `MOST` that were used last are kept.

        Raises:
            WebGPUCompileError: as compilation does.
        """
        key = tuple(sizes.items())
        with self._lock:
            found = self._known.get(key)
            if found is None:
                before = self._device.kernels_compiled
                found = make(self._plan_at(sizes))
                counters.add(kernels_compiled=self._device.kernels_compiled - before)
            self._known[key] = found
            self._known.move_to_end(key)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
            return found
