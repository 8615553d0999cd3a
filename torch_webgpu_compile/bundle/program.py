"""`Program`: an entry of a bundle on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import DType, int32
from ..errors import BundleError, DeviceError, InputError, WebGPUCompileError
from ..plan.model import HostStep, Plan
from ..runtime.buffers import GpuBuffer, round_up
from ..runtime.composed import ComposedExecutor, GpuTensor, PlainExecutor, Value
from ..runtime.device import Device
from ..symbolic.sizes import are_alike, evaluate, storage_span
from .manifest import Argument, Entry, State
from .signature import Given, tensor_text


class _Host:
    """See `runtime.composed.Host`: without PyTorch."""

    def __init__(self, device: Device, seeds: Callable[[int], bytes]) -> None:
        self._device = device
        self.seeds = seeds

    def calls_of(self, plan: Plan) -> None:
        """Bundles have no host steps."""

    def run(self, step: HostStep, values: Mapping[str, Any]) -> Sequence[Value]:
        """Bundles have no host steps."""
        raise DeviceError(f"{step.target} is no step of a bundle")

    def laid_out(self, tensor: GpuTensor, dtype: DType, strides: tuple[int, ...]) -> GpuTensor:
        """A copy in another layout, by way of host memory."""
        if tensor.dtype is not dtype:
            raise DeviceError(f"a plan takes {dtype.name}, and is given {tensor.dtype.name}")
        width = dtype.itemsize
        data = np.empty(tensor.span, np.uint8)
        if tensor.span:
            address = data.ctypes.data
            place = (tensor.memory, tensor.offset_nbytes, tensor.span, address)
            self._device.download_many([place])
        made = np.zeros(storage_span(tensor.shape, strides) * width, np.uint8)
        element = np.dtype((np.void, width))

        def seen(bits: Any, steps: tuple[int, ...]) -> Any:
            in_bytes = [width * step for step in steps]
            return np.lib.stride_tricks.as_strided(bits.view(element), tensor.shape, in_bytes)

        if made.size:
            seen(made, strides)[...] = seen(data, tensor.strides)
        return GpuTensor(self._device.upload_new(made), dtype, tensor.shape, strides)


class Program:
    """Runs an entry.

    Args:
        file: with the plan.
        name, entry, plan: of the entry; the plan fits it.
        device: where.
        seeds: gives rows of seeds.

    Attributes:
        entry: as given.
        checks_indices: whether kernels may report an index that is out of range.
        text: for people.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        entry: Entry,
        plan: Plan,
        device: Device,
        seeds: Callable[[int], bytes],
    ) -> None:
        self._file, self._name, self.entry, self._plan = file, name, entry, plan
        self._device, self._seeds, self._host = device, seeds, _Host(device, seeds)
        self._execute = (
            PlainExecutor(plan, device, self._host).run
            if plan.plans is None
            else ComposedExecutor(plan, device, self._host)
        )
        self.checks_indices = any(
            buffer.role == "status" for part in plan.all_plans for buffer in part.buffers.values()
        )
        # A composed plan may change these in place before something fails.
        changed = (output.mutates for output in plan.outputs if output.mutates is not None)
        self._kept = frozenset[int]() if plan.plans is None else frozenset(changed)
        inputs = ", ".join(f"{n}: {tensor_text(entry, t)}" for n, t in entry.inputs.items())
        results = (f"{n}: {tensor_text(entry, r.tensor)}" for n, r in entry.results.items())
        self.text = f"{name}({inputs}) -> {', '.join(results) or 'nothing'}"

    def __call__(
        self, given: Given, states: Mapping[str, State], buffers: Mapping[str, GpuBuffer]
    ) -> tuple[list[GpuTensor], dict[str, GpuBuffer]]:
        """Calls it. No state of a composed plan has changed when it raises an error.

        Args:
            states, buffers: of all states.

        Returns:
            The outputs that `Result.output` counts, and memory with the new values of states.

        Raises:
            InputError: a check of the function's failed, or a number has no value.
            ArithmeticError: a size of a plan that is not composed has no value.
            BundleError: what came out is not what the manifest says.
        """
        arguments = [
            self._argument(k, argument, given, states, buffers)
            for k, argument in enumerate(self.entry.arguments)
        ]
        try:
            made = self._execute(arguments)
        except WebGPUCompileError:
            raise
        except (RuntimeError, ArithmeticError, ValueError) as error:
            if self._plan.plans is None:
                raise
            raise InputError(f"{self._name}: {error}") from error
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            raise self.damaged(f"a step cannot be run ({error!r:.200})") from error
        changed: dict[str, GpuBuffer] = {}
        returned: list[GpuTensor] = []
        for output, value in zip(self._plan.outputs, made, strict=True):
            if output.mutates is None:
                returned.append(value)  # type: ignore[arg-type]
                continue
            name = self.entry.arguments[output.mutates].state or ""
            changed[name] = self._new_memory(name, value, states[name])
        self._check(returned, given)
        return returned, changed

    def _argument(
        self,
        position: int,
        argument: Argument,
        given: Given,
        states: Mapping[str, State],
        buffers: Mapping[str, GpuBuffer],
    ) -> GpuTensor:
        if argument.input is not None:
            bits, dtype = given.bits[argument.input], self.entry.inputs[argument.input].dtype
            return in_rows(self._device.upload_new(bits), dtype, bits.shape)
        if argument.state is None:
            count = argument.seeds or 0
            return in_rows(self._device.upload_new(self._seeds(count)), int32, (count, 2))
        state, memory = states[argument.state], buffers[argument.state]
        if position in self._kept:
            copy = self._device.allocate(memory.nbytes)
            if memory.nbytes:
                self._device.copy(memory, 0, copy, 0, round_up(memory.nbytes, 4))
            memory = copy
        return in_rows(memory, state.dtype, state.sizes)

    def _new_memory(self, name: str, value: Value, state: State) -> GpuBuffer:
        wanted = in_rows(None, state.dtype, state.sizes)
        if not isinstance(value, GpuTensor) or (value.dtype, value.shape) != (
            state.dtype,
            state.sizes,
        ):
            raise self._wrong(f"the state {name}", value)
        is_in_rows = are_alike(value.shape, value.strides, wanted.strides)
        if value.span and (value.offset or not is_in_rows):
            value = self._host.laid_out(value, value.dtype, wanted.strides)
        memory: GpuBuffer = value.memory
        return memory

    def _check(self, returned: Sequence[Any], given: Given) -> None:
        """That results are what the manifest says of them."""
        for name, result in self.entry.results.items():
            if result.output is None:
                continue
            value, sizes = returned[result.output], result.tensor.sizes
            fits = (
                isinstance(value, GpuTensor)
                and min((*value.shape, *value.strides, value.offset)) >= 0
                and value.offset_nbytes + value.span <= value.memory.nbytes
                and value.dtype is result.tensor.dtype
                and len(value.shape) == len(sizes)
                and all(
                    size is None or evaluate(size, given.sizes) == found
                    for size, found in zip(sizes, value.shape, strict=True)
                )
            )
            if not fits:
                raise self._wrong(f"the result {name}", value)

    def _wrong(self, what: str, value: Value) -> BundleError:
        found = repr(value)
        if isinstance(value, GpuTensor):
            layout = f"{value.shape} of strides {value.strides} from {value.offset} on"
            found = f"{value.dtype.name} {layout}"
        return self.damaged(f"the call gives {found:.200} for {what}")

    def damaged(self, cause: str) -> BundleError:
        """The error for a plan that makes no sense."""
        return BundleError(self._file, cause)


def in_rows(memory: Any, dtype: DType, sizes: Sequence[int]) -> GpuTensor:
    """A tensor in rows without gaps."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return GpuTensor(memory, dtype, tuple(sizes), tuple(reversed(strides[: len(sizes)])))
