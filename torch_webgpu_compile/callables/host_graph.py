"""`HostGraph`: a compiled graph on CPU tensors.

They are uploaded and downloaded. Parameters and buffers stay on the GPU (`static_copies`),
and so do the values that a forward graph saves for its backward graph (`saved_on_gpu`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..captured import saved_tensors_have_hooks
from ..counters import counters
from ..errors import DeviceLostError
from ..plan.lru_cache import LruCache
from ..runtime.buffers import AnyBuffer
from ..runtime.device import Device, GpuBuffer, reopened, unless_held
from ..runtime.executor import BoundPlan, Executor
from ..runtime.status import Reports
from ..torch_private import _empty_strided_cpu
from . import saved_on_gpu
from .compiled_graph import CompiledGraph, PlanAt, PlansAt
from .saved_on_gpu import SavedOnGpu
from .signature import InputRecipe, MutationRecipe, Signature, SignatureVariant
from .static_copies import (
    StaticCopies,
    data_ptr,
    drop,
    static_buffers,
    watch_optimizers,
    with_layout,
)


def _slow_empty_strided(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


# What Inductor's wrappers call: past the dispatcher, a few microseconds faster.
_empty_strided = _empty_strided_cpu or _slow_empty_strided


@dataclass(slots=True, eq=False)
class _Taken:
    """GPU copies of parameters and buffers that a graph uses, for one set of their addresses.

    Attributes:
        recipes: of the variants that it is for.
        errors: `Status.errors` when everything was right; -1 if something is missing.
        externals: the copies, and what was prepared from them.
        bound: what was bound last to nothing else, and whose reports.
    """

    recipes: tuple[InputRecipe, ...]
    copies: StaticCopies
    errors: int = -1
    externals: dict[str, GpuBuffer] = field(default_factory=dict)
    bound: tuple[SignatureVariant, BoundPlan, Reports | None] | None = None


_MOST_TAKEN = 64
"""Sets of parameters that a graph is ready for, as for layers of a model that share its code."""


class HostGraph(CompiledGraph):
    """A `CompiledGraph` on CPU tensors.

    Calls of one graph take turns. A failed call leaves it usable. When the device is lost, the call
    is made again on a new one.
    """

    def __init__(
        self, signature: Signature, device: Device, plan_at: PlanAt | PlansAt | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._static_of = _getter(signature.constant)
        # Then an argument may be a tensor that a forward graph has kept on the GPU.
        self._is_backward = signature.phase.name == "backward"
        self._is_half_written = False  # a failed call may have changed arguments
        super().__init__(signature, device, plan_at)
        watch_optimizers()

    def _open(self, device: Device) -> None:
        super()._open(device)
        self.executor.lock = self._lock
        self.forget()
        self._static = static_buffers(device)
        self._static.add_user(self.forget)

    def _with(self, signature: Signature) -> HostGraph:
        return HostGraph(signature, self.device)

    def _draw_seeds(self, count: int) -> Any:
        return torch.empty((count, 2), dtype=torch.int32).random_()

    def forget(self) -> None:
        """Drops the references to GPU copies of parameters; the next call looks them up again."""
        self._last: dict[bool, _Taken] = {}
        self._taken = LruCache[tuple[int, tuple[int, ...]], _Taken](_MOST_TAKEN)

    def reclaim(self) -> None:
        """`forget`, unless a call is running."""
        unless_held(self._lock, self.forget)

    def run_seeded(self, values: list[Any]) -> list[Any]:
        with self._lock:
            if self.device.is_lost:
                self._rebind()
            variant = self.signature.variant(values)
            if self.plan_at is not None and not variant.demands.are_met(self.device.target):
                return self._specialize(variant).run_seeded(values)
            try:
                return self._call(values, variant)
            except DeviceLostError:
                if not self.device.is_lost or self._is_half_written:
                    raise
                self._rebind()
                return self._call(values, variant)

    def _rebind(self) -> None:
        """Goes on, on a new device, after the loss of this one."""
        device = reopened(self.device)
        drop(self.device)
        self._open(device)

    def _call(self, values: list[Any], variant: SignatureVariant) -> list[Any]:
        self._is_half_written = False
        if self.plan.plans is not None:
            return self._call_composed(values, variant)
        bound, fresh, states = self._bind(values, variant)
        uploaded = self._upload(values, variant, bound.memory)
        try:
            bound.replay()
            results, downloaded = self._results(values, variant, bound.memory, fresh, states)
        except BaseException:
            self._distrust(values)
            raise
        counters.add_call(bound.dispatch_count, uploaded, downloaded)
        return results

    def _call_composed(self, values: list[Any], variant: SignatureVariant) -> list[Any]:
        memory = dict(self._take_constant(values, variant).externals)
        passed, states = self._take_changing(values, variant)
        memory |= passed
        for recipe in variant.uploads:
            if recipe.buffer not in memory:
                memory[recipe.buffer] = self.device.allocate(recipe.nbytes)
        uploaded = self._upload(values, variant, memory)
        arguments = values[:]
        for position, name, tensor in self.layouts(variant):
            arguments[position] = replace(tensor, memory=memory.get(name, tensor.memory))
        try:
            outcome, found = self.run_composed(variant, arguments)
            stay = () if saved_tensors_have_hooks() else outcome.saved_buffers
            fresh = {name: found[name] for name, _ in (*stay, *outcome.updated_buffers)}
            results, downloaded = self._results(values, outcome, found, fresh, states)
        except BaseException:
            self._distrust(values)
            raise
        counters.add_call(0, uploaded, downloaded)
        return results

    def _distrust(self, values: list[Any]) -> None:
        """After a failure, copies of what the plan changes may differ from their tensors."""
        changed = [output.mutates for output in self.plan.outputs if output.mutates is not None]
        self._static.invalidate([values[position] for position in changed])

    # ---- in

    def _bind(
        self, values: list[Any], variant: SignatureVariant
    ) -> tuple[BoundPlan, dict[str, GpuBuffer], StaticCopies | None]:
        """Memory for this call; also the buffers of outputs that outlive it, and of states."""
        taken = self._take_constant(values, variant)
        # What the calling thread's kernels report goes to a buffer of its own.
        executor = self.executor
        assert isinstance(executor, Executor)
        reports = self.device.status.own() if executor.checks_indices else None
        fresh: dict[str, GpuBuffer] = {}
        if variant.saved_buffers and not saved_tensors_have_hooks():
            for name, nbytes in variant.saved_buffers:
                fresh[name] = self.device.allocate(nbytes)
        for name, nbytes in variant.updated_buffers:
            fresh[name] = self.device.allocate(nbytes)
        passed, states = self._take_changing(values, variant)
        if fresh or passed:
            externals = {**taken.externals, **passed, **fresh}
            return executor.bind(variant.sizes, externals), fresh, states
        known = taken.bound
        if known is None or known[0] is not variant or known[2] is not reports:
            bound = executor.bind(variant.sizes, taken.externals)
            known = taken.bound = (variant, bound, reports)
        return known[1], fresh, None

    def _take_changing(
        self, values: list[Any], variant: SignatureVariant
    ) -> tuple[dict[str, GpuBuffer], StaticCopies | None]:
        """What is on the GPU of the arguments that differ from call to call; and of states."""
        passed = self._saved_on_gpu(values, variant) if self._is_backward else {}
        states = None
        if variant.states:
            states = self._take_states(values, variant)
            for recipe, buffer in zip(variant.states, states.buffers, strict=True):
                passed[recipe.buffer] = buffer
        return passed, states

    def _take_constant(self, values: list[Any], variant: SignatureVariant) -> _Taken:
        """The parameters and buffers that the graph only reads."""
        tensors = self._static_of(values)
        taken = self._take(tensors, variant.static)
        errors = self.device.status.errors  # what was prepared is void after one
        if taken.errors == errors and taken.copies.are_current(tensors):
            return taken
        taken.errors = -1
        taken.copies.update(tensors)
        externals = {
            recipe.buffer: buffer
            for recipe, buffer in zip(variant.static, taken.copies.buffers, strict=True)
        }
        if isinstance(self.executor, Executor):
            externals |= self.executor.prepared(externals)
        if externals != taken.externals:
            taken.externals = externals
            taken.bound = None
        taken.errors = errors
        return taken

    def _take_states(self, values: list[Any], variant: SignatureVariant) -> StaticCopies:
        """The parameters and buffers that the graph changes."""
        tensors = [values[recipe.position] for recipe in variant.states]
        copies = self._take(tensors, variant.states, True).copies
        if not copies.are_current(tensors):
            copies.update(tensors)
        return copies

    def _take(
        self, tensors: Sequence[Tensor], recipes: tuple[InputRecipe, ...], states: bool = False
    ) -> _Taken:
        addresses = tuple(map(data_ptr, tensors))
        taken = self._last.get(states)
        if taken is None or taken.recipes is not recipes or taken.copies.addresses != addresses:
            key = id(recipes), addresses  # the signature keeps them
            all_taken = self._taken
            taken = all_taken.find(key)
            if taken is None:
                copies = StaticCopies(self._static, tensors, recipes)
                taken = all_taken.keep(key, _Taken(recipes, copies))
            self._last[states] = taken
        return taken

    def _saved_on_gpu(self, values: list[Any], variant: SignatureVariant) -> dict[str, GpuBuffer]:
        found: dict[str, GpuBuffer] = {}
        for recipe in variant.uploads:
            saved = saved_on_gpu.of(values[recipe.position])
            if saved is None:
                continue
            if saved.device is self.device and saved.strides == recipe.strides:
                found[recipe.buffer] = saved.buffer
            else:
                saved_on_gpu.fill([values[recipe.position]])
        return found

    def _upload(
        self, values: list[Any], variant: SignatureVariant, memory: Mapping[str, AnyBuffer]
    ) -> int:
        """Uploads the arguments that are not on the GPU; the bytes of them."""
        total = 0
        for recipe in variant.uploads:
            tensor = values[recipe.position]
            if self._is_backward and saved_on_gpu.of(tensor) is not None:
                continue
            if tensor.stride() != recipe.strides:
                tensor = with_layout(tensor, recipe.strides)
            if recipe.nbytes:
                self.device.upload(memory[recipe.buffer], (tensor.data_ptr(), recipe.nbytes))
            total += recipe.nbytes
        return total

    # ---- out

    def _results(
        self,
        values: list[Any],
        variant: SignatureVariant,
        memory: Mapping[str, AnyBuffer],
        fresh: dict[str, GpuBuffer],
        states: StaticCopies | None,
    ) -> tuple[list[Any], int]:
        """The results of the call, and the bytes that were downloaded for it."""
        wanted = [r for r in variant.tensors if r.nbytes and r.buffer not in fresh]
        changed = [r for r in variant.mutations if r.nbytes]
        ranges = [(memory[r.buffer], r.offset_nbytes, r.nbytes) for r in wanted]
        ranges += [(memory[r.buffer], r.offset_nbytes, r.nbytes) for r in changed]
        download = self.device.start_download(ranges) if ranges else None
        # The rest takes about as long as a small graph on the GPU.
        results = variant.results(values)
        addresses: list[int] = []
        for recipe in variant.tensors:
            tensor = _empty_strided(recipe.sizes, recipe.strides, recipe.dtype)
            kept = fresh.get(recipe.buffer)
            if kept is not None:
                saved_on_gpu.keep(tensor, SavedOnGpu(self.device, kept, recipe.strides))
            elif recipe.nbytes:
                addresses.append(tensor.data_ptr())
            for position, view in recipe.results:
                results[position] = tensor if view is None else tensor.as_strided(*view)
        for output, position in self.signature.phase.forwarded:
            results[output] = values[position]
            if self._is_backward:  # a gradient that the forward graph has computed
                saved_on_gpu.fill([values[position]])
        staged = [_staging(values[r.position], r) for r in variant.mutations]
        if download is not None:
            for mutation, target in zip(variant.mutations, staged, strict=True):
                if mutation.nbytes:
                    addresses.append(target.data_ptr())
            try:
                download.finish(addresses)
            except DeviceLostError:
                self._is_half_written = download.is_partial and bool(changed)
                raise
        for mutation, target in zip(variant.mutations, staged, strict=True):
            _write_back(values[mutation.position], mutation, target)
        if states is not None:
            self._keep_states(values, variant, memory, fresh, states)
        return results, sum([entry[2] for entry in ranges])

    def _keep_states(
        self,
        values: list[Any],
        variant: SignatureVariant,
        memory: Mapping[str, AnyBuffer],
        fresh: dict[str, GpuBuffer],
        states: StaticCopies,
    ) -> None:
        """The GPU has the values of what was changed already: the next call need not copy them."""
        kept: dict[tuple[int, tuple[int, ...]], GpuBuffer] = {}
        for mutation in variant.mutations:
            own: AnyBuffer | None = None
            if mutation.in_place:
                own = memory[mutation.buffer]
            elif mutation.keep:
                own = fresh.get(mutation.buffer)
            if isinstance(own, GpuBuffer):
                kept[mutation.position, mutation.strides] = own
        states.replace(
            [values[recipe.position] for recipe in variant.states],
            [kept.get((recipe.position, recipe.strides)) for recipe in variant.states],
        )


def _write_back(tensor: Tensor, recipe: MutationRecipe, value: Tensor) -> None:
    if value is not tensor:
        with torch.no_grad():
            tensor.copy_(value)
    elif not recipe.counted and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _staging(tensor: Tensor, recipe: MutationRecipe) -> Tensor:
    """The download target of a changed argument: itself, or a tensor with the plan's layout."""
    if recipe.dense and tensor.stride() == recipe.strides:
        return tensor
    return torch.empty_strided(recipe.sizes, recipe.strides, dtype=recipe.dtype)


def _getter(positions: Sequence[int]) -> Any:
    """A function that takes the items at ``positions`` from a list, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[position] for position in positions])
