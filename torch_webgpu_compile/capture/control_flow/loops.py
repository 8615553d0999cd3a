"""What runs between the parts of a divided graph: loops, branches, and calls of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

higher_order = torch.ops.higher_order


class Function:
    """A compiled function of a graph, called with its arguments one by one."""

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return tuple(self._run(list(arguments)))


def run(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator of a divided graph on tensors."""
    return _RUNS.get(target, target)(*args, **kwargs)


def _cond(predicate: Any, when_true: Function, when_false: Function, operands: Any) -> Any:
    """Reads the predicate, and runs one branch."""
    return (when_true if predicate else when_false)(*operands)


def _while_loop(
    condition: Function, body: Function, carried: Sequence[Any], others: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    """Reads the condition before every turn."""
    state = tuple(_copied(carried))
    while _holds(condition, state, others):
        state = body(*state, *others)
    return state


def _while_loop_stacked(
    condition: Function, body: Function, carried: Sequence[Any], others: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    """The same with the results of all turns; source: PyTorch's ``while_loop_stack_output``."""
    state = tuple(_copied(carried))
    turns: list[tuple[Any, ...]] = []
    while _holds(condition, state, others):
        state = body(*state, *others)
        turns.append(state)
    if not turns:
        return tuple(v.unsqueeze(0) if isinstance(v, Tensor) else v for v in state)
    return tuple(torch.stack(column) for column in map(list, zip(*turns, strict=True)))


def _copied(values: Sequence[Any]) -> list[Any]:
    """What is returned unchanged must not be the caller's own tensor."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _holds(condition: Function, state: Sequence[Any], others: Sequence[Any]) -> bool:
    (found,) = condition(*state, *others)
    return bool(found)


def _scan(
    step: Function, init: Sequence[Any], xs: Sequence[Tensor], others: Sequence[Any]
) -> tuple[Any, ...]:
    """One step after the other, without waiting for the GPU."""
    count = len(init)
    carry: tuple[Any, ...] = tuple(init)
    stacks: list[Any] = []
    for k in range(xs[0].shape[0]):
        made = step(*carry, *(x.select(0, k) for x in xs), *others)
        carry, rows = made[:count], made[count:]
        if not stacks:
            stacks = [_stack_like(row, xs[0].shape[0]) for row in rows]
        for stack, row in zip(stacks, rows, strict=True):
            if stack is not None:
                stack.select(0, k).copy_(row)
    return (*carry, *stacks)


def _stack_like(row: Any, length: int) -> Tensor | None:
    return row.new_empty((length, *row.shape)) if isinstance(row, Tensor) else None


def _map(function: Function, xs: Sequence[Tensor], others: Sequence[Any]) -> tuple[Any, ...]:
    """One row after the other."""
    turns = [function(*(x.select(0, k) for x in xs), *others) for k in range(xs[0].shape[0])]
    return tuple(
        torch.stack(column) if isinstance(column[0], Tensor) else column[0]
        for column in map(list, zip(*turns, strict=True))
    )


def _associative_scan(
    combine: Function, xs: Sequence[Tensor], others: Sequence[Any]
) -> tuple[Any, ...]:
    """One element after the other."""
    stacks = [_stack_like(x.select(0, 0), x.shape[0]) for x in xs]
    state = tuple(x.select(0, 0) for x in xs)
    for k in range(xs[0].shape[0]):
        if k:
            state = combine(*state, *(x.select(0, k) for x in xs), *others)
        for stack, row in zip(stacks, state, strict=True):
            assert stack is not None
            stack.select(0, k).copy_(row)
    return tuple(stacks)


def _invoke(function: Function, _identifier: str, *operands: Any) -> tuple[Any, ...]:
    return function(*operands)


def _found(name: str, function: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """An operator that not every supported PyTorch has."""
    operator = getattr(higher_order, name, None)
    return {} if operator is None else {operator: function}


_RUNS: dict[Any, Callable[..., Any]] = {
    higher_order.cond: _cond,
    higher_order.while_loop: _while_loop,
    higher_order.scan: _scan,
    higher_order.map_impl: _map,
    higher_order.associative_scan: _associative_scan,
    higher_order.invoke_subgraph: _invoke,
    **_found("while_loop_stack_output", _while_loop_stacked),
}
