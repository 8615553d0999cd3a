"""Dataclasses to JSON and back: the annotations of their fields are the schema.

A dataclass is an object with all of its fields (but for `LEFT_OUT`), a tuple or set an array, an
enumeration's member or a dtype its name, bytes base64, a float that is not finite its `repr`. An
`Expr` is a number, or
``{"c": constant, "t": [[coefficient, atom, …], …]}``, where an atom is ``[symbol's name, lower
bound]``, ``["//", numerator, denominator]`` or ``["%", …]``. In a union, None, booleans, integers,
strings and tuples stand for themselves, anything else is ``{class name: value}``, except that a
type's union with None alone has no names. `Any` is what arguments of a `HostStep` may be.

What is read may be anything that is not nested too deeply for Python's stack. A decoder gives a
value of exactly the annotated type or raises ValueError, in time and memory that follow from the
length of what it reads. Nothing that is read names code.
"""

from __future__ import annotations

import math
import types
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from reprlib import repr as brief
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ..dtypes import BY_NAME, DType
from ..symbolic.nested import HostBuffer, HostView
from ..symbolic.sizes import INT64, Atom, Expr, FloorDiv, Symbol, as_expr, floordiv, mod, symbol
from .numbers import HostNumber

Json = Any

LEFT_OUT = {"left_out": True}
"""The metadata of a field that is left out where it is None, as readers of older versions want."""

_PLAIN = {type(None): type(None), bool: bool, int: int, str: str, tuple: list}
"""What stands for itself in a union, as JSON."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes and reads values of one type.

    Attributes:
        encode: a value as JSON. Raises ValueError for a value of another type.
        decode: the value. Raises ValueError for anything that `encode` does not make.
    """

    encode: Callable[[Any], Json]
    decode: Callable[[Json], Any]


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of an annotation. Raises NotImplementedError for one that it does not know."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if hint is Any:  # arguments hold arguments: their codec is made when it is needed
        return Codec(lambda value: _argument().encode(value), lambda data: _argument().decode(data))
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
    plain = None | bool | int | float | str | tuple[Any, ...]
    return codec_of(plain | Expr | HostNumber | HostBuffer | HostView)


def _refuse(expected: str, value: Any) -> NoReturn:
    raise ValueError(f"{expected} expected, not {brief(value)}")


def _exact(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else _refuse(kind.__name__, value)


def _integer(value: Any) -> int:
    return value if type(value) is int and value in INT64 else _refuse("64-bit integer", value)


_text, _float, _bytes = _exact(str), _exact(float), _exact(bytes)
_tuple, _list, _dict = _exact(tuple), _exact(list), _exact(dict)


def _decode_float(data: Json) -> float:
    return float(data) if data in ("inf", "-inf", "nan") else _float(data)  # JSON has none of these


def _choice(values: Mapping[str, Any]) -> Codec:
    """The codec of one of a few values, each of which has a name."""
    names = {value: name for name, value in values.items()}
    expected = f"one of {', '.join(values)}"
    return Codec(
        lambda value: names[value] if value in names else _refuse(expected, value),
        lambda data: values[data] if _text(data) in values else _refuse(expected, data),
    )


# Of plans that this package makes, the longest expressions have 30 terms.
_MAX_TERMS = 512
_MAX_DEGREE = 32
_DIVISIONS = {"//": floordiv, "%": mod}
_symbol = lru_cache(1 << 10)(symbol)


def _encode_expr(expr: Expr) -> Json:
    """An expression as JSON. Raises ValueError for one with an iteration symbol."""
    if not isinstance(expr, Expr):
        raise ValueError(f"a size expected, not {expr!r}")
    if expr.is_constant:
        return expr.constant
    return {"c": expr.constant, "t": [[c, *map(_encode_atom, atoms)] for atoms, c in expr.terms]}


def _encode_atom(atom: Atom) -> Json:
    if isinstance(atom, Symbol):
        if atom.extent is not None:
            raise ValueError(f"a plan cannot hold the iteration symbol {atom}")
        return [atom.name, atom.lower]
    sign = "//" if isinstance(atom, FloorDiv) else "%"
    return [sign, _encode_expr(atom.numerator), _encode_expr(atom.denominator)]


def _decode_expr(data: Json) -> Expr:
    """The expression that `_encode_expr` was given. Raises ValueError for anything else.

    The time that it takes is bounded by the length of ``data``, also where products of sums would
    grow without end.
    """
    if type(data) is int:
        return as_expr(_integer(data))
    if type(data) is not dict or data.keys() != {"c", "t"} or type(data["t"]) is not list:
        raise ValueError("this is no size")
    total = as_expr(_integer(data["c"]))
    for term in data["t"]:
        total = _bounded(total + _decode_term(term))
    return total


def _decode_term(data: Json) -> Expr:
    if type(data) is not list or not 0 < len(data) <= _MAX_DEGREE:
        raise ValueError("this is no term of a size, or one of too high a degree")
    product = as_expr(_integer(data[0]))
    for atom in data[1:]:
        product = _bounded(product * _decode_atom(atom))
    return product


def _decode_atom(data: Json) -> Expr:
    match data:
        case [str(name), lower]:
            return _symbol(name, _integer(lower))
        case ["//" | "%" as sign, over, under]:
            denominator = _decode_expr(under)
            if denominator.is_constant and denominator.constant <= 0:
                raise ValueError("a division by a number that is not positive")
            return _DIVISIONS[sign](_decode_expr(over), denominator)
    raise ValueError("this is no symbol and no division")


def _bounded(expr: Expr) -> Expr:
    """An expression that did not grow beyond what plans have: products of sums can."""
    if len(expr.terms) > _MAX_TERMS:
        raise ValueError("a size has too many terms")
    _integer(expr.constant)
    for _, coefficient in expr.terms:
        _integer(coefficient)
    return expr


_LEAVES = {
    int: Codec(_integer, _integer),
    str: Codec(_text, _text),
    bool: Codec(_exact(bool), _exact(bool)),
    type(None): Codec(_exact(type(None)), _exact(type(None))),
    float: Codec(lambda v: v if math.isfinite(_float(v)) else repr(v), _decode_float),
    bytes: Codec(
        lambda value: b64encode(_bytes(value)).decode(),
        lambda data: b64decode(_text(data), validate=True),
    ),
    DType: _choice(BY_NAME),
    Expr: Codec(_encode_expr, _decode_expr),
}


def _array(kind: type[tuple[Any, ...]] | type[frozenset[Any]], of: Codec) -> Codec:
    """Any number of values of one type."""
    check, order = _exact(kind), sorted if kind is frozenset else list
    return Codec(
        lambda value: order(map(of.encode, check(value))),
        lambda data: kind(map(of.decode, _list(data))),
    )


def _fixed(parts: Sequence[Codec]) -> Codec:
    """A tuple in which each place has its type."""

    def paired(values: Any) -> Iterator[tuple[Codec, Any]]:
        if len(values) != len(parts):
            _refuse(f"{len(parts)} values", values)
        return zip(parts, values, strict=True)

    return Codec(
        lambda value: [part.encode(item) for part, item in paired(_tuple(value))],
        lambda data: tuple([part.decode(item) for part, item in paired(_list(data))]),
    )


def _table(of: Codec) -> Codec:
    """Values by name."""
    return Codec(
        lambda value: {_text(name): of.encode(item) for name, item in value.items()},
        lambda data: {name: of.decode(item) for name, item in _dict(data).items()},
    )


def _union(parts: Sequence[Any]) -> Codec:
    codecs = {get_origin(part) or part: codec_of(part) for part in parts}
    if len(codecs) < len(parts) or Literal in codecs:
        raise NotImplementedError(f"no codec of a union of {parts}")
    plain = {_PLAIN[kind]: codec for kind, codec in codecs.items() if kind in _PLAIN}
    named = {kind.__name__: codec for kind, codec in codecs.items() if kind not in _PLAIN}
    if [*plain] == [type(None)] and len(named) == 1:
        (of,) = named.values()
        return _optional(of)
    expected = " or ".join(kind.__name__ for kind in codecs)

    def encode(value: Any) -> Json:
        kind = type(value)
        if kind not in codecs:
            _refuse(expected, value)
        data = codecs[kind].encode(value)
        return data if kind in _PLAIN else {kind.__name__: data}

    def decode(data: Json) -> Any:
        if type(data) is dict and len(data) == 1:
            ((name, inner),) = data.items()
            codec = named.get(name)
        else:
            inner, codec = data, plain.get(type(data))
        return _refuse(expected, data) if codec is None else codec.decode(inner)

    return Codec(encode, decode)


def _optional(of: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else of.encode(value),
        lambda data: None if data is None else of.decode(data),
    )


def _record(kind: Any) -> Codec:
    """A dataclass. One may hold others of its kind: its fields' codecs are made when needed."""
    check = _exact(kind)

    @cache
    def members() -> list[tuple[str, Codec]]:
        hints = get_type_hints(kind)
        return [(field.name, codec_of(hints[field.name])) for field in fields(kind)]

    optional = {field.name for field in fields(kind) if field.metadata == LEFT_OUT}

    def encode(value: Any) -> Json:
        check(value)
        made = {name: codec.encode(getattr(value, name)) for name, codec in members()}
        for name in optional:
            if made[name] is None:
                del made[name]
        return made

    def decode(data: Json) -> Any:
        if type(data) is not dict:
            _refuse(kind.__name__, data)
        values, name, unknown = [], "", set[str]()
        try:
            for name, codec in members():
                is_absent = name in optional and name not in data
                values.append(None if is_absent else codec.decode(data[name]))
        except KeyError:
            raise ValueError(f"{kind.__name__}.{name} is missing") from None
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        if len(data) > len(values) - len(optional):
            unknown = set(data) - {name for name, _ in members()}
        if unknown:
            raise ValueError(f"{kind.__name__} has no {brief(sorted(unknown))}")
        return kind(*values)

    return Codec(encode, decode)
