"""From Dynamo's graph to `CapturedGraph`s: AOTAutograd with our partitioner and decompositions.

Dynamo calls the backend once per graph. AOTAutograd then makes one functional graph for inference,
or a forward graph and, when the first gradient is asked for, a backward graph.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from ...captured import CapturedGraph, Phase
from ...errors import UnsupportedOp
from ...fallbacks import OnFallback, on_fallback
from ...torch_private import (
    MutationType,
    OpOverload,
    OutputType,
    TracingContext,
    aot_autograd,
    is_traceable_wrapper_subclass,
    min_cut_rematerialization_partition,
)
from .. import tracing
from ..complex_numbers.separation import separate_graph
from ..control_flow.divided import DividedGraph, Place
from ..control_flow.inline import inline_operators
from ..control_flow.numbers import WithNumbers, take_numbers
from ..control_flow.parts import Call, Calls, HostNumbers, Part, calls_between, divide
from ..decompositions import symbolic_numbers
from ..decompositions.table import decompositions
from ..patches import fusible_operators, own_rules, region_schemas
from . import double_backward, dynamo, patterns, recompute
from .argument_views import take_views, token_count, with_views
from .refused import check_calls
from .unstorable import (
    Reason,
    Uncompiled,
    leaves_to_pytorch,
    reason_against,
    reason_of,
    runnable,
)

BoxedFunction = Callable[[list[Any]], Sequence[Any]]

_numbers = itertools.count()


_REFUSE = on_fallback("error")
_NO_FLOATS: Mapping[str, tuple[int, int]] = MappingProxyType({})
_IN_GRAPH = (MutationType.NOT_MUTATED, MutationType.MUTATED_IN_GRAPH)

GraphCompiler = Callable[[CapturedGraph, Phase], BoxedFunction]


def capture(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    native: Collection[OpOverload],
    on_host: OnFallback = _REFUSE,
    on_whole: Callable[[BoxedFunction], None] = lambda compiled: None,
    gpu: Callable[[], Place | None] = lambda: None,
    host_numbers: HostNumbers = lambda module: (),
    fill: Callable[[Iterable[Any]], None] = lambda values: None,
) -> Callable[..., Any]:
    """Traces a Dynamo graph and compiles each resulting graph with ``compile_graph``.

    Args:
        module: Dynamo's graph; changed in place.
        example_inputs: fake tensors and sizes, in the order of the graph's arguments.
        compile_graph: makes a function of a list of arguments, which it empties, from a graph.
        native: the operators that lowering knows.
        on_host: told why a graph is not compiled; raises where it has to be.
        on_whole: told of a compiled graph that is all there is to Dynamo's graph.
        gpu: gives the place where a graph of CPU tensors works that has to be divided; None where
            its tensors are.
        host_numbers: finds the integers in a graph that no plan computes of its arguments.
        fill: gives tensors the contents that ``compile_graph`` kept elsewhere for a backward graph,
            before something else reads them.

    Raises:
        Exception: what PyTorch's kernels raise about a call in the graph.
        UnsupportedOp: an operator can run neither on the GPU nor between its plans, and ``on_host``
            raises, or PyTorch could not run it either.
    """
    check_calls(module)
    results = _results_of(module)
    misdescribed = dynamo.misdescribed(module)
    written = double_backward.unchanged(module) if torch.is_grad_enabled() else None
    patterns.rewrite_calls(module)
    number = next(_numbers)
    static: frozenset[int] = frozenset()
    table = decompositions(native) | symbolic_numbers.DECOMPOSITIONS
    operators = frozenset(native)
    direct: BoxedFunction | None = None
    parts: _Parts | None = None
    refused: Reason | None = None
    is_random = twice = has_divided_backward = False
    kept_at: Place | None = None  # where graphs in parts have what is saved for a backward graph

    def report(reason: Reason | None) -> Reason | None:
        if reason is not None:
            on_host(reason.op, reason.dtype, reason.source, reason.cause)
        return reason

    def compile_inference(graph: torch.fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        nonlocal direct, parts
        reason = report(reason_against(graph))
        if reason is not None:
            return Uncompiled(graph, reason)
        inline_operators(graph, table, operators)
        calls = calls_between(graph.graph)
        is_plain = not calls and _is_plain(graph, example_inputs, results)
        # Who calls it without AOTAutograd has nobody to count changes: the graph does.
        counted = frozenset() if is_plain else _counted()
        compiled = compile_phase(graph, calls, "inference", _static_inputs(), counted=counted)
        if is_plain and not isinstance(compiled, Uncompiled):
            direct, parts = compiled, _parts_of(example_inputs)
        return compiled

    def compile_forward(graph: torch.fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        nonlocal static, twice, kept_at
        if refused is not None:
            return Uncompiled(graph, refused)
        # AOTAutograd shifts these behind the tokens of effects for inference graphs only.
        static = _behind_tokens(_static_inputs())
        # Saved tensors are given back when they are read for the last time, if nobody keeps them:
        # unlike one with "donated" buffers, a graph that was run may be run again.
        if (metadata := _metadata()) is not None:
            metadata.bw_donated_idxs = []
            twice = _may_run_again(metadata)
        calls = calls_between(graph.graph)
        kept_at = gpu() if has_divided_backward or calls else None
        return compile_phase(graph, calls, "forward", static, _saved_outputs(graph), _counted())

    def compile_backward(graph: torch.fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        if refused is not None:
            return Uncompiled(graph, refused)
        calls = calls_between(graph.graph)
        return compile_phase(graph, calls, "backward", _static_in_backward(graph, static))

    def compile_phase(
        graph: torch.fx.GraphModule,
        calls: Calls,
        name: str,
        static_inputs: frozenset[int],
        saved: frozenset[int] = frozenset(),
        counted: frozenset[int] = frozenset(),
    ) -> BoxedFunction:
        metadata = None if name == "backward" else _metadata()
        on_host = _results_on_host(graph, saved)
        taken = take_views(graph, metadata, decides=bool(calls))
        title = f"graph{number}_{name}"
        compiled: BoxedFunction
        # Parts give and take tensors of that place: both graphs have some, or neither.
        if kept_at is not None or calls:
            place = gpu() if kept_at is None else kept_at
            compiled = compile_divided(
                graph, calls, title, static_inputs, counted, place, saved=saved
            )
        else:
            compiled = compile_whole(graph, title, name, static_inputs, saved, counted)
        if taken.views:
            compiled = with_views(compiled, taken)
        if on_host:
            compiled = _on_host(compiled, on_host)
        if name == "backward" and isinstance(compiled, (Uncompiled, DividedGraph)):
            compiled = _filling(compiled, fill)
        compiled._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol
        return compiled

    def compile_whole(
        graph: torch.fx.GraphModule,
        title: str,
        name: str = "inference",
        static_inputs: frozenset[int] = frozenset(),
        saved: frozenset[int] = frozenset(),
        counted: frozenset[int] = frozenset(),
        floats: Mapping[str, tuple[int, int]] = _NO_FLOATS,
        device: torch.device | None = None,
    ) -> BoxedFunction:
        """A graph that a plan may hold; PyTorch runs one that none can.

        Args:
            floats: `CapturedGraph.numbers`.
            device: where a part of a divided graph works, if that is not where the graph's
                tensors are.
        """
        unchanged = runnable(graph, floats)
        placeholders = graph.graph.find_nodes(op="placeholder")
        computed = host_numbers(graph)
        take_numbers(graph, computed)
        forwarded = _take_forwarded(graph)
        saved -= {output for output, _ in forwarded}
        seed_count = tracing.take_seeds(graph)
        real = separate_graph(graph, table, operators)
        phase = Phase(
            *(name, saved, forwarded, counted, seed_count, real.inputs, real.outputs), _lazy(graph)
        )
        captured = CapturedGraph(title, real.module, static_inputs, numbers=floats)
        try:
            compiled = compile_graph(captured, phase)
            return WithNumbers(compiled, placeholders, computed) if computed else compiled
        except Exception as error:
            if not leaves_to_pytorch(error):
                raise
            reason = reason_of(error, unchanged)
            try:
                report(reason)
            except UnsupportedOp:
                raise error from None
            return Uncompiled(unchanged, reason, device)

    def compile_divided(
        graph: torch.fx.GraphModule,
        calls: Calls,
        title: str,
        static_inputs: frozenset[int] = frozenset(),
        counted: frozenset[int] = frozenset(),
        place: Place | None = None,
        stays: bool = False,
        saved: frozenset[int] = frozenset(),
    ) -> DividedGraph:
        device = None if place is None else place.device
        divided = divide(graph, calls, static_inputs, device, host_numbers)
        if stays:
            divided = replace(divided, devices=(None,) * len(divided.devices))
        parts: list[BoxedFunction] = []
        functions: dict[int, BoxedFunction] = {}
        known: dict[int, BoxedFunction] = {}  # a repeated block is one function of many calls
        for k, step in enumerate(divided.steps):
            inner = f"{title}_{k}"
            if isinstance(step, Part):
                parts.append(
                    compile_whole(
                        *(step.module, inner),
                        static_inputs=step.static,
                        floats=step.float_places,
                        device=device,
                    )
                )
            elif isinstance(step, Call):
                for slot, function in step.functions.items():
                    if id(function) not in known:
                        name = f"{inner}_{len(known)}"
                        known[id(function)] = compile_function(function, name, place)
                    functions[slot] = known[id(function)]
        return DividedGraph(divided, parts, functions, place, counted, saved)

    def compile_function(
        function: torch.fx.GraphModule, title: str, place: Place | None
    ) -> BoxedFunction:
        """A function that a loop or a branch calls, whose results stay where it works."""
        inline_operators(function, table, operators)
        calls = calls_between(function.graph)
        return compile_divided(function, calls, title, place=place, stays=True)

    def partition(graph: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
        nonlocal refused, is_random, has_divided_backward
        refused = report(reason_against(graph))
        is_random = any(map(tracing.is_random, graph.graph.nodes))
        inline_operators(graph, table, operators)
        forward, backward = _partition(graph, *arguments, **keywords)
        has_divided_backward = bool(calls_between(backward.graph))
        return forward, backward

    trace = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        decompositions=table,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with dynamo.compiling(), region_schemas.install(), own_rules.install():
        traced: Callable[..., Any] = trace(module, example_inputs)
    if direct is not None:
        if parts is None and not misdescribed and not isinstance(direct, WithNumbers):
            on_whole(direct)
        traced = unwrapped(direct, parts)
    elif twice and not is_random and written is not None:
        traced = double_backward.differentiable_twice(traced, written)
    return dynamo.converting(traced, misdescribed)


def _results_on_host(graph: torch.fx.GraphModule, saved: frozenset[int]) -> tuple[int, ...]:
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


def _on_host(run: BoxedFunction, positions: Sequence[int]) -> BoxedFunction:
    """``run`` with the results at these positions on the host."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        results = list(run(arguments))
        for position in positions:
            if results[position] is not None:
                results[position] = results[position].cpu()
        return results

    return call


def _filling(run: BoxedFunction, fill: Callable[[Iterable[Any]], None]) -> BoxedFunction:
    """``run``, whose arguments are given their contents before."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        fill(arguments)
        return run(arguments)

    return call


def unwrapped(compiled: BoxedFunction, parts: _Parts | None = None) -> Callable[..., Any]:
    """``compiled`` called by Dynamo itself, without AOTAutograd's wrappers around it.

    They cost about 8 µs a call, and up to a millisecond for a hundred quantized weights, and have
    nothing to do for a plain inference graph but to take these to ``parts``.
    """

    run = getattr(compiled, "run", compiled)

    def call(*arguments: Any) -> Sequence[Any]:
        results: Sequence[Any] = run(list(arguments))
        return results

    if parts is None:
        return call

    def call_with_parts(*arguments: Any) -> Sequence[Any]:
        results: Sequence[Any] = run(_taken_apart(arguments, parts))
        return results

    return call_with_parts


# For each argument what gives the tensors that a subclass of tensors consists of, None of others.
_Parts = tuple[Callable[[Any], Iterable[Any]] | None, ...]


def _parts_of(arguments: Sequence[Any]) -> _Parts | None:
    """None if none has parts."""
    found = tuple(_getter(a) if is_traceable_wrapper_subclass(a) else None for a in arguments)
    return found if any(found) else None


def _getter(argument: Any) -> Callable[[Any], Iterable[Any]]:
    names, _ = argument.__tensor_flatten__()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def _taken_apart(arguments: Sequence[Any], parts: _Parts) -> list[Any]:
    given: list[Any] = []
    for argument, get in zip(arguments, parts, strict=True):
        if get is None:
            given.append(argument)
        else:
            given += get(argument)
    return given


def _is_plain(
    graph: torch.fx.GraphModule, arguments: Sequence[Any], results: Sequence[Any]
) -> bool:
    """Whether a graph takes Dynamo's arguments, or their parts, and gives its results as they are.

    Not if an argument is changed outside of the graph, an output is an alias or has parts, or
    AOTAutograd changed the arguments (removed duplicates, added sizes, tokens or seeds).

    Args:
        results: what Dynamo knows of them.
    """
    metadata, found = _metadata(), _parts_of(arguments)
    parts = arguments if found is None else _taken_apart(arguments, found)
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


def _results_of(module: torch.fx.GraphModule) -> list[Any]:
    """What Dynamo knows of the results of its graph."""
    (returned,) = module.graph.find_nodes(op="output")[0].args
    nodes = [node for node in returned if isinstance(node, torch.fx.Node)]
    return [node.meta.get("example_value") for node in nodes]


def _partition(graph: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
    """Splits a joint graph into forward and backward."""
    recompute.keep_seeds(graph)
    recompute.recompute_constants(graph)
    recompute.recompute_masks(graph)
    recompute.split_log_softmax(graph)
    with fusible_operators.install():
        return min_cut_rematerialization_partition(graph, *arguments, **keywords)


def _metadata() -> Any:
    """What AOTAutograd knows about the graph that it is compiling."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _static_inputs() -> frozenset[int]:
    """Positions of parameters and buffers, for graphs whose arguments are the user's."""
    return frozenset(getattr(_metadata(), "static_input_indices", None) or ())


def _counted() -> frozenset[int]:
    name = "mutated_graph_handled_indices_seen_by_autograd"
    return _behind_tokens(getattr(_metadata(), name, None) or ())


def _behind_tokens(positions: Iterable[int]) -> frozenset[int]:
    """Positions in a graph, whose first arguments and outputs are the tokens of its effects."""
    count = token_count(_metadata())
    return frozenset(position + count for position in positions)


def _static_in_backward(graph: torch.fx.GraphModule, static: frozenset[int]) -> frozenset[int]:
    """Positions of parameters among saved values: argument i is named ``primals_{i+1}``."""
    found = set()
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        match = re.fullmatch(r"primals_(\d+)", str(node.target))
        if match is not None and int(match[1]) - 1 in static:
            found.add(position)
    return frozenset(found)


def _saved_outputs(graph: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of the outputs that follow everything that the user gets to see."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    visible = metadata.num_forward + token_count(metadata)
    (returned,) = graph.graph.find_nodes(op="output")[0].args
    return frozenset(
        position
        for position, node in enumerate(returned)
        if position >= visible
        and isinstance(node, torch.fx.Node)
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _take_forwarded(graph: torch.fx.GraphModule) -> tuple[tuple[int, int], ...]:
    """Replaces arguments among a graph's outputs by None; (output, input) positions of each.

    Also those that the graph changes: they are returned as the ``copy_`` into them.
    """
    output = graph.graph.find_nodes(op="output")[0]
    positions = {node: k for k, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in positions:
            positions[node] = positions[node.args[0]]
    (returned,) = output.args
    found = tuple((k, positions[node]) for k, node in enumerate(returned) if node in positions)
    if found:
        output.args = (tuple(None if node in positions else node for node in returned),)
        graph.recompile()
    return found


def _may_run_again(metadata: Any) -> bool:
    """Whether Dynamo's graph gives the same results when it is run once more.

    And whether its gradients are those of its results: none is a view of what it does not return.
    """
    changes = metadata.num_mutated_inp_runtime_indices + metadata.num_mutated_graph_handled_indices
    return not (changes or metadata.num_intermediate_bases or metadata.tokens)


def _lazy(graph: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of arguments that may be lazily conjugated or negated.

    Dynamo's guards keep what it saw of its arguments; gradients are known to autograd only.
    """
    return frozenset(
        position
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and (value.is_conj() or value.is_neg() or str(node.target).startswith("tangents"))
    )
