"""The dtype table: how each element type is stored and computed.

A tensor's bytes on the GPU are its bytes in PyTorch. Types that WGSL cannot store are packed into
32-bit words (``packing`` elements a word); a kernel loads and stores whole words.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kind of arithmetic of an element type."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: PyTorch's name without ``torch.``.
        short: the name in IR text and kernel names.
        kind: the arithmetic it follows.
        itemsize: bytes per element, in PyTorch and in a GPU buffer.
        compute: the WGSL type of a value in a register. Narrow floats compute in f32 (PyTorch's
            opmath) and narrow integers in 32 bits. A float of 8 bits is rounded wherever a value
            becomes one, of 16 bits where it is stored.
        storage: the WGSL element type of a buffer; ``u32`` when packed.
        packing: elements per stored word (1: not packed).
        feature: the WebGPU feature without which the type has no kernels, or "".
    """

    name: str
    short: str
    kind: Kind
    itemsize: int
    compute: str
    storage: str
    packing: int = 1
    feature: str = ""

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return _of_name, (self.name,)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.kind is Kind.FLOAT

    @property
    def is_float8(self) -> bool:
        """Whether its elements are floats of 8 bits."""
        return self.kind is Kind.FLOAT and self.itemsize == 1

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers; bool is none."""
        return self.kind in (Kind.SIGNED, Kind.UNSIGNED)

    @property
    def lowest(self) -> bool | int | float:
        """Its smallest value; of floats, -inf."""
        if self.is_float:
            return float("-inf")
        return -(1 << (self.bits - 1)) if self.kind is Kind.SIGNED else 0

    @property
    def highest(self) -> bool | int | float:
        """Its largest value; of floats, inf."""
        if self.is_float:
            return float("inf")
        if self.kind is Kind.BOOL:
            return 1
        return (1 << (self.bits - (self.kind is Kind.SIGNED))) - 1

    @property
    def bits(self) -> int:
        """Bits of an element in memory; 8 for bool."""
        return self.itemsize * 8

    def __repr__(self) -> str:
        return self.short


float32 = DType("float32", "f32", Kind.FLOAT, 4, "f32", "f32")
float16 = DType("float16", "f16", Kind.FLOAT, 2, "f32", "f16")
float16_in_words = DType("float16", "f16", Kind.FLOAT, 2, "f32", "u32", packing=2)
"""Of graphs for GPUs without ``shader-f16``: the pass `store_float16_in_words` puts it there."""
bfloat16 = DType("bfloat16", "bf16", Kind.FLOAT, 2, "f32", "u32", packing=2)
float8_e4m3fn = DType("float8_e4m3fn", "f8e4m3fn", Kind.FLOAT, 1, "f32", "u32", packing=4)
float8_e5m2 = DType("float8_e5m2", "f8e5m2", Kind.FLOAT, 1, "f32", "u32", packing=4)
float8_e4m3fnuz = DType("float8_e4m3fnuz", "f8e4m3fnuz", Kind.FLOAT, 1, "f32", "u32", packing=4)
float8_e5m2fnuz = DType("float8_e5m2fnuz", "f8e5m2fnuz", Kind.FLOAT, 1, "f32", "u32", packing=4)
float64 = DType("float64", "f64", Kind.FLOAT, 8, "f64", "f64", feature="shader-f64")
int64 = DType("int64", "i64", Kind.SIGNED, 8, "i64", "i64")
int64_in_words = DType("int64", "i64", Kind.SIGNED, 8, "vec2<u32>", "vec2<u32>")
"""int64 in kernels for GPUs without ``shader-int64``, the low word first: see `Target.in_wgsl`."""
int32 = DType("int32", "i32", Kind.SIGNED, 4, "i32", "i32")
int16 = DType("int16", "i16", Kind.SIGNED, 2, "i32", "u32", packing=2)
int8 = DType("int8", "i8", Kind.SIGNED, 1, "i32", "u32", packing=4)
uint8 = DType("uint8", "u8", Kind.UNSIGNED, 1, "u32", "u32", packing=4)
uint32 = DType("uint32", "u32", Kind.UNSIGNED, 4, "u32", "u32")
bool_ = DType("bool", "bool", Kind.BOOL, 1, "bool", "u32", packing=4)

DTYPES: tuple[DType, ...] = (
    float32,
    float16,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e4m3fnuz,
    float8_e5m2fnuz,
    float64,
    int64,
    int32,
    int16,
    int8,
    uint8,
    uint32,
    bool_,
)
BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}


def _of_name(name: str) -> DType:
    return BY_NAME[name]  # there is one of each
