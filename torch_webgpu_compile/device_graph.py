"""`DeviceGraph`: a compiled graph on ``webgpu`` tensors. Nothing passes through the host.

Arguments are bound where they are. Results get memory of their own, which the kernels write; an
argument that the graph changes gets new memory in the same way, which replaces its storage's when
it is all of that storage (`storages.replace`), and is copied into it otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import devices, storages
from .copying import write_part
from .counters import counters
from .device.random import draw_seeds
from .host_calls import HostCalls
from .plan.model import Plan
from .runtime.buffers import AnyBuffer, round_up
from .runtime.device import Device, GpuBuffer
from .runtime.executor import Executor
from .signature import MutationRecipe, Signature, TensorRecipe, UploadRecipe, Variant
from .sizes import evaluate


class DeviceGraph:
    """A function of a list of arguments, which it empties, to a list of results.

    It may be called from several threads. A failed call leaves the arguments and itself as they
    were.

    Args:
        plan: what to run.
        device: where.
        index: the device's number in PyTorch.
        signature: what the plan's inputs and outputs are to PyTorch; without static inputs.

    Raises (when called):
        DeviceError: the GPU refused; the subclass and the message say what.
    """

    _boxed_call = True

    def __init__(
        self,
        plan: Plan,
        device: Device,
        index: int,
        signature: Signature,
    ) -> None:
        self.plan = plan
        self.device = device
        self.index = index
        self.signature = signature
        self.executor = Executor(plan, device, HostCalls(plan))
        self._nbytes: dict[Variant, dict[str, int]] = {}

    def __call__(self, arguments: list[Any]) -> list[Any]:
        values = arguments[:]
        arguments.clear()
        return self.run(values)

    def run(self, values: list[Any]) -> list[Any]:
        """The call on a list of arguments that is not needed afterwards."""
        if self.signature.seeds:
            values.append(draw_seeds(self.index, self.signature.seeds))
        return self.run_seeded(values)

    def run_seeded(self, values: list[Any]) -> list[Any]:
        """The call on a list of arguments, the last of which are the seeds if there are any."""
        signature = self.signature
        variant = signature.variant(values)
        nbytes = self._nbytes.get(variant) or self._sizes(variant)
        externals: dict[str, AnyBuffer] = {}
        for recipe in variant.uploads:
            externals[recipe.buffer] = self._memory(values[recipe.position], recipe)
        copies: list[tuple[str, GpuBuffer]] = []
        made = [self._place(r.buffer, nbytes, externals, copies) for r in variant.tensors]
        changed = [self._place(r.buffer, nbytes, externals, copies) for r in variant.mutations]
        executor = self.executor
        with executor.lock:
            bound = executor.bind(variant.sizes, externals)
            bound.replay()
            for name, target in copies:
                self.device.copy(bound.buffer(name), 0, target, 0, round_up(nbytes[name], 4))
        counters.add_call(bound.dispatch_count, 0, 0)
        results: list[Any] = list(variant.constants)
        for made_recipe, buffer in zip(variant.tensors, made, strict=True):
            self._add_results(made_recipe, buffer, results)
        for mutation, buffer in zip(variant.mutations, changed, strict=True):
            self._assign(values[mutation.position], mutation, buffer)
        for output, position in signature.forwarded:
            results[output] = values[position]
        return results

    def _sizes(self, variant: Variant) -> dict[str, int]:
        """Bytes of the plan buffers that hold results."""
        names = {recipe.buffer for recipe in variant.tensors}
        names |= {recipe.buffer for recipe in variant.mutations}
        buffers = self.plan.buffers
        found = {name: evaluate(buffers[name].nbytes, variant.sizes) for name in names}
        self._nbytes[variant] = found
        return found

    # ---- in

    def _memory(self, tensor: Tensor, recipe: UploadRecipe) -> AnyBuffer:
        """The memory of an argument, laid out as the plan expects it."""
        if tensor.stride() != recipe.strides and not _same_layout(tensor, recipe.strides):
            tensor = _with_layout(tensor, recipe.strides)
        if tensor.device.type != devices.NAME:
            return self._uploaded(tensor, recipe)
        address = storages.data_ptr(tensor)
        buffer = storages.buffer_at(address)
        if buffer is None:
            return self.device.allocate(recipe.nbytes)
        offset = storages.offset_at(address) - recipe.offset_nbytes
        if offset == 0:
            return buffer
        if offset % storages.ALIGNMENT == 0 and offset > 0:
            return buffer.slice(offset)
        return storages.buffer_of(_with_layout(tensor, recipe.strides))

    def _uploaded(self, tensor: Tensor, recipe: UploadRecipe) -> GpuBuffer:
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        buffer = self.device.allocate(recipe.nbytes)
        if recipe.nbytes:
            self.device.upload(buffer, (tensor.data_ptr(), recipe.nbytes))
            counters.add(bytes_uploaded=recipe.nbytes)
        return buffer

    # ---- out

    def _place(
        self,
        name: str,
        nbytes: dict[str, int],
        externals: dict[str, AnyBuffer],
        copies: list[tuple[str, GpuBuffer]],
    ) -> GpuBuffer:
        """Memory for the value of a plan buffer that outlives the call.

        The kernels write it themselves, unless the value is needed twice or is also an input's.
        """
        buffer = self.device.allocate(nbytes[name])
        if name in externals or self.plan.buffers[name].role != "output":
            copies.append((name, buffer))
        else:
            externals[name] = buffer
        return buffer

    def _add_results(self, recipe: TensorRecipe, buffer: GpuBuffer, results: list[Any]) -> None:
        itemsize = recipe.dtype.itemsize
        offset, index = recipe.offset_nbytes // itemsize, self.index
        storage = storages.new_storage(recipe.offset_nbytes + recipe.nbytes, index, buffer)
        for position, view in recipe.results:
            sizes, strides, start = view or (recipe.sizes, recipe.strides, offset)
            results[position] = storages.new_tensor(
                storage, recipe.dtype, sizes, strides, start, index
            )

    def _assign(self, tensor: Tensor, recipe: MutationRecipe, buffer: GpuBuffer) -> None:
        """Gives an argument the value that it has after the call."""
        if not recipe.counted and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        if recipe.nbytes == 0:
            return
        on_device = tensor.device.type == devices.NAME
        if on_device and tensor.stride() == recipe.strides and storages.fills_storage(tensor):
            storages.replace(tensor, buffer)
            return
        storage = storages.new_storage(recipe.nbytes, self.index, buffer)
        value = storages.new_tensor(
            storage, recipe.dtype, recipe.sizes, recipe.strides, 0, self.index
        )
        write_part(tensor.detach(), value)


def _same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether ``tensor`` has these strides where they matter (sizes other than 1)."""
    sizes = tensor.shape
    return 0 in sizes or all(
        a == b or n == 1 for n, a, b in zip(sizes, tensor.stride(), strides, strict=True)
    )


def _with_layout(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of ``tensor`` with these strides, on the same device."""
    with torch.no_grad():
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
