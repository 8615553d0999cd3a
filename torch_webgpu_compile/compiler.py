"""The compiler: one flat, ordered list of passes from a captured graph to a plan.

`PASSES` is all of it, top to bottom. After each pass its result is verified; it is timed, and shown
where somebody asks for it. Nothing else composes stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from . import debug, fallbacks
from .captured import CapturedGraph, Phase, verify_captured
from .codegen import Kernels, render, verify_kernels
from .codegen.hardening import harden
from .codegen.tilings.choose import (
    TiledSchedule,
    choose_tilings,
    format_tilings,
    verify_tilings,
)
from .counters import counters
from .errors import VerificationError, WebGPUCompileError, too_large
from .ir.at_sizes import at_sizes, has_symbols
from .ir.graph import LoopGraph, Program, Schedule
from .ir.lanes import Lanes
from .ir.nodes import HostCall, outputs_of
from .ir.text import format_graph, format_schedule
from .ir.verify import verify_loop_graph
from .ir.verify_schedule import verify_prepared, verify_schedule
from .lowering.captured_text import captured_text, verify_plan_of
from .lowering.graph import lower
from .lowering.registry import LOWERINGS, register_all
from .lowering.symbols import unknown_integers
from .options import CompileOptions
from .passes import Form, Pass
from .plan import cache as plan_cache
from .plan.cache_folder import digest_of
from .plan.model import Kernel, KernelCall, Plan
from .plan.verify import verify_plan
from .planner import build_plan
from .planner.match import verify_match
from .scheduler.grouping.fusion import Grouping, fuse, one_group_per_node
from .scheduler.grouping.in_place import write_in_place
from .scheduler.grouping.joint import join_small_kernels
from .scheduler.grouping.lanes import repeat_lanes
from .scheduler.grouping.maps import join_connected_maps, join_foreach, join_small_maps
from .scheduler.grouping.order import order_groups, verify_grouping
from .scheduler.grouping.products import join_pairs, join_siblings
from .scheduler.rewrites.bf16_scales import precompute_bf16_scales
from .scheduler.rewrites.cache_writes import forward_cache_writes
from .scheduler.rewrites.causal import find_causal_masks
from .scheduler.rewrites.common_nodes import drop_unit_symbols, eliminate_common_nodes
from .scheduler.rewrites.float16_words import store_float16_in_words
from .scheduler.rewrites.inline import inline_producers
from .scheduler.rewrites.key_bounds import bound_keys_by_mask
from .scheduler.rewrites.layouts import choose_layouts
from .scheduler.rewrites.preparation import hoist_parameter_work
from .scheduler.rewrites.split import (
    split_contractions,
    split_reductions,
    split_weight_gradients,
)
from .scheduler.rewrites.split_attention import split_attention
from .scheduler.rewrites.statistics import recompute_statistics
from .stages import Stage
from .target import Target
from .torch_private import OpOverload
from .tuning import machines
from .tuning.autotune import Tune, tilings_for


@dataclass
class Compilation:
    """The state of one graph's compilation.

    Attributes:
        captured, phase: what is compiled.
        target, options: for what, and how.
        tune: measures kernels on the GPU, if that is wanted.
        lanes: what the graph is one of, if it is one of many.
        on_kernel: told of each kernel when its text is known.
        results: what each pass so far gave, by the pass's name.
        seconds: how long each pass and the verification of its result took, by the pass's name;
            first those of capture.
        fallbacks: operators that run on the host.
        depends_on_determinism: whether the result is another one with the other value of
            ``options.deterministic`` or ``options.fill_empty``.
        key: of the plan in the cache, if it is looked for there.
        is_known: whether the cache knows that this plan is that of the captured graph.
    """

    captured: CapturedGraph
    phase: Phase
    target: Target
    options: CompileOptions
    tune: Tune | None = None
    lanes: Lanes | None = None
    on_kernel: Callable[[Kernel], None] = lambda kernel: None
    results: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    depends_on_determinism: bool = False
    key: str = ""
    is_known: bool = False

    @property
    def graph(self) -> LoopGraph:
        """The result of lowering."""
        found = self.results["ir"]
        assert isinstance(found, LoopGraph)
        return found

    @property
    def program(self) -> Program[Schedule]:
        """The program as the last pass that regroups kernels left it."""
        found: Program[Schedule] = self.results[_last_schedule(self.options).name]
        return found

    @property
    def schedule(self) -> Schedule:
        """The schedule of every call, of `program`."""
        return self.program.called

    @property
    def calls(self) -> tuple[KernelCall | HostCall, ...]:
        """The kernel calls and host calls of every call, in order."""
        made: Program[Kernels] = self.results["wgsl"]
        return made.called.calls

    @property
    def plan(self) -> Plan:
        """The result of the pass ``plan``, or the plan from the plan cache."""
        found = self.results["plan"]
        assert isinstance(found, Plan)
        return found

    def texts(self) -> dict[str, str]:
        """The results of the passes that changed something, as text, by the pass's name."""
        found, before = {}, None
        for step in passes(self.options):
            if step.name in self.results:
                result = self.results[step.name]
                if result is not before:
                    found[step.name] = step.gives.text(result)
                before = result
        return found


def _lower(captured: CapturedGraph, state: Compilation) -> LoopGraph:
    report = fallbacks.on_fallback(state.options.fallback)

    def on_fallback(op: str, dtype: str, source: str, cause: str) -> None:
        report(op, dtype, source, cause)
        state.fallbacks.append(op)

    def on_deterministic() -> None:
        state.depends_on_determinism = True

    # A training step changes the parameters: what it computes from them serves one call only.
    unchanging = captured.static_inputs if state.phase.name == "inference" else frozenset()
    return lower(
        captured,
        state.target,
        on_fallback,
        unchanging,
        deterministic=state.options.deterministic,
        fill_empty=state.options.fill_empty,
        on_deterministic=on_deterministic,
    )


def _write_in_place(grouping: Grouping, state: Compilation) -> Grouping:
    return write_in_place(grouping, single=state.lanes is not None or state.options.in_place)


def _repeat_lanes(schedule: Schedule, state: Compilation) -> Schedule:
    lanes = state.lanes
    return schedule if lanes is None else repeat_lanes(schedule, lanes, state.target)


def _choose_tilings(schedule: Schedule, state: Compilation) -> TiledSchedule:
    if state.tune is not None and not state.options.deterministic:
        measured = state.tune(schedule)
    else:
        measured = tilings_for(state.target, state.options)
    return choose_tilings(schedule, state.target, measured)


def _render(tiled: TiledSchedule, state: Compilation) -> Kernels:
    return render(tiled, state.target, state.on_kernel)


def _plan(program: Program[Kernels], state: Compilation) -> Plan:
    prepared = program.prepared
    preparation = None if prepared is None else build_plan(prepared.schedule, prepared.calls)
    return build_plan(program.called.schedule, program.called.calls, preparation)


# ---- what passes take and give


def _verify_graph(graph: LoopGraph, before: object, state: Compilation) -> None:
    verify_loop_graph(graph, before if isinstance(before, LoopGraph) else None)


def _verify_hoisted(program: Program[LoopGraph], before: LoopGraph, state: Compilation) -> None:
    for part in program.parts:
        verify_loop_graph(part, before)
    verify_prepared(program)


def _verify_each(verify: Callable[[Any, Target], None]) -> Callable[[Any, Any, Compilation], None]:
    def both(program: Program[Any], before: object, state: Compilation) -> None:
        for part in program.parts:
            verify(part, state.target)

    return both


def _verify_schedules(program: Program[Schedule], before: Any, state: Compilation) -> None:
    was_verified = isinstance(before, Program) and len(before.parts) == len(program.parts)
    for number, part in enumerate(program.parts):
        given = before.parts[number] if was_verified else None
        verify_schedule(part, state.target, given if isinstance(given, Schedule) else None)
    verify_prepared(program.map(lambda schedule: schedule.graph))


def _of_parts(text: Callable[[Any], str]) -> Callable[[Program[Any]], str]:
    return lambda program: "\n".join(map(text, program.parts))


CAPTURED = Form(
    "CapturedGraph",
    lambda captured, before, state: verify_captured(captured, state.phase),
    lambda captured: captured.text,
)
GRAPH = Form("LoopGraph", _verify_graph, format_graph)
GRAPHS = Form("Program[LoopGraph]", _verify_hoisted, _of_parts(format_graph))
GROUPS = Form(
    "Program[Grouping]",
    _verify_each(lambda grouping, target: verify_grouping(grouping)),
    _of_parts(lambda grouping: format_schedule(order_groups(grouping))),
)
SCHEDULES = Form("Program[Schedule]", _verify_schedules, _of_parts(format_schedule))
HARDENED = replace(SCHEDULES, name="Program[Schedule], hardened")
TILED = Form("Program[TiledSchedule]", _verify_each(verify_tilings), _of_parts(format_tilings))
KERNELS = Form(
    "Program[Kernels]",
    _verify_each(verify_kernels),
    _of_parts(lambda part: debug.calls_text(part.calls)),
)
PLAN = Form("Plan", lambda plan, before, state: verify_plan(plan), debug.plan_text)

PassFunction = Callable[[Any, Compilation], Any]


def _alone(rewrite: Callable[[Any], Any]) -> PassFunction:
    """A pass of a function that needs nothing but its argument."""
    return lambda value, state: rewrite(value)


def _on_target(rewrite: Callable[[Any, Target], Any]) -> PassFunction:
    """A pass of a function that depends on the GPU."""
    return lambda value, state: rewrite(value, state.target)


def _each(run: PassFunction) -> PassFunction:
    """A pass that does the same to both parts of a program."""

    def both(program: Program[Any], state: Compilation) -> Program[Any]:
        made = program.map(lambda part: run(part, state))
        same = all(map(lambda old, new: old is new, program.parts, made.parts))
        return program if same else made

    return both


PASSES: tuple[Pass, ...] = (
    # What is computed: loops over index expressions.
    Pass("ir", CAPTURED, GRAPH, _lower),
    Pass(
        *("store_float16_in_words", GRAPH, GRAPH, _on_target(store_float16_in_words)), needed=True
    ),
    Pass("split_attention", GRAPH, GRAPH, _on_target(split_attention)),
    Pass("drop_unit_symbols", GRAPH, GRAPH, _alone(drop_unit_symbols)),
    Pass("eliminate_common_nodes", GRAPH, GRAPH, _alone(eliminate_common_nodes)),
    Pass("find_causal_masks", GRAPH, GRAPH, _alone(find_causal_masks)),
    Pass("bound_keys_by_mask", GRAPH, GRAPH, _on_target(bound_keys_by_mask)),
    Pass("recompute_statistics", GRAPH, GRAPH, _alone(recompute_statistics)),
    Pass("forward_cache_writes", GRAPH, GRAPH, _on_target(forward_cache_writes)),
    Pass("inline_producers", GRAPH, GRAPH, _on_target(inline_producers)),
    Pass("choose_layouts", GRAPH, GRAPH, _on_target(choose_layouts)),
    Pass("split_contractions", GRAPH, GRAPH, _on_target(split_contractions)),
    Pass("split_weight_gradients", GRAPH, GRAPH, _on_target(split_weight_gradients)),
    Pass("precompute_bf16_scales", GRAPH, GRAPH, _on_target(precompute_bf16_scales)),
    Pass("split_reductions", GRAPH, GRAPH, _on_target(split_reductions)),
    Pass("hoist_parameter_work", GRAPH, GRAPHS, _on_target(hoist_parameter_work)),
    # What shares a kernel.
    Pass("one_group_per_node", GRAPHS, GROUPS, _each(_on_target(one_group_per_node)), fusion=False),
    Pass("fuse", GRAPHS, GROUPS, _each(_on_target(fuse)), fusion=True),
    Pass("write_in_place", GROUPS, GROUPS, _each(_write_in_place)),
    Pass("order_groups", GROUPS, SCHEDULES, _each(_alone(order_groups))),
    Pass("join_connected_maps", SCHEDULES, SCHEDULES, _each(_on_target(join_connected_maps)), True),
    Pass("join_foreach", SCHEDULES, SCHEDULES, _each(_on_target(join_foreach)), True),
    Pass("join_small_maps", SCHEDULES, SCHEDULES, _each(_on_target(join_small_maps)), True),
    Pass("repeat_lanes", SCHEDULES, SCHEDULES, _each(_repeat_lanes), needed=True),
    Pass("join_pairs", SCHEDULES, SCHEDULES, _each(_on_target(join_pairs)), True),
    Pass("join_siblings", SCHEDULES, SCHEDULES, _each(_on_target(join_siblings)), True),
    Pass("join_small_kernels", SCHEDULES, SCHEDULES, _each(_on_target(join_small_kernels)), True),
    # How it is computed.
    Pass("harden", SCHEDULES, HARDENED, _each(_alone(harden))),
    Pass("choose_tilings", HARDENED, TILED, _each(_choose_tilings)),
    Pass("wgsl", TILED, KERNELS, _each(_render)),
    Pass("plan", KERNELS, PLAN, _plan),
)


def passes(options: CompileOptions) -> tuple[Pass, ...]:
    """The passes that these options want, in order."""
    return tuple(step for step in PASSES if step.fusion in (None, options.fusion))


def _last_schedule(options: CompileOptions) -> Pass:
    """After it, kernels are no longer regrouped: its result is the stage ``schedule``."""
    return next(step for step in reversed(passes(options)) if step.gives is SCHEDULES)


def compile_graph(
    captured: CapturedGraph,
    phase: Phase,
    target: Target,
    options: CompileOptions,
    use_cache: bool = True,
    tune: Tune | None = None,
    lanes: Lanes | None = None,
    on_kernel: Callable[[Kernel], None] = lambda kernel: None,
) -> Compilation:
    """Runs every pass, or takes the plan from the cache before or after lowering; needs no GPU.

    Before lowering where the graph has no size symbols and was lowered by a process before: its
    `Compilation` has no `graph`.

    Args:
        captured, phase: what to compile.
        target, options: for what, and how.
        use_cache: whether a plan compiled before will do.
        tune: measures kernels on the GPU; without it they are chosen by what is known.
        lanes: what the graph is one of: the plan is that of several, see `repeat_lanes`, and not
            that of the graph, for which the cache would take it.
        on_kernel: told of each kernel when its text is known, while the next are rendered.

    Raises:
        UnsupportedOp: an operator can run neither on the GPU nor on the host, or not at all under
            ``fallback="error"``.
        OutOfMemoryError: no buffer of the GPU can hold a result.
        VerificationError: a pass gave an inconsistent result, without optional passes too, or
            under ``fallback="error"``.
    """
    target = machines.measured_target(target, options)
    seconds = dict(captured.seconds)
    state = Compilation(captured, phase, target, options, tune, lanes, on_kernel, seconds=seconds)
    show = debug.Shower(captured.name, options)
    for name, text in captured.texts.items():
        show(name, partial(str, text))
    CAPTURED.verify(captured, None, state)
    show("fx", partial(CAPTURED.text, captured))
    use_cache = use_cache and lanes is None and not show.needs_every_stage
    key = _graph_key(state) if use_cache and not options.shows("ir") else ""
    if key and _take_known(state, key):
        _finish(state, show)
        return state
    done = _run(passes(options), state, show, use_cache)
    if key and done is state:
        _store_known(state, key)
    return done


def _run(
    steps: Sequence[Pass], state: Compilation, show: debug.Shower, use_cache: bool
) -> Compilation:
    """Runs passes. Where they break a graph, the passes that are needed are run alone.

    Returns:
        The state with a plan, which is a new one where passes were left out.
    """
    try:
        _run_passes(steps, state, show, use_cache)
    except Exception as error:
        is_told = isinstance(error, WebGPUCompileError) and not isinstance(error, VerificationError)
        if is_told or state.options.fallback == "error" or "ir" not in state.results:
            raise
        simple = replace(state.options, fusion=False)
        seconds = dict(state.captured.seconds)
        again = replace(state, options=simple, tune=None, results={}, seconds=seconds, fallbacks=[])
        needed = [step for step in passes(simple) if not step.is_optional]
        _run_passes([steps[0], *needed[1:]], again, show, use_cache=False)
        if state.options.fallback == "warn":
            fallbacks.warn_once(
                "a graph",
                "is compiled without optional passes, right but slower, because of a fault in this "
                f"package: please report this ({state.captured.name}, {type(error).__name__}: "
                f"{error})",
            )
        return again
    return state


def _run_passes(
    steps: Sequence[Pass], state: Compilation, show: debug.Shower, use_cache: bool
) -> None:
    value: Any = state.captured
    last_schedule = _last_schedule(state.options)
    for step in steps:
        before = value
        with Stage("pass", step.name) as stage:
            value = step(before, state)
            if value is not before:
                show(step.name, partial(step.gives.text, value))
            if step is last_schedule:
                show("schedule", partial(step.gives.text, value))
        state.results[step.name] = value
        state.seconds[step.name] = stage.seconds
        if step.name == "ir":
            _refuse_large_results(value, state.target)
            if use_cache:
                state.key = cache_key(value, state.target, state.options)
                if _take_cached(state, state.key):
                    break
    else:
        if state.key:
            plan_cache.store(state.key, state.plan, state.options.cache)
    _finish(state, show)


def _finish(state: Compilation, show: debug.Shower) -> None:
    show.write_kernels(state.plan)
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
                source = next((origin.source for origin in node.origins if origin.source), "")
                raise too_large(next(named, ""), known, target.max_buffer_nbytes, source)


@dataclass(frozen=True)
class Loops:
    """A lowered graph with size symbols, kept to compile it again for other sizes.

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
        nothing = CapturedGraph(name, torch.fx.GraphModule({}, torch.fx.Graph()), frozenset())
        state = Compilation(nothing, Phase("inference"), self.target, self.options)

        def sized(captured: CapturedGraph, state: Compilation) -> LoopGraph:
            return replace(at_sizes(self.graph, sizes), name=name)

        first, *others = passes(self.options)
        show = debug.Shower(name, self.options)
        use_cache = not show.needs_every_stage
        return _run([replace(first, run=sized), *others], state, show, use_cache).plan


def loops_of(state: Compilation) -> Loops | None:
    """The lowered graph that plans for other sizes start from; None without size symbols."""
    if "ir" not in state.results:
        return None  # see `compile_graph`
    graph = state.graph
    return Loops(graph, state.target, state.options) if has_symbols(graph) else None


def cache_key(graph: LoopGraph, target: Target, options: CompileOptions) -> str:
    """The key of a graph's plan in the cache: a digest of all that the plan follows from.

    That is the graph with its constants, the GPU, the options that change code, and the version of
    this package's sources.
    """
    text = format_graph(replace(graph, name="graph"))
    constants = (
        part
        for name, data in sorted(graph.constants.items())
        for part in (name.encode(), memoryview(data).tobytes())
    )
    return digest_of(chain(of_every_graph(target, options), [text.encode()], constants))


def of_every_graph(target: Target, options: CompileOptions) -> Iterator[bytes]:
    """What plans follow from beside their graphs."""
    tilings = sorted(tilings_for(target, options).items())
    settings = f"{options.fusion} {options.in_place}"
    for part in (target.text, settings, repr(tilings)):
        yield part.encode()


def _graph_key(state: Compilation) -> str:
    """The key of a captured graph in the cache folder; "" where there is none.

    Lowering and writing down what it gives take most of a compilation whose plan is in the cache.
    """
    options = state.options
    text = None if options.cache is None else captured_text(state.captured, state.phase)
    if text is None:
        return ""
    text += f"\n{options.deterministic} {options.fill_empty}"
    return digest_of((*of_every_graph(state.target, options), text.encode()))


def _take_known(state: Compilation, key: str) -> bool:
    """Takes the plan of a captured graph from the cache if it is known which one that is."""
    assert state.options.cache is not None
    known = plan_cache.load_way(key, "graph", state.options.cache)
    if known is None:
        return False
    plan_key, depends = known.decode().split()
    verify = partial(verify_plan_of, state.captured)
    found = plan_cache.load_by_way(plan_key, state.options.cache, verify)
    if found is None:
        return False
    state.results["plan"] = found.renamed(state.captured.name)
    state.key, state.is_known = plan_key, True
    state.depends_on_determinism = depends == "True"
    counters.add(plan_cache_hits=1)
    return True


def _store_known(state: Compilation, key: str) -> None:
    """Keeps which plan is that of a captured graph.

    Not where an operator is on the host: lowering says so, and that nothing else is called there.
    """
    assert state.options.cache is not None
    if not any(isinstance(node, HostCall) for node in state.graph.nodes):
        known = f"{state.key} {state.depends_on_determinism}"
        plan_cache.store_way(key, "graph", known.encode(), state.options.cache)
        state.is_known = True


def _take_cached(state: Compilation, key: str) -> bool:
    """Takes the plan from the cache if it is there: the passes in between are not needed then."""
    graph = state.graph
    found = plan_cache.load(key, state.options.cache, lambda plan: verify_match(plan, graph))
    if found is None:
        return False
    state.results["plan"] = found.renamed(graph.name)
    counters.add(plan_cache_hits=1)
    return True


def host_numbers(module: torch.fx.GraphModule) -> list[torch.SymInt]:
    """The integers in a graph that its plan has to be given: see `lowering.symbols`."""
    return unknown_integers(module.graph)


def native_operators() -> frozenset[OpOverload]:
    """The ATen overloads that have a lowering."""
    register_all()
    return frozenset(LOWERINGS)
