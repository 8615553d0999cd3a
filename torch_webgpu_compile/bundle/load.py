"""`load_bundle`: runs what `export` has written, with NumPy arrays in and out, without PyTorch.

bundle = load_bundle("bundle/")
logits = bundle.run("forward", ids=ids)["logits"]
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..counters import counters
from ..errors import AdapterError, InputError
from ..options import from_environment
from ..plan.seeds import WORD, seed_bytes
from ..runtime.composed import GpuTensor
from ..runtime.device import Device, device_for
from .arrays import Array, array_of
from .manifest import Entry, Manifest, Variant
from .program import Program, in_rows
from .signature import Given, read_inputs
from .states import States
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
            name: Program(reader.path / entry.plan, name, entry, plans[name], device, self._seeds)
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
                made, changed = program(given, self.variant.state, self._states.buffers)
                self._states.buffers |= changed
                return self._results(program, given, made)
        except ArithmeticError as error:
            raise program.damaged(f"a size cannot be computed ({error})") from error

    def _seeds(self, count: int) -> bytes:
        rows = seed_bytes(self._seed, self._drawn, count)
        self._drawn += count
        return rows

    def _results(
        self, program: Program, given: Given, made: Sequence[GpuTensor]
    ) -> dict[str, Array]:
        """The results of a call.

        Args:
            made: what `Result.output` counts.
        """
        tensors = {}
        for name, result in program.entry.results.items():
            if result.state is not None:
                state, memory = self.variant.state[result.state], self._states.buffers[result.state]
                tensors[name] = in_rows(memory, state.dtype, state.sizes)
            elif result.output is not None:
                tensors[name] = made[result.output]
        data = {name: np.empty(tensor.span, np.uint8) for name, tensor in tensors.items()}
        downloaded = sum(tensor.span for tensor in tensors.values())
        if downloaded:
            self.device.download_many(
                [
                    (tensor.memory, tensor.offset_nbytes, tensor.span, data[name].ctypes.data)
                    for name, tensor in tensors.items()
                ]
            )
        elif program.checks_indices:
            self.device.synchronize()
        results = {}
        for name, result in program.entry.results.items():
            dtype = result.tensor.dtype
            if result.input is None:
                shape, strides = tensors[name].shape, tensors[name].strides
                results[name] = array_of(data[name], dtype, shape, strides)
            else:
                bits = given.bits[result.input]
                results[name] = array_of(bits.reshape(-1).view(np.uint8), dtype, bits.shape)
        counters.add_call(0, sum(array.nbytes for array in given.bits.values()), downloaded)
        return results

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
