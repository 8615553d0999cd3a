"""NumPy arrays as the bytes of tensors, and back.

What NumPy does not have, bfloat16 and floats of 8 bits, are float32 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..ir import float8
from ..ir.numeric import from_bits, numpy_dtype, round_bfloat16

Array = npt.NDArray[Any]


def element_bytes(value: Any, dtype: DType) -> Array:
    """An array's elements in rows without gaps, as they are on the GPU: bits of its shape.

    Args:
        value: an array, a number, or nested lists of them.
        dtype: of the result. It has to be of the same kind, or one that holds the kind's numbers
            (NumPy's ``same_kind``): integers become floats, but floats no integers.

    Raises:
        ValueError: ``value`` is no array of such a kind, or a number in it lies outside of what the
            dtype has. The message goes on where a name of the array stops.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # of any class: it is whatever the object's __array__ raises
        raise ValueError(f"is of {type(value).__name__}, which is no array ({error})") from error
    wanted = numpy_dtype(dtype)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(wanted)  # an empty list has no dtype of its own
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ValueError(f"is {array.dtype}, and has to be {dtype.name}; convert it")
    if dtype.is_integer and array.dtype.kind in "iu" and array.size:
        low, high = int(array.min()), int(array.max())
        if low < dtype.lowest or high > dtype.highest:
            raise ValueError(
                f"has values {low} … {high}, which are not all in the range of {dtype.name}"
            )
    with np.errstate(over="ignore"):
        made = np.array(array, wanted, order="C")
    if dtype.is_float and (np.isfinite(array) & ~(abs(made) <= _largest(dtype))).any():
        raise ValueError(f"has values that are too large for {dtype.name}")
    if dtype is dtypes.bfloat16:
        return (round_bfloat16(made).view(np.uint32) >> 16).astype(np.uint16)
    return float8.encode(made, dtype) if dtype.is_float8 else made


def array_of(
    data: Array, dtype: DType, sizes: Sequence[int], strides: Sequence[int] | None = None
) -> Array:
    """A new array of elements on the GPU.

    Args:
        data: their bytes, uint8, from the first element to the last one.
        strides: in elements; by default those of rows without gaps.
    """
    elements = data.view(_bits_dtype(dtype))
    if strides is None:
        return np.asarray(from_bits(elements.reshape(tuple(sizes)), dtype))
    steps = tuple(stride * dtype.itemsize for stride in strides)
    view = np.lib.stride_tricks.as_strided(elements, tuple(sizes), steps, writeable=False)
    return np.asarray(from_bits(np.array(view, order="C"), dtype))


def _bits_dtype(dtype: DType) -> np.dtype[Any]:
    """The dtype of an element's bits where NumPy does not have its dtype; else the dtype."""
    if dtype is dtypes.bfloat16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint8) if dtype.is_float8 else numpy_dtype(dtype)


@cache
def _largest(dtype: DType) -> float:
    """The largest finite number of a float dtype."""
    bits = _bits_dtype(dtype)
    if bits.kind == "f":
        return float(np.finfo(bits).max)
    numbers = from_bits(np.arange(1 << dtype.bits).astype(bits), dtype)
    return float(numbers[np.isfinite(numbers)].max())
