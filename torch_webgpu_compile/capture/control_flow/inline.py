"""`inline_operators`: higher-order operators whose function is better a part of the graph.

``torch.cond`` of two cheap branches becomes both of them and a choice, ``map`` one call on all
rows, a short ``scan`` its steps one after the other, an associative scan a few rounds over all
elements. So their operators fuse with each other and with what is around them. The others stay: see
`parts`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import UnsupportedOp
from ...torch_ops.elementwise import NotElementwise
from ..tracing import Recorder, Traced, clean_dispatch, trace
from .scans import elementwise_scan

aten = torch.ops.aten
higher_order = torch.ops.higher_order

Decompositions = Mapping[OpOverload, Callable[..., Any]]

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


def inline_operators(
    module: GraphModule, decompositions: Decompositions, native: frozenset[OpOverload]
) -> None:
    """Replaces the higher-order operators of a graph that have a rule, where it applies.

    Args:
        module: a functional ATen graph with fake tensors; changed in place.
        decompositions, native: as for `tracing.trace`.
    """
    if not any(node.target in RULES for node in module.graph.nodes):
        return
    values = [leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return
    with clean_dispatch(symbolic=mode.shape_env is not None), mode:
        made = Inlining(module, mode, decompositions, native).run()
    for name, constant in made.items():
        setattr(module, name, constant)
    module.recompile()


class Inlining:
    """A graph copied node by node, but for the operators that have a rule."""

    def __init__(
        self,
        module: GraphModule,
        mode: FakeTensorMode,
        decompositions: Decompositions,
        native: frozenset[OpOverload],
    ) -> None:
        self._module = module
        self._mode = mode
        self._decompositions = decompositions
        self._native = native
        self._recorder = Recorder(decompositions, native)
        self._copies: dict[Node, Node] = {}
        self._results: dict[Node, Any] = {}  # of inlined operators, and the elements of those

    def run(self) -> Mapping[str, Any]:
        """Makes it the module's graph; gives the constants that it has besides the module's."""
        for node in list(self._module.graph.nodes):
            if node.target is operator.getitem and node.args[0] in self._results:
                value = self._results[node.args[0]][node.args[1]]
                if isinstance(value, Tensor):
                    self._copies[node] = self._recorder.node_of(value)
                    self._results[node] = value
                    continue
            if node.target not in RULES or not self._inline(node):
                self._copy(node)
        self._module.graph = self._recorder.graph
        return self._recorder.constants

    def _copy(self, node: Node) -> None:
        made = self._recorder.graph.node_copy(node, self._copies.__getitem__)
        self._copies[node] = made
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.target is not aten.copy_.default:
            self._recorder.know(value, made)

    def _inline(self, node: Node) -> bool:
        if node.meta.get("unbacked_bindings"):
            return False
        wanted = node.meta["val"]
        recorded = len(self._recorder.graph.nodes)
        self._recorder.stack_trace = node.meta.get("stack_trace")
        try:
            args, kwargs = tree_map_only(Node, self._value, (node.args, node.kwargs))
            with self._recorder:
                made = RULES[node.target](self, *args, **kwargs)
                laid_out = [
                    _in_layout(m, w) for m, w in zip(made, tree_leaves(wanted), strict=True)
                ]
        except NotInlined:
            return False
        finally:
            self._recorder.stack_trace = None
        # The partitioner and `checkpoint` leave notes on nodes that hold for what replaces them.
        notes = {
            name: note
            for name, note in node.meta.items()
            if name not in ("val", "tensor_meta", "stack_trace", "unbacked_bindings")
        }
        for made_node in list(self._recorder.graph.nodes)[recorded:]:
            made_node.meta = {**notes, **made_node.meta}
        self._results[node] = tuple(laid_out)
        return True

    def _value(self, node: Node) -> Any:
        if node in self._results:
            return self._results[node]
        return attribute_of(self._module, node) if node.op == "get_attr" else node.meta.get("val")

    def evaluate(self, function: GraphModule, arguments: Sequence[Any]) -> list[Any]:
        """Calls a function of the graph on what a rule gives; its results.

        Raises:
            NotInlined: it has an operator that cannot be a part of the graph.
        """
        values: dict[Node, Any] = {}
        given = iter(arguments)
        for node in function.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._attribute(function, node)
            elif node.op == "output":
                results = tree_map_only(Node, values.__getitem__, node.args[0])
                return list(results) if isinstance(results, (tuple, list)) else [results]
            else:
                args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                if node.meta.get("unbacked_bindings"):
                    raise NotInlined(f"{node.target} has a size that depends on data")
                if node.target in RULES:
                    values[node] = RULES[node.target](self, *args, **kwargs)
                elif isinstance(node.target, HigherOrderOperator):
                    raise NotInlined(f"{node.target} is not a part of a plan")
                else:
                    values[node] = node.target(*args, **kwargs)
        raise ValueError("a graph without an output")

    def traced(self, function: GraphModule, arguments: Sequence[Any]) -> Traced:
        """A function's graph, for arguments of these sizes and dtypes.

        Raises:
            NotInlined: as `evaluate`, or it cannot be traced by itself.
        """
        with clean_dispatch(symbolic=self._mode.shape_env is not None):
            with self._mode:
                inputs = [
                    torch.empty(a.shape, dtype=a.dtype, device=a.device)
                    if isinstance(a, Tensor)
                    else a
                    for a in arguments
                ]
            try:
                return trace(
                    lambda *given: tuple(self.evaluate(function, given)),
                    inputs,
                    self._mode,
                    self._decompositions,
                    self._native,
                    mutates=False,
                )
            except (RuntimeError, TypeError, UnsupportedOp) as error:
                raise NotInlined(str(error)) from error

    def _attribute(self, function: GraphModule, node: Node) -> Any:
        value = attribute_of(function, node)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._mode.from_tensor(value)
        self._recorder.constant(f"inlined{len(self._recorder.constants)}", value, fake)
        return fake


def attribute_of(module: GraphModule, node: Node) -> Any:
    """What a ``get_attr`` node gives: a constant, or the graph of a function."""
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _in_layout(value: Any, wanted: Any) -> Any:
    """A result with the strides that PyTorch says the operator's has."""
    if not isinstance(value, Tensor) or value.stride() == wanted.stride():
        return value
    copy = torch.empty_strided(
        wanted.shape, wanted.stride(), dtype=wanted.dtype, device=wanted.device
    )
    laid_out: Tensor = aten.copy.default(copy, value)
    return laid_out


# ---- the rules: of (inlining, *arguments of the operator), to the list of results


def _cond(
    inlining: Inlining,
    predicate: Any,
    when_true: GraphModule,
    when_false: GraphModule,
    operands: Sequence[Any],
) -> list[Any]:
    """Both branches, where that costs little, and a choice: no wait for the predicate."""
    if not isinstance(predicate, Tensor):
        raise NotInlined("the predicate is a number")
    for branch in (when_true, when_false):
        _require_cheap(branch)
    chosen = inlining.evaluate(when_true, operands)
    other = inlining.evaluate(when_false, operands)
    results = []
    for a, b in zip(chosen, other, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a is not b:
                raise NotInlined("a result is a number")
            results.append(a)
            continue
        results.append(torch.where(predicate.reshape(()), a, b))
    return results


def _require_cheap(branch: GraphModule) -> None:
    nodes = [node for node in branch.graph.nodes if node.op == "call_function"]
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
    inlining: Inlining, function: GraphModule, xs: Sequence[Any], arguments: Sequence[Any]
) -> list[Any]:
    """One call on all rows."""
    if not _is_positive(xs[0].shape[0]):
        raise NotInlined("there are no rows")
    places: list[bool] = []
    others: list[Any] = []

    def on_row(*rows: Any) -> tuple[Tensor, ...]:
        results = inlining.evaluate(function, (*rows, *arguments))
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
    inlining: Inlining,
    step: GraphModule,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
) -> list[Any]:
    """A few steps one after the other; a loop in a kernel where they are elementwise."""
    length: Any = xs[0].shape[0] if xs else 0
    if not _is_positive(length):
        raise NotInlined("it has no steps")
    nodes = sum(node.op == "call_function" for node in step.graph.nodes)
    if type(length) is not int or length * max(nodes, 1) > _MOST_IN_SCAN:
        return _in_kernel(inlining, step, init, xs, arguments, length)
    carry: list[Any] = list(init)
    rows: list[list[Any]] = []
    for k in range(length):
        made = inlining.evaluate(step, (*carry, *(x.select(0, k) for x in xs), *arguments))
        carry = made[: len(init)]
        rows.append(made[len(init) :])
    stacked = [
        torch.stack(column) if isinstance(column[0], Tensor) else column[0]
        for column in map(list, zip(*rows, strict=True))
    ]
    return [*carry, *stacked]


def _in_kernel(
    inlining: Inlining,
    step: GraphModule,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
    length: int | torch.SymInt,
) -> list[Any]:
    traced = inlining.traced(step, (*init, *(x.select(0, 0) for x in xs), *arguments))
    return _looped(traced, init, xs, arguments, length)


def _looped(
    traced: Traced,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    arguments: Sequence[Any],
    length: int | torch.SymInt,
) -> list[Any]:
    try:
        return elementwise_scan(traced, init, xs, arguments, length, _on_rows)
    except NotElementwise as error:
        raise NotInlined(str(error)) from error


def _associative_scan(
    inlining: Inlining, combine: GraphModule, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """Loops in kernels where elements are combined elementwise, else rounds over all elements."""
    if not _is_positive(xs[0].shape[0]):
        raise NotInlined("it has no elements")
    try:
        if _is_divisible(xs, arguments):
            return _in_blocks(inlining, combine, xs, arguments)
        return _one_by_one(inlining, combine, xs, arguments)[1]
    except NotInlined:
        return _in_rounds(inlining, combine, xs, arguments)


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
    inlining: Inlining, combine: GraphModule, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> list[Any]:
    """Each block by itself; then what is before each block is combined with all of its elements."""
    length, *row = xs[0].shape
    blocks = -(-length // _BLOCK)
    more = (0, 0) * len(row) + (0, blocks * _BLOCK - length)  # nobody reads what becomes of them
    divided = [
        aten.constant_pad_nd.default(x, more).reshape(blocks, _BLOCK, *row).transpose(0, 1)
        for x in xs
    ]
    totals, within = _one_by_one(inlining, combine, divided, arguments)
    before = _associative_scan(inlining, combine, totals, arguments)
    combined = inlining.evaluate(
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
    inlining: Inlining, combine: GraphModule, xs: Sequence[Tensor], arguments: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The last of the combined elements, and all of them, of a loop in a kernel."""
    first = [x.select(0, 0) for x in xs]
    traced = inlining.traced(combine, (*first, *first, *arguments))
    results = tuple(traced.results)
    length = xs[0].shape[0]
    if type(length) is int and length == 1:
        return first, list(xs)
    rest = [x.narrow(0, 1, length - 1) for x in xs]
    made = _looped(replace(traced, results=results * 2), first, rest, arguments, length - 1)
    rows = zip(xs, made[len(xs) :], strict=True)
    return made[: len(xs)], [torch.cat([x.narrow(0, 0, 1), row]) for x, row in rows]


def _in_rounds(
    inlining: Inlining, combine: GraphModule, xs: Sequence[Tensor], arguments: Sequence[Any]
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
        combined = _map(inlining, combine, [*before, *here], arguments)
        values = [
            torch.cat([value.narrow(0, 0, distance), new])
            for value, new in zip(values, combined, strict=True)
        ]
        distance *= 2
    return [value.clone() if value is x else value for value, x in zip(values, xs, strict=True)]


def _call(inlining: Inlining, function: GraphModule, *arguments: Any, **_: Any) -> list[Any]:
    """An operator that only notes something of a function."""
    return inlining.evaluate(function, arguments)


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
