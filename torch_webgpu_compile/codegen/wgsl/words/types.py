"""WGSL types as text, what 64-bit integers become, and the types of results.

An ``i64`` or ``u64`` becomes ``vec2<u32>``, its low word first, and a vector of them an array. A
type that this package need not know is "".
"""

from __future__ import annotations

import re

WORDS = "vec2<u32>"
WIDE = ("i64", "u64")
_VECTOR = re.compile(r"vec([234])<(\w+)>$")
_ARRAY = re.compile(r"array<(.*?)(?:,([^<>,]+))?>$")
_OF_WIDE = re.compile(r"vec([234])<[iu]64>")


def is_wide(type: str) -> bool:
    """Whether it is a 64-bit integer, or a vector of them."""
    return element(type) in WIDE


def lanes(type: str) -> int:
    """Components of a vector, 1 of anything else."""
    found = _VECTOR.match(type)
    return int(found[1]) if found else 1


def element(type: str) -> str:
    """The type of a vector's components; of anything else, itself."""
    found = _VECTOR.match(type)
    return found[2] if found else type


def vector(type: str, count: int) -> str:
    """A vector of so many components; one component is no vector."""
    return f"vec{count}<{type}>" if count > 1 and type else type


def indexed(type: str) -> str:
    """The type of an element of an array or of a component of a vector."""
    found = _ARRAY.match(type)
    return found[1] if found else element(type) if _VECTOR.match(type) else ""


def in_words(type: str) -> str:
    """A type without 64-bit integers."""
    arrays = _OF_WIDE.sub(rf"array<{WORDS}, \1>", type)
    return re.sub(r"\b[iu]64\b", WORDS, arrays)


_TO_BOOL = frozenset({"any", "all"})
_OF_ELEMENT = frozenset({"dot", "length", "distance", "determinant"})
_FIXED = {
    "arrayLength": "u32",
    "pack2x16float": "u32",
    "pack4x8snorm": "u32",
    "unpack2x16float": "vec2<f32>",
    "dot4I8Packed": "i32",
    "dot4U8Packed": "u32",
}


def of_builtin(name: str, arguments: list[str]) -> str:
    """The type of a built-in function's result."""
    if name in _TO_BOOL:
        return "bool"
    if name in _FIXED:
        return _FIXED[name]
    if not arguments:
        return ""
    if name.startswith("atomic") or name == "workgroupUniformLoad":
        found = re.match(r"atomic<(\w+)>$", arguments[0])
        return found[1] if found else arguments[0]
    known = [a for a in arguments if a not in ("", "number")]
    first = known[0] if known else arguments[0]
    return element(first) if name in _OF_ELEMENT else first
