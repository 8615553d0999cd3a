"""`CompiledOp`: one operator, compiled for a signature or for a family of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .. import devices
from ..backend import compile_graph, native_operators
from ..capture.eager import Argument, CapturedCall, Constant, Output, TensorSpec, capture_call
from ..counters import counters
from ..device_graph import DeviceGraph
from ..errors import UnsupportedOp
from ..options import CompileOptions, resolve
from ..signature import Signature
from ..storages import ALIGNMENT, data_ptr
from . import random

aten = torch.ops.aten

# Operators whose tensor arguments may be on the host, as with other devices.
_TAKES_HOST_TENSORS = frozenset(
    {
        "aten::copy_",
        "aten::copy",
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index",
        "aten::_unsafe_index_put",
        "aten::_foreach_copy_",
    }
)


@dataclass(frozen=True)
class Placement:
    """Where a call's arguments are, and what they look like to the compiler.

    Attributes:
        index: the device.
        specs: the leaves with a `TensorSpec` in place of each tensor.
        spec: how the leaves are nested in (arguments, keywords).
        kind: equal for calls that one graph with symbolic sizes may serve.
        cause_for_host: why the call cannot be compiled, or "".
    """

    index: int
    specs: tuple[Any, ...]
    spec: pytree.TreeSpec
    kind: tuple[Any, ...]
    cause_for_host: str

    @staticmethod
    def of(op: OpOverload, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Placement:
        """The placement of a call.

        Raises:
            RuntimeError: the tensors are on different devices.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = {tensor.device for tensor in tensors if _has_place(op, tensor)}
        asked = {x for x in leaves if isinstance(x, torch.device) and x.type == devices.NAME}
        if len(places) > 1:
            first, second, *_ = sorted(map(str, places), reverse=True)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{first} and {second}! (when running {op})"
            )
        place = next(iter(places or asked), None)
        specs = specs_of(leaves)
        kind = (op, spec, *map(_kind, specs))
        return Placement(devices.index_of(place), specs, spec, kind, _cause_for_host(tensors))


def _has_place(op: OpOverload, tensor: Tensor) -> bool:
    """Whether a tensor decides where the operator runs: not one that is read as a number."""
    if tensor.device.type != "cpu":
        return True
    return tensor.dim() > 0 and op._schema.name not in _TAKES_HOST_TENSORS


def _cause_for_host(tensors: Sequence[Tensor]) -> str:
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "sparse tensors have no kernels"
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return "lazily conjugated tensors have no kernels"
    return ""


def specs_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What the compiler needs to know of the leaves of a call."""
    return tuple(
        _spec(leaf, k) if isinstance(leaf, Tensor) else leaf for k, leaf in enumerate(leaves)
    )


def _spec(tensor: Tensor, position: int) -> TensorSpec:
    offset, memory = 0, -1 - position
    if tensor.device.type == devices.NAME:
        residue, rest = divmod(data_ptr(tensor) % ALIGNMENT, tensor.element_size())
        offset = 0 if rest else residue
        memory = tensor.untyped_storage().data_ptr()
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, memory)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return leaf.dtype, len(leaf.sizes)
    if isinstance(leaf, (int, float)):
        return type(leaf)
    return None if isinstance(leaf, torch.Generator) else leaf


class CompiledOp:
    """A call as a graph on the device.

    Args:
        call: the captured call.
        graph: what it was compiled to.
    """

    def __init__(self, call: CapturedCall, graph: DeviceGraph) -> None:
        self._call = call
        self._graph = graph
        self._arguments = call.arguments
        self._seeds = call.phase.seeds
        self._single = call.results[0] if call.results_spec.is_leaf() else None

    def accepts(self, specs: Sequence[Any]) -> bool:
        """Whether the graph computes the call with these leaves too."""
        return self._call.accepts(specs)

    def run(self, leaves: list[Any]) -> Any:
        """The call's results."""
        values = [leaves[k] for k in self._arguments]
        if self._seeds:
            generator = next((x for x in leaves if isinstance(x, torch.Generator)), None)
            values.append(random.draw_seeds(self._graph.index, self._seeds, generator))
        outputs = self._graph.run(values)
        single = self._single
        if single is None:
            results = [_result(result, outputs, leaves) for result in self._call.results]
            return pytree.tree_unflatten(results, self._call.results_spec)
        return _result(single, outputs, leaves)


def _result(result: Output | Argument | Constant, outputs: list[Any], leaves: list[Any]) -> Any:
    match result:
        case Output(position):
            return outputs[position]
        case Argument(leaf):
            return leaves[leaf]
        case Constant(value):
            return value


def compile_op(op: OpOverload, placement: Placement, dynamic: bool) -> CompiledOp:
    """Compiles a call.

    Args:
        dynamic: for symbolic sizes and numbers, where the operator allows it.

    Raises:
        UnsupportedOp: the operator cannot be traced, or a part of it has no kernel.
        Exception: what PyTorch raises about the arguments.
    """
    described, named = pytree.tree_unflatten(placement.specs, placement.spec)
    native = native_operators()
    if dynamic:
        try:
            return _compile(capture_call(op, described, named, native, dynamic=True), placement)
        except Exception:  # whatever symbolic tracing cannot do: the call as it is decides
            pass
    return _compile(capture_call(op, described, named, native), placement)


def _compile(call: CapturedCall, placement: Placement) -> CompiledOp:
    device = devices.get_device(placement.index)
    state = compile_graph(call.captured, call.phase, device.target, _options())
    changed = (output.mutates for output in state.plan.outputs if output.mutates is not None)
    signature = Signature(
        state.plan,
        forwarded=call.phase.forwarded,
        counted=frozenset(changed),  # PyTorch counts the versions of what an operator changes
    )
    before = device.kernels_compiled
    graph = DeviceGraph(state.plan, device, placement.index, signature)
    counters.add(kernels_compiled=device.kernels_compiled - before)
    return CompiledOp(call, graph)


@cache
def _options() -> CompileOptions:
    """A part without a kernel is an error here: the whole operator then runs on the host."""
    return resolve(options={"fallback": "error"})


def fit_outputs(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Gives ``out=`` arguments the sizes of the results; whether any was changed.

    PyTorch's meta kernels decide, and warn about outputs that were not empty.
    """
    if not op._schema.name.startswith("aten::") or "out" not in op._schema.overload_name:
        return False
    tensors = [
        value
        for schema in op._schema.arguments
        if schema.is_out
        for value in pytree.tree_leaves(keywords.get(schema.name))
        if isinstance(value, Tensor)
    ]
    if not tensors:
        return False
    made: dict[int, Tensor] = {}

    def to_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            return made.setdefault(id(value), meta)
        return torch.device("meta") if isinstance(value, torch.device) else value

    described, named = pytree.tree_map(to_meta, (arguments, keywords))
    try:
        op(*described, **named)
    except NotImplementedError:
        return False
    changed = False
    for tensor in tensors:
        shape = made[id(tensor)].shape
        if shape != tensor.shape:
            tensor.resize_(shape)
            changed = True
    return changed


__all__ = [
    "CompiledOp",
    "Placement",
    "UnsupportedOp",
    "aten",
    "compile_op",
    "fit_outputs",
    "specs_of",
]
