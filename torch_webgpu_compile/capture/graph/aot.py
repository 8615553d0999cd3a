"""From Dynamo's graph to `CapturedGraph`s: AOTAutograd with our partitioner and decompositions.

Dynamo calls the backend once per graph. AOTAutograd then makes one functional graph for inference,
or a forward graph and, when the first gradient is asked for, a backward graph.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.fx import GraphModule, Node

from ...captured import CapturedGraph, Phase
from ...errors import OutOfMemoryError, UnsupportedOp
from ...fallbacks import OnFallback, on_fallback
from ...passes import Form
from ...patches import attempt
from ...plan.model import Plan
from ...stages import Stage
from ...torch_private import (
    MutationType,
    OpOverload,
    OutputType,
    TracingContext,
    aot_autograd,
    aot_module_simplified,
    functorch_config,
    is_traceable_wrapper_subclass,
    min_cut_rematerialization_partition,
)
from ..control_flow.numbers import WithNumbers
from ..control_flow.parts import HostNumbers
from ..decompositions import symbolic_numbers
from ..decompositions.table import decompositions
from ..fx_graphs import copy_of
from ..patches import autograd_functions, fusible_operators, own_rules, region_schemas
from ..tracing import Rules, is_random
from . import dynamo, passes
from .argument_views import token_count, with_views
from .autograd_function import AutogradFunction
from .composing import Composer, PlanMaker, with_calls
from .passes import Draft, State, aot_metadata
from .refused import check_calls
from .unstorable import (
    Reason,
    Uncompiled,
    leaves_to_pytorch,
    reason_against,
    reason_of,
)
from .wrappers import (
    BoxedFunction,
    Parts,
    Surroundings,
    filling,
    on_host,
    parts_of,
    raising,
    taken_apart,
)

_numbers = itertools.count()

_REFUSE = on_fallback("error")
_IN_GRAPH = (MutationType.NOT_MUTATED, MutationType.MUTATED_IN_GRAPH)

_Function = TypeVar("_Function", bound=Callable[..., Any])
AOTCompiler = Callable[[GraphModule, Sequence[Any]], BoxedFunction]
GraphCompiler = Callable[[CapturedGraph, Phase], BoxedFunction]


class Storing(Protocol):
    """Has PyTorch store what comes of one graph of Dynamo's."""

    def compiler(self, compile: AOTCompiler) -> AOTCompiler:
        """``compile``, of whose functions AOTAutograd can make an entry to store."""
        ...

    def capturing(self) -> AbstractContextManager[object]:
        """Entered around AOTAutograd."""
        ...

    def whole(self, traced: Callable[..., Any], surroundings: Surroundings) -> Callable[..., Any]:
        """The function of the arguments of Dynamo's graph: what AOTAutograd made, surrounded."""
        ...


@dataclass(frozen=True)
class Hooks:
    """What capture asks of the rest of the package, and tells it.

    Attributes:
        on_host: told why a graph is not compiled; raises where it has to be.
        storing: has what comes of Dynamo's graph stored; None: nobody wants that.
        on_traced: told when AOTAutograd is done, of the compiled graph that is all that came of
            Dynamo's, or None.
        on_gradients: told of the function around a forward and a backward graph that are all that
            came of Dynamo's, when the latter is compiled.
        plan: makes a plan of a part of a graph.
        composed: makes a function of a composed plan; without it PyTorch runs what needs one.
        host_numbers: finds the integers in a graph that no plan computes of its arguments.
        fill: gives tensors the contents that compiled graphs kept elsewhere for a backward graph,
            before something else reads them.
        shows: whether somebody wants to read what a pass gave, by the pass's name.
    """

    on_host: OnFallback = _REFUSE
    storing: Storing | None = None
    on_traced: Callable[[BoxedFunction | None], None] = lambda compiled: None
    on_gradients: Callable[[AutogradFunction, BoxedFunction, BoxedFunction], None] = (
        lambda function, forward, backward: None
    )
    plan: PlanMaker | None = None
    composed: Callable[[Plan, Phase, frozenset[int]], BoxedFunction] | None = None
    host_numbers: HostNumbers = lambda module: ()
    fill: Callable[[Iterable[Any]], None] = lambda values: None
    shows: Callable[[str], bool] = lambda name: False


def capture(
    module: GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    native: Collection[OpOverload],
    hooks: Hooks = Hooks(),
) -> Callable[..., Any]:
    """Traces a Dynamo graph and compiles each resulting graph with ``compile_graph``.

    Args:
        module: Dynamo's graph; changed in place.
        example_inputs: fake tensors and sizes, in the order of the graph's arguments.
        compile_graph: makes a function of a list of arguments, which it empties, from a graph.
        native: the operators that lowering knows.

    Raises:
        Exception: what PyTorch's kernels raise about a call in the graph.
        UnsupportedOp: an operator can run neither on the GPU nor between its plans, and ``on_host``
            raises, or PyTorch could not run it either.
    """
    check_calls(module)
    table = decompositions(native) | symbolic_numbers.DECOMPOSITIONS
    state = State(Rules(table, frozenset(native)), hooks.host_numbers, hooks.shows)
    return GraphCapture(module, example_inputs, compile_graph, state, hooks).run(module)


def assembled(
    module: GraphModule, graphs: Sequence[BoxedFunction], function: AutogradFunction | None
) -> Callable[..., Any]:
    """What `capture` gives for a Dynamo graph, of compiled graphs.

    Args:
        graphs: one that is all that comes of it; or a forward and a backward graph.
        function: what is around two.
    """
    dtypes = dynamo.misdescribed(module)
    if function is None:
        return Surroundings(graphs[0], None, None, dtypes).around(None)
    forward, backward = graphs[0], _disabled(graphs[1])
    backward._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol
    again = copy_of(module) if function.may_run_again else None
    traced = _disabled(function.around(forward, backward))
    return Surroundings(None, None, again, dtypes).around(traced)


def next_title() -> str:
    """What the names of the graphs begin with that come of another one of Dynamo's."""
    return f"graph{next(_numbers)}"


class GraphCapture:
    """A graph of Dynamo's that is captured: what AOTAutograd makes of it comes to its methods.

    One graph comes to `compile_inference`; or a joint one to `partition`, whose halves come to
    `compile_forward` and, when the first gradient is asked for, to `compile_backward`.

    Attributes:
        title: what the names of its graphs begin with.
        inputs, results: what Dynamo knows of the graph's arguments and results.
        seconds, texts: of the passes so far, of which the next graph comes: see `CapturedGraph`.
        refused: why PyTorch runs the graphs of a joint one.
        is_random: whether the joint graph draws random numbers.
        may_run_again: whether Dynamo's graph gives the same results when it is run once more.
        static: positions of the forward graph's arguments that are parameters and buffers.
        direct: the inference graph, if Dynamo can call it without AOTAutograd's wrappers.
        parts: what gives its arguments, if those of Dynamo's graph have parts.
        forward: the compiled forward graph.
        function: what AOTAutograd has around that and a backward graph, if it can be stored.
    """

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        compile_graph: GraphCompiler,
        state: State,
        hooks: Hooks,
    ) -> None:
        self._compile_graph, self._state, self._hooks = compile_graph, state, hooks
        self.title = next_title()
        self.inputs, self.results = inputs, results_of(module)
        self.seconds: Mapping[str, float] = {}
        self.texts: Mapping[str, str] = {}
        self.refused: Reason | None = None
        self.is_random = self.may_run_again = False
        self.static: frozenset[int] = frozenset()
        self.direct: BoxedFunction | None = None
        self.parts: Parts | None = None
        self.forward: BoxedFunction | None = None
        self.function: AutogradFunction | None = None

    def run(self, module: GraphModule) -> Callable[..., Any]:
        """The compiled function of the arguments of Dynamo's graph."""
        dtypes = dynamo.misdescribed(module)
        written = copy_of(module) if torch.is_grad_enabled() else None
        self._rewrite(module, passes.DYNAMO)
        storing = self._hooks.storing
        made = storing.compiler if storing is not None else lambda compile: compile
        settings = {
            "fw_compiler": made(self.compile_forward),
            "bw_compiler": made(self.compile_backward),
            "inference_compiler": made(self.compile_inference),
            "decompositions": self._state.rules.decompositions,
            "partition_fn": self.partition,
            "keep_inference_input_mutations": True,
        }
        context = nullcontext() if storing is None else storing.capturing()
        guards = _guards_of_aot()
        functions: list[tuple[Mapping[str, Any], Callable[..., Any]]] = []
        with (
            Stage("autograd"),
            dynamo.compiling(),
            region_schemas.install(),
            own_rules.install(),
            autograd_functions.install(lambda *made: functions.append(made)),
            context,
        ):
            traced, inner = _traced(module, self.inputs, settings, storing is not None)
        is_repeatable = self.direct is None and self.may_run_again and not self.is_random
        is_all = self.parts is None and _guards_of_aot() == guards
        self._hooks.on_traced(self.direct if is_all else None)
        if is_all and self.forward is not None:
            given = next((given for given, function in functions if function is inner), None)
            keep = partial(self._keep_function, given, self.forward, is_repeatable)
            attempt(autograd_functions.__name__, keep)
        around = Surroundings(self.direct, self.parts, written if is_repeatable else None, dtypes)
        if storing is not None:
            return storing.whole(traced, around)
        return around.around(traced)

    # ---- what AOTAutograd calls

    def compile_inference(self, graph: GraphModule, _: Sequence[Any]) -> BoxedFunction:
        """A graph without gradients."""
        reason = self._reported(reason_against(graph))
        if reason is not None:
            return Uncompiled(graph, reason)
        draft = self._draft(graph, Phase("inference"), _static_inputs())
        draft = with_calls(passes.run(draft, self._state, passes.TRACED))
        is_plain = not draft.calls and _is_plain(graph, self.inputs, self.results)
        if not is_plain:
            # Who calls it without AOTAutograd has nobody to count changes: the graph does.
            draft = replace(draft, phase=replace(draft.phase, counted=_counted()))
        compiled = self._compile_phase(draft)
        if is_plain and not isinstance(compiled, Uncompiled):
            self.direct, self.parts = compiled, _parts_of(self.inputs)
        return compiled

    def partition(self, graph: GraphModule, *arguments: Any, **keywords: Any) -> Any:
        """The forward and the backward graph of a joint one."""
        self.refused = self._reported(reason_against(graph))
        self.is_random = any(map(is_random, graph.graph.nodes))
        self._rewrite(graph, passes.TRACED, passes.JOINT)
        with fusible_operators.install(), functorch_config.patch(cse=False):
            return min_cut_rematerialization_partition(graph, *arguments, **keywords)

    def compile_forward(self, graph: GraphModule, _: Sequence[Any]) -> BoxedFunction:
        """A graph that also gives what the backward graph takes."""
        if self.refused is not None:
            return Uncompiled(graph, self.refused)
        # AOTAutograd shifts these behind the tokens of effects for inference graphs only.
        self.static = _behind_tokens(_static_inputs())
        # Saved tensors are given back when they are read for the last time, if nobody keeps them:
        # unlike one with "donated" buffers, a graph that was run may be run again.
        if (metadata := aot_metadata()) is not None:
            metadata.bw_donated_idxs = []
            self.may_run_again = _may_run_again(metadata)
        phase = Phase("forward", _saved_outputs(graph), counted=_counted())
        self.forward = self._compile_phase(with_calls(self._draft(graph, phase, self.static)))
        return self.forward

    def compile_backward(self, graph: GraphModule, _: Sequence[Any]) -> BoxedFunction:
        """A graph that takes what the forward graph saved, and gradients."""
        if self.refused is not None:
            return Uncompiled(graph, self.refused)
        static = _static_in_backward(graph, self.static)
        compiled = self._compile_phase(with_calls(self._draft(graph, Phase("backward"), static)))
        if self.function is not None and self.forward is not None:
            self._hooks.on_gradients(self.function, self.forward, compiled)
        return compiled

    # ---- from there to compiled functions

    def _keep_function(
        self, given: Mapping[str, Any] | None, forward: BoxedFunction, may_run_again: bool
    ) -> None:
        if given is not None:
            self.function = AutogradFunction.of(given, forward, may_run_again)

    def _draft(
        self, graph: GraphModule, phase: Phase, static: frozenset[int] = frozenset()
    ) -> Draft:
        name = f"{self.title}_{phase.name}"
        captured = CapturedGraph(name, graph, static, seconds=self.seconds, texts=self.texts)
        return Draft(captured, replace(phase, lazy=_lazy(graph)))

    def _rewrite(self, graph: GraphModule, *forms: Form) -> None:
        """Runs passes on a graph of which others come."""
        captured = passes.run(self._draft(graph, Phase("joint")), self._state, *forms).captured
        self.seconds, self.texts = captured.seconds, captured.texts

    def _reported(self, reason: Reason | None) -> Reason | None:
        if reason is not None:
            self._hooks.on_host(reason.op, reason.dtype, reason.source, reason.cause)
        return reason

    def _compile_phase(self, draft: Draft) -> BoxedFunction:
        """A graph of AOTAutograd's, in its calling convention."""
        positions = _results_on_host(draft.module, draft.phase.saved)
        whole = copy_of(draft.module)
        compiled: BoxedFunction
        try:
            draft = passes.run(draft, self._state, passes.PHASE, passes.RETURNED)
            compile_draft = self._compile_composed if draft.calls else self._compile_whole
            compiled = compile_draft(draft)
            if draft.views.views:
                compiled = with_views(compiled, draft.views)
        except OutOfMemoryError as error:
            # Dynamo would wrap it in an error of its own: calls raise it instead.
            compiled = raising(str(error))
        except Exception as error:
            if not leaves_to_pytorch(error):
                raise
            reason = reason_of(error, whole)
            try:
                self._reported(reason)
            except UnsupportedOp:
                raise error from None
            compiled = Uncompiled(whole, reason)
        if positions:
            compiled = on_host(compiled, positions)
        is_ours = not isinstance(compiled, Uncompiled)
        if draft.phase.name == "backward" and not is_ours:
            compiled = filling(compiled, self._hooks.fill)
        compiled._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol
        return compiled

    def _compile_whole(self, draft: Draft) -> BoxedFunction:
        """A graph that a plan of kernels may hold."""
        placeholders = draft.module.graph.find_nodes(op="placeholder")
        draft = passes.run(draft, self._state, passes.WHOLE, passes.CALL)
        compiled = self._compile_graph(draft.captured, draft.phase)
        return WithNumbers(compiled, placeholders, draft.numbers) if draft.numbers else compiled

    def _compile_composed(self, draft: Draft) -> BoxedFunction:
        """A graph that is divided."""
        if self._hooks.composed is None or self._hooks.plan is None:
            what = "data decides what of it runs, and nobody was given to compose its parts"
            raise UnsupportedOp(draft.captured.name, what, "give `Hooks` what makes plans")
        draft = passes.run(draft, self._state, passes.SEVERAL)
        plan = Composer(self._state, self._hooks.plan, self._hooks.on_host).compose(draft)
        return self._hooks.composed(plan, draft.phase, draft.captured.static_inputs)


def _traced(
    module: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], is_stored: bool
) -> tuple[Callable[..., Any], object]:
    """What AOTAutograd makes of Dynamo's graph, and what that calls with a list, or None.

    That is what `aot_autograd` does, which takes a quarter of a second of a program's first call to
    load Inductor, for logs. It is left what has to do with what it wraps: parts and stored graphs.
    """
    has_parts = any(isinstance(value, (tuple, list, dict)) for value in inputs)
    if has_parts or is_stored or os.environ.get("TORCH_COMPILE_DEBUG") == "1":
        return aot_autograd(**settings)(module, inputs), None
    backward = _untraced(settings["bw_compiler"])
    traced = aot_module_simplified(module, inputs, **{**settings, "bw_compiler": backward})
    return _disabled(traced), getattr(traced, "__wrapped__", None)


def _untraced(compile: AOTCompiler) -> AOTCompiler:
    """A compiler that runs in the backward pass, where Dynamo may trace: not it, nor its result.

    It may where a compiled function asks for gradients.
    """

    def compiled(graph: GraphModule, inputs: Sequence[Any]) -> BoxedFunction:
        return _disabled(_disabled(compile)(graph, inputs))

    return compiled


def _disabled(function: _Function) -> _Function:
    disable: Callable[..., _Function] = torch.compiler.disable
    return disable(function, reason="what is compiled is not traced again")


def _results_on_host(graph: GraphModule, saved: frozenset[int]) -> tuple[int, ...]:
    """Positions of the results of a graph on the device that are CPU tensors.

    The device computes them, too. What only a backward graph reads (``saved``) may stay there.
    """
    places = [getattr(node.meta.get("val"), "device", None) for node in graph.graph.nodes]
    if not any(place is not None and place.type != "cpu" for place in places):
        return ()
    results: Any = graph.graph.output_node().args[0]
    found = (getattr(node, "meta", {}).get("val") for node in results)
    return tuple(
        k
        for k, value in enumerate(found)
        if k not in saved and isinstance(value, torch.Tensor) and value.device.type == "cpu"
    )


def _parts_of(arguments: Sequence[Any]) -> Parts | None:
    """None if none has parts."""
    found = tuple(parts_of(a) if is_traceable_wrapper_subclass(a) else None for a in arguments)
    return found if any(found) else None


def _is_plain(graph: GraphModule, arguments: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether a graph takes Dynamo's arguments, or their parts, and gives its results as they are.

    Not if an argument is changed outside of the graph, an output is an alias or has parts, or
    AOTAutograd changed the arguments (removed duplicates, added sizes, tokens or seeds).

    Args:
        results: what Dynamo knows of them.
    """
    metadata, found = aot_metadata(), _parts_of(arguments)
    parts = arguments if found is None else taken_apart(arguments, found)
    if metadata is None or len(graph.graph.find_nodes(op="placeholder")) != len(parts):
        return False
    return (
        all(info.mutation_type in _IN_GRAPH for info in metadata.input_info)
        and all(info.output_type is OutputType.non_alias for info in metadata.output_info)
        and len(metadata.input_info) == len(parts)
        and not metadata.tokens
        and not metadata.is_rng_op_functionalized
        and metadata.grad_enabled_mutation is None
        and not any(map(is_traceable_wrapper_subclass, (*parts, *results)))
    )


def results_of(module: GraphModule) -> list[Any]:
    """What Dynamo knows of the results of its graph."""
    (returned,) = module.graph.find_nodes(op="output")[0].args
    nodes = [node for node in returned if isinstance(node, Node)]
    return [node.meta.get("example_value") for node in nodes]


def _guards_of_aot() -> int:
    """How many guards Dynamo has from AOTAutograd, for the frame that it compiles."""
    context = TracingContext.try_get()
    return 0 if context is None else len(context.guards_context.aotautograd_guards)


def _static_inputs() -> frozenset[int]:
    """Positions of parameters and buffers, for graphs whose arguments are the user's."""
    return frozenset(getattr(aot_metadata(), "static_input_indices", None) or ())


def _counted() -> frozenset[int]:
    name = "mutated_graph_handled_indices_seen_by_autograd"
    return _behind_tokens(getattr(aot_metadata(), name, None) or ())


def _behind_tokens(positions: Iterable[int]) -> frozenset[int]:
    """Positions in a graph, whose first arguments and outputs are the tokens of its effects."""
    count = token_count(aot_metadata())
    return frozenset(position + count for position in positions)


def _static_in_backward(graph: GraphModule, static: frozenset[int]) -> frozenset[int]:
    """Positions of parameters among saved values: argument i is named ``primals_{i+1}``."""
    found = set()
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        match = re.fullmatch(r"primals_(\d+)", str(node.target))
        if match is not None and int(match[1]) - 1 in static:
            found.add(position)
    return frozenset(found)


def _saved_outputs(graph: GraphModule) -> frozenset[int]:
    """Positions of the outputs that follow everything that the user gets to see."""
    metadata = aot_metadata()
    if metadata is None:
        return frozenset()
    visible = metadata.num_forward + token_count(metadata)
    (returned,) = graph.graph.find_nodes(op="output")[0].args
    return frozenset(
        position
        for position, node in enumerate(returned)
        if position >= visible
        and isinstance(node, Node)
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _may_run_again(metadata: Any) -> bool:
    """Whether Dynamo's graph gives the same results when it is run once more.

    And whether its gradients are those of its results: none is a view of what it does not return.
    """
    changes = metadata.num_mutated_inp_runtime_indices + metadata.num_mutated_graph_handled_indices
    return not (changes or metadata.num_intermediate_bases or metadata.tokens)


def _lazy(graph: GraphModule) -> frozenset[int]:
    """Positions of arguments that may be lazily conjugated or negated.

    Dynamo's guards keep what it saw of its arguments; gradients are known to autograd only.
    """
    return frozenset(
        position
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and (value.is_conj() or value.is_neg() or str(node.target).startswith("tangents"))
    )
