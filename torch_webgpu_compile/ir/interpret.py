"""Runs a `LoopGraph` on NumPy: maps and reductions, and what else `interprets` is told of.

Every node is evaluated at once over its whole range, on index arrays that broadcast. Indices are
checked: a load out of range, where no mask hides it, is an error (`IndexOutOfRangeError` where the
graph checks the index).

bfloat16 and floats of 8 bits are float32 arrays whose values are rounded at each store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedOp, VerificationError
from ..symbolic.sizes import Expr, FloorDiv, Symbol, as_symbol, evaluate
from .buffers import Buffer
from .graph import GraphOutput, LoopGraph, is_effect
from .nodes import HostCall, Pointwise, Reduction, UserKernel, computed_at
from .numeric import convert, from_bits, numpy_dtype, round_to, scalar_op
from .scalar import Checked, Const, FunctionCall, Index, Load, Local, Masked, Op, Scalar, children
from .spaces import Node, Space, symbols_in

Array = npt.NDArray[Any]
RunHostCall = Callable[[HostCall, Mapping[str, Array], Mapping[str, int]], Sequence[Array]]


def interpret(
    graph: LoopGraph,
    arguments: Sequence[Any],
    run_host_call: RunHostCall | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Any]:
    """The graph's outputs, in order, those that mutate an input included.

    An argument is an integer for a size, else an array of the buffer's sizes (of any strides) or a
    flat array of its memory. Outputs have the strides of their `GraphOutput`.
    ``run_host_call(call, arrays by buffer name, sizes by name)`` runs what has no kernel. ``sizes``
    are the values of symbols that the arguments do not show.
    """
    with np.errstate(all="ignore"):
        return Run(graph, run_host_call, sizes or {}).run(arguments)


class Run:
    def __init__(
        self, graph: LoopGraph, run_host_call: RunHostCall | None, sizes: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.run_host_call = run_host_call
        self.sizes = dict(sizes)
        self.arrays: dict[str, Array] = {}

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        self._bind_sizes(arguments)
        for name, buffer in self.graph.buffers.items():
            if 0 in self.shape(buffer.sizes):  # has no writer
                self.arrays[name] = np.zeros(self.shape(buffer.sizes), numpy_dtype(buffer.dtype))
        for spec, argument in zip(self.graph.inputs, arguments, strict=True):
            if spec.buffer is not None:
                self.arrays[spec.buffer] = self._input(self.graph.buffers[spec.buffer], argument)
        for name, array in self.graph.constants.items():
            buffer = self.graph.buffers[name]
            self.arrays[name] = self._input(buffer, from_bits(array, buffer.dtype))
        for node in self.graph.nodes:
            self._node(node)
        return [self._output(output) for output in self.graph.outputs]

    def _bind_sizes(self, arguments: Sequence[Any]) -> None:
        for spec, argument in zip(self.graph.inputs, arguments, strict=True):
            if spec.size is not None:
                self._bind(spec.size, int(argument))
            elif spec.buffer is not None:
                self._bind_layout(self.graph.buffers[spec.buffer], np.asarray(argument))

    def _bind_layout(self, buffer: Buffer, array: Array) -> None:
        if len(buffer.sizes) == array.ndim:
            for size, value in zip(buffer.sizes, array.shape, strict=True):
                self._bind(size, value)
            for stride, nbytes in zip(buffer.strides, array.strides, strict=True):
                self._bind(stride, nbytes // array.itemsize)

    def _bind(self, size: Expr, value: int) -> None:
        symbol = as_symbol(size)
        if symbol is not None:
            self.sizes.setdefault(symbol.name, value)

    def shape(self, sizes: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(evaluate(size, self.sizes) for size in sizes)

    def _input(self, buffer: Buffer, argument: Any) -> Array:
        array = np.asarray(argument)
        shape = self.shape(buffer.sizes)
        if array.shape == shape:
            return array
        return self._strided(array, shape, buffer.strides, evaluate(buffer.offset, self.sizes))

    def _strided(
        self, memory: Array, shape: tuple[int, ...], strides: Sequence[Expr], offset: int
    ) -> Array:
        nbytes = tuple(s * memory.itemsize for s in self.shape(strides))
        if 0 in shape:
            return np.zeros(shape, memory.dtype)
        return np.lib.stride_tricks.as_strided(memory[offset:], shape, nbytes)

    def _output(self, output: GraphOutput) -> Any:
        if output.size is not None:
            return evaluate(output.size, self.sizes)
        if output.buffer is None:
            return output.constant
        buffer = self.graph.buffers[output.buffer]
        memory = np.zeros(max(0, evaluate(buffer.span, self.sizes)), numpy_dtype(buffer.dtype))
        shape = self.shape(buffer.sizes)
        array = self.arrays[buffer.name] if 0 not in shape else np.zeros(shape)
        if 0 not in shape:
            offset = evaluate(buffer.offset, self.sizes)
            self._strided(memory, shape, buffer.strides, offset)[...] = array
        assert output.offset is not None
        offset = evaluate(output.offset, self.sizes)
        shape = self.shape(output.sizes)
        if 0 in shape:
            return np.zeros(shape, memory.dtype)
        last = offset + sum(
            (n - 1) * s for n, s in zip(shape, self.shape(output.strides), strict=True)
        )
        if last >= memory.size:
            raise VerificationError(f"output {output} reads past the end of {buffer}")
        return self._strided(memory, shape, output.strides, offset)

    def _node(self, node: Node) -> None:
        rule = _RULES.get(type(node))
        if rule is None:
            raise VerificationError(f"no rule of the interpreter for {type(node).__name__}")
        rule(self, node)

    def store(self, name: str, array: Array) -> None:
        """Sets a buffer's contents, rounded to its dtype."""
        buffer = self.graph.buffers[name]
        shape = self.shape(buffer.sizes)
        stored = round_to(np.asarray(array), buffer.dtype)
        self.arrays[name] = np.ascontiguousarray(stored).reshape(shape)

    def computed(self, node: Node) -> dict[str, Any]:
        """A node's scalars and index expressions at all points of their spaces.

        By field: an array of the shape of the field's space, or a list of them for a tuple, or a
        function that gives it of the field's locals. What is None has no entry.
        """
        points: dict[Space, Points] = {}
        found: dict[str, Any] = {}
        for field, space, value in computed_at(node):
            if space not in points:
                points[space] = Points(self, space)
            if field in node.locals:
                found[field] = partial(Points(self, space).of_locals, value)
                continue
            array = points[space].full(value)
            if isinstance(getattr(node, field), tuple):
                found.setdefault(field, []).append(array)
            else:
                found[field] = array
        return found


def not_interpreted(name: str) -> UnsupportedOp:
    """The error for a node that only a GPU can compute."""
    cause = "it is written in WGSL, which the interpreter does not run"
    return UnsupportedOp(name, cause, "compute it on a GPU")


_Node = TypeVar("_Node", bound=Node)
_RULES: dict[type[Node], Callable[[Run, Any], None]] = {}


def interprets(
    kind: type[_Node],
) -> Callable[[Callable[[Run, _Node], None]], Callable[[Run, _Node], None]]:
    """Registers how nodes of a kind are run: it stores the node's outputs.

    Raises:
        ValueError: the kind has a rule.
    """

    def register(rule: Callable[[Run, _Node], None]) -> Callable[[Run, _Node], None]:
        if kind in _RULES:
            raise ValueError(f"{kind.__name__} has two rules of the interpreter")
        _RULES[kind] = rule
        return rule

    return register


@interprets(Pointwise)
def _pointwise(run: Run, node: Pointwise) -> None:
    run.store(node.output, run.computed(node)["body"])


@interprets(Reduction)
def _reduction(run: Run, node: Reduction) -> None:
    values = run.computed(node)["body"].reshape((*run.shape(node.ranges), -1))
    run.store(node.output, _REDUCE[node.kind](values))


@interprets(HostCall)
def _host_call(run: Run, node: HostCall) -> None:
    if run.run_host_call is None:
        raise VerificationError(f"{node.target} runs on the host, but there is no callback")
    results = run.run_host_call(node, run.arrays, run.sizes)
    if is_effect(node, run.graph):
        return
    for name, result in zip(node.outputs, results, strict=True):
        run.store(name, np.asarray(result))


@interprets(UserKernel)
def _user_kernel(run: Run, node: UserKernel) -> None:
    raise not_interpreted(node.kernel.name)


_REDUCE: dict[str, Callable[[Array], Any]] = {
    "sum": lambda values: np.sum(values, -1, dtype=values.dtype),
    "prod": lambda values: np.prod(values, -1, dtype=values.dtype),
    "minimum": lambda values: np.min(values, -1),
    "maximum": lambda values: np.max(values, -1),
    "argmin": lambda values: np.argmin(values, -1).astype(np.int64),
    "argmax": lambda values: np.argmax(values, -1).astype(np.int64),
    "any": lambda values: np.any(values, -1),
    "all": lambda values: np.all(values, -1),
}


class Points:
    """The points of an iteration space, with an axis for each of its symbols."""

    def __init__(self, run: Run, space: Space) -> None:
        self.run = run
        sizes = [size for _, ranges in space for size in ranges]
        self.shape = run.shape(sizes)
        self.values: dict[Symbol, Array] = {}
        for axis, (key, size) in enumerate(zip(symbols_in(space), self.shape, strict=True)):
            along = [1] * len(sizes)
            along[axis] = size
            self.values[key] = np.arange(size, dtype=np.int64).reshape(along)
        self.memo: dict[tuple[Scalar, int], Array] = {}
        self.masks: dict[int, Array] = {}
        self.index_memo: dict[Expr, Array] = {}
        self.locals: dict[str, Array] = {}

    def full(self, value: Scalar | Expr) -> Array:
        """A scalar or an index expression at every point of the space."""
        body = Index(value) if isinstance(value, Expr) else value
        if 0 in self.shape:
            return np.zeros(self.shape, numpy_dtype(body.dtype))
        return np.broadcast_to(self.evaluate(body, None), self.shape)

    def of_locals(self, body: Scalar | Expr, **locals: Array) -> Array:
        """A scalar at every point, of the locals that it goes on with; called once."""
        self.locals = locals
        return self.full(body)

    def index(self, expr: Expr) -> Array:
        """An index expression at every point."""
        found = self.index_memo.get(expr)
        if found is not None:
            return found
        total: Array = np.asarray(expr.constant, np.int64)
        for monomial, coefficient in expr.terms:
            term: Array = np.asarray(coefficient, np.int64)
            for atom in monomial:
                if isinstance(atom, Symbol):
                    value = self._symbol(atom)
                else:
                    a, b = self.index(atom.numerator), self.index(atom.denominator)
                    value = a // b if isinstance(atom, FloorDiv) else a % b
                term = term * value
            total = total + term
        self.index_memo[expr] = total
        return total

    def _symbol(self, symbol: Symbol) -> Array:
        if symbol in self.values:
            return self.values[symbol]
        if symbol.extent is not None or symbol.name not in self.run.sizes:
            raise VerificationError(f"symbol {symbol} is not in the space {list(self.values)}")
        return np.asarray(self.run.sizes[symbol.name], np.int64)

    def evaluate(self, node: Scalar, mask: Array | None) -> Array:
        """``node`` at every point where ``mask`` holds; anything elsewhere."""
        key = (node, id(mask))
        found = self.memo.get(key)
        if found is None:
            if mask is not None:
                self.masks[id(mask)] = mask  # keeps the id from being reused
            found = self.memo[key] = self._evaluate(node, mask)
        return found

    def _evaluate(self, node: Scalar, mask: Array | None) -> Array:
        match node:
            case Const(value, dtype):
                return round_to(np.asarray(value), dtype)
            case Index(expr):
                return self.index(expr)
            case Load():
                return self._load(node, mask)
            case Op(name, args, dtype):
                operands = [self.evaluate(arg, mask) for arg in args]
                if name in ("cast", "bitcast"):
                    return convert(name, operands[0], children(node)[0].dtype, dtype)
                return scalar_op(name, operands, dtype)
            case Masked(condition, body, other):
                holds = self.evaluate(condition, mask)
                inner = holds if mask is None else holds & mask
                return np.where(holds, self.evaluate(body, inner), self.evaluate(other, mask))
            case Checked():
                return self._checked(node, mask)
            case FunctionCall(function):
                raise not_interpreted(function.name)
            case Local(name, _):
                return self.locals[name]

    def _checked(self, node: Checked, mask: Array | None) -> Array:
        position, given, size = (self.evaluate(part, mask) for part in children(node))
        wrong = (position < 0) | (position >= size)
        if mask is not None:
            wrong = wrong & mask
        if wrong.any():
            indices = np.broadcast_to(given, wrong.shape)[wrong]
            raise node.check.error(int(indices[0]), int(size))
        return position

    def _load(self, node: Load, mask: Array | None) -> Array:
        buffer = self.run.graph.buffers[node.buffer]
        if node.buffer not in self.run.arrays:
            raise VerificationError(f"{node.buffer} is read before it is written")
        array = self.run.arrays[node.buffer]
        where = []
        for entry, size in zip(node.index, array.shape, strict=True):
            position = self.evaluate(entry, mask)
            if mask is not None:
                position = np.where(mask, position, 0)
            if position.size and (position.min() < 0 or position.max() >= max(size, 1)):
                raise VerificationError(f"{buffer.name} is read at {entry}, outside of [0, {size})")
            where.append(position)
        if 0 in array.shape:
            return np.zeros((), array.dtype)
        return array[tuple(where)] if where else array
