"""The JSON schema of manifests, made from the dataclasses: `docs/bundle.schema.json`."""

from __future__ import annotations

import re
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch_webgpu_compile.bundle.manifest import FORMAT, VERSION, Manifest
from torch_webgpu_compile.dtypes import BY_NAME, DType
from torch_webgpu_compile.plan.codec import LEFT_OUT
from torch_webgpu_compile.symbolic.sizes import Expr

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}

_INTEGER: Schema = {"type": "integer"}
_EXPR_REF: Schema = {"$ref": "#/$defs/Expr"}
_EXPR: Schema = {
    "description": "An integer, or c plus the sum of coefficient times the product of the atoms.",
    "anyOf": [
        _INTEGER,
        {
            "type": "object",
            "properties": {
                "c": _INTEGER,
                "t": {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [_INTEGER],
                        "items": {"$ref": "#/$defs/Atom"},
                    },
                },
            },
            "required": ["c", "t"],
            "additionalProperties": False,
        },
    ],
}
_ATOM: Schema = {
    "description": "A size symbol with its lower bound, or a quotient rounded down or a remainder.",
    "anyOf": [
        {"type": "array", "prefixItems": [{"type": "string"}, _INTEGER], "items": False},
        {
            "type": "array",
            "prefixItems": [{"enum": ["//", "%"]}, _EXPR_REF, _EXPR_REF],
            "items": False,
        },
    ],
}


def schema() -> Schema:
    """The JSON schema (draft 2020-12) of ``manifest.json``. `docs/bundle.schema.json` is this.

    It says which fields there are, and of what type; `docs/bundle.md` says what else has to hold.
    """
    definitions: dict[str, Schema] = {"Expr": _EXPR, "Atom": _ATOM}
    whole = _schema_of(Manifest, definitions)
    fixed = definitions["Manifest"]["properties"]
    fixed["format"] = {"const": FORMAT}
    fixed["version"] = {"const": VERSION}
    return {"$schema": _DIALECT, "title": "manifest.json", **whole, "$defs": definitions}


def _schema_of(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """The schema of an annotation; dataclasses are defined once.

    Raises NotImplementedError for an annotation that no manifest has.
    """
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is DType:
        return {"enum": list(BY_NAME)}
    if hint is Expr:
        return _EXPR_REF
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(part, definitions) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple and parts[1:] == (...,):
        return {"type": "array", "items": _schema_of(parts[0], definitions)}
    if origin is dict and parts[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(parts[1], definitions)}
    if isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # in its place, should it hold itself
            definitions[hint.__name__].update(_record(hint, definitions))
        return {"$ref": f"#/$defs/{hint.__name__}"}
    raise NotImplementedError(f"no JSON schema of {hint}")


def _record(kind: Any, definitions: dict[str, Schema]) -> Schema:
    hints, said = get_type_hints(kind), _descriptions(kind)
    names = [field.name for field in fields(kind)]
    return {
        "description": said[""],
        "type": "object",
        "properties": {
            name: _schema_of(hints[name], definitions)
            | ({"description": said[name]} if name in said else {})
            for name in names
        },
        "required": [field.name for field in fields(kind) if field.metadata != LEFT_OUT],
        "additionalProperties": False,
    }


@cache
def _descriptions(kind: Any) -> dict[str, str]:
    """Descriptions from a class's docstring: its own, under "", and those of its attributes."""
    summary, _, attributes = (kind.__doc__ or "").partition("Attributes:")
    found = {"": " ".join(summary.split())}
    for names, text in re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", attributes, re.M):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
