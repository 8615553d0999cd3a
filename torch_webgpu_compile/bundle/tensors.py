"""Headers of safetensors files: names, dtypes, sizes and places of tensors.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length n of the header,
little-endian; n bytes of JSON; the tensors' bytes. The header has, by name, ``dtype``, ``shape``
and ``data_offsets``, from the end of the header to the first byte and to the one after the last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .. import dtypes
from ..dtypes import DType
from ..errors import BundleError

_MAX_HEADER = 100_000_000  # as the library has it
_MAX_RANK = 64

DTYPES: dict[str, DType] = {
    "BOOL": dtypes.bool_,
    "U8": dtypes.uint8,
    "I8": dtypes.int8,
    "I16": dtypes.int16,
    "I32": dtypes.int32,
    "U32": dtypes.uint32,
    "I64": dtypes.int64,
    "F16": dtypes.float16,
    "BF16": dtypes.bfloat16,
    "F32": dtypes.float32,
    "F64": dtypes.float64,
    "F8_E4M3": dtypes.float8_e4m3fn,
    "F8_E5M2": dtypes.float8_e5m2,
    "F8_E4M3FNUZ": dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": dtypes.float8_e5m2fnuz,
}
"""The names of dtypes in the format, of those that this package has."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: None for one that this package does not have.
        sizes: its shape.
        offset: of its first byte in the file.
        nbytes: how many there are.
    """

    dtype: DType | None
    sizes: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        BundleError: the file cannot be read or is none, or a tensor lies outside of it or has
            another length than its shape says.
    """
    file_nbytes, text = _header(path)
    start = 8 + len(text)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {name: _stored(entry, start, file_nbytes - start) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(path, f"its safetensors header is damaged ({error})") from error


def data_start(path: Path) -> int:
    """Bytes from the start of a safetensors file to the tensors. Raises BundleError."""
    return 8 + len(_header(path)[1])


def _header(path: Path) -> tuple[int, bytes]:
    """(length of the file, text of its header)."""
    try:
        file_nbytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_nbytes < 8 or length > min(_MAX_HEADER, file_nbytes - 8):
                raise BundleError(path, "this is no safetensors file, or it is cut off")
            return file_nbytes, file.read(length)
    except OSError as error:
        raise BundleError(path, f"it cannot be read ({error.strerror})") from error


def _stored(entry: Any, start: int, data_nbytes: int) -> StoredTensor:
    dtype, sizes = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    first, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*sizes, first, end)):
        raise ValueError("a size or an offset is not a whole number")
    if not first <= end <= data_nbytes or len(sizes) > _MAX_RANK:
        raise ValueError("a tensor lies outside of the file")
    if dtype is not None and prod(sizes) * dtype.itemsize != end - first:
        raise ValueError(f"a tensor {list(sizes)} of {dtype.name} has {end - first} bytes")
    return StoredTensor(dtype, sizes, start + first, end - first)
