"""Runs a `LoopGraph` on NumPy: the reference that tells a wrong lowering from a wrong kernel.

Every node is evaluated at once over its whole range, on index arrays that broadcast. Indices are
checked: a load out of range, where no mask hides it, is an error (`IndexOutOfRangeError` where the
graph checks the index).

bfloat16 and floats of 8 bits are float32 arrays whose values are rounded at each store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import VerificationError
from ..sizes import Expr, FloorDiv, Symbol, as_symbol, evaluate
from . import attention
from .attention_nodes import Attention, AttentionGradient
from .graph import Buffer, GraphOutput, LoopGraph, is_effect
from .nodes import (
    Contraction,
    Fourier,
    HostCall,
    Node,
    Pointwise,
    Reduction,
    Scatter,
    TriangularSolve,
)
from .numeric import convert, from_bits, numpy_dtype, round_to, scalar_op
from .scalar import Checked, Const, Index, Load, Masked, Op, Scalar, children
from .spaces import iteration_symbols, named_bodies, symbol_keys

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
        return _Run(graph, run_host_call, sizes or {}).run(arguments)


class _Run:
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
        match node:
            case Pointwise():
                self._store(node.output, self._space(node.body, "i", node.ranges))
            case Reduction():
                self._reduction(node)
            case Contraction():
                self._contraction(node)
            case Scatter():
                self._scatter(node)
            case HostCall():
                self._host_call(node)
            case Attention() | AttentionGradient():
                self._attention(node)
            case TriangularSolve():
                self._triangular_solve(node)
            case Fourier():
                self._fourier(node)

    def _store(self, name: str, array: Array) -> None:
        buffer = self.graph.buffers[name]
        shape = self.shape(buffer.sizes)
        stored = round_to(np.asarray(array), buffer.dtype)
        self.arrays[name] = np.ascontiguousarray(stored).reshape(shape)

    def _space(self, body: Scalar, prefix: str, ranges: Sequence[Expr]) -> Array:
        space = Space(self, [(prefix, ranges)])
        return space.full(body)

    def _reduction(self, node: Reduction) -> None:
        space = Space(self, [("i", node.ranges), ("r", node.reduce_ranges)])
        outer = self.shape(node.ranges)
        values = space.full(node.body).reshape((*outer, -1))
        self._store(node.output, _REDUCE[node.kind](values))

    def _contraction(self, node: Contraction) -> None:
        b, m, n, k = (self.shape(r) for r in (node.batch, node.rows, node.columns, node.inner))
        lhs = Space(self, [("b", node.batch), ("m", node.rows), ("k", node.inner)])
        rhs = Space(self, [("b", node.batch), ("k", node.inner), ("n", node.columns)])
        count = [int(np.prod(s)) for s in (b, m, n, k)]
        left = lhs.full(node.lhs).reshape(count[0], count[1], count[3])
        right = rhs.full(node.rhs).reshape(count[0], count[3], count[2])
        product = np.matmul(left, right).reshape((*b, *m, *n))
        buffer = self.graph.buffers[node.output]
        out = np.full(self.shape(buffer.sizes), np.nan, product.dtype)
        space = Space(self, [("b", node.batch), ("m", node.rows), ("n", node.columns)])
        where = tuple(np.broadcast_to(space.index(e), product.shape) for e in node.index)
        written = np.zeros(out.shape, np.int32)
        np.add.at(written, where, 1)
        if not (written == 1).all():
            raise VerificationError(f"the index of {node.output} is not a bijection")
        out[where] = product
        self._store(node.output, out)

    def _scatter(self, node: Scatter) -> None:
        space = Space(self, [("i", node.ranges)])
        out = self.arrays[node.initial].copy()
        where = []
        for entry, size in zip(node.index, out.shape, strict=True):
            position = space.full(entry)
            if position.size and (position.min() < 0 or position.max() >= size):
                raise VerificationError(f"{node.output} is written out of range")
            where.append(position)
        values = space.full(node.body)
        if node.accumulate:
            np.add.at(out, tuple(where), values)
        else:
            out[tuple(where)] = values
        self._store(node.output, out)

    def _triangular_solve(self, node: TriangularSolve) -> None:
        bodies = named_bodies(node)
        arrays = {n: Space(self, node.spaces[n]).full(body) for n, body in bodies.items()}
        matrix, solution = arrays["matrix"], arrays["rhs"].copy()
        for m in range(solution.shape[-2]):
            before = matrix[..., m : m + 1, :m] @ solution[..., :m, :]
            solution[..., m : m + 1, :] -= before
            if not node.unit:
                solution[..., m, :] /= matrix[..., m, m, None]
        self._store(node.output, solution)

    def _host_call(self, node: HostCall) -> None:
        if self.run_host_call is None:
            raise VerificationError(f"{node.target} runs on the host, but there is no callback")
        results = self.run_host_call(node, self.arrays, self.sizes)
        if is_effect(node, self.graph):
            return
        for name, result in zip(node.outputs, results, strict=True):
            self._store(name, np.asarray(result))

    def _attention(self, node: Attention | AttentionGradient) -> None:
        bodies = named_bodies(node)
        arrays = {n: Space(self, node.spaces[n]).full(body) for n, body in bodies.items()}
        if isinstance(node, AttentionGradient):
            gradient = attention.gradient(node.of, node.causal, node.scale, **arrays)
            self._store(node.output, gradient)
            return
        result = attention.forward(node.parts, node.causal, node.scale, **arrays, safe=node.safe)
        self._store(node.output, result.output)
        if node.logsumexp is not None:
            self._store(node.logsumexp, result.logsumexp)

    def _fourier(self, node: Fourier) -> None:
        bodies = named_bodies(node)
        arrays = {n: Space(self, node.spaces[n]).full(body) for n, body in bodies.items()}
        x = arrays["real"] + 1j * arrays.get("imaginary", np.zeros((), np.float32))
        result = np.fft.fft(x) if node.forward else np.fft.ifft(x) * node.length
        factor = arrays.get("factor_real", 1) + 1j * arrays.get("factor_imaginary", 0)
        result = result * factor * node.scale
        buffer = self.graph.buffers[node.output]
        pairs = len(buffer.sizes) > len(node.index)
        out = np.full(self.shape(buffer.sizes[: len(node.index)]), np.nan, np.complex128)
        written = np.zeros(out.shape, np.int32)
        space = Space(self, node.spaces["factor_real"])
        for index, values in ((node.index, result), (node.mirror, result.conj())):
            if index is None:
                continue
            where = [np.broadcast_to(space.index(entry), values.shape) for entry in index]
            inside = np.ones(values.shape, bool)
            for position, size in zip(where, out.shape, strict=True):
                inside &= (position >= 0) & (position < size)
            at = tuple(position[inside] for position in where)
            np.add.at(written, at, 1)
            out[at] = values[inside]
        if not (written == 1).all():
            raise VerificationError(f"{node.output} is not written exactly once")
        self._store(node.output, np.stack([out.real, out.imag], -1) if pairs else out.real)


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


class Space:
    """An iteration space: groups of symbols with their ranges, in axis order."""

    def __init__(self, run: _Run, groups: Sequence[tuple[str, Sequence[Expr]]]) -> None:
        self.run = run
        sizes = [size for _, ranges in groups for size in ranges]
        self.shape = run.shape(sizes)
        self.values: dict[Symbol, Array] = {}
        symbols = [
            key
            for prefix, ranges in groups
            for key in symbol_keys(iteration_symbols(prefix, ranges))
        ]
        for axis, (key, size) in enumerate(zip(symbols, self.shape, strict=True)):
            along = [1] * len(sizes)
            along[axis] = size
            self.values[key] = np.arange(size, dtype=np.int64).reshape(along)
        self.memo: dict[tuple[Scalar, int], Array] = {}
        self.masks: dict[int, Array] = {}
        self.index_memo: dict[Expr, Array] = {}

    def full(self, body: Scalar) -> Array:
        """``body`` at every point of the space."""
        if 0 in self.shape:
            return np.zeros(self.shape, numpy_dtype(body.dtype))
        return np.broadcast_to(self.evaluate(body, None), self.shape)

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
