"""Plans by the graphs of Dynamo that they come of: who finds them traces and lowers nothing.

One plan is all that comes of a graph that Dynamo calls without AOTAutograd's wrappers
(`GraphCapture.direct`). Two, and an `AutogradFunction` around them, come of a graph with gradients.
Where plans that compute nothing on the host are stored, an entry of the cache folder says which
ones are a graph's; what is found is verified against the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from .callables.signature import Signature
from .capture.graph import aot, autograd_function
from .capture.graph.autograd_function import AutogradFunction
from .capture.graph.dynamo_text import dynamo_text
from .captured import Phase
from .compiler import Compilation, of_every_graph
from .counters import counters
from .errors import VerificationError
from .lowering.captured_text import verify_plan_between
from .options import CompileOptions
from .plan import cache as plan_cache
from .plan.cache_folder import digest_of
from .plan.model import HostStep, Plan, PlanInput, PlanOutput
from .target import Target

_PHASE = Phase("inference")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """What is stored of a plan: its key, and the rest of its `Signature`."""

    plan_key: str
    phase: Phase
    static: frozenset[int]

    def signature(self, plan: Plan, title: str) -> Signature:
        return Signature(plan.renamed(f"{title}_{self.phase.name}"), self.phase, self.static)


@dataclass(frozen=True)
class Found:
    """What comes of a graph, but the kernels: see `aot.assembled`."""

    signatures: tuple[Signature, ...]
    function: AutogradFunction | None = None


class DynamoPlans:
    """The plans of a graph of Dynamo's, if they are stored; else it is traced, and they are kept.

    Args:
        module, inputs: the graph, and fake tensors and sizes in the order of its arguments.
        target, options: as for `compile_graph`.
        is_looked_for: whether a plan compiled before will do.
    """

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        target: Target,
        options: CompileOptions,
        is_looked_for: bool,
    ) -> None:
        text = None
        if is_looked_for and not options.runs_every_stage and options.cache is not None:
            text = dynamo_text(module, inputs)
        self._has_gradients = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
        )
        if text is not None and self._has_gradients:
            settings = autograd_function.settings()
            text = None if settings is None else f"{text}\n{settings}"
        self._key = ""
        if text is not None:
            text += f"\n{options.deterministic} {options.fill_empty} {options.fallback}"
            self._key = digest_of((*of_every_graph(target, options), text.encode()))
        self._inputs = inputs
        self._folder = options.cache or ""
        self._offered: list[tuple[object, _Entry, Plan]] = []

    def find(self, module: GraphModule) -> Found | None:
        """What is stored; arguments as those that it was made with."""
        if not self._key:
            return None
        found = self._find_gradients() if self._has_gradients else None
        found = found or self._find_direct(module)
        if found is not None:
            count = len(found.signatures)
            counters.add(plan_cache_hits=count, plans_compiled=count)
        return found

    def _find_direct(self, module: GraphModule) -> Found | None:
        known = plan_cache.load_way(self._key, "dynamo", self._folder)
        if known is None:
            return None
        plan_key, *static = known.decode().split()
        verify = partial(verify_plan_between, self._inputs, {}, aot.results_of(module))
        plan = plan_cache.load_by_way(plan_key, self._folder, verify)
        if plan is None:
            return None
        entry = _Entry(plan_key, _PHASE, frozenset(map(int, static)))
        return Found((entry.signature(plan, aot.next_title()),))

    def _find_gradients(self) -> Found | None:
        content = plan_cache.load_object(self._key, "autograd", self._folder)
        if content is None:
            return None
        function, forward, backward = content
        plan = self._load(forward, partial(_verify_forward, self._inputs, forward.phase))
        if plan is None:
            return None
        other = self._load(backward, partial(_verify_backward, plan, function))
        if other is None:
            return None
        title = aot.next_title()
        signatures = forward.signature(plan, title), backward.signature(other, title)
        return Found(signatures, function)

    def _load(self, entry: _Entry, verify: plan_cache.Verify) -> Plan | None:
        return plan_cache.load_by_way(entry.plan_key, self._folder, verify)

    def offer(self, compiled: object, state: Compilation, static: frozenset[int]) -> None:
        """Something is compiled of the graph that may be all that comes of it, or half of that.

        Args:
            state: of its plan.
            static: positions of parameters and buffers.
        """
        if self._key and state.is_known:
            entry = _Entry(state.key, state.phase, static)
            self._offered.append((compiled, entry, state.plan))

    def keep(self, direct: object) -> None:
        """Keeps that a compiled graph is all that came of the graph; None if none is."""
        for compiled, entry, _ in self._offered:
            if compiled is direct and entry.phase == _PHASE:
                way = " ".join((entry.plan_key, *map(str, sorted(entry.static))))
                plan_cache.store_way(self._key, "dynamo", way.encode(), self._folder)
        if not self._has_gradients:
            self._offered.clear()

    def keep_gradients(self, function: AutogradFunction, forward: object, backward: object) -> None:
        """Keeps that two compiled graphs and what is around them are all that came of it."""
        known = {id(compiled): (entry, plan) for compiled, entry, plan in self._offered}
        self._offered.clear()
        if id(forward) not in known or id(backward) not in known:
            return
        (entry, plan), (other, other_plan) = known[id(forward)], known[id(backward)]
        try:
            _verify_forward(self._inputs, entry.phase, plan)
            _verify_backward(plan, function, other_plan)
        except VerificationError as error:
            _log.info("a graph with gradients is not stored: %s", error)
        else:
            content = function, entry, other
            plan_cache.store_object(self._key, "autograd", content, self._folder)


def _verify_forward(inputs: Sequence[Any], phase: Phase, plan: Plan) -> None:
    """Raises VerificationError: a plan does not take these arguments, and its seeds."""
    count = len(inputs)
    if len(plan.inputs) - count != bool(phase.seeds):
        raise VerificationError(f"plan {plan.name}: inputs are not those of the graph")
    verify_plan_between(inputs, {}, (), replace(plan, inputs=plan.inputs[:count]))


def _verify_backward(forward: Plan, function: AutogradFunction, plan: Plan) -> None:
    """Raises VerificationError: a plan does not take what another one saves for it."""
    returned = [output for output in forward.outputs if output.mutates is None]
    saved = returned[function.result_count :]

    def takes(entry: PlanInput, output: PlanOutput) -> bool:
        if entry.buffer is None or output.buffer is None:
            return True
        own, made = plan.buffers[entry.buffer], forward.buffers[output.buffer]
        return own.dtype is made.dtype and own.sizes == output.sizes

    calls = any(isinstance(step, HostStep) for part in plan.all_plans for step in part.steps)
    if calls or len(plan.inputs) < len(saved) or not all(map(takes, plan.inputs, saved)):
        raise VerificationError(f"plan {plan.name}: inputs are not what {forward.name} saves")
