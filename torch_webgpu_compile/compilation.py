"""The compiler: the ordered list of passes from a graph to a plan.

fx        capture gives it: a functional ATen graph
ir        lowering: a `LoopGraph`
schedule  fusion: a `Schedule` of kernel groups
preparation  the plan of what is computed once for many calls, if anything is
wgsl      code generation: kernel calls
plan      planning: a `Plan`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from . import debug, fallbacks, machines, plan_cache
from .autotune import Tune, tilings_for
from .captured import CapturedGraph, Phase
from .codegen import generate
from .counters import counters
from .errors import too_large
from .ir.at_sizes import at_sizes, has_symbols
from .ir.graph import LoopGraph, Schedule
from .ir.nodes import outputs_of
from .ir.text import format_graph, format_schedule
from .ir.verify import verify_loop_graph
from .ir.verify_schedule import verify_schedule
from .lowering import attention as _attention  # noqa: F401  registers its lowering
from .lowering import random as _random  # noqa: F401  registers its lowering
from .lowering.families import register_all
from .lowering.graph import lower
from .lowering.registry import LOWERINGS
from .options import CompileOptions
from .plan.model import Plan
from .plan.verify import verify_plan
from .planner import build_plan
from .scheduler import schedule
from .scheduler.fusion import Fuser
from .scheduler.in_place import share_memory
from .scheduler.layouts import choose_layouts
from .scheduler.order import order_groups
from .scheduler.split import split_long_contractions, split_reductions
from .scheduler.units import drop_unit_symbols
from .signature import Signature
from .target import Target


@dataclass
class Compilation:
    """The state of one graph's compilation: what the passes so far gave, by name.

    Attributes:
        results: what the passes so far gave, by name.
        fallbacks: operators that run on the host.
        depends_on_determinism: whether the result is another one with the other value of
            ``options.deterministic`` or ``options.fill_empty``.
    """

    captured: CapturedGraph
    phase: Phase
    target: Target
    options: CompileOptions
    tune: Tune | None = None
    results: dict[str, Any] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    depends_on_determinism: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that ran."""
        return tuple(step for step in PASSES if step.name in self.results)

    @property
    def graph(self) -> LoopGraph:
        found = self.results["ir"]
        assert isinstance(found, LoopGraph)
        return found

    @property
    def schedule(self) -> Schedule:
        found = self.results["schedule"]
        assert isinstance(found, Schedule)
        return found

    @property
    def plan(self) -> Plan:
        found = self.results["plan"]
        assert isinstance(found, Plan)
        return found


@dataclass(frozen=True)
class Pass:
    """A step of compilation.

    Attributes:
        name: also the stage's name in ``TORCH_WEBGPU_DEBUG``.
        run: makes the result from the state.
        verify: raises VerificationError when the result breaks a rule.
        text: the result for a person to read.
    """

    name: str
    run: Callable[[Compilation], Any]
    verify: Callable[[Any], None]
    text: Callable[[Any], str]


def _lower(state: Compilation) -> LoopGraph:
    report = fallbacks.on_fallback(state.options.fallback)

    def on_fallback(op: str, dtype: str, source: str, cause: str) -> None:
        report(op, dtype, source, cause)
        state.fallbacks.append(op)

    def on_deterministic() -> None:
        state.depends_on_determinism = True

    # A training step changes the parameters: what it computes from them serves one call only.
    unchanging = state.captured.static_inputs if state.phase.name == "inference" else frozenset()
    return lower(
        state.captured,
        state.target,
        on_fallback,
        unchanging,
        deterministic=state.options.deterministic,
        fill_empty=state.options.fill_empty,
        on_deterministic=on_deterministic,
    )


def _schedule(state: Compilation) -> Schedule:
    if state.options.fusion:
        return schedule(state.graph, state.target)
    return _schedule_unfused(state.graph, state.target)


def _schedule_unfused(graph: LoopGraph, target: Target) -> Schedule:
    """A kernel group per node."""
    laid_out = choose_layouts(drop_unit_symbols(graph), target)
    divided = split_reductions(split_long_contractions(laid_out, target), target)
    fuser = Fuser(divided, target)
    for node in divided.nodes:
        fuser._open(node)
    return order_groups(share_memory(divided, fuser.groups), fuser.groups)


def _generate_calls(state: Compilation, made: Schedule) -> tuple[Any, ...]:
    if state.tune is not None and not state.options.deterministic:
        tilings = state.tune(made)
    else:
        tilings = tilings_for(state.target, state.options)
    return generate(made, state.target, tilings)


def _prepare(state: Compilation) -> Plan | None:
    preparation = state.schedule.preparation
    if preparation is None:
        return None
    return build_plan(preparation, _generate_calls(state, preparation))


def _verify_preparation(plan: Plan | None) -> None:
    if plan is not None:
        verify_plan(plan)


def _preparation_text(plan: Plan | None) -> str:
    if plan is None:
        return "nothing is prepared"
    return "\n\n".join([debug.plan_text(plan), *map(debug.kernel_text, plan.kernels)])


def _generate(state: Compilation) -> tuple[Any, ...]:
    return _generate_calls(state, state.schedule)


def _plan(state: Compilation) -> Plan:
    return build_plan(state.schedule, state.results["wgsl"], state.results["preparation"])


def _nothing_to_verify(_: Any) -> None:
    """Kernels are verified by the WGSL compiler."""


PASSES: tuple[Pass, ...] = (
    Pass("ir", _lower, verify_loop_graph, format_graph),
    Pass("schedule", _schedule, verify_schedule, format_schedule),
    Pass("preparation", _prepare, _verify_preparation, _preparation_text),
    Pass("wgsl", _generate, _nothing_to_verify, debug.calls_text),
    Pass("plan", _plan, verify_plan, debug.plan_text),
)


def compile_graph(
    captured: CapturedGraph,
    phase: Phase,
    target: Target,
    options: CompileOptions,
    use_cache: bool = True,
    tune: Tune | None = None,
) -> Compilation:
    """Runs every pass, or takes the plan from the cache after lowering; needs no GPU.

    Args:
        captured, phase: what to compile.
        target, options: for what, and how.
        use_cache: whether a plan compiled before will do.
        tune: measures kernels on the GPU; without it they are chosen by what is known.

    Raises:
        UnsupportedOp: an operator can run neither on the GPU nor on the host, or not at all under
            ``fallback="error"``.
        OutOfMemoryError: no buffer of the GPU can hold a result.
        VerificationError: a pass gave an inconsistent result.
    """
    target = machines.measured_target(target, options)
    state = Compilation(captured, phase, target, options, tune)
    show = debug.Shower(captured.name, options)
    show("fx", lambda: debug.fx_text(captured))
    _run(PASSES, state, show, use_cache)
    return state


def _run(passes: Sequence[Pass], state: Compilation, show: debug.Shower, use_cache: bool) -> None:
    key = ""
    for step in passes:
        result = step.run(state)
        step.verify(result)
        state.results[step.name] = result
        show(step.name, partial(step.text, result))
        if step.name == "ir":
            _refuse_large_results(result, state.target)
        if step.name == "ir" and use_cache and not show.needs_every_stage:
            key = plan_cache.key_of(state.graph, state.target, state.options)
            if _take_cached(state, key):
                break
    show.write_kernels(state.plan)
    if key and "schedule" in state.results:
        plan_cache.store(key, state.plan, state.options.cache)
    counters.add(plans_compiled=1)


def _refuse_large_results(graph: LoopGraph, target: Target) -> None:
    """Raises OutOfMemoryError before anything is made of a graph that cannot run."""
    for node in graph.nodes:
        for name in outputs_of(node):
            nbytes = graph.buffers[name].nbytes
            known = nbytes.constant if name in graph.returned and nbytes.is_constant else 0
            if known > target.max_buffer_nbytes:
                # What only lays out a result is of no operator.
                named = (origin.op for origin in node.origins if origin.op != "output")
                raise too_large(next(named, graph.name), known, target.max_buffer_nbytes)


@dataclass(frozen=True)
class Loops:
    """A lowered graph with size symbols: what is left of a compilation that can be compiled again.

    Attributes:
        graph: as lowering gave it.
        target, options: as for `compile_graph`.
    """

    graph: LoopGraph
    target: Target
    options: CompileOptions

    def __call__(self, sizes: Mapping[str, int]) -> Plan:
        """The plan for these sizes, which are those of all symbols.

        Raises:
            OutOfMemoryError: no buffer of the GPU can hold a result.
            VerificationError: a pass gave an inconsistent result.
        """
        name = f"{self.graph.name}_{'_'.join(map(str, sizes.values()))[:100]}"
        nothing = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        captured = CapturedGraph(name, nothing, frozenset())
        state = Compilation(captured, Phase("inference"), self.target, self.options)

        def sized(_: Compilation) -> LoopGraph:
            return replace(at_sizes(self.graph, sizes), name=name)

        first, *others = PASSES
        show = debug.Shower(name, self.options)
        _run([replace(first, run=sized), *others], state, show, use_cache=True)
        return state.plan


def loops_of(state: Compilation) -> Loops | None:
    """What plans for other sizes are made of; None where there are no other sizes."""
    graph = state.graph
    return Loops(graph, state.target, state.options) if has_symbols(graph) else None


def _take_cached(state: Compilation, key: str) -> bool:
    """Takes the plan from the cache if it is there: the passes in between are not needed then."""
    found = plan_cache.load(key, state.graph, state.options.cache)
    if found is None:
        return False
    state.results["plan"] = found
    counters.add(plan_cache_hits=1)
    return True


def signature_of(state: Compilation) -> Signature:
    """What the plan's inputs and outputs are to PyTorch."""
    return Signature(
        state.plan,
        state.captured.static_inputs,
        state.phase.saved,
        state.phase.forwarded,
        state.phase.counted,
        state.phase.seeds,
        backward=state.phase.name == "backward",
        complex_inputs=state.phase.complex_inputs,
        complex_outputs=state.phase.complex_outputs,
        lazy=state.phase.lazy,
    )


def device_signature_of(state: Compilation) -> Signature:
    """`signature_of` for tensors on the device, where every argument is bound where it is."""
    phase = state.phase
    return Signature(
        state.plan,
        forwarded=phase.forwarded,
        counted=phase.counted,
        seeds=phase.seeds,
        complex_inputs=phase.complex_inputs,
        complex_outputs=phase.complex_outputs,
        lazy=phase.lazy,
    )


def native_operators() -> frozenset[torch._ops.OpOverload]:
    """The ATen overloads that have a lowering."""
    register_all()
    return frozenset(LOWERINGS)
