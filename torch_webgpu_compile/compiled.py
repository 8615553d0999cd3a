"""`CompiledGraph`: torch tensors in and out around an `Executor`.

CPU tensors are uploaded and downloaded. Parameters and buffers stay on the GPU (`static_buffers`),
and so do the values that a forward graph saves for its backward graph: AOTAutograd gets tensors of
the right shape whose contents are never written; `Resident` on such a tensor is the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import static_buffers
from .counters import counters
from .errors import DeviceLostError
from .host_calls import HostCalls
from .plan.model import Plan
from .runtime.device import Device, GpuBuffer, reopened
from .runtime.executor import BoundPlan, Executor
from .runtime.status import Reports
from .signature import MutationRecipe, Signature, Variant

_RESIDENT = "_webgpu_resident"


def _slow_empty_strided(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


# What Inductor's wrappers call: past the dispatcher, a few microseconds faster.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _slow_empty_strided)
_NOTHING_FRESH: dict[str, GpuBuffer] = {}


@dataclass(frozen=True, slots=True)
class Resident:
    """The contents, on a GPU, of a tensor that AOTAutograd keeps from forward to backward."""

    device: Device
    buffer: GpuBuffer
    strides: tuple[int, ...]


class CompiledGraph:
    """A function of a list of arguments, which it empties, to a list of results.

    It may be called from several threads; calls of one graph take turns. A failed call leaves it
    usable. When the device is lost, the call is made again on a new one.

    Args:
        plan: what to run.
        device: where.
        signature: what the plan's inputs and outputs are to PyTorch.

    Raises (when called):
        DeviceError: the GPU refused; the subclass and the message say what.
    """

    _boxed_call = True

    def __init__(self, plan: Plan, device: Device, signature: Signature) -> None:
        self.plan = plan
        self.device = device
        self.signature = signature
        self.executor = Executor(plan, device, HostCalls(plan))
        self._static = static_buffers.static_buffers(device)
        self._take_static = _getter([entry.position for entry in signature.constant])
        self._static_state: Any = None
        self._static_externals: dict[str, GpuBuffer] = {}
        self._bound: tuple[Variant, BoundPlan, Reports | None] | None = None
        self._lock = self.executor.lock
        self._is_half_written = False  # a failed call may have changed arguments
        self._static.add_user(self)
        device.add_reclaimable(self)

    def forget(self) -> None:
        """Lets go of parameters; the next call takes them again."""
        self._static_state = None
        self._static_externals = {}
        self._bound = None

    def reclaim(self) -> None:
        """Lets go of memory between calls (`Device.empty_cache`)."""
        if self._lock.acquire(blocking=False):
            try:
                self.forget()
            finally:
                self._lock.release()

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values = arguments[:]
        arguments.clear()
        return self.run(values)

    def run(self, values: list[Any]) -> list[Any]:
        """The call on a list of arguments that is not needed afterwards."""
        if self.signature.lazy:
            return self.signature.call(self._run, values)
        return self._run(values)

    def _run(self, values: list[Any]) -> list[Any]:
        if self.signature.seeds:
            values.append(torch.empty((self.signature.seeds, 2), dtype=torch.int32).random_())
        with self._lock:
            if self.device.is_lost:
                self._rebind()
            try:
                return self._call(values)
            except DeviceLostError:
                if not self.device.is_lost or self._is_half_written:
                    raise
                self._rebind()
                return self._call(values)

    def _rebind(self) -> None:
        """Goes on, on a new device, after the loss of this one."""
        lost = self.device
        device = reopened(lost)
        executor = Executor(self.plan, device, HostCalls(self.plan))
        executor.lock = self._lock
        self.forget()
        static_buffers.drop(lost)
        self.executor = executor
        self._static = static_buffers.static_buffers(device)
        self._static.add_user(self)
        self.device = device
        device.add_reclaimable(self)

    def _call(self, values: list[Any]) -> list[Any]:
        with self._lock:
            self._is_half_written = False
            variant = self.signature.variant(values)
            bound, fresh = self._bind(values, variant)
            uploaded = self._upload(values, variant, bound)
            try:
                bound.replay()
                results, downloaded = self._results(values, variant, bound, fresh)
            except BaseException:
                self._distrust(values, variant)
                raise
        counters.add_call(bound.dispatch_count, uploaded, downloaded)
        return results

    def _distrust(self, values: list[Any], variant: Variant) -> None:
        """After a failure, copies that a plan changes in place may differ from their tensors."""
        for mutation in variant.mutations:
            if mutation.in_place:
                self._static.invalidate(values[mutation.position])

    # ---- in

    def _bind(self, values: list[Any], variant: Variant) -> tuple[BoundPlan, dict[str, GpuBuffer]]:
        """Memory for this call; also the buffers of outputs that outlive it."""
        static = self._take_static(values)
        state = static_buffers.state_of(static)
        if state is not None:  # what was prepared from them is void after an error
            state = (self.device.status.errors, *state)
        # What the calling thread's kernels report goes to a buffer of its own.
        reports = self.device.status.own() if self.executor.checks_indices else None
        known = self._bound
        if known is not None and known[2] is not reports:
            known = None
        unchanged = state is not None and state == self._static_state
        if unchanged and known is not None and known[0] is variant and not variant.rebinds:
            return known[1], _NOTHING_FRESH
        # Here, too: an allocation that fails has this graph forget what it holds (`reclaim`).
        static_externals = self._static_externals
        if not unchanged:
            externals = {
                entry.buffer: self._static.get(values[entry.position], strides)
                for entry, strides in variant.static
            }
            externals |= self.executor.prepared(externals)
            if externals != static_externals:
                known = self._bound = None
            static_externals = self._static_externals = externals
            self._static_state = state
        fresh: dict[str, GpuBuffer] = {}
        if variant.saved and not _has_saved_tensor_hooks():
            for name, nbytes in variant.saved_buffers:
                fresh[name] = self.device.allocate(nbytes)
        for name, nbytes in variant.updated_buffers:
            fresh[name] = self.device.allocate(nbytes)
        passed = self._residents(values, variant) if variant.may_be_resident else {}
        for entry, strides, counted in variant.states:
            passed[entry.buffer] = self._static.get(values[entry.position], strides, counted)
        if not fresh and not passed:
            if known is not None and known[0] is variant:
                return known[1], fresh
            bound = self.executor.bind(variant.sizes, static_externals)
            self._bound = (variant, bound, reports)
            return bound, fresh
        externals = {**static_externals, **passed, **fresh}
        return self.executor.bind(variant.sizes, externals), fresh

    def _residents(self, values: list[Any], variant: Variant) -> dict[str, GpuBuffer]:
        found: dict[str, GpuBuffer] = {}
        for recipe in variant.uploads:
            resident = getattr(values[recipe.position], _RESIDENT, None)
            if resident is None:
                continue
            if resident.device is self.device and resident.strides == recipe.strides:
                found[recipe.buffer] = resident.buffer
            else:
                self._materialize(values[recipe.position], resident)
        return found

    def _materialize(self, tensor: Tensor, resident: Resident) -> None:
        """Gives a kept tensor its contents on the CPU after all."""
        if resident.device.is_lost:
            raise resident.device.lost_error(
                "what the forward pass kept for its backward pass was on the GPU; run the forward "
                "pass again"
            )
        nbytes = static_buffers.span(tensor.shape, tensor.stride()) * tensor.element_size()
        resident.device.download_many([(resident.buffer, 0, nbytes, tensor.data_ptr())])
        delattr(tensor, _RESIDENT)

    def _upload(self, values: list[Any], variant: Variant, bound: BoundPlan) -> int:
        device, total = self.device, 0
        for recipe in variant.uploads:
            tensor = values[recipe.position]
            if variant.may_be_resident and hasattr(tensor, _RESIDENT):
                continue
            if tensor.stride() != recipe.strides:
                tensor = static_buffers.with_layout(tensor, recipe.strides)
            if recipe.nbytes:
                device.upload(bound.buffer(recipe.buffer), (tensor.data_ptr(), recipe.nbytes))
                total += recipe.nbytes
        return total

    # ---- out

    def _results(
        self,
        values: list[Any],
        variant: Variant,
        bound: BoundPlan,
        fresh: dict[str, GpuBuffer],
    ) -> tuple[list[Any], int]:
        """What the call returns, and the bytes that were downloaded for it."""
        wanted = [r for r in variant.tensors if r.nbytes and r.buffer not in fresh]
        changed = [r for r in variant.mutations if r.nbytes]
        ranges = [(bound.buffer(r.buffer), r.offset_nbytes, r.nbytes) for r in wanted]
        ranges += [(bound.buffer(r.buffer), r.offset_nbytes, r.nbytes) for r in changed]
        download = self.device.start_download(ranges) if ranges else None
        # The rest takes about as long as a small graph on the GPU.
        results = list(variant.constants)
        addresses: list[int] = []
        for recipe in variant.tensors:
            tensor = _empty_strided(recipe.sizes, recipe.strides, recipe.dtype)
            kept = fresh.get(recipe.buffer)
            if kept is not None:
                setattr(tensor, _RESIDENT, Resident(self.device, kept, recipe.strides))
            elif recipe.nbytes:
                addresses.append(tensor.data_ptr())
            for position, view in recipe.results:
                results[position] = tensor if view is None else tensor.as_strided(*view)
        for output, position in self.signature.forwarded:
            results[output] = values[position]
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
            self._write_back(values[mutation.position], mutation, target, bound, fresh)
        return results, sum([entry[2] for entry in ranges])

    def _write_back(
        self,
        tensor: Tensor,
        recipe: MutationRecipe,
        value: Tensor,
        bound: BoundPlan,
        fresh: dict[str, GpuBuffer],
    ) -> None:
        if value is not tensor:
            with torch.no_grad():
                tensor.copy_(value)
        elif not recipe.counted and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        kept = fresh.get(recipe.buffer) if recipe.keep else None
        if recipe.in_place and recipe.position in self.signature.static_inputs:
            own = bound.buffer(recipe.buffer)
            kept = own if isinstance(own, GpuBuffer) else None
        if kept is not None:
            # The GPU already has the value: the next call need not copy it back.
            self._static.replace(tensor, recipe.strides, kept)


def _staging(tensor: Tensor, recipe: MutationRecipe) -> Tensor:
    """What a changed argument is downloaded to: itself, or a tensor with the plan's layout."""
    if recipe.dense and tensor.stride() == recipe.strides:
        return tensor
    return torch.empty_strided(recipe.sizes, recipe.strides, dtype=recipe.dtype)


def _getter(positions: Sequence[int]) -> Any:
    """A function that takes the items at ``positions`` from a list, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[position] for position in positions])


def _has_saved_tensor_hooks() -> bool:
    """Whether hooks (checkpointing, offloading) will read the tensors that autograd saves."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is None or hooks(True) is not None
