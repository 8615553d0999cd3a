"""`CompiledOp`: one operator, compiled for a signature or for a family of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, assert_never

import torch
from torch import Tensor

from ... import progress
from ...callables.compiled_graph import PlanAt
from ...callables.device_graph import DeviceGraph
from ...callables.signature import Signature, SignatureVariant
from ...capture.eager.arguments import groups_of_equals
from ...capture.eager.calls import (
    CallInterface,
    CapturedCall,
    Constant,
    Output,
    Result,
    ResultArgument,
    TensorSpec,
)
from ...capture.eager.capture import capture_call
from ...compiler import Compilation, compile_graph, loops_of, native_operators
from ...errors import UnsupportedOp
from ...options import CompileOptions, resolve
from ...plan.model import Plan
from ...runtime.buffers import AnyBuffer
from ...runtime.device import Device
from ...symbolic.sizes import evaluate
from ...target import BINDING_ALIGNMENT
from ...tensors import devices
from ...tensors.aliasing import check_resized, sharing
from ...tensors.determinism import is_on, switched
from ...tensors.generators import draw_seeds
from ...tensors.storages import data_ptr
from ...torch_private import OpOverload, TreeSpec, tree_leaves, tree_unflatten
from . import outputs
from .stored_calls import CompiledCall, StoredCall

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
_INDEXES = frozenset(name for name in _TAKES_HOST_TENSORS if "index" in name)
# Operators on all parameters. Their numbers change at every step; their sizes do not, and only maps
# of known sizes share a kernel.
_OF_MANY = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


@dataclass(frozen=True)
class Placement:
    """The device of a call's arguments, and their description for the compiler.

    Attributes:
        index: the device.
        specs: the leaves with a `TensorSpec` in place of each tensor.
        spec: how the leaves are nested in (arguments, keywords).
        kind: equal for calls that one graph with symbolic sizes may serve.
        in_place: whether it changes arguments, none of which shares memory with another one.
    """

    index: int
    specs: tuple[Any, ...]
    spec: TreeSpec
    kind: tuple[Any, ...]
    in_place: bool = False

    @staticmethod
    def of(
        op: OpOverload,
        leaves: Sequence[Any],
        spec: TreeSpec,
        written: Sequence[Tensor] = (),
    ) -> Placement:
        """The placement of a call.

        Args:
            written: the leaves that it changes, which may not be on the host.

        Raises:
            RuntimeError: the tensors are on different devices.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if op._schema.name in _INDEXES:
            for other in tensors[1:]:
                check_index_device(tensors[0], other)
        places = {tensor.device for tensor in tensors if _has_place(op, tensor)}
        places |= {tensor.device for tensor in written}
        asked = {x for x in leaves if isinstance(x, torch.device) and x.type == devices.NAME}
        if len(places) > 1:
            first, second, *_ = sorted(map(str, places), reverse=True)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{first} and {second}! (when running {op})"
            )
        place = next(iter(places or asked), None)
        specs = specs_of(leaves)
        index = devices.index_of(place)
        # Tensors that are alike share their symbols.
        equals = tuple(groups_of_equals(op, *tree_unflatten(specs, spec)))
        in_place = bool(written) and not sharing(leaves)
        kind = (op, torch.get_default_dtype(), index, in_place, spec, equals, *map(_kind, specs))
        return Placement(index, specs, spec, kind, in_place)


def check_index_device(tensor: Tensor, index: Tensor) -> None:
    """Raises RuntimeError: a tensor on the host is indexed with one that is not."""
    if tensor.device.type == "cpu" and index.device.type != "cpu":
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )


def _has_place(op: OpOverload, tensor: Tensor) -> bool:
    """Whether a tensor decides where the operator runs: not one that is read as a number."""
    if tensor.device.type != "cpu":
        return True
    return tensor.dim() > 0 and op._schema.name not in _TAKES_HOST_TENSORS


def specs_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves of a call as the compiler takes them."""
    return tuple(
        _spec(leaf, k) if isinstance(leaf, Tensor) else leaf for k, leaf in enumerate(leaves)
    )


def _spec(tensor: Tensor, position: int) -> TensorSpec:
    offset = 0
    if tensor.device.type == devices.NAME:
        residue, rest = divmod(data_ptr(tensor) % BINDING_ALIGNMENT, tensor.element_size())
        offset = 0 if rest else residue
    # `aliasing` has seen to arguments that share memory.
    return TensorSpec(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        offset,
        position,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return leaf.dtype, len(leaf.sizes)
    if isinstance(leaf, (int, float)):
        return type(leaf)
    return None if isinstance(leaf, torch.Generator) else leaf


@dataclass(slots=True, eq=False)
class KnownCall:
    """A call with a signature that was seen: its graph, resolved at these sizes.

    Attributes:
        op: the operator, which has to stay: signatures have its identity.
        compiled: what it was compiled to; None: it runs on the host.
        graph: the graph that has a plan for its sizes.
        variant: its recipes and memory at these sizes.
        is_as_expected: whether every tensor is where and how the plan reads it: see `run_at`.
        is_in_place: whether it writes what it changes where that is.
        generator: the leaf that random numbers are drawn of; None: of the device's own.
    """

    op: OpOverload
    compiled: CompiledOp | None = None
    graph: DeviceGraph | None = None
    variant: SignatureVariant | None = None
    is_as_expected: bool = False
    is_in_place: bool = False
    generator: int | None = None


class CompiledOp:
    """A call as a graph on the device.

    Args:
        call: its leaves and results.
        graph: what it was compiled to.
        leaves: how many leaves the call has.
        deterministic: the position of PyTorch's switch that it is for; None: either.
    """

    def __init__(
        self,
        call: CallInterface,
        graph: DeviceGraph,
        leaves: int,
        deterministic: bool | None = None,
    ) -> None:
        self.deterministic = deterministic
        self._call = call
        self._graph = graph
        self._arguments = call.arguments
        count = len(call.arguments)
        self._first = count if [*call.arguments] == [*range(count)] else None
        self._numbers = None if call.numbers is None else call.numbers.compute
        self._seeds = call.phase.seeds
        # Results are picked of the graph's; if that is not all, of these, the leaves and constants.
        self._constants: list[Any] | None = None
        if not all(isinstance(result, Output) for result in call.results):
            self._constants = [r.value for r in call.results if isinstance(r, Constant)]
        made = sum(output.mutates is None for output in graph.plan.outputs)
        self._pick = _picker([*_places(call.results, made, leaves)])
        self._nest = _nester(call.results_spec)

    def resize(self, leaves: list[Any]) -> bool:
        """Gives ``out=`` arguments the sizes and strides of the results; whether any had others."""
        for leaf in self._call.resized:
            position = self._arguments.index(leaf)
            output = next(o for o in self._graph.plan.outputs if o.mutates == position)
            sizes, strides = ([evaluate(e, {}) for e in x] for x in (output.sizes, output.strides))
            if position in self._call.phase.complex_inputs:  # the plan has its real view
                sizes, strides = sizes[:-1], [stride // 2 for stride in strides[:-1]]
            check_resized(leaves[leaf], sizes, leaves[:leaf] + leaves[leaf + 1 :])
            outputs.resize(leaves[leaf], sizes, strides)
        return bool(self._call.resized)

    def forget_sizes(self) -> None:
        """Drops what was made for the sizes of earlier calls; later ones make it again."""
        self._graph.forget_sizes()

    def takes_any_number(self, leaves: Sequence[Any]) -> bool:
        """Whether the floats among the leaves may have any finite values."""
        return {
            k for k, leaf in enumerate(leaves) if type(leaf) is float
        } <= self._call.free_numbers

    def accepts(self, specs: Sequence[Any]) -> bool:
        """Whether the graph computes the call with these leaves too, at present."""
        return self.deterministic in (None, is_on()) and self._call.accepts(specs)

    def known_call(self, op: OpOverload, leaves: Sequence[Any]) -> KnownCall:
        """The `KnownCall` of all calls with the same signature as this one.

        Raises:
            UnsupportedOp, AdapterError: there is no kernel for tensors as large as these.
        """
        values = [leaves[k] for k in self._arguments]
        graph, variant = self._graph.at(values)
        as_expected = graph.expects(variant, values)
        in_place = all(mutation.in_place for mutation in variant.mutations)
        generator = _generator_among(leaves) if self._seeds else None
        return KnownCall(op, self, graph, variant, as_expected, in_place, generator)

    def run(
        self,
        leaves: list[Any],
        known: KnownCall,
        memory: Sequence[AnyBuffer | None] | None = None,
    ) -> Any:
        """The call's results.

        Args:
            known: of an earlier call with the same signature.
            memory: of the leaves that are tensors, see `DeviceGraph.run_at`.
        """
        first = self._first
        values = [leaves[k] for k in self._arguments] if first is None else leaves[:first]
        if self._numbers is not None:
            values.append(self._numbers(leaves))
        if self._seeds:
            generator = None if known.generator is None else leaves[known.generator]
            values.append(draw_seeds(self._graph.index, self._seeds, generator))
        assert known.graph is not None
        assert known.variant is not None
        made = known.graph.run_at(known.variant, values, known.is_as_expected, memory)
        if self._constants is not None:
            made = [*made, *leaves, *self._constants]
        results = self._pick(made)
        return results if self._nest is None else self._nest(results)


def _generator_among(leaves: Sequence[Any]) -> int | None:
    return next((k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Generator)), None)


def _places(results: Sequence[Result], made: int, leaves: int) -> Iterator[int]:
    """Positions of results in the list of a graph's results, the leaves, and constant results."""
    constants = made + leaves
    for result in results:
        match result:
            case Output(position):
                yield position
            case ResultArgument(leaf):
                yield made + leaf
            case Constant():
                yield constants
                constants += 1
            case _:
                assert_never(result)


def _picker(places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """A function that takes items of a list: a tuple of them, or a single one itself."""
    return itemgetter(*places) if places else lambda _: ()


def _nester(spec: TreeSpec) -> Callable[[Any], Any] | None:
    """A function that nests `_picker`'s result as the operator does; None if it need not."""
    if spec.is_leaf() or (spec.type is tuple and spec.num_children == spec.num_leaves > 1):
        return None
    if spec.num_leaves == 1:
        return lambda item: tree_unflatten([item], spec)
    if spec.type is list and spec.num_children == spec.num_leaves:
        return list
    return lambda items: tree_unflatten(items, spec)


def compile_op(op: OpOverload, placement: Placement) -> CompiledOp:
    """Compiles a call, with symbols for sizes and numbers where the operator allows it.

    What it is compiled to follows from the call alone.

    Raises:
        UnsupportedOp: the operator cannot be traced, or a part of it has no kernel.
        Exception: what PyTorch raises about the arguments.
    """
    options = switched(replace(eager_options(), in_place=placement.in_place))
    device = devices.get_device(placement.index)
    stored = StoredCall(op, placement.specs, placement.spec, device.target, options)
    made = stored.find()
    plan_at: PlanAt | None = None
    if made is None:
        call, state = _captured(op, placement, device, options)
        plan_at = loops_of(state)
        has_loops, depends = plan_at is not None, state.depends_on_determinism
        made = CompiledCall(call.interface, state.plan, has_loops, depends)
        stored.keep(made, state.key)
    elif made.has_loops:
        plan_at = partial(_plan_at, op, placement, device, options)
    # PyTorch counts the versions of what an operator changes, but not those in a list.
    changed = {output.mutates for output in made.plan.outputs if output.mutates is not None}
    counted = frozenset(changed) - _of_lists(made.interface, placement)
    signature = Signature(made.plan, replace(made.interface.phase, counted=counted))
    graph = DeviceGraph(signature, device, placement.index, plan_at)
    position = options.deterministic if made.depends_on_determinism else None
    return CompiledOp(made.interface, graph, len(placement.specs), position)


def _captured(
    op: OpOverload, placement: Placement, device: Device, options: CompileOptions
) -> tuple[CapturedCall, Compilation]:
    """The captured call, and what the compiler made of it; raises as `compile_op`."""
    described, named = tree_unflatten(placement.specs, placement.spec)
    native = native_operators()

    def compiled(call: CapturedCall) -> tuple[CapturedCall, Compilation]:
        name, seen = call.captured.name, device.pipelines
        with progress.shown(name, lambda: seen.progress, options.progress):
            return call, compile_graph(call.captured, call.phase, device.target, options)

    if op._schema.name.startswith(_OF_MANY):
        with suppress(UnsupportedOp):
            return compiled(capture_call(op, described, named, native, numbers=True))
    else:
        # Whatever symbols make impossible: the call as it is decides.
        with suppress(Exception):
            call = capture_call(op, described, named, native, dynamic=True)
            if not call.resized:  # else the sizes have to be known here
                return compiled(call)
    return compiled(capture_call(op, described, named, native))


def _plan_at(
    op: OpOverload,
    placement: Placement,
    device: Device,
    options: CompileOptions,
    sizes: Mapping[str, int],
) -> Plan:
    """The plan for these sizes of a call that was not traced so far."""
    loops = loops_of(_captured(op, placement, device, options)[1])
    assert loops is not None
    return loops(sizes)


def _of_lists(call: CallInterface, placement: Placement) -> frozenset[int]:
    """Positions of the graph's arguments that are entries of a list of tensors."""
    numbered = tree_unflatten(range(len(placement.specs)), placement.spec)
    values = (*numbered[0], *numbered[1].values())
    lists = [value for value in values if isinstance(value, (list, tuple))]
    leaves = set(tree_leaves(lists))
    return frozenset(k for k, leaf in enumerate(call.arguments) if leaf in leaves)


@cache
def eager_options() -> CompileOptions:
    """A part without a kernel is an error here: the whole operator then runs on the host."""
    return resolve(options={"fallback": "error"})
