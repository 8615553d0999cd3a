"""A plan's inputs and outputs as PyTorch's tensors, resolved per set of sizes.

A `Signature` is made once per compiled graph, a `SignatureVariant` once per set of sizes: a call
only follows lists. At most `lru_cache.max_resolved_sizes` variants are kept, with all that was made
for their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from ..captured import Phase
from ..errors import UnsupportedOp
from ..plan.lru_cache import LruCache, max_resolved_sizes
from ..plan.model import (
    FIRST_CHECK,
    Binding,
    Dispatch,
    Plan,
    PlanBuffer,
    PlanOutput,
    View,
    bound_nbytes,
    view_at,
)
from ..symbolic.sizes import INT32, ZERO, Expr, Symbol, evaluate, storage_span, symbols_of
from ..target import BINDING_ALIGNMENT, Target
from ..torch_ops.dtypes import torch_dtype


@dataclass(frozen=True, slots=True)
class InputEntry:
    """A tensor argument that the plan reads. ``static``: a parameter or buffer of a module."""

    position: int
    buffer: str
    static: bool


@dataclass(frozen=True, slots=True)
class StaticRecipe:
    """A static argument: ``nbytes`` laid out with ``strides`` (in elements).

    ``counted``: how often its version is incremented before each call for what the call changes.
    """

    position: int
    buffer: str
    strides: tuple[int, ...]
    nbytes: int
    counted: int = 0


@dataclass(frozen=True, slots=True)
class UploadRecipe:
    """An argument that may differ at every call: ``nbytes`` laid out with ``strides``.

    ``offset_nbytes``: where its first element lies in the plan buffer.
    """

    position: int
    buffer: str
    strides: tuple[int, ...]
    nbytes: int
    offset_nbytes: int = 0


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
        uploads: the other tensor inputs.
        constants: results that are not tensors; None in place of a tensor.
        ragged: results that are a multiple of a nested tensor's ragged size, which is no number:
            (position, that of the argument, factor).
        tensors, mutations: tensors to make and to change.
        saved_buffers, updated_buffers: (plan buffer, nbytes) of results that stay on the GPU.
        may_be_saved_on_gpu: whether an upload may be a tensor kept on the GPU by a forward graph.
        rebinds: whether memory may differ from call to call although no static input changed.
        bound_nbytes: the most that one binding has to reach of a buffer whose size is a symbol.
        iterations: the most that an invocation's loops make (`Dispatch.iterations`).
        is_wide: whether a number that kernels take for a 32-bit one is not (`Dispatch.narrow`).
        resolved: what a `DeviceGraph` has made for these sizes, once it has.
    """

    sizes: dict[str, int]
    static: tuple[StaticRecipe, ...]
    states: tuple[StaticRecipe, ...]
    uploads: tuple[UploadRecipe, ...]
    constants: tuple[Any, ...]
    tensors: tuple[TensorRecipe, ...]
    mutations: tuple[MutationRecipe, ...]
    saved_buffers: tuple[tuple[str, int], ...]
    updated_buffers: tuple[tuple[str, int], ...]
    may_be_saved_on_gpu: bool
    rebinds: bool
    bound_nbytes: int
    iterations: int
    is_wide: bool
    ragged: tuple[tuple[int, int, int], ...] = ()
    resolved: Any = None

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The results of a call that are not tensors, and None in place of the others."""
        results = list(self.constants)
        for position, argument, factor in self.ragged:
            results[position] = factor * values[argument]
        return results

    def fits(self, target: Target) -> bool:
        """Whether the plan can run at these sizes; else a `CompiledGraph` needs another one."""
        most = target.max_loop_iterations or self.iterations
        is_small = self.bound_nbytes <= target.max_binding_nbytes and self.iterations <= most
        return is_small and not self.is_wide


_INFERENCE = Phase("inference")


@dataclass(eq=False)
class Signature:
    """See the module.

    Args:
        plan: whose inputs and outputs they are.
        phase: what the graph is for, of which the plan was made.
        static_inputs: positions of parameters and buffers.

    Raises:
        UnsupportedOp: a size of the plan does not follow from the arguments.
    """

    plan: Plan
    phase: Phase = _INFERENCE
    static_inputs: frozenset[int] = frozenset()
    inputs: tuple[InputEntry, ...] = field(init=False)
    constant: tuple[InputEntry, ...] = field(init=False)
    _sources: tuple[SizeSource, ...] = field(init=False)
    _symbolic: frozenset[Binding] = field(init=False)
    _recipes: dict[tuple[StaticRecipe, ...], tuple[StaticRecipe, ...]] = field(init=False)
    _loops: frozenset[Expr] = field(init=False)
    _narrow: frozenset[Expr] = field(init=False)
    _variants: LruCache[tuple[int, ...], SignatureVariant] = field(init=False)
    _only: SignatureVariant | None = field(init=False)

    def __post_init__(self) -> None:
        used = _buffers_read(self.plan)
        self.inputs = tuple(
            InputEntry(position, entry.buffer, position in self.static_inputs)
            for position, entry in enumerate(self.plan.inputs)
            if entry.buffer is not None and entry.buffer in used
        )
        changed = {output.mutates for output in self.plan.outputs}
        self.constant = tuple(e for e in self.inputs if e.static and e.position not in changed)
        self._sources = _size_sources(self.plan, self.phase.complex_inputs)
        self._symbolic = frozenset(
            binding
            for step in self.plan.steps
            if isinstance(step, Dispatch)
            for binding in step.bindings
            if not self.plan.buffers[binding.buffer].nbytes.is_constant
        )
        self._recipes = {}
        dispatches = [step for step in self.plan.steps if isinstance(step, Dispatch)]
        self._loops = frozenset(step.iterations for step in dispatches)
        self._narrow = frozenset(number for step in dispatches for number in step.narrow)
        self._variants = LruCache(max_resolved_sizes(self.plan.dispatch_count))
        self._only = None

    def variant(self, values: Sequence[Any]) -> SignatureVariant:
        """The signature for these arguments."""
        only = self._only
        if only is not None:
            return only
        key = tuple([source.read(values) for source in self._sources])
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
        static: list[StaticRecipe] = []
        states: list[StaticRecipe] = []
        uploads: list[UploadRecipe] = []
        for entry in self.inputs:
            buffer = buffers[entry.buffer]
            view, itemsize = view_at(buffer, sizes), buffer.dtype.itemsize
            nbytes, offset = storage_span(*view[:2]) * itemsize, view[2] * itemsize
            if entry.position in self.phase.complex_inputs:
                view = _of_complex(view)
            strides = view[1]
            if entry.static:
                is_constant = entry in self.constant
                counted = int(not is_constant and entry.position in self.phase.counted)
                recipe = StaticRecipe(entry.position, entry.buffer, strides, nbytes, counted)
                (static if is_constant else states).append(recipe)
            else:
                uploads.append(UploadRecipe(entry.position, entry.buffer, strides, nbytes, offset))
        returned = [output for output in self.plan.outputs if output.mutates is None]
        tensors = self._tensors(returned, sizes)
        mutations = tuple(
            self._mutation(output, sizes)
            for output in self.plan.outputs
            if output.mutates is not None
        )
        kept = [tensor for tensor in tensors if self._stays(tensor)]
        updated = dict.fromkeys(m.buffer for m in mutations if m.keep)
        return SignatureVariant(
            sizes=sizes,
            static=self._recipes.setdefault(tuple(static), tuple(static)),
            states=self._recipes.setdefault(tuple(states), tuple(states)),
            uploads=tuple(uploads),
            constants=tuple(_constant(output, sizes) for output in returned),
            tensors=tensors,
            mutations=mutations,
            saved_buffers=tuple(_with_nbytes(buffers, [t.buffer for t in kept], sizes)),
            updated_buffers=tuple(_with_nbytes(buffers, updated, sizes)),
            may_be_saved_on_gpu=self.phase.name == "backward",
            rebinds=bool(kept or updated or states or self.phase.name == "backward"),
            bound_nbytes=max(
                (bound_nbytes(where, buffers[where.buffer], sizes) for where in self._symbolic),
                default=0,
            ),
            iterations=max((evaluate(loops, sizes) for loops in self._loops), default=0),
            is_wide=any(evaluate(number, sizes) not in INT32 for number in self._narrow),
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
        needed = set(_symbols(replace(self.plan, outputs=others)))
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

    def _tensors(
        self, returned: Sequence[PlanOutput], sizes: Mapping[str, int]
    ) -> tuple[TensorRecipe, ...]:
        by_buffer: dict[tuple[str, bool], list[tuple[int, View]]] = {}
        for position, output in enumerate(returned):
            if output.buffer is not None:
                is_complex = position in self.phase.complex_outputs
                view = view_at(output, sizes)
                view = _of_complex(view) if is_complex else view
                by_buffer.setdefault((output.buffer, is_complex), []).append((position, view))
        return tuple(self._tensor(*key, shown) for key, shown in by_buffer.items())

    def _tensor(self, name: str, is_complex: bool, shown: list[tuple[int, View]]) -> TensorRecipe:
        """One tensor per plan buffer: results that share memory in PyTorch share it here."""
        dtype = _dtype(self.plan.buffers[name], is_complex)
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
            and not any(
                o.mutates is not None and o.buffer == tensor.buffer for o in self.plan.outputs
            )
        )

    def _mutation(self, output: PlanOutput, sizes: Mapping[str, int]) -> MutationRecipe:
        assert output.buffer is not None
        assert output.mutates is not None
        buffer = self.plan.buffers[output.buffer]
        is_complex = output.mutates in self.phase.complex_inputs
        view = view_at(output, sizes)
        shape, strides, offset = _of_complex(view) if is_complex else view
        elements = storage_span(shape, strides)
        sharing = sum(other.buffer == output.buffer for other in self.plan.outputs)
        keep = (
            output.mutates in self.static_inputs
            and sharing == 1
            and offset == 0
            and elements > 0
            and buffer.role == "output"
        )
        dtype = _dtype(buffer, is_complex)
        itemsize = dtype.itemsize
        return MutationRecipe(
            output.mutates,
            output.buffer,
            dtype,
            shape,
            strides,
            offset * itemsize,
            elements * itemsize,
            dense=prod(shape) == elements,
            keep=keep,
            counted=output.mutates in self.phase.counted,
            in_place=buffer.role == "input",
        )


def _of_complex(view: View) -> View:
    """A complex tensor, given its real view (…, 2)."""
    shape, strides, offset = view
    return shape[:-1], tuple(stride // 2 for stride in strides[:-1]), offset // 2


_COMPLEX = {
    "float16": torch.complex32,
    "float32": torch.complex64,
    "float64": torch.complex128,
}


def _dtype(buffer: PlanBuffer, is_complex: bool) -> torch.dtype:
    return _COMPLEX[buffer.dtype.name] if is_complex else torch_dtype(buffer.dtype)


def _constant(output: PlanOutput, sizes: Mapping[str, int]) -> Any:
    return output.constant if output.size is None else evaluate(output.size, sizes)


def _with_nbytes(
    buffers: Mapping[str, PlanBuffer], names: Iterable[str], sizes: Mapping[str, int]
) -> Iterable[tuple[str, int]]:
    return [(name, buffers[name].nbytes_for(sizes)) for name in names]


def _buffers_read(plan: Plan) -> set[str]:
    """Buffers that a step touches or an output shows: an input outside of these is not uploaded."""
    used = {output.buffer for output in plan.outputs if output.buffer is not None}
    if plan.preparation is not None:
        used.update(i.buffer for i in plan.preparation.inputs if i.buffer is not None)
    return used.union(*(step.buffers for step in plan.steps))


# ---- sizes


RAGGED = -(1 << 62)
"""In place of the ragged size of a nested tensor, which stands for several lengths."""


@dataclass(frozen=True, slots=True)
class SizeSource:
    """The place that holds a size symbol's value, as ``coefficient · symbol + constant``.

    Attributes:
        position: of the argument: an integer, or a tensor.
        unit: what the argument's strides and offset are multiplied with.
        field: of the tensor: ``size`` or ``stride`` of a dimension, or ``offset``, where its first
            element is in the memory that is bound for it. "" for an integer.
    """

    name: str
    position: int
    field: str
    dim: int
    coefficient: int
    constant: int
    unit: int = 1

    def read(self, values: Sequence[Any]) -> int:
        """The symbol's value in a call: (number − constant) / coefficient."""
        value = values[self.position]
        match self.field:
            case "size":
                found = int(value.shape[self.dim])
            case "stride":
                found = int(value.stride(self.dim))
            case "offset":
                found = bound_offset(value)
            case _ if type(value) is torch.SymInt and value.node.is_nested_int():
                return RAGGED
            case _:
                found = int(value)
        return (found * self.unit - self.constant) // self.coefficient


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


def _size_sources(
    plan: Plan, complex_inputs: Collection[int] = frozenset()
) -> tuple[SizeSource, ...]:
    """A source for each size symbol of the plan.

    Args:
        complex_inputs: positions of arguments that are complex, where the plan has real tensors
            (…, 2): their strides and offsets are twice those of the argument.

    Raises:
        UnsupportedOp: a symbol's value does not follow from the arguments.
    """
    found: dict[str, SizeSource] = {}
    for position, field_name, dim, expr in _places(plan):
        if len(expr.terms) == 1 and len(expr.terms[0][0]) == 1:
            (atom,), coefficient = expr.terms[0]
            if isinstance(atom, Symbol) and atom.name not in found:
                of_complex = position in complex_inputs and field_name in ("stride", "offset")
                unit = 2 if of_complex else 1
                found[atom.name] = SizeSource(
                    atom.name, position, field_name, dim, coefficient, expr.constant, unit
                )
    missing = sorted(set(_symbols(plan)) - set(found))
    if missing:
        raise UnsupportedOp(
            plan.name,
            f"the sizes {', '.join(missing)} do not follow from the graph's arguments",
            "compile with dynamic=False",
        )
    return tuple(found.values())


def _places(plan: Plan) -> Iterator[tuple[int, str, int, Expr]]:
    """(argument, field, dimension, expression) of every integer among the arguments."""
    for position, entry in enumerate(plan.inputs):
        if entry.size is not None:
            yield position, "", 0, entry.size
    buffers = [
        (position, plan.buffers[entry.buffer])
        for position, entry in enumerate(plan.inputs)
        if entry.buffer is not None and entry.buffer in plan.buffers
    ]
    for position, buffer in buffers:
        for dim, size in enumerate(buffer.sizes):
            yield position, "size", dim, size
    for position, buffer in buffers:
        for dim, stride in enumerate(buffer.strides):
            yield position, "stride", dim, stride
        yield position, "offset", 0, buffer.offset


def _symbols(plan: Plan) -> dict[str, Symbol]:
    """Every size symbol that running the plan needs a value of."""
    exprs: list[Expr] = []
    for buffer in plan.buffers.values():
        exprs += (*buffer.sizes, *buffer.strides, buffer.offset, buffer.nbytes)
    for output in plan.outputs:
        exprs += (*output.sizes, *output.strides)
        exprs += [e for e in (output.offset, output.size) if e is not None]
    for step in plan.steps:
        exprs += step.sizes
    found: dict[str, Symbol] = {}
    for expr in exprs:
        found.update((symbol.name, symbol) for symbol in symbols_of(expr))
    found.pop(FIRST_CHECK.name, None)  # runtimes number checks themselves
    return found
