"""`capture_call`: one call of an ATen operator becomes a `CapturedGraph`, as a compiled graph does.

The call is traced on fake CPU tensors made from descriptions (`TensorSpec`), so that all that holds
for compiled CPU graphs holds here. Mutation is functional: the graph reads the arguments as they
are before the call and ends with writes into those that the operator changes. Where a changed
argument shares memory with one that is only read, the old contents are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.fx import Node

from ...captured import CapturedGraph, Phase
from ...errors import UnsupportedOp
from ...torch_ops.names import dispatch_name
from ...torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    TreeSpec,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    _dispatch_has_computed_kernel_for_dispatch_key,
    _dispatch_has_kernel_for_dispatch_key,
    tree_flatten,
    tree_unflatten,
)
from ..decompositions.table import decompositions
from ..fx_graphs import add_argument
from ..graph.passes import CALL, Draft, State, run
from ..tracing import Rules, Traced, call_with_symbols, clean_dispatch, trace
from . import device_ops
from .arguments import (
    as_traced,
    as_written,
    groups_of_equals,
    number_dtype,
    overlap,
    size_leaves,
    symbolic_leaves,
    with_tensors,
    without_placement,
)
from .calls import CapturedCall, Constant, Output, Result, ResultArgument, TensorSpec
from .inputs import Inputs, LaneInputs, Sizes
from .memory_formats import laid_out
from .numbers import LeafNumber, LeafNumbers, expressions_of
from .rewrites import REWRITES

_ON_HOST = "run it on the host"
_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)

_numbers = itertools.count()


def capture_call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    native: frozenset[OpOverload],
    *,
    dynamic: bool = False,
    numbers: bool | None = None,
) -> CapturedCall:
    """Captures ``op(*args, **kwargs)``.

    Args:
        op: not a view.
        args, kwargs: with a `TensorSpec` for each tensor, and a Python number for each tensor that
            wraps one. Devices and generators are ignored: the device is the caller's, and so is
            the source of the seeds.
        native: the operators that lowering knows.
        dynamic: sizes, strides, offsets and integers are symbols where the operator allows it.
        numbers: floats are symbols where the operator allows it; by default if ``dynamic``.

    Raises:
        UnsupportedOp: the operator cannot be traced, with these symbols at least, or two changed
            arguments share memory.
        Exception: what PyTorch raises about the arguments, such as sizes that do not fit; not with
            symbols, where all errors are `UnsupportedOp`.
    """
    _check_schema(op)
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    kinds: list[type] = [int] if dynamic else []
    kinds += [float] if (dynamic if numbers is None else numbers) else []
    found = symbolic_leaves(op, args, kwargs, leaves) if kinds else {}
    chosen = {k: others for k, others in found.items() if type(leaves[k]) in kinds}
    sizes = None
    if dynamic:
        by_magnitude = torch.Tag.pointwise not in op.tags
        alike = {leaf: found[0] for found in groups_of_equals(op, args, kwargs) for leaf in found}
        sizes = Sizes(by_magnitude, *size_leaves(op, args, kwargs), alike)

    def apply(filled: Sequence[Any]) -> Any:
        positional, named = tree_unflatten(filled, spec)
        return apply_op(op, positional, named)

    mutates = op._schema.is_mutable
    traceable = Traceable(str(op), _short(op), apply, mutates or op in REWRITES, mutates)
    return capture(traceable, leaves, chosen, native, sizes)


@dataclass(frozen=True)
class Traceable:
    """What is captured.

    Attributes:
        name: for messages.
        short: for the graph's name.
        apply: computes the results from the leaves, with tensors in place of `TensorSpec`s.
        mutates: whether it may change leaves.
        gives_leaves: whether leaves that it changes may be among its results.
    """

    name: str
    short: str
    apply: Callable[[Sequence[Any]], Any]
    mutates: bool
    gives_leaves: bool


def capture(
    traceable: Traceable,
    leaves: Sequence[Any],
    chosen: Mapping[int, frozenset[float]],
    native: frozenset[OpOverload],
    sizes: Sizes | None = None,
    length: int = 0,
    held_in: torch.dtype | None = None,
) -> CapturedCall:
    """Captures what is computed from leaves; see `capture_call`.

    Args:
        chosen: the leaves whose numbers are symbols, with the values that these may not have.
        sizes: which sizes are; None: none.
        length: a first size that is one symbol, for all tensors that have it; see `LaneInputs`.
        held_in: the dtype of numbers; by default what the leaves need.
    """
    symbolic = sizes is not None or bool(chosen) or bool(length)
    try:
        with clean_dispatch(symbolic=symbolic):
            inputs = LaneInputs(leaves, chosen, length) if length else Inputs(leaves, chosen, sizes)
            traced = _trace(traceable, leaves, inputs, native)
            held_in = held_in or number_dtype(leaves)
            return _call(traceable, leaves, inputs, traced, native, held_in)
    except UnsupportedOp:
        raise
    except Exception as error:
        if not symbolic and not isinstance(error, _UNTRACEABLE):
            raise
        cause = f"it cannot be traced ({_first_line(error)})"
        step = "capture it without symbols" if symbolic else _ON_HOST
        raise UnsupportedOp(traceable.name, cause, step) from error


def apply_op(op: OpOverload, positional: Sequence[Any], named: dict[str, Any]) -> Any:
    """The operator as it is traced, on fake tensors."""
    function = REWRITES.get(op) or partial(call_with_symbols, op)
    arguments = with_tensors(op, positional)
    return laid_out(op, arguments, function(*arguments, **without_placement(named)))


def next_name(op: OpOverload) -> str:
    """A name for the graph of another call."""
    return f"eager{next(_numbers)}_{_short(op)}"


def _short(op: OpOverload) -> str:
    return op._schema.name.split("::")[-1]


def _trace(
    traceable: Traceable,
    leaves: Sequence[Any],
    inputs: Inputs,
    native: frozenset[OpOverload],
) -> Traced:
    filled = [as_traced(leaf) for leaf in leaves]

    def call(*values: Any) -> Any:
        for k, value in zip(inputs.leaves, values, strict=True):
            leaf = leaves[k]
            filled[k] = as_written(value, leaf) if isinstance(leaf, TensorSpec) else value
        for k, value in inputs.numbers.items():
            filled[k] = value
        return traceable.apply(filled)

    rules = _rules_of(native)
    return trace(call, inputs.values, inputs.mode, rules, mutates=traceable.mutates)


def _call(
    traceable: Traceable,
    leaves: Sequence[Any],
    inputs: Inputs,
    traced: Traced,
    native: frozenset[OpOverload],
    held_in: torch.dtype,
) -> CapturedCall:
    taken = inputs.leaves
    mutated = tuple(taken[position] for position in traced.mutated)
    if overlap([leaves[k] for k in mutated]):
        raise UnsupportedOp(traceable.name, "it changes two arguments that share memory", _ON_HOST)
    results, results_spec = _results(traced, taken, traceable.gives_leaves)
    places, numbers = _take_numbers(traced.module.graph, inputs, held_in)
    name = f"eager{next(_numbers)}_{traceable.short}"
    captured = CapturedGraph(name, traced.module, frozenset(), inputs.offsets, places)
    draft = run(Draft(captured, Phase("inference")), State(_rules_of(native)), CALL)
    return CapturedCall(
        draft.phase,
        taken,
        numbers,
        inputs.free_numbers,
        results,
        results_spec,
        mutated,
        tuple(taken[position] for position in traced.resized),
        inputs.guard(mutated),
        draft.captured,
    )


def _take_numbers(
    graph: torch.fx.Graph, inputs: Inputs, dtype: torch.dtype
) -> tuple[dict[str, tuple[int, int]], LeafNumbers | None]:
    """Adds an argument with the numbers that the graph reads; where each of them is, by expression.

    Also what computes them from the leaves, if there are any: by the last leaf of each.
    """
    symbols = inputs.leaf_symbols
    found = expressions_of(graph, symbols) if inputs.numbers else ()
    if not found:
        return {}, None
    entries = {str(expr): LeafNumber.of(expr, symbols) for expr in found}
    order = sorted(entries, key=lambda text: entries[text].last_leaf)
    position = len(graph.find_nodes(op="placeholder"))
    with inputs.mode:
        add_argument(graph, "numbers", torch.empty((len(order),), dtype=dtype))
    places = {text: (position, k) for k, text in enumerate(order)}
    return places, LeafNumbers([entries[text] for text in order], dtype)


def _check_schema(op: OpOverload) -> None:
    if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
        raise UnsupportedOp(str(op), "its result is a view", "make the view of the tensor itself")
    if "as_strided" in op._schema.name:
        raise UnsupportedOp(str(op), "it reads memory outside of its argument", _ON_HOST)


@lru_cache(maxsize=1)
def _rules_of(native: frozenset[OpOverload]) -> Rules:
    return Rules(decompositions(native) | device_ops.DECOMPOSITIONS, native)


@lru_cache(maxsize=1)
def _host_rules() -> Rules:
    return _rules_of.__wrapped__(frozenset())


def rule_for_host(op: OpOverload) -> Callable[..., Any] | None:
    """What computes on CPU tensors what PyTorch has for other devices only: its decomposition.

    None for an operator that the CPU has, and for one without a decomposition.
    """
    name = dispatch_name(op)
    if op in device_ops.DECOMPOSITIONS:  # the CPU's kernel of some of these only refuses
        is_there = _dispatch_has_kernel_for_dispatch_key(name, "CPU")
    else:
        is_there = _dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
    return None if is_there else _host_rules().decompositions.get(op)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _results(
    traced: Traced, taken: Sequence[int], mutates: bool
) -> tuple[tuple[Result, ...], TreeSpec]:
    """Ends the graph with an output node; what the call's results are."""
    graph = traced.module.graph
    found = traced.results
    leaves, spec = tree_flatten(tuple(found) if isinstance(found, tuple) else found)
    placeholders = graph.find_nodes(op="placeholder")
    positions = {node: k for k, node in enumerate(placeholders)}
    outputs: list[Any] = []
    results: list[Result] = []
    storages: set[int] = set()
    for leaf in leaves:
        if isinstance(leaf, Node) and mutates and leaf in positions:
            results.append(ResultArgument(taken[positions[leaf]]))
        elif isinstance(leaf, torch.SymInt):
            results.append(Output(len(outputs)))
            outputs.append(leaf)
        elif isinstance(leaf, Node):
            results.append(Output(len(outputs)))
            outputs.append(_separate(graph, leaf, storages))
        else:
            results.append(Constant(leaf))
    graph.output(()).args = (tuple(outputs),)
    return tuple(results), spec


def _separate(graph: torch.fx.Graph, node: Node, storages: set[int]) -> Node:
    """``node``, or a copy of it where another result already has its memory."""
    value = node.meta["val"]
    storage = value.untyped_storage()._cdata
    if storage not in storages:
        storages.add(storage)
        return node
    with value.fake_mode:
        copy = torch.ops.aten.clone.default(value)
    made = graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta["val"] = copy
    return made
