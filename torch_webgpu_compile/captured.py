"""`CapturedGraph`: the functional FX graph that capture gives to lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from .errors import VerificationError
from .torch_private import _top_saved_tensors_default_hooks, tree_leaves


@dataclass(frozen=True)
class CapturedGraph:
    """A functional graph of core ATen operators with fake-tensor metadata on every node.

    Attributes:
        name: unique in the process, e.g. ``graph0_forward``.
        module: the FX graph. Placeholders are tensors or symbolic integers, in the order of the
            call's arguments; ``node.meta["val"]`` holds fake tensors and SymInts; trailing
            ``aten.copy_(placeholder, value)`` nodes are the mutations of inputs.
        static_inputs: positions of parameters and buffers: the same tensors at every call.
        offsets: by position, where a tensor argument's first element is in the memory that is bound
            for it, in elements; 0 for the others. The fake tensor's own offset says nothing.
        numbers: by the name of a symbolic float, (position, element) of its value in a tensor
            argument with one dimension.
        seconds: how long each pass of capture and the verification of its result took, by the
            pass's name; those of a graph that was divided count for each part.
        texts: what each that changed something gave, where somebody wants to read it.
    """

    name: str
    module: torch.fx.GraphModule
    static_inputs: frozenset[int]
    offsets: Mapping[int, int | torch.SymInt] = field(default_factory=dict)
    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The FX graph as Python code with shapes and user lines."""
        code = self.module.print_readable(print_output=False)
        static = ", ".join(map(str, sorted(self.static_inputs)))
        return f"# {self.name}; parameters and buffers: arguments {static or 'none'}\n{code}"


@dataclass(frozen=True)
class Phase:
    """The purpose of a captured graph: inference, forward or backward.

    Attributes:
        name: ``inference``, ``forward`` or ``backward``; ``joint`` of a graph that AOTAutograd has
            not divided into the last two.
        saved: positions of a forward graph's outputs that only its backward graph will see.
        forwarded: (output, input) positions of outputs that are just an argument. The captured
            graph has None in their place.
        counted: positions of changed arguments whose version counters AOTAutograd increments, by
            one before each call.
        seeds: rows of the graph's last argument, the seeds of its random operators; 0: no such
            argument.
        complex_inputs, complex_outputs: positions of arguments and outputs that are complex tensors
            to PyTorch, and real ones (…, 2) in the captured graph.
        lazy: positions of arguments whose memory may hold the conjugates or negatives of their
            elements (``Tensor.is_conj``, ``Tensor.is_neg``); the graph takes the elements.
    """

    name: str
    saved: frozenset[int] = frozenset()
    forwarded: tuple[tuple[int, int], ...] = ()
    counted: frozenset[int] = frozenset()
    seeds: int = 0
    complex_inputs: frozenset[int] = frozenset()
    complex_outputs: frozenset[int] = frozenset()
    lazy: frozenset[int] = frozenset()


def verify_captured(captured: CapturedGraph, phase: Phase) -> None:
    """Raises VerificationError where a graph is not what it and its phase are said to be."""
    graph = captured.module.graph
    arguments = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))

    def check(holds: bool, text: str) -> None:
        if not holds:
            raise VerificationError(f"{captured.name}: {text}")

    def shape_of(position: int) -> Sequence[Any]:
        value = arguments[position] if arguments else None
        return value.shape if isinstance(value, torch.Tensor) else ()

    for node in graph.nodes:
        values = tree_leaves(node.meta.get("val"))
        if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
            check(False, f"{node.name} is complex")
    given = [result for result, _ in phase.forwarded]
    read = [argument for argument, _ in captured.numbers.values()]
    returned = [argument for _, argument in phase.forwarded]
    taken = (captured.static_inputs, captured.offsets, phase.counted, phase.lazy, returned, read)
    for kind, places, found in (
        ("argument", arguments, (*taken, phase.complex_inputs)),
        ("result", results, (phase.saved, phase.complex_outputs, given)),
    ):
        last = max(chain(*found), default=-1)
        check(last < len(places), f"there is no {kind} {last}")
    for result in given:
        check(results[result] is None, f"result {result} is computed, and an argument")
    for position in phase.complex_inputs:
        check(tuple(shape_of(position)[-1:]) == (2,), f"argument {position} has no two parts")
    for name, (position, element) in captured.numbers.items():
        check(0 <= element < (*shape_of(position), 0)[0], f"no argument has the number {name}")
    if phase.seeds:
        check(tuple(shape_of(-1)) == (phase.seeds, 2), f"no argument has {phase.seeds} seeds")


def saved_tensors_have_hooks() -> bool:
    """Whether hooks (checkpointing, offloading) will read the tensors that autograd saves."""
    hooks = _top_saved_tensors_default_hooks
    return hooks is None or hooks(True) is not None
