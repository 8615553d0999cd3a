"""`load_bundle`: runs a bundle with numpy in and out, without PyTorch and the compiler."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import deserialize

from ..dtypes import DType
from ..errors import AdapterError, InputError
from ..options import from_environment
from ..plan.model import Plan, view_at
from ..runtime.buffers import AnyBuffer, GpuBuffer
from ..runtime.device import Device, device_for
from ..runtime.executor import Executor
from ..symbolic.sizes import evaluate, storage_span
from .files import BundleFiles, TensorBytes, write_tensors
from .manifest import Entry, Kind, Manifest, State, Tensor, Variant
from .targets import lacking
from .verify import read_kernels, read_plan, verify_manifest

Array = npt.NDArray[Any]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def load_bundle(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    seed: int | None = None,
    adapter: str | None = None,
    provider: str | None = None,
) -> Bundle:
    """Loads what `export` wrote.

    Args:
        path: the folder.
        variant: by name; by default the first that the GPU can run.
        seed: of random numbers; by default another one each time.
        adapter, provider: which GPU, in the place of what the environment says (see `options`).

    Raises:
        BundleError: it is damaged, of another version, or not a bundle.
        AdapterError: there is no GPU, or none of the variants runs on it.
        OutOfMemoryError: its state does not fit.
    """
    files = BundleFiles(Path(os.fspath(path)))
    verify_manifest(files.manifest)
    options = from_environment()
    options = replace(
        options,
        adapter=options.adapter if adapter is None else adapter,
        provider=options.provider if provider is None else provider,
    )
    device = device_for(options)
    chosen = _choose(files.manifest, device, variant)
    return Bundle(files, chosen, device, seed)


def _choose(manifest: Manifest, device: Device, wanted: str | None) -> Variant:
    missing = []
    for variant in manifest.variants:
        if wanted is None or variant.name == wanted:
            lacks = lacking(variant.features, variant.limits, device.target)
            if not lacks:
                return variant
            missing.append(f"{variant.name} needs {', '.join(lacks)}")
    names = ", ".join(variant.name for variant in manifest.variants)
    why = "; ".join(missing) or f"there is no variant {wanted!r} among {names}"
    raise AdapterError(
        f"{device.info.name} can run no variant of the bundle: {why}; export for this GPU"
    )


@dataclass
class _Callable:
    """An entry that is ready to run."""

    entry: Entry
    plan: Plan
    executor: Executor


class Bundle:
    """A loaded bundle. It may be used from several threads; calls come one after the other.

    Attributes:
        manifest: what the bundle holds.
        variant: the variant that runs.
    """

    def __init__(
        self, files: BundleFiles, variant: Variant, device: Device, seed: int | None
    ) -> None:
        self.manifest, self.variant = files.manifest, variant
        self._device = device
        self._lock = threading.RLock()
        chosen = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._key = _mix(chosen * _GOLDEN + 1 & _WORD)
        self._drawn = 0
        modules = read_kernels(files, variant)
        plans = {name: read_plan(files, variant, name, modules) for name in variant.entries}
        self._state: dict[str, GpuBuffer] = {}
        for name, state in variant.state.items():
            buffer = self._state[name] = device.allocate(_nbytes(state))
            device.upload(buffer, _first_value(files, state))
        self._callables = {
            name: _Callable(variant.entries[name], plan, Executor(plan, device))
            for name, plan in plans.items()
        }

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What can be called, by name."""
        return self.variant.entries

    # ---- state

    def state(self, name: str) -> Array:
        """A state as it is now; bfloat16 as float32, which holds it exactly."""
        with self._lock:
            state, data = self._known(name), self._download(name)
        return _elements(data, state.dtype, state.sizes)

    def set_state(self, name: str, value: npt.ArrayLike) -> None:
        """Gives a state another value. Raises InputError for one that does not fit."""
        state = self._known(name)
        data = _converted(np.asarray(value), state.dtype, name)
        if data.shape != state.sizes:
            raise InputError(f"{name} has the sizes {state.sizes}, the value {data.shape}")
        with self._lock:
            self._device.upload(self._state[name], _bytes(data, state.dtype))

    def save(
        self, path: str | os.PathLike[str], kinds: Iterable[Kind] = ("parameter", "buffer")
    ) -> None:
        """Writes a safetensors file, as ``load_state_dict`` takes, with states of these kinds."""
        chosen = set(kinds)
        with self._lock:
            content = {
                name: TensorBytes(state.dtype.name, state.sizes, self._download(name))
                for name, state in self.variant.state.items()
                if state.kind in chosen
            }
        write_tensors(Path(os.fspath(path)), content)

    def _download(self, name: str) -> Array:
        data = np.empty(_nbytes(self._known(name)), np.uint8)
        if data.nbytes:
            self._device.download(self._state[name], data)
        return data

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Takes states from a safetensors file; others stay as they are.

        Raises:
            InputError: the file has something that is no state, or has another dtype or size.
                Nothing is changed then.
        """
        found: dict[str, Any] = dict(deserialize(Path(os.fspath(path)).read_bytes()))  # type: ignore[no-untyped-call]
        for name, tensor in found.items():
            state = self._known(name)
            same = tuple(tensor["shape"]) == state.sizes and len(tensor["data"]) == _nbytes(state)
            if not same or tensor["dtype"] != _SAFETENSORS.get(state.dtype.name):
                raise InputError(
                    f"{name} is {tensor['dtype']} {tuple(tensor['shape'])} in the file, and "
                    f"{state.dtype.name} {state.sizes} here; take the file of this model"
                )
        with self._lock:
            for name, tensor in found.items():
                self._device.upload(self._state[name], bytes(tensor["data"]))

    def _known(self, name: str) -> State:
        found = self.variant.state.get(name)
        if found is None:
            names = ", ".join(list(self.variant.state)[:20])
            raise InputError(f"there is no state {name!r}; there are {names}")
        return found

    # ---- calls

    def run(
        self, entry: str, inputs: Mapping[str, npt.ArrayLike] | None = None, **named: npt.ArrayLike
    ) -> dict[str, Array]:
        """Calls an entry.

        Args:
            entry: its name.
            inputs, named: by name, one way or the other.

        Returns:
            Results by name; bfloat16 as float32, which holds it exactly.

        Raises:
            InputError: an input is missing, or has a dtype or sizes that the entry does not take.
            IndexOutOfRangeError: an input, or what was computed from it, is an index of nothing.
            DeviceError: the GPU refused.
        """
        called = self._callables.get(entry)
        if called is None:
            raise InputError(f"there is no entry {entry!r}; there are {', '.join(self.entries)}")
        arrays = _checked(entry, called.entry, {**(inputs or {}), **named})
        sizes = _sizes(entry, called.entry, arrays)
        with self._lock:
            return self._call(called, arrays, sizes)

    def _call(
        self, called: _Callable, arrays: Mapping[str, Array], sizes: Mapping[str, int]
    ) -> dict[str, Array]:
        plan, executor, device = called.plan, called.executor, self._device
        given: dict[str, AnyBuffer] = {}
        states: dict[int, str] = {}
        for k, (place, argument) in enumerate(
            zip(plan.inputs, called.entry.arguments, strict=True)
        ):
            if argument.state is not None:
                states[k] = argument.state
            if place.buffer is None or place.buffer not in plan.buffers:
                continue
            if argument.state is not None:
                given[place.buffer] = self._state[argument.state]
                continue
            if argument.input is not None:
                spec = called.entry.inputs[argument.input]
                data = _bytes(arrays[argument.input], spec.dtype)
            else:
                data = np.frombuffer(self._seeds(argument.seeds or 0), np.uint8)
            given[place.buffer] = device.upload_new(data)
        given |= executor.prepared(given)
        bound = executor.bind(dict(sizes), given)
        bound.replay()
        returned = []
        for output in plan.outputs:
            if output.mutates is None:
                returned.append(output)
            elif plan.buffers[output.buffer or ""].role != "input":
                name = states[output.mutates]
                nbytes = -(-_nbytes(self.variant.state[name]) // 4) * 4
                device.copy(bound.buffer(output.buffer or ""), 0, self._state[name], 0, nbytes)
        results = {}
        for name, result in called.entry.results.items():
            if result.input is not None:
                results[name] = arrays[result.input].copy()
            elif result.state is not None:
                results[name] = self.state(result.state)
            else:
                output = returned[result.output or 0]
                view = view_at(output, sizes)
                buffer = bound.buffer(output.buffer or "")
                results[name] = self._read(buffer, result.tensor, *view)
        return results

    def _read(
        self,
        buffer: AnyBuffer,
        tensor: Tensor,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
    ) -> Array:
        itemsize = tensor.dtype.itemsize
        span = storage_span(sizes, strides)
        start = offset * itemsize // 4 * 4
        skipped = offset * itemsize - start
        data = np.empty(skipped + span * itemsize, np.uint8)
        if span:
            self._device.download(buffer, data, start)
        flat = _elements(data[skipped:], tensor.dtype, (span,))
        steps = [stride * flat.itemsize for stride in strides]
        if not span:
            return np.zeros(sizes, flat.dtype)
        return np.lib.stride_tricks.as_strided(flat, sizes, steps).copy()

    def _seeds(self, count: int) -> bytes:
        """As ``docs/bundle.md`` says."""
        rows = range(self._drawn, self._drawn + count)
        self._drawn += count
        return b"".join(
            _mix(self._key + row * _GOLDEN & _WORD).to_bytes(8, "little") for row in rows
        )


def _mix(value: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood 2014): a hash of 64 bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


# ---- elements

_SAFETENSORS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint32": "U32",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def _nbytes(state: State) -> int:
    return prod(state.sizes) * state.dtype.itemsize


def _first_value(files: BundleFiles, state: State) -> Array:
    data = np.zeros(_nbytes(state), np.uint8)
    if state.file is not None:
        end = state.offset + data.nbytes
        for start, chunk in files.chunks(state.file, state.offset, end):
            low, high = max(start, state.offset), min(start + len(chunk), end)
            part = np.frombuffer(chunk, np.uint8)[low - start : high - start]
            data[low - state.offset : high - state.offset] = part
    return data


def _numpy(dtype: DType) -> np.dtype[Any]:
    """The dtype that arrays of these elements have."""
    if dtype.name == "bfloat16":
        return np.dtype(np.float32)
    if dtype.is_float8:
        return np.dtype(np.uint8)  # their bytes
    return np.dtype(dtype.name)


def _elements(data: Array, dtype: DType, sizes: tuple[int, ...]) -> Array:
    if dtype.name == "bfloat16":
        halves = data.view(np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(sizes)
    return data.copy().view(_numpy(dtype)).reshape(sizes)


def _bytes(array: Array, dtype: DType) -> Array:
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    if dtype.name == "bfloat16":
        bits = flat.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        flat = np.where(np.isnan(flat), 0x7FC0, rounded).astype(np.uint16)
    return flat.view(np.uint8)


def _converted(array: Array, dtype: DType, what: str) -> Array:
    """Numbers as elements of a dtype, where all of them are some."""
    wanted = _numpy(dtype)
    if array.dtype == wanted:
        return array
    if array.dtype.kind in "biu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        inside = not array.size or (array.min() >= limits.min and array.max() <= limits.max)
    elif wanted.kind == "b":
        inside = array.dtype.kind in "iu" and bool(np.isin(array, (0, 1)).all())
    else:
        inside = wanted.kind == "f" and array.dtype.kind in "biuf"
    if not inside:
        raise InputError(f"{what} is {array.dtype}, and has to be {dtype.name}; convert it")
    return array.astype(wanted)


def _checked(name: str, entry: Entry, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    unknown = [key for key in inputs if key not in entry.inputs]
    if unknown:
        raise InputError(f"{name} has no input {unknown[0]!r}; it takes {', '.join(entry.inputs)}")
    found = {}
    for key, spec in entry.inputs.items():
        if key not in inputs:
            shape = "×".join(map(str, spec.sizes)) or "one element"
            raise InputError(f"{name} needs the input {key!r}: {spec.dtype.name}, {shape}")
        found[key] = _converted(np.asarray(inputs[key]), spec.dtype, f"{name}: {key}")
    return found


def _sizes(name: str, entry: Entry, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The values of size symbols. Raises InputError where inputs' sizes do not fit."""
    for key, spec in entry.inputs.items():
        if arrays[key].ndim != len(spec.sizes):
            raise InputError(
                f"{name}: {key} has {arrays[key].ndim} dimensions, it has to have {len(spec.sizes)}"
            )
    sizes = {}
    for symbol, size in entry.sizes.items():
        value = sizes[symbol] = arrays[size.input].shape[size.dim]
        if not size.low <= value <= size.high:
            raise InputError(
                f"{name}: {size.name} is {value} (dimension {size.dim} of {size.input}), it has to "
                f"be {size.low} to {size.high}"
            )
    for key, spec in entry.inputs.items():
        wanted = tuple(evaluate(size, sizes) for size in spec.sizes)
        if arrays[key].shape != wanted:
            raise InputError(f"{name}: {key} has the sizes {arrays[key].shape}, not {wanted}")
    return sizes
