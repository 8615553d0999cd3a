"""`capture_function`: a Python function, with the state that it reaches, as a `CapturedGraph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..capture.control_flow.parts import HostNumbers
from ..capture.decompositions import symbolic_numbers
from ..capture.decompositions.table import decompositions
from ..capture.graph import passes
from ..capture.graph.composing import Composer, PlanMaker, with_calls
from ..capture.graph.passes import CALL, Draft, State
from ..capture.tracing import Rules, Traced, clean_dispatch, run_functional
from ..captured import CapturedGraph, Phase
from ..errors import UnsupportedOp
from ..fallbacks import on_fallback
from ..plan.model import Plan
from ..torch_private import (
    FakeTensor,
    OpOverload,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from .inputs import Dimension, ExportInputs, fake_like, path_name
from .names import Names
from .recorded import Recorded
from .recording import any_sizes, record
from .steps import StepRecorder, drop_unused, keep_equal

aten = torch.ops.aten


@dataclass(frozen=True)
class Returned:
    """A result: an output of the graph by number, or an argument, which may have changed.

    Attributes:
        name: e.g. ``logits``, ``0`` or ``output`` where there is only one.
        value: a fake tensor like it.
    """

    name: str
    value: Tensor
    output: int | None = None
    argument: int | None = None


@dataclass(frozen=True)
class CapturedFunction:
    """A function as a graph.

    Attributes:
        draft: the graph, after the passes so far. Its arguments are the inputs, the states, and the
            seeds if there are any.
        state: for the passes that follow.
        inputs: fake tensors by name.
        states: the real tensors, in order.
        changed: the states, by number, that the graph changes.
        halved: the states, by number, that the graph takes as float16.
        dimensions: the sizes that are symbols.
        returned: the tensors among the results.
        structure: the results as nested lists and dictionaries; see `manifest.Entry`.
    """

    draft: Draft
    state: State
    inputs: dict[str, FakeTensor]
    states: tuple[Tensor, ...]
    changed: frozenset[int]
    halved: frozenset[int]
    dimensions: tuple[Dimension, ...]
    returned: tuple[Returned, ...]
    structure: Any

    @property
    def largest(self) -> dict[str, int]:
        """The largest sizes, by symbol."""
        return {d.symbol: d.high for d in self.dimensions}

    def plan(self, make: PlanMaker) -> Plan:
        """Its plan, composed of others where data decide; ``make`` makes a plan of a graph."""
        if not self.draft.calls:
            return make(self.draft.captured, self.draft.phase)
        draft = passes.run(self.draft, self.state, passes.SEVERAL)
        silent = on_fallback("silent")  # bundles refuse operators that run on the host
        return Composer(self.state, make, silent).compose(draft)


def capture_function(
    name: str,
    inputs: ExportInputs,
    names: Names,
    native: frozenset[OpOverload],
    host_numbers: HostNumbers,
    half: Callable[[Tensor], bool] | None = None,
    change: Callable[[Recorded], Recorded] | None = None,
) -> CapturedFunction:
    """Captures a function.

    Args:
        name: the graph's.
        inputs: its arguments.
        names: what it reaches.
        native: the operators that lowering knows.
        host_numbers: see `passes.State`.
        half: of a variant in half precision, whether a state is to be float16; the call is made
            under autocast.
        change: what is done to the call that was recorded, if anything.

    Raises:
        UnsupportedOp: the function cannot be captured; the message says where and why.
    """
    rules = Rules(decompositions(native) | symbolic_numbers.DECOMPOSITIONS, native)
    autocast = torch.float16 if half is not None else None
    recorded = record(inputs, names, rules, autocast)
    recorded = recorded if change is None else change(recorded)
    states = tuple(recorded.states.values())
    with clean_dispatch(symbolic=True), any_sizes():
        fakes = inputs.fakes()
        values = [*fakes, *(_fake(inputs, s, half) for s in states)]
        traced = _functional(recorded, values, len(fakes), inputs, rules)
    inputs.settle()
    _refuse_aliases(states, traced.mutated, len(fakes))
    for position in traced.mutated:
        if position < len(fakes):
            raise UnsupportedOp(
                "export",
                f"the input {inputs.names[position]} is changed in place",
                "return the new value, or keep the tensor in the module: it is state then",
            )
    first, used = len(fakes), _used_states(traced, len(fakes))
    states = tuple(states[k] for k in used)
    returned, structure = _results(traced, [*fakes, *(values[first + k] for k in used)])
    changed = frozenset(new for new, old in enumerate(used) if first + old in traced.mutated)
    static = frozenset(first + k for k in range(len(used)) if k not in changed)
    state = State(rules, host_numbers)
    draft = with_calls(Draft(CapturedGraph(name, traced.module, static), Phase("inference")))
    if draft.calls:  # nothing is prepared between plans
        draft = replace(draft, captured=replace(draft.captured, static_inputs=frozenset()))
    else:
        draft = passes.run(draft, state, CALL)
    if draft.phase.complex_inputs or draft.phase.complex_outputs:
        raise UnsupportedOp(
            "export", "an input, state or result is complex", "use torch.view_as_real"
        )
    return CapturedFunction(
        draft,
        state,
        dict(zip(inputs.names, fakes, strict=True)),
        states,
        changed,
        frozenset(k for k, s in enumerate(states) if half is not None and half(s)),
        tuple(inputs.dimensions.values()),
        returned,
        structure,
    )


def _used_states(traced: Traced, first: int) -> list[int]:
    """Ends the graph, without what no result and no state needs; the numbers of states in it."""
    graph = traced.module.graph
    keep_equal(graph)
    graph.output(()).args = (tuple(n for n in tree_leaves(traced.results) if isinstance(n, Node)),)
    drop_unused(graph)
    used = []
    for k, node in enumerate(graph.find_nodes(op="placeholder")[first:]):
        if node.users:
            used.append(k)
        else:
            graph.erase_node(node)
    return used


def _fake(inputs: ExportInputs, state: Tensor, half: Callable[[Tensor], bool] | None) -> FakeTensor:
    """In rows without gaps, as it is stored."""
    dtype = torch.float16 if half is not None and half(state) else state.dtype
    return fake_like(state, inputs.mode, state.shape, dtype=dtype)


def _functional(
    recorded: Recorded,
    values: Sequence[FakeTensor],
    input_count: int,
    inputs: ExportInputs,
    rules: Rules,
) -> Traced:
    """The recorded graph once more: functional, and with decompositions."""
    numbers = {name: input_count + k for k, name in enumerate(recorded.states)}
    recorder = StepRecorder(rules, recorded.steps)

    def replay(*given: Any) -> Any:
        def attribute(name: str) -> Any:
            if name not in numbers:
                return getattr(recorded.module, name)
            value, real = given[numbers[name]], recorded.states[name]
            return value if value.dtype == real.dtype else value.to(real.dtype)

        known = recorder.replay(recorded.module, given, attribute)
        for name, node in recorded.replaced:
            given[numbers[name]].copy_(known[node])
        return tree_map_only(Node, known.__getitem__, recorded.results)

    with inputs.mode:
        traced = run_functional(recorder, replay, values)
    if isinstance(traced.results, Mapping) and type(traced.results) is not dict:
        return replace(traced, results=dict(traced.results))  # as transformers and diffusers return
    return traced


def _refuse_aliases(states: Sequence[Tensor], mutated: Collection[int], first: int) -> None:
    """Raises UnsupportedOp where a state that changes shares memory with another one."""
    storages: dict[int, list[int]] = {}
    for k, state in enumerate(states):
        storages.setdefault(state.untyped_storage()._cdata, []).append(k)
    for sharing in storages.values():
        if len(sharing) > 1 and any(first + k in mutated for k in sharing):
            shapes = " and ".join(str(tuple(states[k].shape)) for k in sharing)
            raise UnsupportedOp(
                "export",
                f"tensors of {shapes} that share memory are kept, and one of them is changed",
                "keep one of them, and make views of it in the function",
            )


def _results(traced: Traced, values: Sequence[Tensor]) -> tuple[tuple[Returned, ...], Any]:
    """The results; those that are no arguments become the graph's outputs."""
    graph = traced.module.graph
    positions = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    found, spec = tree_flatten_with_path(traced.results)
    outputs: list[Any] = []
    returned: dict[str, Returned] = {}
    by_leaf: list[Any] = []
    for path, leaf in found:
        if isinstance(leaf, torch.SymInt):
            raise UnsupportedOp("export", "a result is a size", "return tensors")
        if not isinstance(leaf, Node):
            by_leaf.append({"constant": leaf if _is_plain(leaf) else str(leaf)})
            continue
        name = path_name(path) or "output"
        if leaf in positions:
            k = positions[leaf]
            returned[name] = Returned(name, values[k], argument=k)
        else:
            returned[name] = Returned(name, leaf.meta["val"], output=len(outputs))
            outputs.append(leaf)
        by_leaf.append({"result": name})
    graph.output_node().args = (tuple(outputs),)
    traced.module.recompile()
    return tuple(returned.values()), _nested(spec, by_leaf)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _nested(spec: Any, leaves: list[Any]) -> Any:
    """Leaves in the structure of a pytree, as lists and dictionaries."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and set(value) in ({"result"}, {"constant"}):
            return value
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if hasattr(value, "_asdict"):
            return {key: plain(item) for key, item in value._asdict().items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        raise UnsupportedOp(
            "export", f"it returns a {type(value).__name__}", "return tensors, tuples, dictionaries"
        )

    return plain(tree_unflatten(leaves, spec))
