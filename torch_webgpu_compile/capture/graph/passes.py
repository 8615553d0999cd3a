"""`CAPTURE_PASSES`: one flat, ordered list of what is done to FX graphs until they are compiled.

A graph of Dynamo's goes all of it; between its forms are AOTAutograd, which traces it and divides a
joint graph into forward and backward, and `aot`, which compiles the parts of what no one plan can
hold. Eager calls and exported functions, which this package traces, come in at the form `CALL`.

A pass changes its FX graph in place, or puts another one in its place, and gives another `Draft`
where it did. After that the result is verified, and kept as text for whoever wants to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...captured import CapturedGraph, Phase
from ...errors import VerificationError
from ...options import resolve
from ...passes import Form, Pass
from ...stages import Stage
from ...torch_private import OpOverload, TracingContext
from ..complex_numbers.separation import separate_graph
from ..control_flow.compose import format_divided
from ..control_flow.inline import inline_operators
from ..control_flow.numbers import take_numbers
from ..control_flow.parts import Divided, Division, HostNumbers
from ..tracing import Rules, take_seeds
from . import patterns, recompute
from .argument_views import ArgumentViews, take_forwarded, take_views
from .common_calls import merge_common_calls

_NO_VIEWS = ArgumentViews()


@dataclass(frozen=True)
class Draft:
    """A graph that is being captured.

    Attributes:
        captured, phase: as they are so far.
        calls: what divides the graph; see `Division`.
        views: results that the caller makes of the arguments, which are no longer in the graph.
        numbers: integers that the caller computes of the arguments, which are the graph's last.
        divided: the graph in parts.
    """

    captured: CapturedGraph
    phase: Phase
    calls: frozenset[Node] = frozenset()
    views: ArgumentViews = _NO_VIEWS
    numbers: tuple[torch.SymInt, ...] = ()
    divided: Divided | None = None

    @property
    def module(self) -> GraphModule:
        """The FX graph."""
        return self.captured.module


@dataclass(frozen=True)
class State:
    """What passes need besides a draft.

    Attributes:
        rules: what is recorded where a graph is traced again.
        host_numbers: finds the integers in a graph that no plan computes of its arguments.
        shows: whether somebody wants to read what a pass gave, by the pass's name; by default as
            the environment says.
    """

    rules: Rules
    host_numbers: HostNumbers = lambda module: ()
    shows: Callable[[str], bool] = lambda name: resolve().shows(name)


def aot_metadata() -> Any:
    """What AOTAutograd knows about the forward or inference graph that it is compiling."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


# ---- the passes: in place, but for the last two


def _in_place(rewrite: Callable[[GraphModule], object]) -> Callable[[Draft, State], Draft]:
    """A pass of a function that needs nothing but the graph, and says whether it changed it."""
    return lambda draft, state: replace(draft) if rewrite(draft.module) else draft


def _inline_operators(draft: Draft, state: State) -> Draft:
    found = inline_operators(draft.module, state.rules)
    return replace(draft) if found else draft


def _take_views(draft: Draft, state: State) -> Draft:
    metadata = None if draft.phase.name == "backward" else aot_metadata()
    views = take_views(draft.module, metadata, decides=bool(draft.calls))
    return replace(draft, views=views) if views.views else draft


def _divide(draft: Draft, state: State) -> Draft:
    captured = draft.captured
    given = captured.module, captured.name, draft.calls, captured.static_inputs
    divided = Division(*given, state.host_numbers).run()
    inputs, outputs = divided.complex_inputs, divided.complex_outputs
    phase = replace(draft.phase, complex_inputs=inputs, complex_outputs=outputs)
    return replace(draft, divided=divided, phase=phase)


def _take_numbers(draft: Draft, state: State) -> Draft:
    numbers = tuple(state.host_numbers(draft.module))
    take_numbers(draft.module, numbers)
    return replace(draft, numbers=numbers) if numbers else draft


def _take_forwarded(draft: Draft, state: State) -> Draft:
    forwarded = take_forwarded(draft.module)
    if not forwarded:
        return draft
    saved = draft.phase.saved - {output for output, _ in forwarded}
    return replace(draft, phase=replace(draft.phase, forwarded=forwarded, saved=saved))


def _take_seeds(draft: Draft, state: State) -> Draft:
    count = take_seeds(draft.module)
    return replace(draft, phase=replace(draft.phase, seeds=count)) if count else draft


def _separate_complex(draft: Draft, state: State) -> Draft:
    real = separate_graph(draft.module, state.rules)
    if real.module is draft.module:
        return draft
    offsets = draft.captured.offsets.items()
    return replace(
        draft,
        captured=replace(
            draft.captured,
            module=real.module,
            # A complex element is two real ones.
            offsets={k: 2 * offset if k in real.inputs else offset for k, offset in offsets},
        ),
        phase=replace(draft.phase, complex_inputs=real.inputs, complex_outputs=real.outputs),
    )


# ---- what they take and give


def _verify(draft: Draft, before: Draft, state: State) -> None:
    for module in draft.module.modules():
        if isinstance(module, GraphModule):
            try:
                module.graph.lint()
            except (RuntimeError, ValueError) as error:  # what FX raises
                what = str(error).partition("\n")[0]  # the graph follows
                raise VerificationError(f"{draft.captured.name}: {what}") from error


def _verify_traced(draft: Draft, before: Draft, state: State) -> None:
    _verify(draft, before, state)
    for node in draft.module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.users and "val" not in node.meta:
            raise VerificationError(f"{draft.captured.name}: nothing is known of {node.name}")


def _text(draft: Draft) -> str:
    return draft.captured.text


def _joint_text(draft: Draft) -> str:
    nodes = [node for node in draft.module.graph.nodes if "recompute" in node.meta]
    marks = [f"# {node.name}: {node.meta['recompute']}" for node in nodes]
    return "\n".join([_text(draft), *marks])


DYNAMO = Form("Dynamo's graph", _verify, _text)
TRACED = Form("AOTAutograd's graph", _verify_traced, _text)
JOINT = replace(TRACED, name="joint graph", text=_joint_text)
PHASE = replace(TRACED, name="graph of a phase")
RETURNED = replace(TRACED, name="graph whose arguments the caller returns")
SEVERAL = replace(TRACED, name="graph of several plans")
# Steps are verified when there are the plans that they run: see `plan.verify`.
DIVIDED = Form(
    "Divided", lambda draft, before, state: None, lambda draft: format_divided(draft.divided)
)
WHOLE = replace(TRACED, name="graph of one plan")
CALL = replace(TRACED, name="graph of one plan, called as it is")
CAPTURED = replace(TRACED, name="CapturedGraph")


CAPTURE_PASSES: tuple[Pass, ...] = (
    # Dynamo's graph, of PyTorch's functions. AOTAutograd traces it.
    Pass("replace_attention", DYNAMO, DYNAMO, _in_place(patterns.replace_attention)),
    Pass("replace_calls", DYNAMO, DYNAMO, _in_place(patterns.replace_calls)),
    # Functional, of ATen's operators. AOTAutograd divides a joint graph.
    Pass("inline_operators", TRACED, TRACED, _inline_operators),
    Pass("keep_seeds", JOINT, JOINT, _in_place(recompute.keep_seeds)),
    Pass("recompute_constants", JOINT, JOINT, _in_place(recompute.recompute_constants)),
    Pass("recompute_masks", JOINT, JOINT, _in_place(recompute.recompute_masks)),
    Pass("split_log_softmax", JOINT, JOINT, _in_place(recompute.split_log_softmax)),
    Pass("merge_common_calls", JOINT, JOINT, _in_place(merge_common_calls)),
    # For inference, forward or backward. What no one plan can hold is divided.
    Pass("take_views", PHASE, PHASE, _take_views),
    Pass("take_forwarded", RETURNED, RETURNED, _take_forwarded),
    Pass("divide", SEVERAL, DIVIDED, _divide),
    # What one plan holds.
    Pass("take_numbers", WHOLE, WHOLE, _take_numbers),
    Pass("take_seeds", CALL, CALL, _take_seeds),
    Pass("separate_complex", CALL, CAPTURED, _separate_complex),
)


def run(draft: Draft, state: State, *forms: Form) -> Draft:
    """Runs the passes that take one of these forms.

    Raises:
        UnsupportedOp: see the passes.
        VerificationError: a pass gave an inconsistent result.
    """
    for step in CAPTURE_PASSES:
        if step.takes not in forms:
            continue
        before = draft
        with Stage("pass", step.name) as stage:
            draft = step(before, state)
            texts = draft.captured.texts
            if draft is not before and state.shows(step.name):
                texts = {**texts, step.name: step.gives.text(draft)}
        seconds = {**draft.captured.seconds, step.name: stage.seconds}
        draft = replace(draft, captured=replace(draft.captured, seconds=seconds, texts=texts))
    return draft
