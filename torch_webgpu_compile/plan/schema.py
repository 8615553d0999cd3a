"""Whether the fields of a dataclass hold what they are declared to.

The declarations of `plan.model` are the schema: nothing has to be written twice when it changes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..dtypes import DType
from ..sizes import Expr
from .model import HostBuffer, HostConstant

Check = Callable[[Any], bool]

_LIMIT = 1 << 63


def check(value: Any) -> None:
    """Raises TypeError, which names the field, unless all fields of a dataclass fit, nested ones
    too. Integers have to fit in 64 bits."""
    _check_fields(value)


def fits(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type; TypeError names a field of a dataclass that is not."""
    return _check_of(declared)(value)


def _check_fields(value: Any) -> bool:
    kind: Any = type(value)
    for name, fits in _fields_of(kind):
        if not fits(getattr(value, name)):
            raise TypeError(f"{type(value).__name__}.{name}")
    return True


@cache
def _fields_of(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(kind))


@cache
def _check_of(hint: Any) -> Check:
    """A function that says whether a value is of a declared type, or raises TypeError."""
    if hint is Any:
        return _is_argument
    if hint is int:
        return lambda value: type(value) is int and -_LIMIT <= value < _LIMIT
    if hint in (str, bool, bytes, float, type(None)):
        return lambda value: type(value) is hint
    if hint is Expr or hint is DType:
        return lambda value: isinstance(value, (Expr, DType)) and type(value) is hint
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: type(value) is hint and _check_fields(value)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is frozenset:
        of_item = _check_of(parts[0])
        return lambda value: type(value) is frozenset and all(map(of_item, value))
    if origin in (Union, types.UnionType):
        choices = [_check_of(part) for part in parts]
        return lambda value: any(fits(value) for fits in choices)
    if origin is tuple and len(parts) == 2 and parts[1] is ...:
        each = _check_of(parts[0])
        return lambda value: type(value) is tuple and all(map(each, value))
    if origin is tuple:
        checks = [_check_of(part) for part in parts]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(fits(item) for fits, item in zip(checks, value, strict=True))
        )
    if origin is dict:
        of_key, of_value = map(_check_of, parts)
        return lambda value: (
            type(value) is dict and all(map(of_key, value)) and all(map(of_value, value.values()))
        )
    raise NotImplementedError(f"no check of {hint}")


def _is_argument(value: Any) -> bool:
    """Whether a value may be an argument of a `HostStep`, or an output that is a constant."""
    if type(value) is tuple:
        return all(map(_is_argument, value))
    if type(value) in (HostBuffer, HostConstant):
        return _check_fields(value)
    if type(value) is int:
        return -_LIMIT <= value < _LIMIT
    return value is None or type(value) in (bool, float, str) or isinstance(value, Expr)
