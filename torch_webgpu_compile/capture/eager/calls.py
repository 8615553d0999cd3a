"""What `eager.capture_call` takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...captured import CapturedGraph, Phase
from ...torch_private import TreeSpec, tree_structure, tree_unflatten
from .numbers import LeafNumbers


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument.

    Attributes:
        dtype, sizes, strides: as PyTorch has them; strides and sizes in elements.
        offset: the first element, in elements from where the argument's memory is bound: what the
            storage offset leaves beyond a multiple of the binding alignment.
        memory: equal for arguments that may share memory.
        conj, neg: whether the tensor is the conjugate, or the negative, of what its memory holds.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    memory: int = 0
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A result that is output number ``position`` of the graph, mutations not counted."""

    position: int


@dataclass(frozen=True, slots=True)
class ResultArgument:
    """A result that is the argument at a leaf: what in-place and ``out=`` overloads return."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is not a tensor."""

    value: Any


Result = Output | ResultArgument | Constant


@dataclass(frozen=True)
class CallInterface:
    """How the leaves and results of a call are those of its graph. It can be pickled.

    Leaves are those of ``torch.utils._pytree.tree_flatten((args, kwargs))``, in that order.

    Attributes:
        phase: what `compiler.compile_graph` takes.
        arguments: the leaf that each of the graph's arguments is, a tensor or an integer. The graph
            may have two more. First, if there are ``numbers``: a vector of them. Then, with
            ``phase.seeds``, random seeds: int32 (seeds, 2).
        numbers: what computes that vector from the leaves; None: there is none.
        free_numbers: the leaves that may be any finite floats.
        results: the flattened result of the call.
        results_spec: how `torch.utils._pytree.tree_unflatten` builds the result from them.
        mutated: the leaves that the call changes.
        resized: those of them that have other sizes than the result, as ``out=`` arguments may: the
            caller gives them the sizes and strides that the plan writes, before the call.
        accepts: whether the graph also computes the call with these leaves, of the same structure
            (lengths of lists, names of keywords), which have a `TensorSpec` for each tensor.
    """

    phase: Phase
    arguments: tuple[int, ...]
    numbers: LeafNumbers | None
    free_numbers: frozenset[int]
    results: tuple[Result, ...]
    results_spec: TreeSpec
    mutated: tuple[int, ...]
    resized: tuple[int, ...]
    accepts: Callable[[Sequence[Any]], bool]

    def __reduce__(self) -> tuple[Any, ...]:
        # PyTorch warns where a `TreeSpec` is unpickled: an example of its structure will do.
        example = tree_unflatten([0] * self.results_spec.num_leaves, self.results_spec)
        values = {known.name: getattr(self, known.name) for known in fields(CallInterface)}
        return _unpickled, ({**values, "results_spec": example},)


def _unpickled(values: dict[str, Any]) -> CallInterface:
    return CallInterface(**{**values, "results_spec": tree_structure(values["results_spec"])})


@dataclass(frozen=True)
class CapturedCall(CallInterface):
    """A call as a graph.

    Attributes:
        captured: what `compiler.compile_graph` takes.
    """

    captured: CapturedGraph

    @property
    def interface(self) -> CallInterface:
        """The rest."""
        return CallInterface(*(getattr(self, known.name) for known in fields(CallInterface)))
