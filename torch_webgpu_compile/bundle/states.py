"""`States`: the tensors of a bundle that stay on the GPU between calls."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..errors import InputError
from ..runtime.buffers import GpuBuffer
from ..runtime.device import Device
from .arrays import Array, array_of, element_bytes
from .files import TensorBytes, write_tensors
from .manifest import Kind, State
from .tensors import StoredTensor, read_header
from .verify import BundleReader

KINDS = get_args(Kind)


class States:
    """The state of one variant. Not safe to be used by several threads at once.

    Args:
        reader: reads the first values.
        states: by name.
        device: where they are.

    Attributes:
        buffers: the memory of each, by name.

    Raises:
        BundleError: a file is damaged.
        OutOfMemoryError: they do not fit.
    """

    def __init__(self, reader: BundleReader, states: Mapping[str, State], device: Device) -> None:
        self._states = states
        self._device = device
        self.buffers: dict[str, GpuBuffer] = {}
        stored: dict[str, list[str]] = defaultdict(list)
        for name, state in states.items():
            if state.file is None:
                zeros = np.zeros(state.nbytes, np.uint8)
                self.buffers[name] = device.upload_new(zeros)
            else:
                self.buffers[name] = device.allocate(state.nbytes)
                stored[state.file].append(name)
        for file, names in stored.items():
            self._fill(reader, file, names)

    def _fill(self, reader: BundleReader, file: str, names: Collection[str]) -> None:
        """Uploads the states that are in a file, as it is read."""
        start = 0
        for piece in reader.pieces(file):
            end = start + len(piece)
            for name in names:
                offset = self._states[name].offset
                first = max(start, offset)
                last = min(end, offset + self._states[name].nbytes)
                if first < last:
                    part = piece[first - start : last - start]
                    self._device.upload(self.buffers[name], part, first - offset)
            start = end

    def read(self, name: str) -> Array:
        """The value of a state. Raises InputError where there is none of this name."""
        state = self._known(name)
        return array_of(self._download([name])[name], state.dtype, state.sizes)

    def write(self, name: str, value: Any) -> None:
        """Gives a state a value. Raises InputError for one of another kind or shape."""
        state = self._known(name)
        try:
            bits = element_bytes(value, state.dtype)
        except ValueError as error:
            raise InputError(f"the state {name}: the value {error}") from error
        if bits.shape != state.sizes:
            raise InputError(
                f"the state {name} has the sizes {state.sizes}, the value {bits.shape}"
            )
        self._device.upload(self.buffers[name], bits)

    def save(self, path: Path, kinds: Iterable[str]) -> None:
        """Writes the states of these kinds to a safetensors file. Raises InputError, OSError."""
        wanted = set(kinds)
        if not wanted <= set(KINDS):
            raise InputError(f"kinds={sorted(wanted)} is not valid; use {', '.join(KINDS)}")
        names = [name for name, state in self._states.items() if state.kind in wanted]
        data = self._download(names)
        tensors = {
            name: TensorBytes(self._states[name].dtype.name, self._states[name].sizes, data[name])
            for name in names
        }
        temporary = path.with_name(f"{path.name}.tmp")
        write_tensors(temporary, tensors, {"format": "pt"})  # transformers reads no other ones
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Takes the states that a safetensors file has from it; all or, after an error, none.

        Raises:
            BundleError: it is no safetensors file.
            InputError: it has what is no state, or one of another kind or shape.
        """
        found = {name: self._stored(path, name, entry) for name, entry in read_header(path).items()}
        for name, bits in found.items():
            self._device.upload(self.buffers[name], bits)

    def _stored(self, path: Path, name: str, entry: StoredTensor) -> Array:
        state = self._states.get(name)
        if state is None or entry.dtype is None or entry.sizes != state.sizes:
            kind = "no state" if state is None else f"{state.dtype.name} {state.sizes}"
            raise InputError(
                f"{path}: its tensor {name} {entry.sizes} is {kind} in the bundle; load a file of "
                "this model"
            )
        data = np.fromfile(path, np.uint8, entry.nbytes, offset=entry.offset)
        if entry.dtype is state.dtype:
            return data
        try:
            return element_bytes(array_of(data, entry.dtype, entry.sizes), state.dtype)
        except ValueError as error:
            raise InputError(f"{path}: its tensor {name} {error}") from error

    def _known(self, name: str) -> State:
        found = self._states.get(name)
        if found is None:
            raise InputError(f"there is no state {name!r}; there are {', '.join(self._states)}")
        return found

    def _download(self, names: Collection[str]) -> dict[str, Array]:
        data = {name: np.empty(self._states[name].nbytes, np.uint8) for name in names}
        self._device.download_many(
            [(self.buffers[name], 0, bits.nbytes, bits.ctypes.data) for name, bits in data.items()]
        )
        return data
