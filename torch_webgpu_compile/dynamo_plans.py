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
from .plan.model import Plan, PlanInput, PlanOutput
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
        content = plan_cache.load_object(self._key, "dynamo", self._folder) if self._key else None
        if content is None:
            return None
        function, entries = content
        title, found = aot.next_title(), list[Plan]()
        for entry in entries:
            verify = self._verify_of(entry, function, found, aot.results_of(module))
            plan = plan_cache.load_by_way(entry.plan_key, self._folder, verify)
            if plan is None:
                return None
            found.append(plan)
        counters.add(plan_cache_hits=len(found), plans_compiled=len(found))
        pairs = zip(entries, found, strict=True)
        return Found(tuple(entry.signature(plan, title) for entry, plan in pairs), function)

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
        entry = next((entry for known, entry, _ in self._offered if known is direct), None)
        if entry is not None and entry.phase == _PHASE:
            self._store(None, entry)
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
            self._verify_of(entry, function, [], ())(plan)
            self._verify_of(other, function, [plan], ())(other_plan)
        except VerificationError as error:
            _log.info("a graph with gradients is not stored: %s", error)
        else:
            self._store(function, entry, other)

    def _store(self, function: AutogradFunction | None, *entries: _Entry) -> None:
        plan_cache.store_object(self._key, "dynamo", (function, entries), self._folder)

    def _verify_of(
        self,
        entry: _Entry,
        function: AutogradFunction | None,
        before: Sequence[Plan],
        results: Sequence[Any],
    ) -> plan_cache.Verify:
        """What raises VerificationError for a plan that is not an entry's.

        Args:
            before: a backward graph's forward plan.
            results: what Dynamo knows of those of an inference graph.
        """
        if function is None:
            return partial(verify_plan_between, self._inputs, {}, results)
        if before:
            return partial(_verify_backward, before[0], function)
        return partial(_verify_forward, self._inputs, entry.phase)


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

    if plan.calls_host or len(plan.inputs) < len(saved) or not all(map(takes, plan.inputs, saved)):
        raise VerificationError(f"plan {plan.name}: inputs are not what {forward.name} saves")
