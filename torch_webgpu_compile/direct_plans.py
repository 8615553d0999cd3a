"""Plans by the graphs of Dynamo that they come of: who finds one traces and lowers nothing.

A plan is all that comes of a graph that Dynamo calls without AOTAutograd's wrappers
(`GraphCapture.direct`) and that computes nothing on the host. Where such a plan is stored, an entry
of the cache folder says which one is a graph's; what is found is verified against the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from .callables.signature import Signature
from .capture.graph import aot
from .capture.graph.dynamo_text import dynamo_text
from .captured import Phase
from .compiler import Compilation, of_every_graph
from .counters import counters
from .lowering.captured_text import verify_plan_between
from .options import CompileOptions
from .plan import cache as plan_cache
from .plan.cache_folder import digest_of
from .target import Target

_PHASE = Phase("inference")


class DirectPlan:
    """The plan of a graph of Dynamo's, if it is stored; else the graph is traced, and it is kept.

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
        self._key = ""
        if text is not None:
            text += f"\n{options.deterministic} {options.fill_empty} {options.fallback}"
            self._key = digest_of((*of_every_graph(target, options), text.encode()))
        self._folder = options.cache or ""
        self._offered: list[tuple[object, str, frozenset[int]]] = []

    def find(self, module: GraphModule, inputs: Sequence[Any]) -> Signature | None:
        """The stored plan, and what it takes; arguments as those that it was made with."""
        known = plan_cache.load_way(self._key, "dynamo", self._folder) if self._key else None
        if known is None:
            return None
        plan_key, *static = known.decode().split()
        verify = partial(verify_plan_between, inputs, {}, aot.results_of(module))
        found = plan_cache.load_by_way(plan_key, self._folder, verify)
        if found is None:
            return None
        counters.add(plan_cache_hits=1, plans_compiled=1)
        plan = found.renamed(f"{aot.next_title()}_{_PHASE.name}")
        return Signature(plan, _PHASE, frozenset(map(int, static)))

    def offer(self, compiled: object, state: Compilation, static: frozenset[int]) -> None:
        """Something is compiled of the graph that may be all that comes of it.

        Args:
            state: of its plan.
            static: positions of parameters and buffers.
        """
        if self._key and state.is_known and state.phase == _PHASE:
            self._offered.append((compiled, state.key, static))

    def keep(self, direct: object) -> None:
        """Keeps that a compiled graph is all that came of the graph; None if none is."""
        for compiled, plan_key, static in self._offered:
            if compiled is direct:
                way = " ".join((plan_key, *map(str, sorted(static))))
                plan_cache.store_way(self._key, "dynamo", way.encode(), self._folder)
        self._offered.clear()
