"""`Builder`: makes nodes and buffers while a graph is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .. import dtypes
from ..dtypes import DType
from ..ir.buffers import Buffer, BufferOrigin, unused_name
from ..ir.depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from ..ir.folding import fold, narrow
from ..ir.nodes import (
    Contraction,
    HostCall,
    Pointwise,
    Reduction,
    Scatter,
    UserKernel,
    is_plain,
    map_bodies,
)
from ..ir.scalar import (
    Const,
    FunctionCall,
    Index,
    Load,
    Masked,
    Op,
    Scalar,
    cast,
    const,
    is_host_number,
    loads_of,
    neutral,
    walk,
)
from ..ir.spaces import Node, Origin
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import ONE, ZERO, Expr, contiguous_strides
from ..target import Target
from ..user_wgsl.modules import WgslKernel
from .promotion import Operand
from .symbols import SizeReader
from .value import IndexLike, Value, broadcast_index, expand, has_no_elements, positions, zeros

# A body without loads is recomputed where it is used instead of stored when it is this small. A
# mask of a causal attention is 5 nodes; storing it costs a kernel and its bytes.
FREE_NODES = 24
_FREE_OPS = frozenset(
    {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where", "cast"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
# What these reductions make of one element is that element, known as such: of x - x and x / x
# drivers make 0 and 1, even if x is infinite.
_OF_ONE = frozenset({"sum", "prod", "maximum", "minimum", "any", "all"})
_NO_ORIGIN = Origin("")


@dataclass(frozen=True, slots=True)
class ResultType:
    """One result of the ATen operator being lowered, from its fake tensor."""

    dtype: DType
    sizes: tuple[Expr, ...]


@dataclass
class Builder:
    """The state of one lowering.

    Attributes:
        target: the GPU that kernels are for.
        reader: converts symbolic sizes.
        results: signatures of the current operator's results; None where it is not a tensor.
        used: for an operator with several results, which of them are read.
        arguments: the fake tensors of its tensor arguments.
        traced: its positional and named arguments as they were traced, with fake tensors.
        updates_argument: whether the current operator's result is an update of an argument, which
            the graph changes: worth a scatter, which may be done in place.
        deterministic: whether results may not depend on timing, see
            ``torch.use_deterministic_algorithms``.
        fill_empty: whether memory that the user leaves unwritten holds NaN and largest integers.
        on_deterministic: called where either of the two makes a difference.
        origin: the current operator and the user's line.
        hint: name for the next buffer.
        exact: of numbers that kernels compute in float32 as they have no float64, by body: makes
            a buffer with the number in float64.
    """

    target: Target
    reader: SizeReader = field(default_factory=SizeReader)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    results: tuple[ResultType | None, ...] = ()
    used: frozenset[int] | None = None
    arguments: tuple[Any, ...] = ()
    traced: Any = ((), {})
    updates_argument: bool = False
    deterministic: bool = False
    fill_empty: bool = False
    on_deterministic: Callable[[], None] = lambda: None
    origin: Origin = _NO_ORIGIN
    hint: str = "value"
    exact: dict[Scalar, Callable[[], Buffer]] = field(default_factory=dict)

    @property
    def out(self) -> ResultType:
        """The signature of the operator's only (or first) result."""
        return self.result(0)

    def result(self, number: int) -> ResultType:
        """The signature of result ``number`` of the operator, which is a tensor."""
        found = self.results[number]
        assert found is not None
        return found

    def zeros(self, number: int) -> Value:
        """Result ``number`` of the operator, filled with zeros."""
        return zeros(self.result(number).sizes, self.result(number).dtype)

    def is_used(self, result: int) -> bool:
        """Whether result number ``result`` of the current operator is read."""
        return self.used is None or result in self.used

    def new_buffer(
        self,
        dtype: DType,
        sizes: Sequence[Expr],
        name: str = "",
        origin: BufferOrigin = BufferOrigin.INTERMEDIATE,
        strides: Sequence[Expr] | None = None,
        offset: Expr = ZERO,
    ) -> Buffer:
        """Declares memory of ``sizes``; row-major unless ``strides`` (in elements) are given.

        The name is ``name``, or the hint, with a number where that is taken.
        """
        unique = unused_name(name or self.hint, self.buffers)
        layout = contiguous_strides(tuple(sizes)) if strides is None else tuple(strides)
        buffer = Buffer(unique, dtype, tuple(sizes), layout, offset, origin)
        self.buffers[unique] = buffer
        return buffer

    def load(self, buffer: Buffer) -> Value:
        """The value of a whole buffer."""
        index = tuple(Index(i) for i in positions(buffer.sizes))
        body: Scalar = Load(buffer.name, index, buffer.dtype)
        if has_no_elements(buffer.sizes):
            body = const(0, buffer.dtype)
        return Value(buffer.dtype, buffer.sizes, body)

    def pointwise(
        self, body: Scalar, sizes: Sequence[Expr], *, name: str = "", strides: Any = None
    ) -> Value:
        """``body`` over ``sizes``: a `Pointwise` node, or no node where recomputing is free.

        With ``strides`` there is always a node: the value gets memory in that layout.
        """
        sizes, body = tuple(sizes), self.finished(body)
        if has_no_elements(sizes) and strides is None:
            return zeros(sizes, body.dtype)
        in_float64 = body.dtype is dtypes.float64 and not self.target.supports(body.dtype)
        if strides is None and (in_float64 or _is_free(body, is_number=not sizes)):
            return Value(body.dtype, sizes, body)
        buffer = self.new_buffer(body.dtype, sizes, self._named(name), strides=strides)
        self.nodes.append(Pointwise(buffer.name, sizes, body, origins=(self.origin,)))
        return self.load(buffer)

    def reduce(
        self,
        kind: str,
        body: Scalar,
        sizes: Sequence[Expr],
        reduce_sizes: Sequence[Expr],
        *,
        name: str = "",
    ) -> Value:
        """``kind`` over r… of a body over i… and r…; the result has ``sizes``.

        Of no elements it is the neutral element of ``kind``; argmin and argmax give int64.
        """
        dtype = dtypes.int64 if kind in ("argmin", "argmax") else body.dtype
        sizes, reduce_sizes = tuple(sizes), tuple(reduce_sizes)
        if has_no_elements(sizes):
            return zeros(sizes, dtype)
        if has_no_elements(reduce_sizes):
            return Value(dtype, sizes, neutral(kind, dtype))
        if kind in _OF_ONE and all(size is ONE for size in reduce_sizes):
            return self.pointwise(body, sizes, name=name)
        body = self.finished(body)
        buffer = self.new_buffer(dtype, sizes, self._named(name))
        node = Reduction(buffer.name, kind, sizes, reduce_sizes, body, origins=(self.origin,))
        self.nodes.append(node)
        return self.load(buffer)

    def contract(
        self,
        dtype: DType,
        sizes: Sequence[Expr],
        node: Contraction | DepthwiseConvolution | DepthwiseWeightGradient,
        *,
        name: str = "",
    ) -> Value:
        """Adds a node, given without output and origins, that writes ``sizes`` in ``dtype``."""
        buffer = self.new_buffer(dtype, sizes, self._named(name))
        made = map_bodies(node, self.finished)
        self.nodes.append(replace(made, output=buffer.name, origins=(self.origin,)))
        return self.load(buffer)

    def scatter(
        self,
        initial: Value,
        ranges: Sequence[Expr],
        index: Sequence[IndexLike],
        body: Scalar,
        combines: Literal["", "sum", "maximum"] = "",
    ) -> Value:
        """A copy of ``initial`` with elements set to ``body``, or as `Scatter.combines` says.

        ``index`` and ``body`` are over the symbols i… of ``ranges``.
        """
        if initial.is_empty or has_no_elements(ranges):
            return initial
        where = tuple(Index(i) if isinstance(i, Expr) else self.finished(i) for i in index)
        origins, element = (self.origin,), self.finished(body)
        is_known = not combines and all(isinstance(i, Index) for i in where)
        if is_known and element is self.finished(initial.at(where)):
            return initial  # Python assigns what ``x[0] += 1`` gives to ``x[0]``, which is it
        start = self.materialize(initial, name=f"{self.hint}_initial")
        buffer = self.new_buffer(initial.dtype, initial.sizes)
        self.nodes.append(
            Scatter(
                buffer.name, start.name, tuple(ranges), where, element, combines, origins=origins
            )
        )
        return self.load(buffer)

    def host(
        self,
        target: str,
        arguments: tuple[Any, ...],
        keywords: tuple[tuple[str, Any], ...],
        strides: Sequence[Sequence[Expr] | None] | None = None,
        changed: tuple[HostBuffer, ...] = (),
        *,
        on_device: bool = False,
    ) -> tuple[Value | None, ...]:
        """A `HostCall`; its outputs are the tensors among the operator's results, in order.

        A call without such results has one empty buffer as output, so that it is not left out.

        Args:
            strides: of each result, in elements; row-major where there are none.
            changed, on_device: as `HostCall` says.
        """
        made = self._result_buffers(strides)
        names = tuple(buffer.name for buffer in made if buffer is not None)
        if not names:
            effect = self.new_buffer(dtypes.int32, (ZERO,), origin=BufferOrigin.EFFECT)
            names = (effect.name,)
        call = HostCall(
            names, target, arguments, keywords, changed, on_device, origins=(self.origin,)
        )
        self.nodes.append(call)
        return tuple(None if buffer is None else self.load(buffer) for buffer in made)

    def user_kernel(
        self,
        kernel: WgslKernel,
        inputs: Sequence[Value],
        numbers: Sequence[Scalar],
        grid: tuple[Expr, Expr, Expr],
        iterations: Expr = ZERO,
    ) -> tuple[Value, ...]:
        """Adds a `UserKernel`, which gives the current operator's results."""
        given = tuple(HostBuffer(self.plain(value).name) for value in inputs)
        made = [buffer for buffer in self._result_buffers() if buffer is not None]
        names = tuple(buffer.name for buffer in made)
        finished = tuple(map(self.finished, numbers))
        self.nodes.append(
            UserKernel(names, given, kernel, finished, grid, iterations, origins=(self.origin,))
        )
        return tuple(map(self.load, made))

    def _result_buffers(
        self, strides: Sequence[Sequence[Expr] | None] | None = None
    ) -> list[Buffer | None]:
        """A buffer for each result of the current operator that is a tensor."""
        made: list[Buffer | None] = []
        for k, result in enumerate(self.results):
            name = self.hint if len(self.results) == 1 else f"{self.hint}_{k}"
            layout = None if strides is None else strides[k]
            if result is None:
                made.append(None)
            else:
                made.append(self.new_buffer(result.dtype, result.sizes, name, strides=layout))
        return made

    def plain(self, value: Value) -> Buffer:
        """`materialize`, as a contiguous buffer from the start of its memory."""
        buffer = self.materialize(value)
        if is_plain(buffer):
            return buffer
        copy = self.new_buffer(value.dtype, value.sizes, f"{self.hint}_contiguous")
        body = self.finished(value.body)
        self.nodes.append(Pointwise(copy.name, value.sizes, body, origins=(self.origin,)))
        return copy

    def materialize(self, value: Value, name: str = "") -> Buffer:
        """A buffer that holds exactly ``value``, made by a copy if there is none."""
        buffer = whole_buffer(value, self.buffers)
        if buffer is not None:
            return buffer
        if value.body in self.exact and not value.sizes:
            return self.exact[value.body]()
        made = self.new_buffer(value.dtype, value.sizes, name or f"{self.hint}_copy")
        if not self.target.supports(value.dtype):
            self.nodes.append(self._host_full(made, value))
        elif not value.is_empty:
            body = self.finished(value.body)
            self.nodes.append(Pointwise(made.name, value.sizes, body, origins=(self.origin,)))
        return made

    def number_of_input(self, value: Value) -> Value:
        """A float64 graph input that holds one number, where the GPU cannot read float64.

        PyTorch passes Python floats that may change between calls as such inputs; the host converts
        them to float32. What is to be float64 in the end is computed on the host, see `exact`.
        """
        made = self.new_buffer(dtypes.float32, (), f"{self.hint}_f32")
        given = self.materialize(value)
        arguments = (HostBuffer(given.name),)
        keywords = (("dtype", "torch.float32"),)
        self.nodes.append(
            HostCall(
                (made.name,), "aten._to_copy.default", arguments, keywords, origins=(self.origin,)
            )
        )
        number = self.load(made).cast(value.dtype)
        self.exact[number.body] = lambda: given
        return number

    def finished(self, body: Scalar) -> Scalar:
        """A body as nodes hold it: folded, and without float64 where the GPU has none.

        Float64 arithmetic on sizes and constants stays, since the host computes it before a call;
        other float64 arithmetic whose result becomes another dtype is done in float32.
        """
        body = fold(body)
        if body.dtype is dtypes.float64:
            return body
        of_tensors = any(load.dtype is dtypes.float64 for load in loads_of(body))
        if of_tensors and self.target.supports(dtypes.float64):
            return body
        return fold(narrow(body, dtypes.float64, dtypes.float32, self._stays_float64))

    def _stays_float64(self, node: Scalar) -> bool:
        """Whether a node converts a number from sizes that is computed in float64."""
        match node:
            case Op("cast", (Op(dtype=dtypes.float64) as number,), dtype):
                is_single = dtype.compute == "f32"
                return (is_single or self.target.supports(dtypes.float64)) and is_host_number(
                    number
                )
        return False

    def _host_full(self, buffer: Buffer, value: Value) -> HostCall:
        # A value of a dtype without kernels is a whole buffer or a number.
        target = "aten.full.default"
        arguments: tuple[Any, ...]
        body = fold(value.body)
        if isinstance(body, Const):
            arguments = (value.sizes, body.value)
        elif isinstance(body, Index) and is_host_number(body):
            arguments = (value.sizes, body.expr)
        else:
            number = self.finished(cast(value.body, dtypes.float32))
            target = "aten._to_copy.default"
            single = self.materialize(Value(dtypes.float32, (), number))
            arguments = (HostBuffer(single.name),)
        keywords = (("dtype", f"torch.{value.dtype.name}"),)
        return HostCall((buffer.name,), target, arguments, keywords, origins=(self.origin,))

    def constant(self, array: Any, dtype: DType, sizes: Sequence[Expr], name: str) -> Value:
        """A buffer with contents known when compiling."""
        buffer = self.new_buffer(dtype, sizes, name, BufferOrigin.CONSTANT)
        self.constants[buffer.name] = array
        return self.load(buffer)

    def _named(self, name: str) -> str:
        return f"{self.hint}_{name}" if name else self.hint


def operand(arg: Operand, sizes: Sequence[Expr], dtype: DType) -> Scalar:
    """One element of a tensor or number broadcast to ``sizes``, converted to ``dtype``."""
    if isinstance(arg, Value):
        return cast(arg.at(broadcast_index(arg, positions(sizes))), dtype)
    if isinstance(arg, Expr):
        if arg.is_constant:
            return const(arg.constant, dtype)
        return cast(Index(arg), dtype)
    return const(arg, dtype)


def as_value(arg: Operand, sizes: Sequence[Expr], dtype: DType) -> Value:
    """``arg`` as a tensor of ``sizes`` and ``dtype``, without a node."""
    if isinstance(arg, Value):
        return expand(arg.cast(dtype), sizes)
    return Value(dtype, tuple(sizes), operand(arg, sizes, dtype))


def whole_buffer(value: Value, buffers: dict[str, Buffer]) -> Buffer | None:
    """The buffer that ``value`` is, element by element, if it is one."""
    if not isinstance(value.body, Load):
        return None
    buffer = buffers[value.body.buffer]
    wanted = tuple(Index(i) for i in positions(value.sizes))
    if buffer.sizes == value.sizes and value.body.index == wanted:
        return buffer
    return None


def masked(condition: Scalar, body: Scalar, other: Scalar | float) -> Scalar:
    """``Masked(condition, body, other)``, or one of the two where no choice is left.

    None is left for a constant condition, and where both are the same constant. A number as
    ``other`` is a constant of the body's dtype.
    """
    if isinstance(other, (int, float)):
        other = const(other, body.dtype)
    if isinstance(condition, Const):
        return body if condition.value else other
    if isinstance(body, Const) and body is other:
        return body
    return Masked(condition, body, other)


def _is_free(body: Scalar, is_number: bool) -> bool:
    """Whether a body is cheaper to compute again than to load; any number made from sizes is."""
    for count, node in enumerate(walk(body)):
        if isinstance(node, (Load, Masked, FunctionCall)) or count >= FREE_NODES:
            return False
        if isinstance(node, Op) and node.name not in _FREE_OPS and not is_number:
            return False
    return True
