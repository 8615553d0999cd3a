"""What a call of an entry is given: arrays that fit its inputs, and the sizes that they have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..symbolic.sizes import evaluate
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
        ValueError: an input is missing, unknown, or of another dtype or shape than the entry's.
    """
    for kind, names in (
        ("no input", values.keys() - entry.inputs.keys()),
        ("an input", entry.inputs.keys() - values.keys()),
    ):
        if names:
            wanted = ", ".join(_text(entry, each) for each in entry.inputs) or "no inputs"
            raise ValueError(f"{name} has {kind} {', '.join(sorted(names))}; it takes {wanted}")
    bits = {each: _bits(name, entry, each, values[each]) for each in entry.inputs}
    for each, array in bits.items():
        if array.ndim != len(entry.inputs[each].sizes):
            raise _wrong_shape(name, entry, each, array)
    sizes = {}
    for symbol, size in entry.sizes.items():
        sizes[symbol] = bits[size.input].shape[size.dim]
        if not size.low <= sizes[symbol] <= size.high:
            raise _wrong_shape(name, entry, size.input, bits[size.input])
    for each, array in bits.items():
        if array.shape != shape_at(entry.inputs[each], sizes):
            raise _wrong_shape(name, entry, each, array, sizes)
    return Given(sizes, bits)


def shape_at(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or result for these values of size symbols."""
    return tuple(evaluate(size, sizes) for size in tensor.sizes)


def _bits(name: str, entry: Entry, each: str, value: Any) -> Array:
    try:
        return element_bytes(value, entry.inputs[each].dtype)
    except ValueError as error:
        raise ValueError(f"{name}: the input {each}: {error}; {_wanted(entry, each)}") from error


def _wrong_shape(
    name: str, entry: Entry, each: str, array: Array, sizes: Mapping[str, int] | None = None
) -> ValueError:
    at = ""
    if sizes:
        values = ", ".join(f"{entry.sizes[s].name} = {value}" for s, value in sizes.items())
        at = f", here {shape_at(entry.inputs[each], sizes)} as {values}"
    cause = f"the input {each} has the shape {array.shape}"
    return ValueError(f"{name}: {cause}; {_wanted(entry, each)}{at}")


def _wanted(entry: Entry, each: str) -> str:
    text = _text(entry, each)
    ranges = [
        f"{size.name} in {size.low} … {size.high}"
        for symbol, size in entry.sizes.items()
        if any(re.search(rf"\b{re.escape(symbol)}\b", str(s)) for s in entry.inputs[each].sizes)
    ]
    return f"give {text}" + (f" with {', '.join(ranges)}" if ranges else "")


def _text(entry: Entry, each: str) -> str:
    """An input for people, e.g. ``ids: int64 (n, 16)``."""
    return f"{each}: {tensor_text(entry, entry.inputs[each])}"


def tensor_text(entry: Entry, tensor: Tensor) -> str:
    """A tensor for people, e.g. ``int64 (n, 16)``."""
    shape = ", ".join(map(str, tensor.sizes)) + "," * (len(tensor.sizes) == 1)
    for symbol, size in entry.sizes.items():
        shape = size.name.join(re.split(rf"\b{re.escape(symbol)}\b", shape))
    return f"{tensor.dtype.name} ({shape})"
