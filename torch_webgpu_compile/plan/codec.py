"""Dataclasses to JSON and back: the annotations of their fields are the schema.

A dataclass is an object with all of its fields, a tuple or set an array, an enumeration's member
or a dtype its name, `Expr` as in `size_json`, bytes base64, a float that is no number its `repr`.
In a union, None, booleans, integers, strings and tuples stand for themselves, anything else is
``{class name: value}``, except that a type's union with None alone has no names. `Any` is what
arguments of a `HostStep` may be.

What is read may be anything. A decoder gives a value of exactly the annotated type or raises
ValueError, in time and memory that follow from the length of what it reads. Nothing that is read
names code.
"""

from __future__ import annotations

import base64
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from reprlib import repr as brief
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ..dtypes import BY_NAME, DType
from ..sizes import INT64, Expr
from .model import HostBuffer, HostConstant
from .size_json import Json, Symbols, decode_expr, encode_expr

# Of dataclasses and tuples in each other: 32 `HostNumber`s, of which plans that this package makes
# have 7.
_MAX_DEPTH = 72
_TOO_DEEP = "it is nested too deeply"
_PLAIN = {type(None): type(None), bool: bool, int: int, str: str, tuple: list}


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes and reads values of one type.

    Attributes:
        encode: a value as JSON; its size symbols are added to the table that is given. Raises
            ValueError for a value of another type.
        decode: the value, from JSON, the symbols by name and the depth (0: not inside anything).
            Raises ValueError for anything that `encode` does not make.
    """

    encode: Callable[[Any, Symbols], Json]
    decode: Callable[[Json, Symbols, int], Any]


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of an annotation. Raises NotImplementedError for one that it does not know."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if hint is Any:  # recursive: its codec is made when it is needed
        return Codec(
            lambda value, symbols: _argument().encode(value, symbols),
            lambda data, symbols, depth: _argument().decode(data, symbols, depth),
        )
    if hint in _LEAVES:
        return _LEAVES[hint]
    if origin in (Union, types.UnionType):
        return _union(parts)
    if origin is Literal and all(type(part) is str for part in parts):
        return _choice({part: part for part in parts})
    if origin is frozenset or (origin is tuple and parts[1:] == (...,)):
        return _array(origin, codec_of(parts[0]))
    if origin is tuple:
        return _fixed([codec_of(part) for part in parts])
    if origin in (dict, Mapping) and parts[0] is str:
        return _table(codec_of(parts[1]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice(hint.__members__)
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    raise NotImplementedError(f"no codec of {hint}")


@cache
def _argument() -> Codec:
    """Of what `HostStep.arguments` may be."""
    return codec_of(
        None | bool | int | float | str | Expr | HostBuffer | HostConstant | tuple[Any, ...]
    )


def _refuse(expected: str, value: Any) -> NoReturn:
    raise ValueError(f"{expected} expected, not {brief(value)}")


def _leaf(kind: type) -> Codec:
    def checked(value: Any, *_: Any) -> Any:
        return value if type(value) is kind else _refuse(kind.__name__, value)

    return Codec(checked, checked)


def _integer(value: Any, *_: Any) -> int:
    return value if type(value) is int and value in INT64 else _refuse("64-bit integer", value)


def _encode_float(value: Any, _: Symbols) -> Json:
    if type(value) is not float:
        _refuse("float", value)
    return value if math.isfinite(value) else repr(value)  # JSON has no infinities and NaN


def _decode_float(data: Json, *_: Any) -> float:
    if type(data) is float:
        return data
    return float(data) if data in ("inf", "-inf", "nan") else _refuse("float", data)


def _encode_bytes(value: Any, _: Symbols) -> Json:
    if type(value) is not bytes:
        _refuse("bytes", value)
    return base64.b64encode(value).decode("ascii")


def _decode_bytes(data: Json, *_: Any) -> bytes:
    return base64.b64decode(data, validate=True) if type(data) is str else _refuse("bytes", data)


def _choice(values: Mapping[str, Any]) -> Codec:
    """One of a few values, each of which has a name."""
    names = {value: name for name, value in values.items()}

    def encode(value: Any, _: Symbols) -> Json:
        return names[value] if value in names else _refuse(f"one of {', '.join(values)}", value)

    def decode(data: Json, *_: Any) -> Any:
        if type(data) is not str or data not in values:
            _refuse(f"one of {', '.join(values)}", data)
        return values[data]

    return Codec(encode, decode)


_LEAVES = {
    int: Codec(_integer, _integer),
    str: _leaf(str),
    bool: _leaf(bool),
    type(None): _leaf(type(None)),
    float: Codec(_encode_float, _decode_float),
    bytes: Codec(_encode_bytes, _decode_bytes),
    DType: _choice(BY_NAME),
    Expr: Codec(encode_expr, lambda data, symbols, _: decode_expr(data, symbols)),
}


def _list(data: Json, depth: int) -> list[Json]:
    if type(data) is not list:
        _refuse("list", data)
    if depth > _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    return data


def _array(kind: type[tuple[Any, ...]] | type[frozenset[Any]], of: Codec) -> Codec:
    """Any number of values of one type."""
    encode_item, decode_item = of.encode, of.decode

    def encode(value: Any, symbols: Symbols) -> Json:
        if type(value) is not kind:
            _refuse(kind.__name__, value)
        items = [encode_item(item, symbols) for item in value]
        return sorted(items) if kind is frozenset else items

    def decode(data: Json, symbols: Symbols, depth: int) -> Any:
        return kind([decode_item(item, symbols, depth + 1) for item in _list(data, depth)])

    return Codec(encode, decode)


def _fixed(parts: list[Codec]) -> Codec:
    """A tuple in which each place has its type."""

    def encode(value: Any, symbols: Symbols) -> Json:
        if type(value) is not tuple or len(value) != len(parts):
            _refuse(f"{len(parts)} values", value)
        return [part.encode(item, symbols) for part, item in zip(parts, value, strict=True)]

    def decode(data: Json, symbols: Symbols, depth: int) -> Any:
        if len(_list(data, depth)) != len(parts):
            _refuse(f"{len(parts)} values", data)
        pairs = zip(parts, data, strict=True)
        return tuple([part.decode(item, symbols, depth + 1) for part, item in pairs])

    return Codec(encode, decode)


def _table(of: Codec) -> Codec:
    """Values by name."""

    def encode(value: Any, symbols: Symbols) -> Json:
        return {_LEAVES[str].encode(k, symbols): of.encode(v, symbols) for k, v in value.items()}

    def decode(data: Json, symbols: Symbols, depth: int) -> Any:
        if type(data) is not dict:
            _refuse("object", data)
        return {name: of.decode(item, symbols, depth + 1) for name, item in data.items()}

    return Codec(encode, decode)


def _union(parts: tuple[Any, ...]) -> Codec:
    codecs = {get_origin(part) or part: codec_of(part) for part in parts}
    if len(codecs) < len(parts) or Literal in codecs:
        raise NotImplementedError(f"no codec of a union of {parts}")
    none, *others = sorted(codecs, key=lambda kind: kind is not type(None))
    if none is type(None) and len(others) == 1:
        return _optional(codecs[others[0]])
    plain = {_PLAIN[kind]: codec for kind, codec in codecs.items() if kind in _PLAIN}
    named = {kind.__name__: codec for kind, codec in codecs.items() if kind not in _PLAIN}
    expected = " or ".join(kind.__name__ for kind in codecs)

    def encode(value: Any, symbols: Symbols) -> Json:
        kind = type(value)
        if kind not in codecs:
            _refuse(expected, value)
        data = codecs[kind].encode(value, symbols)
        return data if kind in _PLAIN else {kind.__name__: data}

    def decode(data: Json, symbols: Symbols, depth: int) -> Any:
        if type(data) is dict and len(data) == 1:
            ((name, inner),) = data.items()
            codec = named.get(name)
        else:
            inner, codec = data, plain.get(type(data))
        return _refuse(expected, data) if codec is None else codec.decode(inner, symbols, depth)

    return Codec(encode, decode)


def _optional(of: Codec) -> Codec:
    encode, decode = of.encode, of.decode
    return Codec(
        lambda value, symbols: None if value is None else encode(value, symbols),
        lambda data, symbols, depth: None if data is None else decode(data, symbols, depth),
    )


def _record(kind: Any) -> Codec:
    """A dataclass. One may hold others of its kind: its fields' codecs are made when needed."""

    @cache
    def members() -> list[tuple[str, Codec]]:
        hints = get_type_hints(kind)
        return [(field.name, codec_of(hints[field.name])) for field in fields(kind)]

    def encode(value: Any, symbols: Symbols) -> Json:
        if type(value) is not kind:
            _refuse(kind.__name__, value)
        return {name: codec.encode(getattr(value, name), symbols) for name, codec in members()}

    def decode(data: Json, symbols: Symbols, depth: int) -> Any:
        if type(data) is not dict:
            _refuse(kind.__name__, data)
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        values, name = [], ""
        try:
            for name, codec in members():
                values.append(codec.decode(data[name], symbols, depth + 1))
        except KeyError:
            raise ValueError(f"{kind.__name__}.{name} is missing") from None
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        if len(data) > len(values):
            unknown = set(data) - {name for name, _ in members()}
            raise ValueError(f"{kind.__name__} has no {brief(sorted(unknown))}")
        return kind(*values)

    return Codec(encode, decode)
