"""Arguments of an entry's call: arrays that fit its inputs, and the sizes that they have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..symbolic.sizes import Symbol, evaluate, symbols_of
from .arrays import Array, element_bytes
from .manifest import Entry, Tensor


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a call.

    Attributes:
        sizes: the values of the plan's size symbols.
        bits: the elements of each input as they are on the GPU, by name.
    """

    sizes: dict[str, int]
    bits: dict[str, Array]


def read_inputs(name: str, entry: Entry, values: Mapping[str, Any]) -> Given:
    """The inputs of a call of the entry of this name.

    Raises:
        InputError: an input is missing, unknown, or of another dtype or shape than the entry's.
    """
    for verb, names in (
        ("has no input", values.keys() - entry.inputs.keys()),
        ("needs the input", entry.inputs.keys() - values.keys()),
    ):
        if names:
            takes = ", ".join(f"{k}: {tensor_text(entry, t)}" for k, t in entry.inputs.items())
            raise InputError(f"{name} {verb} {min(names)!r}; it takes {takes or 'none'}")
    bits = {}
    for key, tensor in entry.inputs.items():
        try:
            bits[key] = element_bytes(values[key], tensor.dtype)
        except ValueError as error:
            wanted = tensor_text(entry, tensor)
            raise InputError(f"{name}: the input {key} {error} ({wanted})") from error
        if bits[key].ndim != len(tensor.sizes):
            raise _wrong_sizes(name, entry, key, bits[key])
    sizes = {}
    for symbol, size in entry.sizes.items():
        sizes[symbol] = bits[size.input].shape[size.dim]
        if not size.low <= sizes[symbol] <= size.high:
            raise _wrong_sizes(name, entry, size.input, bits[size.input])
    for key, array in bits.items():
        if array.shape != shape_at(entry.inputs[key], sizes):
            raise _wrong_sizes(name, entry, key, array, sizes)
    return Given(sizes, bits)


def shape_at(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input for these values of size symbols."""
    return tuple(evaluate(size, sizes) for size in tensor.known_sizes)


def _wrong_sizes(
    name: str, entry: Entry, key: str, array: Array, sizes: Mapping[str, int] | None = None
) -> InputError:
    """The error for an input's sizes; with those of all inputs where they do not fit together."""
    wanted = sizes_text(entry, entry.inputs[key])
    used = set[Symbol]().union(*map(symbols_of, entry.inputs[key].known_sizes))
    ranges = [
        f"{size.name} = {sizes[symbol]}" if sizes else f"{size.name} in {size.low} … {size.high}"
        for symbol, size in entry.sizes.items()
        if symbol in {each.name for each in used}
    ]
    at = f" with {', '.join(ranges)}" if ranges else ""
    return InputError(f"{name}: the input {key} has the sizes {array.shape}, not {wanted}{at}")


def tensor_text(entry: Entry, tensor: Tensor) -> str:
    """A tensor for people, e.g. ``int64 (n, 16)``."""
    return f"{tensor.dtype.name} {sizes_text(entry, tensor)}"


def sizes_text(entry: Entry, tensor: Tensor) -> str:
    """Its sizes, with the names that people have given; ``?`` for one that data decide."""
    text = ", ".join("?" if size is None else str(size) for size in tensor.sizes) + "," * (
        len(tensor.sizes) == 1
    )
    for symbol, size in entry.sizes.items():
        text = size.name.join(re.split(rf"\b{re.escape(symbol)}\b", text))
    return f"({text})"
