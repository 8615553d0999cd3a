"""`DeviceGraph`: a compiled graph on ``webgpu`` tensors. Nothing passes through the host.

Arguments are bound where they are. Results get memory of their own, which the kernels write. An
argument that the graph changes is written where it is, if the plan says so; else it gets new memory
in the same way, which replaces its storage's when it is all of that storage (`storages.replace`),
and is copied into it otherwise.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..counters import counters
from ..errors import SharedMemoryError
from ..plan.lru_cache import max_resolved_sizes
from ..plan.model import HostStep
from ..runtime.buffers import SMALL_NBYTES, AnyBuffer, BufferSlice, round_up
from ..runtime.device import Device, GpuBuffer
from ..runtime.executor import Executor
from ..runtime.launcher import Launcher
from ..runtime.sections import Section
from ..runtime.sized import MemoryPlace
from ..symbolic.sizes import evaluate, may_overlap
from ..target import BINDING_ALIGNMENT
from ..tensors import devices, storages
from ..tensors.generators import draw_seeds
from .call_data import CallData
from .compiled_graph import CompiledGraph, PlanAt, PlansAt
from .part_writes import write_part
from .signature import InputRecipe, MutationRecipe, Signature, SignatureVariant, TensorRecipe
from .static_copies import same_layout, with_layout


@dataclass(frozen=True, slots=True)
class _Kept:
    """The place of a value that outlives the call.

    Attributes:
        position: among the launcher's buffers.
        constant: the plan's own buffer that it is in, instead.
        nbytes: if not 0, it is needed twice, or is also an input: it has to be copied.
    """

    position: int
    constant: GpuBuffer | None
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """Whether it is just the memory at the position."""
        return self.constant is None and not self.nbytes


@dataclass(frozen=True, slots=True)
class _Made:
    """New tensors in memory that the call has filled.

    Attributes:
        position: of the memory among the buffers; -1: ask ``kept``.
        nbytes: of their storage.
        tensors: (position among the results, then the arguments of `storages.new_tensor`).
    """

    kept: _Kept
    position: int
    nbytes: int
    dtype: torch.dtype
    tensors: tuple[tuple[int, int, Sequence[int], Sequence[int]], ...]

    @staticmethod
    def of(recipe: TensorRecipe, kept: _Kept) -> _Made:
        """The tensor that a recipe makes."""
        whole = recipe.sizes, recipe.strides, recipe.offset_nbytes // recipe.dtype.itemsize
        views = [(position, *(view or whole)) for position, view in recipe.results]
        return _Made(
            kept,
            kept.position if kept.is_plain else -1,
            recipe.offset_nbytes + recipe.nbytes,
            recipe.dtype,
            tuple(
                (position, offset, sizes, storages.given_strides(sizes, strides))
                for position, sizes, strides, offset in views
            ),
        )


class _Many:
    """Tensors among the arguments, as the plan expects them, to be found at once.

    Args:
        inputs: their recipes, with their positions among the buffers.
    """

    __slots__ = ("_given", "_known", "_offsets_nbytes", "_places", "_strides")

    def __init__(self, inputs: Sequence[tuple[InputRecipe, int]]) -> None:
        recipes = [recipe for recipe, _ in inputs]
        self._given = [recipe.position for recipe in recipes]
        self._places = [place for _, place in inputs]
        self._strides = [recipe.strides for recipe in recipes]
        self._offsets_nbytes = [recipe.offset_nbytes for recipe in recipes]
        self._known: storages.Likeness | None = None  # of the tensors of the first call

    def find(self, values: Sequence[Any], device: torch.device, buffers: list[Any]) -> bool:
        """Fills in the buffers of all, and returns whether all are where they are expected."""
        tensors = [values[k] for k in self._given]
        known = self._known
        found = storages.find_buffers(tensors, device, self._strides, self._offsets_nbytes, known)
        if found is None:
            return False
        if known is None:
            self._known = storages.Likeness(tensors)
        for place, buffer in zip(self._places, found, strict=True):
            buffers[place] = buffer
        return True


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of a call: see `runtime.sections`.

    Attributes:
        launch: its launcher, or what that does where nothing is prepared.
        positions: of the launcher's buffers among the call's; None: it takes these.
        new: bytes of the memory that every call gets anew, before the launch, and its positions.
        released: positions of the buffers that are not needed after it.
        arguments: positions of the arguments that are not.
    """

    launch: Callable[[Sequence[AnyBuffer]], None]
    positions: tuple[int, ...] | None
    new: tuple[tuple[int, tuple[int, ...]], ...]
    released: tuple[int, ...]
    arguments: tuple[int, ...]


@dataclass(slots=True)
class _ResolvedCall:
    """A call at known sizes: its memory and commands.

    Attributes:
        sections: what is launched, in order.
        buffers: None in every place that a call fills. The others are the same in all calls: what
            no kernel reads, and intermediates of a few bytes.
        inputs: the arguments, with their positions among the buffers.
        tensors: those that are tensors: (position, place, offset in bytes); the rest are ``data``.
        many, others: the same again, from the first call that looks at them on: tensors that are
            found at once, where they are many, and the rest.
        constants: the results, without tensors; None: ask the variant.
        made, mutations: the tensors of the variant's recipes, and where their values are.
        assigned: those mutations that are not made in place.
        counts: whether versions of arguments are to be counted.
        alone: calls may not be recorded side by side, as they share memory.
    """

    sections: tuple[_Section, ...]
    buffers: list[GpuBuffer | None]
    inputs: tuple[tuple[InputRecipe, int], ...]
    tensors: tuple[tuple[int, int, int], ...]
    data: tuple[tuple[int, int], ...]
    constants: list[Any] | None
    made: tuple[_Made, ...]
    mutations: tuple[tuple[MutationRecipe, _Kept], ...]
    assigned: tuple[tuple[MutationRecipe, _Kept], ...]
    counts: bool
    dispatch_count: int
    alone: bool
    many: _Many | None = None
    others: Sequence[tuple[InputRecipe, int]] | None = None
    order: Callable[[list[Any]], tuple[Any, ...]] | None = None

    def on(self, memory: Sequence[AnyBuffer | None]) -> list[Any]:
        """``buffers`` with the memory of all arguments that are tensors, in one step of C code."""
        if self.order is None:
            sources = list(range(len(memory), len(memory) + len(self.buffers)))
            for position, place, _ in self.tensors:
                sources[place] = position
            self.order = itemgetter(*sources, 0)  # one more: of a single one it makes no tuple
        buffers = list(self.order([*memory, *self.buffers]))
        buffers.pop()
        return buffers

    def sort_inputs(self, values: Sequence[Any]) -> Sequence[tuple[InputRecipe, int]]:
        """Sets ``many`` and ``others`` by what a call gives; returns ``others``."""
        tensors: list[tuple[InputRecipe, int]] = []
        others: list[tuple[InputRecipe, int]] = []
        for entry in self.inputs:
            (tensors if isinstance(values[entry[0].position], Tensor) else others).append(entry)
        if len(tensors) < storages.FEWEST_OF_MANY:
            self.others = self.inputs
        else:
            self.many, self.others = _Many(tensors), others
        return self.others


def _resolve(
    executor: Executor, variant: SignatureVariant, given_up: Collection[str], data: Collection[int]
) -> _ResolvedCall:
    """A call at the sizes of a variant.

    Args:
        given_up: the inputs that the caller has no use for.
        data: positions of the arguments that are bytes.
    """
    plan, sizes, allocate = executor.plan, variant.sizes, executor.device.allocate
    arguments = {recipe.buffer: recipe.position for recipe in variant.uploads}
    sections = executor.sections(sizes, given_up)
    nbytes = {
        n: k for launch, _ in sections for n, k in zip(launch.names, launch.nbytes, strict=True)
    }
    constants = sections[0][0].constants
    position = {name: k for k, name in enumerate(dict.fromkeys((*nbytes, *arguments)))}
    places = [place for _, section in sections for place in section.plan.places]
    filled = {*arguments, *(name for place in places for name in place.names)}
    buffers: list[GpuBuffer | None] = [None] * len(position)
    # Arguments that no kernel reads: any memory will do.
    for name in nbytes.keys() - filled:
        buffers[position[name]] = allocate(nbytes[name])
    # Other memory in each call would be other bind groups in each call.
    few = [place for place in places if _is_kept(place)]
    for place in few:
        memory = allocate(place.nbytes)
        for name in place.names:
            buffers[position[name]] = memory
    lasting = {name for place in few for name in place.names}

    def resolved(launch: Launcher, section: Section) -> _Section:
        released = [name for name in section.released if name not in lasting]
        new = [place for place in section.plan.places if not _is_kept(place)]
        return _Section(
            launch if launch.prepared else launch.run,
            tuple(position[name] for name in launch.names) if len(sections) > 1 else None,
            tuple((place.nbytes, tuple(position[name] for name in place.names)) for place in new),
            tuple(position[name] for name in released),
            tuple(arguments[name] for name in released if name in arguments),
        )

    taken: set[str] = set()

    def keep(name: str, in_place: bool = False) -> _Kept:
        shared = name in taken or not (in_place or plan.buffers[name].role == "output")
        taken.add(name)
        copied_nbytes = evaluate(plan.buffers[name].nbytes, sizes) if shared else 0
        return _Kept(position.get(name, -1), constants.get(name), copied_nbytes)

    inputs = tuple((recipe, position[recipe.buffer]) for recipe in variant.uploads)
    made = tuple(_Made.of(recipe, keep(recipe.buffer)) for recipe in variant.tensors)
    mutations = tuple((m, keep(m.buffer, m.in_place)) for m in variant.mutations)
    return _ResolvedCall(
        tuple(resolved(launch, section) for launch, section in sections),
        buffers,
        inputs,
        tuple(
            (r.position, place, r.offset_nbytes) for r, place in inputs if r.position not in data
        ),
        tuple((r.position, place) for r, place in inputs if r.position in data),
        None if variant.ragged else list(variant.constants),
        made,
        mutations,
        tuple((m, kept) for m, kept in mutations if not m.in_place),
        not all(m.counted for m in variant.mutations),
        sum(launch.dispatch_count for launch, _ in sections),
        any(isinstance(step, HostStep) for step in plan.steps) or bool(few),
    )


def _is_kept(place: MemoryPlace) -> bool:
    """Whether memory of intermediates is so little that it is not returned after a call."""
    return isinstance(place.key, int) and place.nbytes <= SMALL_NBYTES


class DeviceGraph(CompiledGraph):
    """A `CompiledGraph` on the device's tensors.

    A failed call leaves itself and the arguments as they were, except for what it changes in place.

    Args:
        signature: without static inputs: every argument is bound where it is.
        device: where it runs.
        index: the device's number in PyTorch.
        plan_at: makes the plans for sizes at which this one cannot run.

    Raises (when called):
        DeviceError: the GPU refused; the subclass and the message say what.
        DeviceLostError: the device, or the one that arguments were on, was lost. After
            ``torch.webgpu.reset_device`` new arguments are computed with on the new device.
    """

    def __init__(
        self,
        signature: Signature,
        device: Device,
        index: int,
        plan_at: PlanAt | PlansAt | None = None,
    ) -> None:
        self.index = index
        self._own = devices.torch_device(index)  # comparing with it is quicker than `device.type`
        self._lock = threading.Lock()
        self._in_use: deque[SignatureVariant] = deque()  # that are resolved, the oldest first
        super().__init__(signature, device, plan_at)

    def _open(self, device: Device) -> None:
        self._data = CallData(device)
        super()._open(device)
        self.forget_sizes()

    def _with(self, signature: Signature) -> DeviceGraph:
        return DeviceGraph(signature, self.device, self.index)

    @property
    def given_up(self) -> Collection[str]:
        """What was saved for a backward graph is its own, unless somebody will run it again."""
        phase = self.signature.phase
        if phase.name != "backward":
            return ()
        kept = {out.mutates for out in self.plan.outputs} | {k for _, k in phase.forwarded}
        inputs = enumerate(self.plan.inputs)
        return {spec.buffer for k, spec in inputs if spec.buffer is not None and k not in kept}

    def _draw_seeds(self, count: int) -> Any:
        return draw_seeds(self.index, count)

    def run_seeded(self, values: list[Any]) -> list[Any]:
        graph, variant = self.at(values)
        return graph.run_at(variant, values)

    def at(self, values: Sequence[Any]) -> tuple[DeviceGraph, SignatureVariant]:
        """The graph that runs calls with these arguments, and what it makes of their sizes."""
        variant = self.signature.variant(values)
        if (
            variant.resolved is None
            and self.plan_at is not None
            and not variant.demands.are_met(self.device.target)
        ):
            specialized = self._specialize(variant)
            assert isinstance(specialized, DeviceGraph)
            return specialized.at(values)
        return self, variant

    def expects(self, variant: SignatureVariant, values: Sequence[Any]) -> bool:
        """Whether all tensors are as ``is_as_expected`` of `run_at` has it.

        Args:
            values: without what follows them as bytes.
        """
        given = [recipe for recipe in variant.uploads if recipe.position < len(values)]
        return all(
            isinstance(tensor := values[recipe.position], Tensor)
            and tensor.device == self._own
            and tensor.stride() == recipe.strides
            and storages.data_ptr(tensor) % BINDING_ALIGNMENT == recipe.offset_nbytes
            and storages.buffer_at(storages.data_ptr(tensor)) is not None
            for recipe in given
        )

    def run_at(
        self,
        variant: SignatureVariant,
        values: list[Any],
        is_as_expected: bool = False,
        memory: Sequence[AnyBuffer | None] | None = None,
    ) -> list[Any]:
        """`run_seeded` with what `at` gives.

        Args:
            is_as_expected: every tensor is on the device, with the strides that the plan reads, at
                an offset that is the plan's but for multiples of `BINDING_ALIGNMENT`.
            memory: of the tensors, which are as expected, so that nobody has to look at them.
        """
        if self.plan.plans is not None:
            return self._run_composed(variant, values)
        resolved: _ResolvedCall = variant.resolved or self._resolved(variant, values)
        buffers: list[Any] = resolved.buffers[:] if memory is None else resolved.on(memory)
        moved: Collection[int] = ()  # positions of what may be in other memory than the argument
        if memory is None and is_as_expected:
            storages.find_known(values, resolved.tensors, buffers)
        elif memory is None:
            moved = self._find(resolved, values, buffers)
        data: Sequence[GpuBuffer] = ()
        if resolved.data:
            data = [self._data.upload(values[position]) for position, _ in resolved.data]
            for (_, place), buffer in zip(resolved.data, data, strict=True):
                buffers[place] = buffer
        if resolved.alone:
            with self.executor.lock:
                copied = self._launch(variant, resolved, values, buffers)
        else:
            copied = self._launch(variant, resolved, values, buffers)
        if data:
            self._data.recorded(data)
        counters.dispatches += resolved.dispatch_count  # without a call in between: no lock
        constants = resolved.constants
        results = variant.results(values) if constants is None else constants[:]
        index, new_tensor = self.index, storages.new_tensor
        for made in resolved.made:
            where = made.position
            filled = buffers[where] if where >= 0 else self._kept(made.kept, buffers)
            storage = storages.new_storage(made.nbytes, index, filled)
            for position, offset, sizes, strides in made.tensors:
                results[position] = new_tensor(storage, made.dtype, sizes, strides, offset, index)
        if resolved.counts:
            self._count_changes(variant, values)
        for mutation, kept in resolved.mutations if moved or copied else resolved.assigned:
            place = kept.position
            if not mutation.in_place or place in moved or place in copied:
                self._assign(values[mutation.position], mutation, self._kept(kept, buffers))
        for output, position in self.signature.phase.forwarded:
            results[output] = values[position]
        return results

    def repeat(self, values: Sequence[Any], count: int) -> None:
        """Makes a call ``count`` times; each takes what the one before has left in its arguments.

        Only what it changes is kept of it, no results.
        """
        if count and not self._relaunch(values, count):
            for _ in range(count):
                self.run(list(values))

    def _relaunch(self, values: Sequence[Any], count: int) -> bool:
        """`repeat` without looking at the arguments again; whether that is possible."""
        phase = self.signature.phase
        if self.plan.plans is not None or phase.seeds or phase.lazy:
            return False
        graph, variant = self.at(values)
        resolved: _ResolvedCall | None = variant.resolved
        if graph is not self or resolved is None or resolved.data or resolved.assigned:
            return False
        buffers: list[Any] = resolved.buffers[:]
        if self._find(resolved, values, buffers):
            return False
        with self.executor.lock:
            for done in range(count):
                try:
                    self._launch(variant, resolved, list(values), buffers[:], may_copy=False)
                except SharedMemoryError:  # before anything of the first one was recorded
                    if done:
                        raise
                    return False
        counters.dispatches += count * resolved.dispatch_count
        if resolved.counts:
            self._count_changes(variant, values)
        return True

    def _run_composed(self, variant: SignatureVariant, values: list[Any]) -> list[Any]:
        if self.device.is_lost:
            self._rebind()
        arguments = values[:]
        for position, _, layout in self.layouts(variant):
            arguments[position] = layout
        for recipe in variant.uploads:
            layout = arguments[recipe.position]
            memory = self._memory(values[recipe.position], recipe)
            start = memory.offset_nbytes // layout.dtype.itemsize
            arguments[recipe.position] = replace(layout, memory=memory.memory, offset=start)
        variant, memory_of = self.run_composed(variant, arguments)
        results = list(variant.constants)
        for tensor in variant.tensors:
            made = _Made.of(tensor, _Kept(0, None, 0))
            storage = storages.new_storage(made.nbytes, self.index, memory_of[tensor.buffer])
            for place, offset, sizes, strides in made.tensors:
                shown = sizes, strides, offset, self.index
                results[place] = storages.new_tensor(storage, made.dtype, *shown)
        self._count_changes(variant, values)
        for mutation in variant.mutations:
            self._assign(values[mutation.position], mutation, memory_of[mutation.buffer])
        for output, argument in self.signature.phase.forwarded:
            results[output] = values[argument]
        return results

    def _find(
        self, resolved: _ResolvedCall, values: Sequence[Any], buffers: list[Any]
    ) -> Collection[int]:
        """Fills in the memory of tensor arguments, wherever these are and whatever their layout.

        Positions of what is in other memory than the argument.
        """
        moved: set[int] = set()
        find, own = storages.find_buffer, self._own
        inputs = resolved.others
        if inputs is None:
            inputs = resolved.sort_inputs(values)
        if resolved.many is not None and not resolved.many.find(values, own, buffers):
            inputs = resolved.inputs
        for recipe, position in inputs:
            value = values[recipe.position]
            if type(value) is bytes:
                continue
            buffer: AnyBuffer | None = find(value, own, recipe.strides, recipe.offset_nbytes)
            if buffer is None:
                buffer = self._memory(value, recipe)
                moved.add(position)
            buffers[position] = buffer
        return moved

    def _launch(
        self,
        variant: SignatureVariant,
        resolved: _ResolvedCall,
        values: list[Any],
        buffers: list[Any],
        may_copy: bool = True,
    ) -> Collection[int]:
        """Records the call on memory for its inputs, and for what it computes, which it gets here.

        Positions of arguments that it has copied.

        Raises:
            SharedMemoryError: it may not copy arguments that it has to.
        """
        copied: Collection[int] = ()
        allocate = self.device.allocate
        for section in resolved.sections:
            for nbytes, positions in section.new:
                buffer = allocate(nbytes)
                for position in positions:
                    buffers[position] = buffer
            if section.positions is not None:
                section.launch([buffers[position] for position in section.positions])
                for position in section.arguments:
                    values[position] = None
                for position in section.released:
                    buffers[position] = None
                continue
            try:
                section.launch(buffers)
            except SharedMemoryError:
                if not may_copy:
                    raise
                copied = self._copy_changed(variant, resolved, values, buffers)
                section.launch(buffers)
        return copied

    def _copy_changed(
        self,
        variant: SignatureVariant,
        resolved: _ResolvedCall,
        values: list[Any],
        buffers: list[Any],
    ) -> set[int]:
        """Copies of what is changed in place where the call has that memory twice: the positions.

        `_assign` writes them back.
        """
        copied = set()
        recipes = {recipe.position: recipe for recipe in variant.uploads}
        loans = Counter(id(_memory_of(buffer)) for buffer in buffers)
        for mutation, kept in resolved.mutations:
            shared = mutation.in_place and loans[id(_memory_of(buffers[kept.position]))] > 1
            if shared and values[mutation.position].device.type == devices.NAME:
                recipe = recipes[mutation.position]
                buffers[kept.position] = self._copied(values[mutation.position], recipe)
                copied.add(kept.position)
        return copied

    def _kept(self, kept: _Kept, buffers: list[Any]) -> GpuBuffer:
        """The memory of a value after the call, a copy where something else needs it too."""
        source: GpuBuffer = buffers[kept.position] if kept.constant is None else kept.constant
        if not kept.nbytes:
            return source
        copy = self.device.allocate(kept.nbytes)
        self.device.copy(source, 0, copy, 0, round_up(kept.nbytes, 4))
        return copy

    def _resolved(self, variant: SignatureVariant, values: Sequence[Any]) -> _ResolvedCall:
        if self.device.is_lost:
            self._rebind()
        with self.executor.lock:
            made: _ResolvedCall | None = variant.resolved
            if made is None:
                assert isinstance(self.executor, Executor)
                data = {k for k, value in enumerate(values) if type(value) is bytes}
                made = _resolve(self.executor, variant, self.given_up, data)
                variant.resolved = made
                self._in_use.append(variant)
                while len(self._in_use) > max_resolved_sizes(self.plan.dispatch_count):
                    self._in_use.popleft().resolved = None
            return made

    def forget_sizes(self) -> None:
        """Drops what was made for the sizes of earlier calls; later ones make it again."""
        self.signature.forget()
        in_use, self._in_use = self._in_use, deque()
        for variant in in_use:
            variant.resolved = None

    def reclaim(self) -> None:
        self.forget_sizes()

    def _rebind(self) -> None:
        """Goes on, on the device that was opened after a loss.

        Raises:
            DeviceLostError: there is none yet.
        """
        device = devices.get_device(self.index)
        with self._lock:
            if device is not self.device:
                self._open(device)

    # ---- in

    def _memory(self, tensor: Tensor, recipe: InputRecipe) -> AnyBuffer:
        """The memory of an argument, laid out as the plan expects it."""
        if tensor.device != self._own and tensor.device.type != devices.NAME:
            return self._uploaded(tensor, recipe)
        if tensor.stride() != recipe.strides and not same_layout(tensor, recipe.strides):
            return self._copied(tensor, recipe)
        address = storages.data_ptr(tensor)
        buffer = storages.buffer_at(address)
        if buffer is None:
            return self.device.allocate(recipe.nbytes)
        offset = storages.offset_at(address) - recipe.offset_nbytes
        if offset == 0:
            return buffer
        if offset % BINDING_ALIGNMENT == 0 and offset > 0:
            return buffer.slice(offset)
        return self._copied(tensor, recipe)

    def _copied(self, tensor: Tensor, recipe: InputRecipe) -> GpuBuffer:
        """New memory with an argument on the device, laid out as the plan expects it."""
        itemsize = tensor.element_size()
        storage = storages.new_storage(recipe.offset_nbytes + recipe.nbytes, self.index)
        start = recipe.offset_nbytes // itemsize
        sizes: Sequence[int] = tensor.shape
        strides = recipe.strides
        with torch.no_grad():
            if same_layout(tensor, strides) and may_overlap(sizes, strides):
                # No copy may write elements that share memory: all that lies there, as it is.
                sizes, strides = (recipe.nbytes // itemsize,), (1,)
                tensor = tensor.as_strided(sizes, strides)
            target = storages.new_tensor(storage, tensor.dtype, sizes, strides, start, self.index)
            target.copy_(tensor)
        return storages.buffer_of(target)

    def _uploaded(self, tensor: Tensor, recipe: InputRecipe) -> GpuBuffer:
        """New memory with an argument that is on the host."""
        nbytes, start = recipe.nbytes, recipe.offset_nbytes
        if not nbytes:
            return self.device.allocate(0)
        tensor = with_layout(
            tensor if tensor.device.type == "cpu" else tensor.cpu(), recipe.strides
        )
        counters.add(bytes_uploaded=nbytes)
        if not start:
            return self.device.upload_new((tensor.data_ptr(), nbytes))
        buffer = self.device.allocate(start + nbytes)
        self.device.upload(buffer, (tensor.data_ptr(), nbytes), start)
        return buffer

    # ---- out

    def _count_changes(self, variant: SignatureVariant, values: Sequence[Any]) -> None:
        """Increments the versions of the arguments that the call has changed."""
        changed = [values[m.position] for m in variant.mutations if not m.counted]
        counted = [tensor for tensor in changed if not tensor.is_inference()]
        if counted:
            torch.autograd.graph.increment_version(counted)

    def _assign(self, tensor: Tensor, recipe: MutationRecipe, buffer: GpuBuffer) -> None:
        """Gives an argument the value that it has after the call."""
        if recipe.nbytes == 0:
            return
        on_device = tensor.device == self._own or tensor.device.type == devices.NAME
        if recipe.in_place and on_device and _memory_of(buffer) is storages.buffer_of(tensor):
            return
        whole = recipe.offset_nbytes == 0 and tensor.stride() == recipe.strides
        if on_device and whole and storages.replace(tensor, recipe.nbytes, buffer):
            return
        storage = storages.new_storage(recipe.offset_nbytes + recipe.nbytes, self.index, buffer)
        start = recipe.offset_nbytes // recipe.dtype.itemsize
        value = storages.new_tensor(
            storage, recipe.dtype, recipe.sizes, recipe.strides, start, self.index
        )
        write_part(tensor.detach(), value)


def _memory_of(buffer: AnyBuffer) -> GpuBuffer:
    return buffer.buffer if isinstance(buffer, BufferSlice) else buffer
