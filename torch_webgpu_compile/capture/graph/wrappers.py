"""What is around compiled graphs, in parts that can be stored with them.

A stored graph is made again from this module alone: it imports nothing of tracing or lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule

from ...errors import OutOfMemoryError
from .double_backward import differentiable_twice

BoxedFunction = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class PartsOf:
    """Gives the tensors that a subclass of tensors consists of."""

    names: tuple[str, ...]

    def __call__(self, value: Any) -> Iterable[Any]:
        return [getattr(value, name) for name in self.names]


Parts = tuple[Callable[[Any], Iterable[Any]] | None, ...]
"""For each argument what gives its tensors, None of one that has no parts."""


@dataclass(frozen=True)
class Surroundings:
    """What this package has around the function that comes of a graph of Dynamo's.

    Attributes:
        direct: the compiled graph, if Dynamo can call it without AOTAutograd's wrappers.
        parts: what gives its arguments, if those of Dynamo's graph have parts.
        again: Dynamo's graph, if second derivatives are to be had by running it again.
        dtypes: of arguments that calls may give in another dtype, by position.
    """

    direct: BoxedFunction | None
    parts: Parts | None
    again: GraphModule | None
    dtypes: Mapping[int, torch.dtype]

    def around(self, traced: Callable[..., Any] | None) -> Callable[..., Any]:
        """The function of the arguments of Dynamo's graph.

        Args:
            traced: what AOTAutograd made of it; not needed where there is a ``direct`` one.
        """
        if self.direct is not None:
            traced = unwrapped(self.direct, self.parts)
        assert traced is not None
        if self.again is not None:
            traced = differentiable_twice(traced, self.again)
        return converting(traced, self.dtypes)


def unwrapped(compiled: BoxedFunction, parts: Parts | None = None) -> Callable[..., Any]:
    """``compiled`` called by Dynamo itself, without AOTAutograd's wrappers around it.

    They cost about 8 µs a call, and up to a millisecond for a hundred quantized weights, and have
    nothing to do for a plain inference graph but to take these to ``parts``.
    """

    run = getattr(compiled, "run", compiled)

    def call(*arguments: Any) -> Sequence[Any]:
        given = list(arguments) if parts is None else taken_apart(arguments, parts)
        results: Sequence[Any] = run(given)
        if (calls := _calls.get()) is not None:
            calls.append((call, arguments, results))
        return results

    made: Any = call
    made.compiled, made.parts = compiled, parts
    return call


GraphCall = tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]]
"""What Dynamo called, with which arguments, and the results."""

_calls: ContextVar[list[GraphCall] | None] = ContextVar("calls", default=None)


@contextmanager
def noted_calls() -> Iterator[list[GraphCall]]:
    """The calls of compiled graphs in this context that Dynamo makes itself."""
    calls: list[GraphCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def repeat(call: Callable[..., Any], arguments: Sequence[Any], count: int) -> None:
    """Makes a call of `noted_calls` ``count`` times, each on what the one before has changed."""
    made: Any = call
    again = getattr(made.compiled, "repeat", None)
    if again is None:  # of CPU tensors
        for _ in range(count):
            call(*arguments)
    else:
        again(arguments if made.parts is None else taken_apart(arguments, made.parts), count)


def taken_apart(arguments: Sequence[Any], parts: Parts) -> list[Any]:
    """Arguments with the parts of those that have some in their places."""
    given: list[Any] = []
    for argument, get in zip(arguments, parts, strict=True):
        if get is None:
            given.append(argument)
        else:
            given += get(argument)
    return given


def parts_of(argument: Any) -> Callable[[Any], Iterable[Any]]:
    """What gives the parts of arguments like this one."""
    names, _ = argument.__tensor_flatten__()
    return attrgetter(*names) if len(names) > 1 else PartsOf(tuple(names))


def converting(
    compiled: Callable[..., Any], dtypes: Mapping[int, torch.dtype]
) -> Callable[..., Any]:
    """``compiled``, called with the arguments at these positions in these dtypes."""
    if not dtypes:
        return compiled

    def call(*arguments: Any) -> Any:
        given = list(arguments)
        for position, dtype in dtypes.items():
            given[position] = given[position].to(dtype)
        return compiled(*given)

    return call


def raising(text: str) -> BoxedFunction:
    """A graph that no GPU memory is large enough for."""
    return partial(_raise, text)


def _raise(text: str, arguments: list[Any]) -> list[Any]:
    arguments.clear()
    raise OutOfMemoryError(text)


def on_host(run: BoxedFunction, positions: Sequence[int]) -> BoxedFunction:
    """``run`` with the results at these positions on the host."""
    return partial(_run_to_host, run, tuple(positions))


def _run_to_host(
    run: BoxedFunction, positions: Sequence[int], arguments: list[Any]
) -> Sequence[Any]:
    results = list(run(arguments))
    for position in positions:
        if results[position] is not None:
            results[position] = results[position].cpu()
    return results


def filling(run: BoxedFunction, fill: Callable[[Iterable[Any]], None]) -> BoxedFunction:
    """``run``, whose arguments are given their contents before."""
    return partial(_fill_and_run, run, fill)


def _fill_and_run(
    run: BoxedFunction, fill: Callable[[Iterable[Any]], None], arguments: list[Any]
) -> Sequence[Any]:
    fill(arguments)
    return run(arguments)
