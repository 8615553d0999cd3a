"""The table of lowerings: one function per ATen overload, and the modules that fill it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from ..torch_private import OpOverload

LoweringFunction = Callable[..., Any]
F = TypeVar("F", bound=LoweringFunction)

LOWERINGS: dict[OpOverload, LoweringFunction] = {}
_of_users: set[OpOverload] = set()


def lowers(*overloads: OpOverload) -> Callable[[F], F]:
    """Registers a lowering; raises ValueError when an overload already has one.

    The function takes the `Builder` and the operator's arguments by the names of its schema, with
    tensors as `Value`s and sizes as ints or `Expr`s, and returns a `Value`, or a tuple with None
    for results that it does not give.
    """

    def register(function: F) -> F:
        for overload in overloads:
            if overload in LOWERINGS:
                raise ValueError(f"{overload} already has a lowering: {LOWERINGS[overload]}")
            LOWERINGS[overload] = function
        return function

    return register


def lowers_again(overload: OpOverload, function: LoweringFunction) -> None:
    """Registers a lowering, in place of that of an operator that had the same name before."""
    for other in [known for known in LOWERINGS if str(known) == str(overload)]:
        del LOWERINGS[other]
    LOWERINGS[overload] = function
    _of_users.add(overload)


def is_own(overload: OpOverload) -> bool:
    """Whether an operator has a lowering of this package's, not one that a program has defined."""
    return overload in LOWERINGS and not is_of_user(overload)


def is_of_user(overload: OpOverload) -> bool:
    """Whether a program has defined the operator, which may be another one in the next process."""
    return overload in _of_users


class NotLowered(Exception):
    """Raised by a lowering for arguments that it has no kernel for: the call goes to the host."""


FAMILIES = (
    *("views", "reinterpretation", "creation", "pointwise", "activations", "reductions"),
    *("normalization", "matmul", "lower_attention", "flash_attention", "convolution", "pooling"),
    *("factorizations", "joining", "indexing", "embedding_bags", "scans", "sorting"),
    *("resampling", "scatter_reductions", "special", "bessel", "fourier", "random"),
    *("samplers", "ctc", "collectives", "loops"),
)


def register_all() -> None:
    """Imports every op family; a second call does nothing."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
