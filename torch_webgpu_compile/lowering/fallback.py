"""Operators that run on the host: encoding of their calls.

A `HostCall`'s arguments are as `symbolic.nested` says. A dtype, layout or memory format is a string
such as ``torch.float32``; a device is ``cpu``. A string has an apostrophe before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedOp
from ..symbolic.nested import HostBuffer, HostView
from ..symbolic.sizes import Expr, symbols_of
from ..torch_private import OpOverload
from .builder import Builder
from .value import Value


def host_call(
    builder: Builder,
    overload: OpOverload,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> tuple[Value | None, ...]:
    """Lowers a call to a `HostCall`; raises UnsupportedOp when the host cannot run it either."""
    check_sizes(builder, str(overload))
    encoded = tuple(encode(builder, value) for value in arguments)
    named = tuple((name, encode(builder, value)) for name, value in keywords.items())
    return builder.host(str(overload), encoded, named)


def check_sizes(builder: Builder, op: str) -> None:
    """Raises UnsupportedOp for a result of the current operator whose size depends on data."""
    for size in (size for result in builder.results if result for size in result.sizes):
        if any(symbol.name not in builder.reader.known for symbol in symbols_of(size)):
            raise UnsupportedOp(
                op,
                f"its result's size {size} depends on data",
                "move the call out of the compiled function",
                builder.origin.source,
            )


def encode(builder: Builder, value: Any) -> Any:
    """An argument as `HostCall` has it. Raises UnsupportedOp for one that cannot be passed."""
    match value:
        case Value(number=True):
            raise UnsupportedOp(
                builder.origin.op,
                "a symbolic float cannot be passed to the host",
                "compile with dynamic=False",
                builder.origin.source,
            )
        case Value():
            return HostBuffer(builder.materialize(value).name)
        case torch.device():
            return "cpu"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case tuple() | list():
            return tuple(encode(builder, item) for item in value)
        case str():
            return f"'{value}"
        case None | bool() | int() | float() | Expr() | HostBuffer() | HostView():
            return value
        case _:
            raise UnsupportedOp(
                builder.origin.op,
                f"an argument of type {type(value).__name__} cannot be passed to the host",
                "move the call out of the compiled function",
                builder.origin.source,
            )
