"""`Demands`: what a plan with symbols asks of a GPU at some sizes.

A plan with symbols does not run at all of them. A kernel reaches a buffer beyond the adapter's
binding limit through several bindings, whose number has to be known when it is compiled: with
symbols it has one for each buffer whose size it does not know. Some drivers end long loops, and
numbers may pass the 32 bits that hold them for most sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..symbolic.sizes import INT32, evaluate
from ..target import Target
from .model import Dispatch, Plan, bound_nbytes


@dataclass(frozen=True, slots=True)
class Demands:
    """What a plan asks of a GPU.

    Attributes:
        bound_nbytes: the most that one binding has to reach of a buffer whose size is a symbol.
        iterations: the most that an invocation's loops make (`Dispatch.iterations`).
        is_wide: whether a number that kernels take for a 32-bit one is not (`Dispatch.narrow`).
    """

    bound_nbytes: int
    iterations: int
    is_wide: bool

    def are_met(self, target: Target) -> bool:
        """Whether the plan can run there; else another one is needed, for just these sizes."""
        most = target.max_loop_iterations or self.iterations
        is_small = self.bound_nbytes <= target.max_binding_nbytes and self.iterations <= most
        return is_small and not self.is_wide


class SymbolicDemands:
    """What a plan asks at any sizes."""

    def __init__(self, plan: Plan) -> None:
        self._buffers = plan.buffers
        dispatches = [step for step in plan.steps if isinstance(step, Dispatch)]
        self._bindings = frozenset(
            binding
            for step in dispatches
            for binding in step.bindings
            if not plan.buffers[binding.buffer].nbytes.is_constant
        )
        self._loops = frozenset(step.iterations for step in dispatches)
        self._narrow = frozenset(number for step in dispatches for number in step.narrow)

    def at(self, sizes: Mapping[str, int]) -> Demands:
        """The demands at these sizes."""
        buffers = self._buffers
        reached = (bound_nbytes(where, buffers[where.buffer], sizes) for where in self._bindings)
        return Demands(
            max(reached, default=0),
            max((evaluate(loops, sizes) for loops in self._loops), default=0),
            any(evaluate(number, sizes) not in INT32 for number in self._narrow),
        )
