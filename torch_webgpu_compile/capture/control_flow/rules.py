"""The rules of `inline`: what higher-order operators are in terms of others.

``torch.cond`` of two cheap branches is both of them and a choice, ``map`` one call on all rows, a
short ``scan`` its steps one after the other, one whose loop is elementwise a loop in a kernel, and
an associative scan a few of these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ...torch_ops.elementwise import NotElementwise
from ..tracing import Traced
from .scans import elementwise_scan

aten = torch.ops.aten
higher_order = torch.ops.higher_order

# Nodes of a branch that is computed although it may not be chosen, and of all steps of a scan.
_MOST_IN_BRANCH = 64
_MOST_IN_SCAN = 128

_EXPENSIVE = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.convolution,
        aten.convolution_backward,
        aten.sort,
        aten.topk,
    }
)


class NotInlined(Exception):
    """An operator has to stay; the message says why."""


Function = Callable[..., Any]
"""What is called with tensors and numbers: a graph, or Python code."""


class Functions(Protocol):
    """The functions that higher-order operators are given, in a trace that is going on."""

    def evaluate(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function; its results, flat.

        Raises:
            NotInlined: it has an operator that cannot be a part of the graph.
        """

    def traced(self, function: Function, arguments: Sequence[Any]) -> Traced:
        """A function's own graph, for arguments of these sizes and dtypes.

        Raises:
            NotInlined: as `evaluate`, or it cannot be traced by itself.
        """

    def nodes(self, function: Function, arguments: Sequence[Any]) -> Sequence[Node]:
        """The calls in a function."""


def _cond(
    functions: Functions,
    predicate: Any,
    when_true: Function,
    when_false: Function,
    operands: Sequence[Any],
) -> list[Any]:
    """Both branches, where that costs little, and a choice: no wait for the predicate."""
    if not isinstance(predicate, Tensor):
        raise NotInlined("the predicate is a number")
    for branch in (when_true, when_false):
        _require_cheap(functions.nodes(branch, operands))
    chosen = functions.evaluate(when_true, operands)
    other = functions.evaluate(when_false, operands)
    results = []
    for a, b in zip(chosen, other, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a is not b:
                raise NotInlined("a result is a number")
            results.append(a)
            continue
        results.append(torch.where(predicate.reshape(()), a, b))
    return results


def _require_cheap(nodes: Sequence[Node]) -> None:
    if len(nodes) > _MOST_IN_BRANCH:
        raise NotInlined("a branch is long")
    for node in nodes:
        target = node.target
        if not isinstance(target, OpOverload):
            if target is not operator.getitem and target not in RULES:
                raise NotInlined(f"{target} in a branch")
        elif (
            target.overloadpacket in _EXPENSIVE or torch.Tag.nondeterministic_seeded in target.tags
        ):
            raise NotInlined(f"{target} in a branch")


def _map(
    functions: Functions, function: Function, xs: Sequence[Any], arguments: Sequence[Any]
) -> list[Any]:
    """One call on all rows."""
    if not _is_positive(xs[0].shape[0]):
        raise NotInlined("there are no rows")
    places: list[bool] = []
    others: list[Any] = []

    def on_row(*rows: Any) -> tuple[Tensor, ...]:
        results = functions.evaluate(function, (*rows, *arguments))
        places[:] = [isinstance(result, Tensor) for result in results]
        others[:] = results
        return tuple(result for result in results if isinstance(result, Tensor))

    found = iter(_on_rows(on_row, xs))
    return [next(found) if is_tensor else others[k] for k, is_tensor in enumerate(places)]


def _on_rows(function: Callable[..., tuple[Tensor, ...]], xs: Sequence[Any]) -> tuple[Tensor, ...]:
    """One call of a function on all rows of tensors."""
    try:
        made: tuple[Tensor, ...] = torch.func.vmap(function, randomness="error")(*xs)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise NotInlined(str(error)) from error
    return made


def _is_positive(size: int | torch.SymInt) -> bool:
    return type(size) is not int or size > 0


def _scan(
    functions: Functions,
    step: Function,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
) -> list[Any]:
    """A few steps one after the other; a loop in a kernel where they are elementwise."""
    length: Any = xs[0].shape[0] if xs else 0
    if not _is_positive(length):
        raise NotInlined("it has no steps")
    first = (*init, *(x.select(0, 0) for x in xs), *arguments)
    nodes = len(functions.nodes(step, first))
    if type(length) is not int or length * max(nodes, 1) > _MOST_IN_SCAN:
        return _in_kernel(functions, step, init, xs, arguments, length)
    carry: list[Any] = list(init)
    rows: list[list[Any]] = []
    for k in range(length):
        made = functions.evaluate(step, (*carry, *(x.select(0, k) for x in xs), *arguments))
        carry = made[: len(init)]
        rows.append(made[len(init) :])
    stacked = [
        torch.stack(column) if isinstance(column[0], Tensor) else column[0]
        for column in map(list, zip(*rows, strict=True))
    ]
    return [*carry, *stacked]


def _in_kernel(
    functions: Functions,
    step: Function,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
    length: int | torch.SymInt,
) -> list[Any]:
    traced = functions.traced(step, (*init, *(x.select(0, 0) for x in xs), *arguments))
    return _looped(traced, init, xs, arguments, length)


def _looped(
    traced: Traced,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
    length: int | torch.SymInt,
) -> list[Any]:
    try:
        others = (*arguments, *traced.captured)
        return elementwise_scan(traced, init, xs, others, length, _on_rows)
    except NotElementwise as error:
        raise NotInlined(str(error)) from error


def _associative_scan(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """Loops in kernels where elements are combined elementwise, else rounds over all elements."""
    if not _is_positive(xs[0].shape[0]):
        raise NotInlined("it has no elements")
    try:
        if _is_divisible(xs, arguments):
            return _in_blocks(functions, combine, xs, arguments)
        return _one_by_one(functions, combine, xs, arguments)[1]
    except NotInlined:
        return _in_rounds(functions, combine, xs, arguments)


# Elements that a lane combines one after the other, and lanes that are enough for a GPU.
_BLOCK, _MANY_LANES = 64, 1 << 14


def _is_divisible(xs: Sequence[Tensor], arguments: Sequence[Any]) -> bool:
    """Whether blocks of elements are to be lanes of their own; lanes have one shape then."""
    length, *row = xs[0].shape
    known = all(type(size) is int for size in xs[0].shape)
    ranks = [a.dim() for a in arguments if isinstance(a, Tensor)]
    return (
        known
        and length > 2 * _BLOCK
        and math.prod(row) < _MANY_LANES
        and all(x.shape == xs[0].shape for x in xs)
        and max(ranks, default=0) <= len(row)
    )


def _in_blocks(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """Each block by itself; then what is before each block is combined with all of its elements."""
    length, *row = xs[0].shape
    blocks = -(-length // _BLOCK)
    more = (0, 0) * len(row) + (0, blocks * _BLOCK - length)  # nobody reads what becomes of them
    divided = [
        aten.constant_pad_nd.default(x, more).reshape(blocks, _BLOCK, *row).transpose(0, 1)
        for x in xs
    ]
    totals, within = _one_by_one(functions, combine, divided, arguments)
    before = _associative_scan(functions, combine, totals, arguments)
    combined = functions.evaluate(
        combine,
        (
            *(x[:-1].expand(_BLOCK, blocks - 1, *row) for x in before),
            *(x[:, 1:] for x in within),
            *arguments,
        ),
    )
    return [
        torch.cat([first[:, :1], others], 1).transpose(0, 1).reshape(-1, *row)[:length].clone()
        for first, others in zip(within, combined, strict=True)
    ]


def _one_by_one(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The last of the combined elements, and all of them, of a loop in a kernel."""
    first = [x.select(0, 0) for x in xs]
    traced = functions.traced(combine, (*first, *first, *arguments))
    results = tuple(traced.results)
    length = xs[0].shape[0]
    if type(length) is int and length == 1:
        return first, list(xs)
    rest = [x.narrow(0, 1, length - 1) for x in xs]
    made = _looped(replace(traced, results=results * 2), first, rest, arguments, length - 1)
    rows = zip(xs, made[len(xs) :], strict=True)
    return made[: len(xs)], [torch.cat([x.narrow(0, 0, 1), row]) for x, row in rows]


def _in_rounds(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """After k rounds over all elements each has 2 ** k before it.

    Source: W. D. Hillis, G. L. Steele, Data parallel algorithms, 1986.
    """
    length: Any = xs[0].shape[0]
    if type(length) is not int:
        raise NotInlined("nobody knows how many elements it has")
    values = list(xs)
    distance = 1
    while distance < length:
        before = [value.narrow(0, 0, length - distance) for value in values]
        here = [value.narrow(0, distance, length - distance) for value in values]
        combined = _map(functions, combine, [*before, *here], arguments)
        values = [
            torch.cat([value.narrow(0, 0, distance), new])
            for value, new in zip(values, combined, strict=True)
        ]
        distance *= 2
    return [value.clone() if value is x else value for value, x in zip(values, xs, strict=True)]


def _call(functions: Functions, function: Function, *arguments: Any, **_: Any) -> list[Any]:
    """An operator that only notes something of a function."""
    return functions.evaluate(function, arguments)


RULES: dict[Any, Callable[..., list[Any]]] = {
    higher_order.cond: _cond,
    higher_order.map_impl: _map,
    higher_order.scan: _scan,
    higher_order.associative_scan: _associative_scan,
}
for _name, _rule in {
    "invoke_quant": _call,
    "invoke_quant_packed": _call,
    "local_map_hop": _call,
    "strict_mode": _call,
}.items():
    if (_found := getattr(higher_order, _name, None)) is not None:
        RULES[_found] = _rule
