"""Runs a `LoopGraph` on NumPy: the reference that tells a wrong lowering from a wrong kernel.

Every node is evaluated at once over its whole range, on index arrays that broadcast. Indices are
checked: a load out of range, where no mask hides it, is an error (`IndexOutOfRangeError` where the
graph checks the index).

bfloat16 and floats of 8 bits are float32 arrays whose values are rounded at each store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedOp, VerificationError
from ..symbolic.sizes import Expr, FloorDiv, Symbol, as_symbol, evaluate, storage_span
from . import attention_numpy, depthwise_numpy, sorting_numpy
from .attention_nodes import Attention, AttentionGradient
from .buffers import Buffer
from .depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from .graph import GraphOutput, LoopGraph, is_effect
from .nodes import (
    Contraction,
    Factorization,
    Fourier,
    HostCall,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    TriangularSolve,
    UserKernel,
    carry_name,
    computed_at,
    outputs_of,
)
from .numeric import convert, from_bits, numpy_dtype, round_to, scalar_op
from .scalar import Checked, Const, FunctionCall, Index, Load, Local, Masked, Op, Scalar, children
from .sorting_nodes import Compact, DigitCounts, DigitScatter, PartSums, PickDigit, RowSort
from .spaces import Node, Space, numbered, symbols_in

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
        return Run(graph, run_host_call, dict(sizes or {})).run(arguments)


@dataclass
class Run:
    graph: LoopGraph
    run_host_call: RunHostCall | None
    sizes: dict[str, int]
    arrays: dict[str, Array] = field(default_factory=dict)

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
                self._bind([spec.size], [int(argument)])
            elif spec.buffer is not None:
                buffer, array = self.graph.buffers[spec.buffer], np.asarray(argument)
                if len(buffer.sizes) == array.ndim:
                    self._bind(buffer.sizes, array.shape)
                    self._bind(buffer.strides, [n // array.itemsize for n in array.strides])

    def _bind(self, sizes: Sequence[Expr], values: Sequence[int]) -> None:
        for size, value in zip(sizes, values, strict=True):
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
        if 0 not in shape:
            offset = evaluate(buffer.offset, self.sizes)
            self._strided(memory, shape, buffer.strides, offset)[...] = self.arrays[buffer.name]
        assert output.offset is not None
        shape, offset = self.shape(output.sizes), evaluate(output.offset, self.sizes)
        if (
            0 not in shape
            and offset + storage_span(shape, self.shape(output.strides)) > memory.size
        ):
            raise VerificationError(f"output {output} reads past the end of {buffer}")
        return self._strided(memory, shape, output.strides, offset)

    def _node(self, node: Node) -> None:
        rule = _RULES.get(type(node))
        if rule is None:
            raise VerificationError(f"no rule of the interpreter for {type(node).__name__}")
        for name, array in zip(outputs_of(node), rule(self, node), strict=True):
            buffer = self.graph.buffers[name]
            stored = round_to(np.asarray(array), buffer.dtype)
            self.arrays[name] = np.ascontiguousarray(stored).reshape(self.shape(buffer.sizes))

    def placed(
        self, name: str, sizes: Sequence[Expr], *parts: tuple[Sequence[Array], Array]
    ) -> Array:
        """An array of the numbers of each part at its indices, except those outside of it."""
        out = np.zeros(self.shape(sizes), parts[0][1].dtype)
        written = np.zeros(out.shape, np.int32)
        for index, numbers in parts:
            inside = np.ones(numbers.shape, bool)
            for position, size in zip(index, out.shape, strict=True):
                inside &= (position >= 0) & (position < size)
            at = tuple(position[inside] for position in index)
            np.add.at(written, at, 1)
            out[at] = numbers[inside]
        if not (written == 1).all():
            raise VerificationError(f"{name} is not written exactly once")
        return out

    def computed(self, node: Node) -> dict[str, Any]:
        """A node's scalars and index expressions at all points of their spaces.

        By field: an array of the shape of the field's space, or a list of them for a tuple, or a
        function that gives it of the field's locals. What is None has no entry.
        """
        points: dict[Space, Points] = {}
        found: dict[str, Any] = {}
        for name, space, value in computed_at(node):
            if space not in points:
                points[space] = Points(self, space)
            if name in node.locals:
                found[name] = partial(Points(self, space).of_locals, value)
                continue
            array = points[space].full(value)
            if isinstance(getattr(node, name), tuple):
                found.setdefault(name, []).append(array)
            else:
                found[name] = array
        return found


def not_interpreted(name: str) -> UnsupportedOp:
    """The error for a node that only a GPU can compute."""
    cause = "it is written in WGSL, which the interpreter does not run"
    return UnsupportedOp(name, cause, "compute it on a GPU")


_Node = TypeVar("_Node", bound=Node)
_Rule = Callable[[Run, _Node], Sequence[Array]]
_RULES: dict[type[Node], _Rule[Any]] = {}


def interprets(kind: type[_Node]) -> Callable[[_Rule[_Node]], _Rule[_Node]]:
    """Registers how nodes of a kind are run: a function that computes the node's outputs.

    Raises:
        ValueError: the kind has a rule.
    """

    def register(rule: _Rule[_Node]) -> _Rule[_Node]:
        if kind in _RULES:
            raise ValueError(f"{kind.__name__} has two rules of the interpreter")
        _RULES[kind] = rule
        return rule

    return register


@interprets(Pointwise)
def _pointwise(run: Run, node: Pointwise) -> Sequence[Array]:
    return [run.computed(node)["body"]]


@interprets(Reduction)
def _reduction(run: Run, node: Reduction) -> Sequence[Array]:
    values = run.computed(node)["body"].reshape((*run.shape(node.ranges), -1))
    return [_REDUCE[node.kind](values)]


@interprets(Contraction)
def _contraction(run: Run, node: Contraction) -> Sequence[Array]:
    groups = (node.batch, node.rows, node.columns, node.inner)
    shapes = [run.shape(sizes) for sizes in groups]
    b, m, n, k = (int(np.prod(shape)) for shape in shapes)
    values = run.computed(node)
    lhs, rhs = values["lhs"].reshape(b, m, k), values["rhs"].reshape(b, n, k)
    product = np.matmul(lhs, rhs.transpose(0, 2, 1)).reshape(sum(shapes[:3], ()))
    sizes = run.graph.buffers[node.output].sizes
    return [run.placed(node.output, sizes, (values.get("index", ()), product))]


@interprets(Scatter)
def _scatter(run: Run, node: Scatter) -> Sequence[Array]:
    out = run.arrays[node.initial].copy()
    values = run.computed(node)
    where = tuple(values.get("index", ()))
    for position, size in zip(where, out.shape, strict=True):
        if position.size and (position.min() < 0 or position.max() >= size):
            raise VerificationError(f"{node.output} is written out of range")
    match node.combines:
        case "sum":
            np.add.at(out, where, values["body"])
        case "maximum":
            np.maximum.at(out, where, values["body"])
        case "":
            out[where] = values["body"]
    return [out]


@interprets(TriangularSolve)
def _triangular_solve(run: Run, node: TriangularSolve) -> Sequence[Array]:
    values = run.computed(node)
    matrix, solution = values["matrix"], values["rhs"].copy()
    for m in range(solution.shape[-2]):
        before = matrix[..., m : m + 1, :m] @ solution[..., :m, :]
        solution[..., m : m + 1, :] -= before
        if not node.unit:
            solution[..., m, :] /= matrix[..., m, m, None]
    return [solution]


@interprets(Factorization)
def _factorization(run: Run, node: Factorization) -> Sequence[Array]:
    matrix = run.computed(node)["matrix"].copy()
    *batch, rows, columns = matrix.shape
    steps = min(rows, columns)
    pivots, info = np.zeros((*batch, steps), np.int32), np.zeros(batch, np.int32)
    for at in np.ndindex(*batch):
        a = matrix[at]
        if node.pivots is None:
            a[...] = np.tril(a) + np.tril(a, -1).T
        for k in range(steps):
            if node.pivots is not None:
                other = k + int(np.argmax(np.abs(a[k:, k])))
                a[[k, other]] = a[[other, k]]
                pivots[(*at, k)] = other + 1
            if a[k, k] == 0 if node.pivots is not None else not a[k, k] > 0:
                info[at] = info[at] or k + 1
                if node.pivots is None:
                    break
                continue
            below = a[k + 1 :, k] / a[k, k]
            a[k + 1 :, k + 1 :] -= np.outer(below, a[k, k + 1 :])
            if node.pivots is None:
                a[k:, k] /= np.sqrt(a[k, k])
            else:
                a[k + 1 :, k] = below
    return [np.tril(matrix), info] if node.pivots is None else [matrix, info, pivots]


@interprets(Scan)
def _scan(run: Run, node: Scan) -> Sequence[Array]:
    (lanes,) = node.spaces["init"]
    (time,) = numbered("t", (node.length,))
    carries = [Points(run, (lanes,)).full(body) for body in node.init]
    rows: list[list[Array]] = [[] for _ in node.row]
    (steps,) = run.shape((node.length,))
    for t in range(steps):
        points = Points(run, (lanes,))
        points.values[time] = np.asarray(t)
        points.locals = {carry_name(k): carry for k, carry in enumerate(carries)}
        for found, body in zip(rows, node.row, strict=True):
            found.append(points.full(body))
        carries = [points.full(body) for body in node.step]
    return [*(carries[number] for number in node.finals), *map(np.stack, rows)]


@interprets(HostCall)
def _host_call(run: Run, node: HostCall) -> Sequence[Array]:
    if run.run_host_call is None:
        raise VerificationError(f"{node.target} runs on the host, but there is no callback")
    results = run.run_host_call(node, run.arrays, run.sizes)
    return [np.zeros(0)] if is_effect(node, run.graph) else results


@interprets(UserKernel)
def _user_kernel(run: Run, node: UserKernel) -> Sequence[Array]:
    raise not_interpreted(node.kernel.name)


@interprets(Attention)
def _attention(run: Run, node: Attention) -> Sequence[Array]:
    return attention_numpy.forward(node, run.computed(node))[: len(outputs_of(node))]


@interprets(AttentionGradient)
def _attention_gradient(run: Run, node: AttentionGradient) -> Sequence[Array]:
    return attention_numpy.gradient(node, run.computed(node))


@interprets(DepthwiseConvolution)
def _depthwise_convolution(run: Run, node: DepthwiseConvolution) -> Sequence[Array]:
    values = run.computed(node)
    positions = run.shape(node.positions)
    image, weight = values["image"], values["weight"]
    return [depthwise_numpy.convolution(node.windows, image, weight, positions)]


@interprets(DepthwiseWeightGradient)
def _depthwise_weight_gradient(run: Run, node: DepthwiseWeightGradient) -> Sequence[Array]:
    values = run.computed(node)
    result = depthwise_numpy.weight_gradient(node.windows, values["moved"], values["image"])
    parts = np.zeros((node.parts, *result.shape), np.float32)
    parts[0] = result  # whose sum alone is defined
    sizes = run.graph.buffers[node.output].sizes
    return [run.placed(node.output, sizes, (values["index"], parts))]


@interprets(Fourier)
def _fourier(run: Run, node: Fourier) -> Sequence[Array]:
    values = run.computed(node)
    x = values["real"] + 1j * values.get("imaginary", np.zeros((), np.float32))
    result = np.fft.fft(x) if node.forward else np.fft.ifft(x) * node.length
    factor = values.get("factor_real", 1) + 1j * values.get("factor_imaginary", 0)
    result = result * factor * node.scale
    buffer = run.graph.buffers[node.output]
    parts = [(values["index"], result)]
    if node.mirror is not None:
        parts.append((values["mirror"], result.conj()))
    out = run.placed(node.output, buffer.sizes[: len(node.index)], *parts)
    pairs = len(buffer.sizes) > len(node.index)
    return [np.stack([out.real, out.imag], -1) if pairs else out.real]


@interprets(RowSort)
def _row_sort(run: Run, node: RowSort) -> Sequence[Array]:
    (count,) = run.shape((node.count,))
    values = run.computed(node)
    places = sorting_numpy.order(values["words"])[..., :count]
    return [np.take_along_axis(payload, places, -1) for payload in values["payloads"]]


@interprets(DigitCounts)
def _digit_counts(run: Run, node: DigitCounts) -> Sequence[Array]:
    (part,) = run.shape((node.part,))
    return [sorting_numpy.digit_counts(run.computed(node)["digit"], part, node.bins)]


@interprets(PartSums)
def _part_sums(run: Run, node: PartSums) -> Sequence[Array]:
    return sorting_numpy.part_sums(run.arrays[node.counts])


@interprets(DigitScatter)
def _digit_scatter(run: Run, node: DigitScatter) -> Sequence[Array]:
    values = run.computed(node)
    sums = run.arrays[node.before], run.arrays[node.totals]
    places = sorting_numpy.digit_places(values["digit"], node.tile, *sums)
    moved = [np.zeros(payload.shape, payload.dtype) for payload in values["payloads"]]
    for array, payload in zip(moved, values["payloads"], strict=True):
        np.put_along_axis(array, places, payload, -1)
    return moved


@interprets(PickDigit)
def _pick_digit(run: Run, node: PickDigit) -> Sequence[Array]:
    return sorting_numpy.pick_digit(run.arrays[node.counts], **run.computed(node))


@interprets(Compact)
def _compact(run: Run, node: Compact) -> Sequence[Array]:
    (count,) = run.shape((node.count,))
    return [sorting_numpy.compact(run.computed(node)["kind"], count)]


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
