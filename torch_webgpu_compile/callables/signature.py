"""A plan's inputs and outputs as PyTorch's tensors, resolved per set of sizes.

A `Signature` is made once per compiled graph, a `SignatureVariant` once per set of sizes: a call
only follows lists. At most `lru_cache.max_resolved_sizes` variants are kept, with all that was made
for their sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..captured import Phase
from ..dtypes import DType
from ..errors import UnsupportedOp
from ..plan.demands import Demands, SymbolicDemands
from ..plan.lru_cache import LruCache, max_resolved_sizes
from ..plan.model import (
    Plan,
    PlanBuffer,
    PlanOutput,
    View,
    view_at,
)
from ..plan.size_sources import SizeSource, size_sources, symbols_of_plan
from ..runtime.buffers import GpuBuffer
from ..runtime.composed import GpuTensor, Value
from ..runtime.sized import touched
from ..symbolic.sizes import ZERO, Expr, Symbol, evaluate, storage_span, symbols_of
from ..target import BINDING_ALIGNMENT
from ..torch_ops.dtypes import torch_dtype


@dataclass(frozen=True, slots=True)
class InputRecipe:
    """A tensor argument that the plan reads: ``nbytes`` laid out with ``strides`` (in elements).

    Attributes:
        offset_nbytes: where its first element lies in the plan buffer.
        counted: how often its version is incremented before each call for what the call changes,
            if it is static.
    """

    position: int
    buffer: str
    strides: tuple[int, ...]
    nbytes: int
    offset_nbytes: int = 0
    counted: int = 0


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """A new tensor, filled with ``nbytes`` from ``offset_nbytes`` of a plan buffer.

    ``results`` are the positions that return it, whole (None) or through a view.
    """

    buffer: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset_nbytes: int
    nbytes: int
    results: tuple[tuple[int, View | None], ...]


@dataclass(frozen=True, slots=True)
class MutationRecipe:
    """An argument that takes a value after the call.

    Attributes:
        dense: its memory has no gaps, so that it can be written as it is.
        keep: the argument is static, the plan buffer has exactly its layout, and nothing else
            returns it.
        counted: its version counter has been incremented for this change before the call.
        in_place: the plan writes it into the buffer that it reads the argument from.
    """

    position: int
    buffer: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset_nbytes: int
    nbytes: int
    dense: bool
    keep: bool
    counted: bool
    in_place: bool


@dataclass(slots=True, eq=False)
class SignatureVariant:
    """A signature with its sizes resolved.

    Attributes:
        sizes: values of the plan's size symbols.
        static: the static inputs without the next ones; one object for variants with equal ones.
        states: static inputs that the graph changes; one object in the same way.
        uploads: the other tensor inputs, which may differ at every call.
        constants: results that are not tensors; None in place of a tensor.
        ragged: results that are a multiple of a nested tensor's ragged size, which is no number:
            (position, that of the argument, factor).
        tensors, mutations: tensors to make and to change.
        saved_buffers, updated_buffers: (plan buffer, nbytes) of results that stay on the GPU.
        demands: what the plan asks of the GPU.
        resolved: what a `DeviceGraph` has made for these sizes, once it has.
    """

    sizes: dict[str, int]
    static: tuple[InputRecipe, ...]
    states: tuple[InputRecipe, ...]
    uploads: tuple[InputRecipe, ...]
    constants: tuple[Any, ...]
    tensors: tuple[TensorRecipe, ...]
    mutations: tuple[MutationRecipe, ...]
    saved_buffers: tuple[tuple[str, int], ...]
    updated_buffers: tuple[tuple[str, int], ...]
    demands: Demands
    ragged: tuple[tuple[int, int, int], ...] = ()
    resolved: Any = None

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The results of a call that are not tensors, and None in place of the others."""
        results = list(self.constants)
        for position, argument, factor in self.ragged:
            results[position] = factor * values[argument]
        return results


_INFERENCE = Phase("inference")


class Signature:
    """See the module.

    Args:
        plan: whose inputs and outputs they are.
        phase: what the graph is for, of which the plan was made.
        static_inputs: positions of parameters and buffers.

    Attributes:
        constant: positions of those that the plan only reads.

    Raises:
        UnsupportedOp: a size of the plan does not follow from the arguments.
    """

    def __init__(
        self, plan: Plan, phase: Phase = _INFERENCE, static_inputs: frozenset[int] = frozenset()
    ) -> None:
        self.plan, self.phase, self.static_inputs = plan, phase, static_inputs
        used = touched(plan)
        self._inputs = [
            (position, entry.buffer)
            for position, entry in enumerate(plan.inputs)
            if entry.buffer is not None and entry.buffer in used
        ]
        constant = static_inputs - {output.mutates for output in plan.outputs}
        self.constant = tuple(position for position, _ in self._inputs if position in constant)
        self._sources = size_sources(plan, phase.complex_inputs)
        self._demands = SymbolicDemands(plan)
        self._recipes: dict[tuple[InputRecipe, ...], tuple[InputRecipe, ...]] = {}
        most = max_resolved_sizes(plan.dispatch_count)
        self._variants = LruCache[tuple[int, ...], SignatureVariant](most)
        self._only: SignatureVariant | None = None
        self._outcomes = LruCache[tuple[_Shown | None, ...], _Outcome](most)

    def variant(self, values: Sequence[Any]) -> SignatureVariant:
        """The signature for these arguments."""
        only = self._only
        if only is not None:
            return only
        key = tuple([read_size(source, values) for source in self._sources])
        found = self._variants.find(key)
        if found is None:
            names = [source.name for source in self._sources]
            found = self._variants.keep(key, self._resolve(dict(zip(names, key, strict=True))))
            if not self._sources:
                self._only = found
        return found

    def forget(self) -> None:
        """Drops all that was made for sizes; calls make it again."""
        self._variants.clear()
        self._recipes.clear()
        self._only = None

    def call(self, run: Callable[[list[Any]], list[Any]], values: list[Any]) -> list[Any]:
        """``run(values)`` with memory in place of lazily conjugated or negated arguments."""
        given = {k: values[k] for k in self.phase.lazy if values[k].is_conj() or values[k].is_neg()}
        with torch.no_grad():
            for position, tensor in given.items():
                values[position] = tensor.resolve_conj().resolve_neg()
            passed = {position: values[position] for position in given}  # the others may be freed
            results = run(values)
            changed = {output.mutates for output in self.plan.outputs}
            for position, tensor in given.items():
                if position in changed:
                    tensor.copy_(passed[position])
        for output, position in self.phase.forwarded:
            results[output] = given.get(position, results[output])
        return results

    def some_sizes(self) -> dict[str, int] | None:
        """The sizes of an earlier call; None before any call of a plan with symbolic sizes."""
        for variant in self._variants.values():
            return variant.sizes
        return None if self._sources else {}

    def _resolve(self, sizes: dict[str, int]) -> SignatureVariant:
        buffers = self.plan.buffers
        static: list[InputRecipe] = []
        states: list[InputRecipe] = []
        uploads: list[InputRecipe] = []
        constant, counted = set(self.constant), self.static_inputs & self.phase.counted
        for position, name in self._inputs:
            buffer = buffers[name]
            view, itemsize = view_at(buffer, sizes), buffer.dtype.itemsize
            nbytes, offset = storage_span(*view[:2]) * itemsize, view[2] * itemsize
            if position in self.phase.complex_inputs:
                view = _of_complex(view)
            times = int(position in counted and position not in constant)
            recipe = InputRecipe(position, name, view[1], nbytes, offset, times)
            if position not in self.static_inputs:
                uploads.append(recipe)
            else:
                (static if position in constant else states).append(recipe)
        is_known = self.plan.plans is None  # of a composed plan, a call's steps decide
        returned = [output for output in self.plan.outputs if output.mutates is None]
        outcome = self._outcome(self._shown(sizes)) if is_known else _Outcome()
        return SignatureVariant(
            sizes=sizes,
            static=self._recipes.setdefault(tuple(static), tuple(static)),
            states=self._recipes.setdefault(tuple(states), tuple(states)),
            uploads=tuple(uploads),
            constants=tuple(_constant(output, sizes) for output in returned),
            tensors=outcome.tensors,
            mutations=outcome.mutations,
            saved_buffers=tuple(_with_nbytes(buffers, outcome.saved, sizes)),
            updated_buffers=tuple(_with_nbytes(buffers, outcome.updated, sizes)),
            demands=self._demands.at(sizes),
            ragged=tuple(self._ragged(returned, sizes)),
        )

    def _ragged(
        self, returned: Sequence[PlanOutput], sizes: Mapping[str, int]
    ) -> Iterator[tuple[int, int, int]]:
        """`SignatureVariant.ragged`; UnsupportedOp where a ragged size is needed as a number."""
        sources = {s.name: s.position for s in self._sources if sizes[s.name] == RAGGED}
        if not sources:
            return
        others = tuple(replace(output, size=None) for output in self.plan.outputs)
        needed = symbols_of_plan(replace(self.plan, outputs=others))
        for position, size in enumerate(output.size for output in returned):
            names = {s.name for s in symbols_of(size or ZERO)} & set(sources)
            match size:
                case Expr(terms=(((Symbol(name=name),), factor),), constant=0) if names:
                    yield position, sources[name], factor
                case _:
                    needed |= names
        if not needed.isdisjoint(sources):
            raise UnsupportedOp(
                self.plan.name,
                "the ragged size of a nested tensor is needed as a number",
                "compute with the nested tensor, or with its values()",
            )

    def composed(
        self, variant: SignatureVariant, arguments: Sequence[Value], results: Sequence[Value]
    ) -> tuple[SignatureVariant, dict[str, GpuBuffer]]:
        """What a call of a composed plan has made: what its results are, and in which memory."""
        memory: dict[str, GpuBuffer] = {}
        names: dict[int, str] = {}
        shown: list[_Shown | None] = []
        for output, value in zip(self.plan.outputs, results, strict=True):
            if not isinstance(value, GpuTensor):
                shown.append(None)
                continue
            name = names.setdefault(id(value.memory), str(len(names)))
            memory[name] = value.memory
            argument = None if output.mutates is None else arguments[output.mutates]
            is_own = not isinstance(argument, GpuTensor) or argument.memory is not value.memory
            view = value.shape, value.strides, value.offset
            shown.append(_Shown(name, value.dtype, view, is_own, not is_own))
        key = tuple(shown)
        outcome = self._outcomes.find(key)
        if outcome is None:
            outcome = self._outcomes.keep(key, self._outcome(shown))
        returned = zip(self.plan.outputs, results, strict=True)
        constants = [
            None if isinstance(value, GpuTensor) else value
            for output, value in returned
            if output.mutates is None
        ]
        made = replace(
            variant,
            constants=tuple(constants),
            tensors=outcome.tensors,
            mutations=outcome.mutations,
            saved_buffers=tuple((name, memory[name].nbytes) for name in outcome.saved),
            updated_buffers=tuple((name, memory[name].nbytes) for name in outcome.updated),
        )
        return made, memory

    def _shown(self, sizes: Mapping[str, int]) -> list[_Shown | None]:
        """The outputs of a plan of kernels."""
        buffers = self.plan.buffers
        return [
            None
            if output.buffer is None
            else _Shown(
                output.buffer,
                buffers[output.buffer].dtype,
                view_at(output, sizes),
                buffers[output.buffer].role == "output",
                buffers[output.buffer].role == "input",
            )
            for output in self.plan.outputs
        ]

    def _outcome(self, shown: Sequence[_Shown | None]) -> _Outcome:
        """What becomes of the outputs, given what each shows; None of one that is no tensor."""
        pairs = list(zip(self.plan.outputs, shown, strict=True))
        returned = [found for output, found in pairs if output.mutates is None]
        loans = Counter(found.buffer for found in shown if found is not None)
        changed = [(o.mutates, found) for o, found in pairs if o.mutates is not None and found]
        tensors = self._tensors(returned)
        taken = {found.buffer for _, found in changed}
        mutations = tuple(
            self._mutation(position, found, loans[found.buffer] == 1) for position, found in changed
        )
        return _Outcome(
            tensors,
            mutations,
            tuple(t.buffer for t in tensors if t.buffer not in taken and self._stays(t)),
            tuple(dict.fromkeys(m.buffer for m in mutations if m.keep)),
        )

    def _tensors(self, returned: Sequence[_Shown | None]) -> tuple[TensorRecipe, ...]:
        by_buffer: dict[tuple[str, torch.dtype], list[tuple[int, View]]] = {}
        for position, found in enumerate(returned):
            if found is not None:
                is_complex = position in self.phase.complex_outputs
                view = _of_complex(found.view) if is_complex else found.view
                key = found.buffer, _dtype(found.dtype, is_complex)
                by_buffer.setdefault(key, []).append((position, view))
        return tuple(self._tensor(*key, views) for key, views in by_buffer.items())

    def _tensor(self, name: str, dtype: torch.dtype, shown: list[tuple[int, View]]) -> TensorRecipe:
        """One tensor per plan buffer: results that share memory in PyTorch share it here."""
        shape, strides, offset = shown[0][1]
        results: list[tuple[int, View | None]] = [(position, None) for position, _ in shown]
        if any(view != shown[0][1] for _, view in shown):
            length = max(view[2] + storage_span(view[0], view[1]) for _, view in shown)
            shape, strides, offset = (length,), (1,), 0
            results = list(shown)
        return TensorRecipe(
            name,
            dtype,
            shape,
            strides,
            offset * dtype.itemsize,
            storage_span(shape, strides) * dtype.itemsize,
            tuple(results),
        )

    def _stays(self, tensor: TensorRecipe) -> bool:
        """Whether only the backward graph reads a tensor, and can do so from the plan's buffer."""
        return (
            all(position in self.phase.saved and view is None for position, view in tensor.results)
            and tensor.offset_nbytes == 0
            and tensor.nbytes > 0
        )

    def _mutation(self, position: int, shown: _Shown, alone: bool) -> MutationRecipe:
        is_complex = position in self.phase.complex_inputs
        shape, strides, offset = _of_complex(shown.view) if is_complex else shown.view
        elements = storage_span(shape, strides)
        dtype = _dtype(shown.dtype, is_complex)
        itemsize = dtype.itemsize
        keep = position in self.static_inputs and alone and offset == 0 and elements > 0
        return MutationRecipe(
            position,
            shown.buffer,
            dtype,
            shape,
            strides,
            offset * itemsize,
            elements * itemsize,
            dense=prod(shape) == elements,
            keep=keep and shown.is_output,
            counted=position in self.phase.counted,
            in_place=shown.is_input,
        )


@dataclass(frozen=True, slots=True)
class _Shown:
    """A tensor among the outputs: its dtype and its layout in a buffer.

    Attributes:
        is_output, is_input: whether the buffer is the plan's to give away, or the argument's own.
    """

    buffer: str
    dtype: DType
    view: View
    is_output: bool
    is_input: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What becomes of the outputs: see `SignatureVariant`; ``saved``, ``updated``: of which buffers
    those are that stay on the GPU."""

    tensors: tuple[TensorRecipe, ...] = ()
    mutations: tuple[MutationRecipe, ...] = ()
    saved: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()


def _of_complex(view: View) -> View:
    """A complex tensor, given its real view (…, 2)."""
    shape, strides, offset = view
    return shape[:-1], tuple(stride // 2 for stride in strides[:-1]), offset // 2


def _dtype(dtype: DType, is_complex: bool) -> torch.dtype:
    return torch_dtype(dtype).to_complex() if is_complex else torch_dtype(dtype)


def _constant(output: PlanOutput, sizes: Mapping[str, int]) -> Any:
    return output.constant if output.size is None else evaluate(output.size, sizes)


def _with_nbytes(
    buffers: Mapping[str, PlanBuffer], names: Iterable[str], sizes: Mapping[str, int]
) -> Iterable[tuple[str, int]]:
    return [(name, buffers[name].nbytes_for(sizes)) for name in names]


# ---- sizes


RAGGED = -(1 << 62)
"""In place of the ragged size of a nested tensor, which stands for several lengths."""


def read_size(source: SizeSource, values: Sequence[Any]) -> int:
    """A symbol's value in a call."""
    value = values[source.position]
    match source.field:
        case "size":
            found = int(value.shape[source.dim])
        case "stride":
            found = int(value.stride(source.dim))
        case "offset":
            found = bound_offset(value)
        case _ if type(value) is torch.SymInt and value.node.is_nested_int():
            return RAGGED
        case _:
            found = int(value)
    return (found * source.unit - source.constant) // source.coefficient


def bound_offset(tensor: torch.Tensor) -> int:
    """Elements from where a tensor's memory is bound, rounded down, to its first element.

    0 where that is no whole number of them. On the device the address decides: the storage itself
    may be a part of another one.
    """
    itemsize = tensor.element_size()
    if tensor.device.type == "cpu":
        return int(tensor.storage_offset()) % (BINDING_ALIGNMENT // itemsize)
    elements, rest = divmod(tensor.data_ptr() % BINDING_ALIGNMENT, itemsize)
    return 0 if rest else elements
