"""The rules of `inline`: what higher-order operators are in terms of others.

``torch.cond`` of two cheap branches is both of them and a choice, ``map`` one call on all rows, a
short ``scan`` its steps one after the other, one whose loop is elementwise a loop in a kernel, and
an associative scan a few of these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from ...errors import UnsupportedOp
from ...torch_private import FakeTensorMode, OpOverload
from ..tracing import Rules, Traced, clean_dispatch, trace
from .scans import ElementwiseScan, NotInlined, on_rows

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


def traced_alone(
    function: Function,
    arguments: Sequence[Any],
    mode: FakeTensorMode,
    rules: Rules,
    lift: Callable[[Tensor], Tensor],
) -> Traced:
    """`Functions.traced` of a function whose results are a tuple; the others as for `trace`.

    Raises:
        NotInlined: it cannot be traced by itself.
    """
    with clean_dispatch(symbolic=mode.shape_env is not None):
        with mode:
            inputs = [
                torch.empty(a.shape, dtype=a.dtype, device=a.device) if isinstance(a, Tensor) else a
                for a in arguments
            ]
        try:
            return trace(function, inputs, mode, rules, mutates=False, lift=lift)
        except (RuntimeError, TypeError, UnsupportedOp) as error:
            raise NotInlined(str(error)) from error


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

    found = iter(on_rows(on_row, xs))
    return [next(found) if is_tensor else others[k] for k, is_tensor in enumerate(places)]


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
    if (
        type(length) is not int
        or length * max(len(functions.nodes(step, first)), 1) > _MOST_IN_SCAN
    ):
        return ElementwiseScan(functions.traced(step, first), init, xs, arguments).run()
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


def _associative_scan(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """Loops in kernels where elements are combined elementwise, else rounds over all elements."""
    if not _is_positive(xs[0].shape[0]):
        raise NotInlined("it has no elements")
    try:
        return _combined(functions, combine, xs, arguments)
    except NotInlined:
        return _in_rounds(functions, combine, xs, arguments)


# Elements that a lane combines one after the other, and lanes that are enough for a GPU.
_BLOCK, _MANY_LANES = 64, 1 << 13


def _combined(
    functions: Functions, combine: Function, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """In one loop; or in blocks, of which first the totals are computed, and scanned.

    Then each block starts with what is before it. Source: S. Chatterjee, G. Blelloch, M. Zagha,
    Scan primitives for vector computers, 1990.
    """
    length, *row = xs[0].shape
    if not _has_blocks(xs, arguments):
        first = [x.select(0, 0) for x in xs]
        start = _is_zero(length, xs[0]).reshape(-1, *(1 for _ in row))
        return _one_by_one(functions, combine, xs, first, start, arguments)[1]
    blocks = -(-length // _BLOCK)
    more = (0, 0) * len(row) + (0, blocks * _BLOCK - length)  # nobody reads what becomes of them
    divided = [
        aten.constant_pad_nd.default(x, more).reshape(blocks, _BLOCK, *row).transpose(0, 1)
        for x in xs
    ]
    start = _is_zero(_BLOCK, xs[0]).reshape(-1, 1, *(1 for _ in row))
    init = [x.select(0, 0) for x in divided]
    totals, _ = _one_by_one(functions, combine, divided, init, start, arguments)
    before = _combined(functions, combine, totals, arguments)
    shifted = [torch.cat([x[:1], x[:-1]]) for x in before]  # nothing is before the first block
    start = start & _is_zero(blocks, xs[0]).reshape(-1, *(1 for _ in row))
    _, rows = _one_by_one(functions, combine, divided, shifted, start, arguments, outer=1)
    return [x.transpose(0, 1).reshape(-1, *row)[:length] for x in rows]


def _is_zero(length: Any, like: Tensor) -> Tensor:
    """Which of so many positions is the first."""
    return torch.arange(length, device=like.device) == 0


def _has_blocks(xs: Sequence[Tensor], arguments: Sequence[Any]) -> bool:
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


def _one_by_one(
    functions: Functions,
    combine: Function,
    xs: Sequence[Tensor],
    init: Sequence[Tensor],
    start: Tensor,
    arguments: Sequence[Any],
    outer: int = 0,
) -> tuple[list[Any], list[Any]]:
    """The last of the combined elements, and all of them, of a loop in a kernel.

    Args:
        init: with what the first element is combined.
        start: where instead the element itself is the first, by step.
        outer: as ``webgpu::scan`` has it.
    """
    count = len(xs)

    def step(*given: Any) -> list[Any]:
        carries, elements, (starts, *others) = given[:count], given[count:-more], given[-more:]
        made = functions.evaluate(combine, (*carries, *elements, *others))
        following = [
            torch.where(starts, element, combined)
            for element, combined in zip(elements, made, strict=True)
        ]
        return [*following, *following]

    more = 1 + len(arguments)
    rows = [*xs, start]
    first = (*init, *(x.select(0, 0) for x in rows), *arguments)
    traced = functions.traced(step, first)
    made = ElementwiseScan(traced, init, rows, arguments, outer).run()
    return made[:count], made[count:]


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
