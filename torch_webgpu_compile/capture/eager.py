"""`capture_call`: one call of an ATen operator becomes a `CapturedGraph`, as a compiled graph does.

The call is traced on fake CPU tensors made from descriptions (`TensorSpec`), so that all that holds
for compiled CPU graphs holds here. Mutation is functional: the graph reads the arguments as they
are before the call and ends with writes into those that the operator changes. Where a changed
argument shares memory with one that is only read, the old contents are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..captured import CapturedGraph, Phase
from ..errors import UnsupportedOp
from . import decompositions, device_ops, random
from .rewrites import REWRITES
from .tracing import Traced, trace

_ON_HOST = "run it on the host"
_CPU = torch.device("cpu")
_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument.

    Attributes:
        dtype, sizes, strides: as PyTorch has them; strides and sizes in elements.
        offset: the first element, in elements from where the argument's memory is bound: what the
            storage offset leaves beyond a multiple of the binding alignment.
        memory: equal for arguments that may share memory.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A result that is output number ``position`` of the graph, mutations not counted."""

    position: int


@dataclass(frozen=True, slots=True)
class Argument:
    """A result that is the argument at a leaf: what in-place and ``out=`` overloads return."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is not a tensor."""

    value: Any


Result = Output | Argument | Constant


@dataclass(frozen=True)
class CapturedCall:
    """A call as a graph.

    Leaves are those of ``torch.utils._pytree.tree_flatten((args, kwargs))``, in that order.

    Attributes:
        captured, phase: what `compile_graph` takes. With ``phase.seeds`` the graph has one
            argument more than ``arguments``, the seeds: int32 (seeds, 2).
        arguments: the leaf that each of the graph's arguments is.
        results: the flattened result of the call.
        results_spec: how `torch.utils._pytree.tree_unflatten` builds the result from them.
        mutated: the leaves that the call changes.
        resized: those of them that have other sizes than the result, as ``out=`` arguments may: the
            caller gives them the sizes and strides that the plan writes, before the call.
        accepts: whether the graph also computes the call with these leaves, with a `TensorSpec`
            for each tensor.
    """

    captured: CapturedGraph
    phase: Phase
    arguments: tuple[int, ...]
    results: tuple[Result, ...]
    results_spec: TreeSpec
    mutated: tuple[int, ...]
    resized: tuple[int, ...]
    accepts: Callable[[Sequence[Any]], bool]


def capture_call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    native: frozenset[OpOverload],
    *,
    dynamic: bool = False,
) -> CapturedCall:
    """Captures ``op(*args, **kwargs)``.

    Args:
        op: not a view.
        args, kwargs: with a `TensorSpec` for each tensor, and a Python number for each tensor that
            wraps one. Devices and generators are ignored: the device is the caller's, and so is
            the source of the seeds.
        native: the operators that lowering knows.
        dynamic: sizes, offsets and numbers are symbols where the operator allows it.

    Raises:
        UnsupportedOp: the operator cannot be traced, or two changed arguments share memory.
        Exception: what PyTorch raises about the arguments, such as sizes that do not fit.
    """
    _check_schema(op)
    leaves, spec = tree_flatten((tuple(args), kwargs))
    mode = FakeTensorMode()
    taken = tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, TensorSpec))
    filled = [_neutral(leaf) for leaf in leaves]
    function = REWRITES.get(op, op)

    def call(*inputs: Any) -> Any:
        for k, value in zip(taken, inputs, strict=True):
            filled[k] = value
        positional, named = tree_unflatten(filled, spec)
        positional = _with_tensors(op, positional)
        return function(*positional, **_without_placement(named))

    fakes = [_fake(mode, leaves[k]) for k in taken]
    mutates = op._schema.is_mutable or op in REWRITES
    try:
        traced = trace(call, fakes, mode, _table(native), native, mutates=mutates)
    except UnsupportedOp:
        raise
    except _UNTRACEABLE as error:
        raise UnsupportedOp(
            str(op), f"it cannot be traced ({_first_line(error)})", _ON_HOST
        ) from error
    mutated = tuple(taken[position] for position in traced.mutated)
    if _share_memory([leaves[k] for k in mutated]):
        raise UnsupportedOp(str(op), "it changes two arguments that share memory", _ON_HOST)
    results, results_spec = _results(traced, taken, mutates)
    phase = Phase("inference", seeds=random.take_seeds(traced.module))
    offsets = {k: leaves[leaf].offset for k, leaf in enumerate(taken) if leaves[leaf].offset}
    name = f"eager{next(_numbers)}_{op._schema.name.split('::')[-1]}"
    return CapturedCall(
        CapturedGraph(name, traced.module, frozenset(), offsets),
        phase,
        taken,
        results,
        results_spec,
        mutated,
        tuple(taken[position] for position in traced.resized),
        _exact_match(leaves, mutated),
    )


def _check_schema(op: OpOverload) -> None:
    if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
        raise UnsupportedOp(str(op), "its result is a view", "make the view of the tensor itself")
    if "as_strided" in op._schema.name:
        raise UnsupportedOp(str(op), "it reads memory outside of its argument", _ON_HOST)


@lru_cache(maxsize=1)
def _table(native: frozenset[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    return decompositions.table(native) | device_ops.DECOMPOSITIONS


def _neutral(leaf: Any) -> Any:
    """An argument as the trace sees it: on the CPU, with the default generator."""
    if isinstance(leaf, torch.device):
        return _CPU
    return None if isinstance(leaf, torch.Generator) else leaf


def _without_placement(named: dict[str, Any]) -> dict[str, Any]:
    if named.get("layout") not in (None, torch.strided):
        raise UnsupportedOp("layout=", f"{named['layout']} tensors cannot be stored", _ON_HOST)
    if named.get("pin_memory"):
        return {**named, "pin_memory": False}
    return named


def _with_tensors(op: OpOverload, positional: Sequence[Any]) -> list[Any]:
    """Arguments with a tensor in place of a number where the operator takes no numbers."""
    arguments = op._schema.arguments[: len(positional)]
    wrapped = [
        k
        for k, argument in enumerate(arguments)
        if isinstance(positional[k], (bool, int, float)) and _is_tensor(argument.type)
    ]
    name = op._schema.name.split("::")[1]
    if not wrapped or torch._C._should_allow_numbers_as_tensors(name):
        return list(positional)
    tensors = [value for value in positional if isinstance(value, torch.Tensor)]
    return [
        _wrapped(value, tensors) if k in wrapped else value for k, value in enumerate(positional)
    ]


def _is_tensor(kind: Any) -> bool:
    return str(kind) in ("Tensor", "Optional[Tensor]")


def _wrapped(value: bool | int | float, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number as a tensor that leaves the dtype of the result to ``tensors``, as a number does."""
    if isinstance(value, float):
        dtype = torch.get_default_dtype()
    else:
        dtype = torch.bool if isinstance(value, bool) else torch.int64
    if tensors and not any(tensor.dim() for tensor in tensors):
        found = [torch.result_type(tensor, value) for tensor in tensors]
        dtype = reduce(torch.promote_types, found)
    return torch.scalar_tensor(value, dtype=dtype)


def _fake(mode: FakeTensorMode, spec: TensorSpec) -> FakeTensor:
    meta = torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device="meta")
    return FakeTensor(mode, meta, _CPU)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _share_memory(specs: Sequence[TensorSpec]) -> bool:
    return len({spec.memory for spec in specs}) < len(specs)


def _results(
    traced: Traced, taken: Sequence[int], mutates: bool
) -> tuple[tuple[Result, ...], TreeSpec]:
    """Ends the graph with an output node; what the call's results are."""
    graph = traced.module.graph
    leaves, spec = tree_flatten(traced.results)
    placeholders = graph.find_nodes(op="placeholder")
    positions = {node: k for k, node in enumerate(placeholders)}
    outputs: list[Any] = []
    results: list[Result] = []
    storages: set[int] = set()
    for leaf in leaves:
        if isinstance(leaf, Node) and mutates and leaf in positions:
            results.append(Argument(taken[positions[leaf]]))
        elif isinstance(leaf, Node):
            results.append(Output(len(outputs)))
            outputs.append(_separate(graph, leaf, storages))
        else:
            results.append(Constant(leaf))
    graph.output(tuple(outputs))
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


def _exact_match(leaves: Sequence[Any], mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """Whether other leaves are the same, but for which of them share memory."""
    wanted = [_key(leaf) for leaf in leaves]

    def accepts(others: Sequence[Any]) -> bool:
        if len(others) != len(wanted) or [_key(leaf) for leaf in others] != wanted:
            return False
        return not _share_memory([others[k] for k in mutated])

    return accepts


def _key(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return leaf.dtype, leaf.sizes, leaf.strides, leaf.offset
    if isinstance(leaf, (torch.device, torch.Generator)):
        return None
    # 1, 1.0 and True are equal in Python but not to an operator, and -0.0 is not 0.0.
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf
