"""`Plan` to JSON and back. The format is versioned and holds data only: reading it runs no code.

It is the plan's fields as `codec` writes them, and ``format``.

What is read may be anything. The reader gives a `Plan` whose every field has the declared type or
raises PlanFormatError; whether the fields make sense together is for `verify`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain

from ..errors import WebGPUCompileError
from .codec import Json, codec_of
from .model import VERSION, Plan

_FORMAT = "webgpu-plan"
_MAX_DEPTH = 100  # of lists and objects; those of GPT-2 with dynamic sizes have 21


class PlanFormatError(WebGPUCompileError, ValueError):
    """Data that is not a plan, or one of another version."""


def dumps(plan: Plan) -> bytes:
    """A plan as text. Raises ValueError for one with a value that the format has no form for."""
    return json.dumps(to_json(plan), allow_nan=False).encode()


def loads(text: bytes | str) -> Plan:
    """The plan that `dumps` was given. Raises PlanFormatError for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"this is no plan ({error}); compile it again") from error
    return from_json(data)


def to_json(plan: Plan) -> dict[str, Json]:
    """A plan as nested lists and dictionaries of JSON's types."""
    return {"format": _FORMAT, **codec_of(Plan).encode(plan)}


def from_json(data: Mapping[str, Json]) -> Plan:
    """The plan that `to_json` was given. Raises PlanFormatError for anything else."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanFormatError("this is not a plan; make one with serialize.to_json")
    if data.get("version") != VERSION:
        raise PlanFormatError(
            f"the plan has version {data.get('version')}, this package reads {VERSION}; "
            "compile it again"
        )
    try:
        _check_depth(data)
        body = {name: value for name, value in data.items() if name != "format"}
        plan: Plan = codec_of(Plan).decode(body)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise PlanFormatError(f"the plan is damaged ({error}); compile it again") from error
    return plan


def _check_depth(data: Json) -> None:
    """Raises ValueError for JSON that is nested more deeply than plans are."""
    level = [data]
    for _ in range(_MAX_DEPTH):
        lists = (item for item in level if type(item) is list)
        tables = (item.values() for item in level if type(item) is dict)
        level = [*chain.from_iterable(lists), *chain.from_iterable(tables)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


__all__ = ["PlanFormatError", "dumps", "from_json", "loads", "to_json"]
