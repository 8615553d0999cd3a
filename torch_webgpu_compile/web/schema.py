"""`schema`: the JSON schema of a manifest, made of the dataclasses that define it."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..dtypes import BY_NAME, DType
from ..symbolic.sizes import Expr
from .manifest import FORMAT, VERSION, Manifest


def schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of ``manifest.json``."""
    found: dict[str, Any] = {}
    top = _of(Manifest, found)
    manifest = found["Manifest"]["properties"]
    manifest["format"] = {"const": FORMAT}
    manifest["version"] = {"const": VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A bundle's manifest.json",
        **top,
        "$defs": found,
    }


def _of(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The schema of an annotated type; those of dataclasses go to ``found``."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if hint in _LEAVES:
        return _LEAVES[hint]
    if hint is Expr:
        found["Expr"] = _EXPR
        return {"$ref": "#/$defs/Expr"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(part, found) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple and parts[1:] == (...,):
        return {"type": "array", "items": _of(parts[0], found)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(parts[1], found)}
    if is_dataclass(hint) and isinstance(hint, type):
        name = hint.__name__
        if name not in found:
            found[name] = {}
            hints = get_type_hints(hint)
            names = [entry.name for entry in fields(hint)]
            found[name] = {
                "type": "object",
                "properties": {field: _of(hints[field], found) for field in names},
                "required": names,
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
    raise NotImplementedError(f"no schema of {hint}")


_LEAVES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    DType: {"enum": list(BY_NAME)},
}

_REF = {"$ref": "#/$defs/Expr"}
_ATOM = {
    "anyOf": [
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        {"type": "array", "prefixItems": [{"enum": ["//", "%"]}, _REF, _REF], "items": False},
    ]
}
_EXPR: dict[str, Any] = {
    "anyOf": [
        {"type": "integer"},
        {
            "type": "object",
            "properties": {
                "c": {"type": "integer"},
                "t": {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [{"type": "integer"}],
                        "items": _ATOM,
                    },
                },
            },
            "required": ["c", "t"],
            "additionalProperties": False,
        },
    ]
}
