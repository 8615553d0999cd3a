"""`ComposedEntry`: an entry of a bundle whose plan is composed of others, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import DType, int32
from ..errors import BundleError, DeviceError, InputError, WebGPUCompileError
from ..plan.model import HostStep, Plan
from ..runtime.buffers import GpuBuffer, round_up
from ..runtime.composed import ComposedExecutor, GpuTensor, Value
from ..runtime.device import Device
from ..symbolic.sizes import evaluate, storage_span
from .manifest import Argument, Entry, State
from .signature import Given


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


class ComposedEntry:
    """Runs an entry with a composed plan.

    Args:
        name, entry, plan: of the entry; the plan fits it.
        device: where.
        seeds: gives rows of seeds.
    """

    def __init__(
        self,
        name: str,
        entry: Entry,
        plan: Plan,
        device: Device,
        seeds: Callable[[int], bytes],
    ) -> None:
        self._name, self._entry, self._plan, self._device = name, entry, plan, device
        self._seeds, self._host = seeds, _Host(device, seeds)
        self._executor = ComposedExecutor(plan, device, self._host)
        self.checks_indices = any(
            buffer.role == "status" for part in plan.all_plans for buffer in part.buffers.values()
        )
        self._changed = frozenset(o.mutates for o in plan.outputs if o.mutates is not None)

    def __call__(
        self, given: Given, states: Mapping[str, State], buffers: Mapping[str, GpuBuffer]
    ) -> tuple[list[GpuTensor], dict[str, GpuBuffer]]:
        """Calls it. No state has changed when it raises an error.

        Args:
            states, buffers: of all states.

        Returns:
            The outputs that `Result.output` counts, and memory with the new values of states.

        Raises:
            InputError: a check of the function's failed, or a number has no value.
            BundleError: what came out is not what the manifest says.
        """
        arguments = [
            self._argument(k, argument, given, states, buffers)
            for k, argument in enumerate(self._entry.arguments)
        ]
        try:
            made = self._executor(arguments)
        except WebGPUCompileError:
            raise
        except (RuntimeError, ArithmeticError, ValueError) as error:
            raise InputError(f"{self._name}: {error}") from error
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            cause = f"a step cannot be run ({error!r:.200})"
            raise BundleError(self._entry.plan, cause) from error
        changed: dict[str, GpuBuffer] = {}
        returned: list[GpuTensor] = []
        for output, value in zip(self._plan.outputs, made, strict=True):
            if output.mutates is None:
                returned.append(value)  # type: ignore[arg-type]
                continue
            name = self._entry.arguments[output.mutates].state or ""
            changed[name] = self._in_rows(name, value, states[name])
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
            bits, dtype = given.bits[argument.input], self._entry.inputs[argument.input].dtype
            return _rows(self._device.upload_new(bits), dtype, bits.shape)
        if argument.state is None:
            count = argument.seeds or 0
            return _rows(self._device.upload_new(self._seeds(count)), int32, (count, 2))
        state, memory = states[argument.state], buffers[argument.state]
        if position in self._changed:  # in place, perhaps, before something fails
            copy = self._device.allocate(memory.nbytes)
            if memory.nbytes:
                self._device.copy(memory, 0, copy, 0, round_up(memory.nbytes, 4))
            memory = copy
        return _rows(memory, state.dtype, state.sizes)

    def _in_rows(self, name: str, value: Value, state: State) -> GpuBuffer:
        wanted = _rows(None, state.dtype, state.sizes)
        if not isinstance(value, GpuTensor) or (value.dtype, value.shape) != (
            state.dtype,
            state.sizes,
        ):
            raise self._damaged(f"the state {name}", value)
        if value.span and (value.strides != wanted.strides or value.offset):
            value = self._host.laid_out(value, value.dtype, wanted.strides)
        memory: GpuBuffer = value.memory
        return memory

    def _check(self, returned: Sequence[Any], given: Given) -> None:
        """That results are what the manifest says of them."""
        for name, result in self._entry.results.items():
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
                raise self._damaged(f"the result {name}", value)

    def _damaged(self, what: str, value: Value) -> BundleError:
        found = repr(value)
        if isinstance(value, GpuTensor):
            found = f"{value.dtype.name} {value.shape}"
        return BundleError(self._entry.plan, f"the call gives {found:.200} for {what}")


def _rows(memory: Any, dtype: DType, sizes: Sequence[int]) -> GpuTensor:
    """A tensor in rows without gaps."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return GpuTensor(memory, dtype, tuple(sizes), tuple(reversed(strides[: len(sizes)])))
