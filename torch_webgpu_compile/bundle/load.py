"""`load_bundle`: runs what `export` has written, with NumPy arrays in and out, without PyTorch.

bundle = load_bundle("bundle/")
logits = bundle.run("forward", ids=ids)["logits"]
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..counters import counters
from ..errors import AdapterError, BundleError, InputError
from ..options import from_environment
from ..plan.lru_cache import LruCache, max_resolved_sizes
from ..plan.model import Plan, view_at
from ..plan.seeds import WORD, seed_bytes
from ..runtime.buffers import GpuBuffer, round_up
from ..runtime.composed import GpuTensor
from ..runtime.device import Device, device_for
from ..runtime.executor import Executor
from ..runtime.launcher import Launcher
from ..symbolic.sizes import storage_span
from .arrays import Array, array_of
from .composed import ComposedEntry
from .manifest import Argument, Entry, Manifest, Result, Variant
from .signature import Given, read_inputs, tensor_text
from .states import States, nbytes_of
from .targets import lacking
from .verify import BundleReader, open_bundle


def load_bundle(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    seed: int | None = None,
    adapter: str | int | None = None,
    provider: str | None = None,
    trusted: bool = False,
) -> Bundle:
    """Loads a bundle to a GPU. PyTorch is not imported.

    Args:
        path: its folder.
        variant: the name of one; by default the first one that the GPU can run.
        seed: of the random numbers; by default a random one.
        adapter: a part of the GPU's name, or its number; by default as the environment says.
        provider: ``wgpu`` or ``wgpudawn``; by default as the environment says.
        trusted: the bundle is your own: kernels run without the checks that keep one that was made
            to do harm from reading memory of other programs.

    Raises:
        BundleError: a file is missing or damaged, or the files do not agree.
        InputError: there is no variant of this name.
        AdapterError: there is no GPU, or it lacks a feature or limit that each variant needs.
        OutOfMemoryError: the weights do not fit.
        ShaderError: a kernel does not compile.
    """
    reader = open_bundle(path)
    options = from_environment()
    options = replace(
        options,
        adapter=options.adapter if adapter is None else str(adapter),
        provider=options.provider if provider is None else provider,
        checked=options.checked or not trusted,
    )
    device = device_for(options)
    chosen = _choose(reader, variant, device)
    return Bundle(reader, chosen, device, secrets.randbits(64) if seed is None else seed)


def _choose(reader: BundleReader, wanted: str | None, device: Device) -> Variant:
    """The variant of this name, or the first that a device can run."""
    variants = reader.manifest.variants
    named = [each for each in variants if wanted in (None, each.name)]
    if not named:
        names = ", ".join(each.name for each in variants)
        raise InputError(f"{reader.path} has no variant {wanted!r}; there are {names}")
    missing = []
    for each in named:
        lacks = lacking(each.features, each.limits, device.target)
        if not lacks:
            return each
        missing.append(f"{each.name} needs {', '.join(lacks)}")
    raise AdapterError(
        f"{reader.path}: no variant of the bundle runs on {device.info.name}: "
        f"{'; '.join(missing)}; choose another GPU with adapter=, or export for another target"
    )


class Bundle:
    """A bundle on a GPU; `load_bundle` makes it. Safe to call from several threads, one at a time.

    Its entries share their state, which stays on the GPU. What NumPy does not have, bfloat16 and
    floats of 8 bits, are float32 arrays, of inputs, results and states alike.

    Attributes:
        manifest: of all variants.
        variant: the one that runs.
        entries: what can be called, by name.
        device: the GPU.
    """

    def __init__(self, reader: BundleReader, variant: Variant, device: Device, seed: int) -> None:
        plans = reader.plans(variant)
        self.manifest: Manifest = reader.manifest
        self.variant = variant
        self.entries: Mapping[str, Entry] = variant.entries
        self.device = device
        self._lock = threading.RLock()
        self.manual_seed(seed)
        self._programs = {
            name: _Program(reader.path / entry.plan, name, entry, plans[name], device, self._seeds)
            for name, entry in variant.entries.items()
        }
        self._states = States(reader, variant.state, device)
        device.add_holder(self)

    def run(
        self, entry: str, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> dict[str, Array]:
        """Calls an entry, and waits for its results.

        Args:
            entry: its name.
            inputs, named: its inputs, by name: arrays, or what NumPy makes arrays of. Their dtype
                may be another one of the same kind, if all values lie in the range of the input's.

        Returns:
            The results, by name.

        Raises:
            InputError: there is no such entry, an input is missing or does not fit, or a check that
                the function makes of numbers fails: no state has changed then.
            IndexOutOfRangeError: a tensor of indices had one that there is no element for. State
                that the call changes has been changed.
            DeviceError, OutOfMemoryError, DeviceLostError: the GPU failed.
            BundleError: sizes of the plan make no sense for these inputs.
        """
        program = self._programs.get(entry)
        if program is None:
            names = ", ".join(self.entries)
            raise InputError(f"the bundle has no entry {entry!r}; there are {names}")
        try:
            given = read_inputs(entry, program.entry, {**(inputs or {}), **named})
            with self._lock:
                return self._run(program, given)
        except ArithmeticError as error:
            raise program.damaged(f"a size cannot be computed ({error})") from error

    def _run(self, program: _Program, given: Given) -> dict[str, Array]:
        uploaded = sum(array.nbytes for array in given.bits.values())
        if program.composed is not None:
            made, changed = program.composed(given, self.variant.state, self._states.buffers)
            self._states.buffers |= changed
            parts = {
                name: _part_of(made[result.output])
                for name, result in program.entry.results.items()
                if result.output is not None
            }
            results, nbytes = self._results(program, given, parts)
            counters.add_call(0, uploaded, nbytes)
            return results
        launcher = program.launcher(given.sizes)
        memory: dict[str, GpuBuffer] = {
            name: self._memory(argument, given)
            for name, argument in zip(program.arguments, program.entry.arguments, strict=True)
        }
        for place in launcher.places:
            memory |= dict.fromkeys(place.names, self.device.allocate(place.nbytes))
        memory |= launcher.constants
        if program.shows_prepared:
            memory |= program.executor.prepared(memory)
        launcher([memory[name] for name in launcher.names])
        self._take_states(program, memory)
        made_parts = {
            name: self._part(program, result, given, memory)
            for name, result in program.entry.results.items()
            if result.output is not None
        }
        results, nbytes = self._results(program, given, made_parts)
        counters.add_call(launcher.dispatch_count, uploaded, nbytes)
        return results

    def _memory(self, argument: Argument, given: Given) -> GpuBuffer:
        if argument.input is not None:
            return self.device.upload_new(given.bits[argument.input])
        if argument.state is not None:
            return self._states.buffers[argument.state]
        return self.device.upload_new(self._seeds(argument.seeds or 0))

    def _seeds(self, count: int) -> bytes:
        rows = seed_bytes(self._seed, self._drawn, count)
        self._drawn += count
        return rows

    def _take_states(self, program: _Program, memory: Mapping[str, GpuBuffer]) -> None:
        """States that a call has computed in other memory than they had."""
        for name, made in program.moved.items():
            buffer = memory[made.buffer]
            if not made.is_own:
                source, nbytes = buffer, nbytes_of(self.variant.state[name])
                buffer = self.device.allocate(nbytes)
                self.device.copy(source, 0, buffer, 0, round_up(nbytes, 4))
            self._states.buffers[name] = buffer

    def _results(
        self, program: _Program, given: Given, made: Mapping[str, _Part]
    ) -> tuple[dict[str, Array], int]:
        """The results, and how many bytes have been downloaded for them.

        Args:
            made: those that are outputs.
        """
        parts = dict(made)
        for name, result in program.entry.results.items():
            if result.state is not None:
                state, buffer = self.variant.state[result.state], self._states.buffers[result.state]
                parts[name] = _Part(buffer, 0, nbytes_of(state), state.sizes)
        data = {name: np.empty(part.nbytes, np.uint8) for name, part in parts.items()}
        ranges = [
            (part.buffer, part.offset_nbytes, part.nbytes, data[name].ctypes.data)
            for name, part in parts.items()
        ]
        nbytes = sum(part.nbytes for part in parts.values())
        if nbytes:
            self.device.download_many(ranges)
        elif program.checks_indices:
            self.device.synchronize()
        results = {}
        for name, result in program.entry.results.items():
            dtype = result.tensor.dtype
            if result.input is None:
                results[name] = array_of(data[name], dtype, parts[name].sizes, parts[name].strides)
            else:
                bits = given.bits[result.input]
                results[name] = array_of(bits.reshape(-1).view(np.uint8), dtype, bits.shape)
        return results, nbytes

    def _part(
        self, program: _Program, result: Result, given: Given, memory: Mapping[str, GpuBuffer]
    ) -> _Part:
        output, itemsize = program.returned[result.output or 0], result.tensor.dtype.itemsize
        sizes, strides, offset = view_at(output, given.sizes)
        if min((*sizes, *strides, offset)) < 0:
            raise program.damaged(f"a result has the sizes {sizes} and strides {strides}")
        nbytes = storage_span(sizes, strides) * itemsize
        return _Part(memory[output.buffer or ""], offset * itemsize, nbytes, sizes, strides)

    def manual_seed(self, seed: int) -> None:
        """Starts the random numbers again from a seed, of which 64 bits count."""
        with self._lock:
            self._seed, self._drawn = seed & WORD, 0

    def state(self, name: str) -> Array:
        """The value of a state. Raises InputError where there is none of this name."""
        with self._lock:
            return self._states.read(name)

    def set_state(self, name: str, value: Any) -> None:
        """Gives a state a value, for all entries.

        Raises:
            InputError: there is no such state, or it has another shape or kind of dtype.
        """
        with self._lock:
            self._states.write(name, value)

    def save(
        self,
        path: str | os.PathLike[str],
        kinds: Iterable[str] = ("parameter", "buffer"),
    ) -> None:
        """Writes states to a safetensors file, which PyTorch can load: names are those of modules.

        Args:
            path: the file; it is replaced when all is written.
            kinds: of the states: ``parameter``, ``buffer``, ``optimizer``, ``tensor``.

        Raises:
            InputError: there is no such kind.
            OSError: the file cannot be written.
        """
        with self._lock:
            self._states.save(Path(path), kinds)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Takes the states that a safetensors file has from it; the others stay as they are.

        Raises:
            BundleError: it is no such file.
            InputError: it has a tensor that is no state of this shape; no state has changed then.
        """
        with self._lock:
            self._states.load(Path(path))

    def held(self) -> tuple[str, int]:
        """The states' memory."""
        return "states of bundles", sum(buffer.nbytes for buffer in self._states.buffers.values())

    def __repr__(self) -> str:
        entries = "".join(f"\n  {program.text}" for program in self._programs.values())
        name = f"{self.manifest.name}, {self.variant.name}"
        return f"Bundle({name}, on {self.device.info.name}){entries}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A result in GPU memory; without strides in rows without gaps."""

    buffer: GpuBuffer
    offset_nbytes: int
    nbytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None


def _part_of(tensor: GpuTensor) -> _Part:
    start, nbytes = tensor.offset_nbytes, tensor.span
    return _Part(tensor.memory, start, nbytes, tensor.shape, tensor.strides)


@dataclass(frozen=True, slots=True)
class _Moved:
    """The plan buffer with a state's new value; copied unless nobody else needs it (``is_own``)."""

    buffer: str
    is_own: bool


class _Program:
    """An entry on a device.

    Attributes:
        entry, executor: as given, and of its plan.
        composed: runs a plan that is composed of others; then there is nothing else but the text.
        checks_indices: whether kernels may report an index that is out of range.
        arguments: names of the plan buffers of the entry's arguments.
        returned: what `Result.output` counts.
        moved: states of which a call computes the new value elsewhere.
        shows_prepared: whether a result or a state is something that was prepared.
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
        self._file = file
        self.entry = entry
        inputs = ", ".join(f"{n}: {tensor_text(entry, t)}" for n, t in entry.inputs.items())
        results = (f"{n}: {tensor_text(entry, r.tensor)}" for n, r in entry.results.items())
        self.text = f"{name}({inputs}) -> {', '.join(results) or 'nothing'}"
        self.composed: ComposedEntry | None = None
        if plan.plans is not None:
            self.composed = ComposedEntry(name, entry, plan, device, seeds)
            self.checks_indices = self.composed.checks_indices
            return
        self.executor = Executor(plan, device)
        self.checks_indices = self.executor.checks_indices
        self._launchers = LruCache[tuple[int, ...], Launcher](
            max_resolved_sizes(plan.dispatch_count)
        )
        self.arguments = tuple(given.buffer or "" for given in plan.inputs)
        self.returned = tuple(output for output in plan.outputs if output.mutates is None)
        takers = Counter(output.buffer for output in plan.outputs if output.mutates is not None)
        self.moved: dict[str, _Moved] = {}
        for output in plan.outputs:
            if output.mutates is None or output.buffer == self.arguments[output.mutates]:
                continue
            buffer = output.buffer or ""
            is_own = plan.buffers[buffer].role == "output" and takers[buffer] == 1
            state = entry.arguments[output.mutates].state
            self.moved[state or ""] = _Moved(buffer, is_own)
        shown = {output.buffer for output in plan.outputs}
        self.shows_prepared = not shown.isdisjoint(plan.prepared)

    def launcher(self, sizes: Mapping[str, int]) -> Launcher:
        """Runs the plan at these sizes. Raises DeviceError where it cannot."""
        key = tuple(sizes.values())
        found = self._launchers.find(key)
        return found or self._launchers.keep(key, self.executor.launcher(sizes))

    def damaged(self, cause: str) -> BundleError:
        """The error for sizes that make no sense."""
        return BundleError(self._file, cause)
