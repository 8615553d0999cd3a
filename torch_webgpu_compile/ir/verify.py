"""Checks of loop graphs between passes. A failure is a bug of the pass before.

`verify_loop_graph` raises `VerificationError`, naming the node; for schedules see
`verify_schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import dtypes
from ..dtypes import Kind
from ..errors import VerificationError
from ..sizes import Expr, Symbol, as_expr, symbols_of
from .attention_nodes import Attention, AttentionGradient
from .graph import (
    Buffer,
    BufferOrigin,
    GraphOutput,
    LoopGraph,
    is_effect,
)
from .nodes import (
    REDUCTIONS,
    Contraction,
    Fourier,
    HostCall,
    Node,
    Pointwise,
    Reduction,
    Scatter,
    TriangularSolve,
    inputs_of,
    outputs_of,
)
from .scalar import OPS, Checked, Index, Load, Masked, Op, Scalar, scalar_symbols, walk
from .spaces import iteration_symbols, named_bodies, symbol_keys

_CONTRACTED = (dtypes.float32, dtypes.float64, dtypes.int32)


def verify_loop_graph(graph: LoopGraph, verified: LoopGraph | None = None) -> None:
    """Raises VerificationError unless every rule of the loop IR holds.

    Args:
        graph: what to look at.
        verified: a graph in which they hold. Nodes that it has too, over the same buffers, are
            known to be right.
    """
    known = _Known(graph, verified)
    for buffer in graph.buffers.values():
        require(len(buffer.sizes) == len(buffer.strides), buffer.name, "as many strides as sizes")
    written = set(graph.given)
    for name in written:
        require(name in graph.buffers, name, "a declared buffer")
    sizes = _size_symbols(graph)
    for node in graph.nodes:
        for name in inputs_of(node):
            require(name in graph.buffers, _title(node), f"a declaration of {name}")
            require(
                name in written or is_empty(graph.buffers[name]),
                _title(node),
                f"{name} written before it is read",
            )
        for name in outputs_of(node):
            require(name in graph.buffers, _title(node), f"a declaration of {name}")
            require(name not in written, _title(node), f"{name} written once only")
            origin = graph.buffers[name].origin
            allowed = origin is BufferOrigin.INTERMEDIATE or is_effect(node, graph)
            require(allowed, _title(node), f"{name} an intermediate")
            written.add(name)
        if not known(node):
            verify_node(node, graph, sizes)
    for position, output in enumerate(graph.outputs):
        verify_output(position, output, graph, written)


class _Known:
    """Whether a node of a graph was verified as a node of another one."""

    def __init__(self, graph: LoopGraph, verified: LoopGraph | None) -> None:
        alike = verified is not None and verified.inputs == graph.inputs  # they declare symbols
        self._nodes = {id(node) for node in verified.nodes} if verified and alike else set()
        self._buffers = graph.buffers
        self._before = verified.buffers if verified else {}

    def __call__(self, node: Node) -> bool:
        return id(node) in self._nodes and all(
            self._buffers[name] == self._before.get(name)
            for name in (*inputs_of(node), *outputs_of(node))
        )


def verify_node(node: Node, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    """Raises VerificationError unless a node fits the declared buffers and size symbols."""
    title = _title(node)
    match node:
        case Pointwise():
            _body(title, node.body, [("i", node.ranges)], graph, sizes)
            _shape(title, graph.buffers[node.output], node.ranges)
            _same_dtype(title, node.body, graph.buffers[node.output])
        case Reduction():
            groups = [("i", node.ranges), ("r", node.reduce_ranges)]
            _body(title, node.body, groups, graph, sizes)
            _shape(title, graph.buffers[node.output], node.ranges)
            _reduction(title, node, graph.buffers[node.output])
        case Contraction():
            _contraction(title, node, graph, sizes)
        case Attention() | AttentionGradient():
            _attention(title, node, graph, sizes)
        case TriangularSolve():
            for name, body in named_bodies(node).items():
                _body(title, body, node.spaces[name], graph, sizes)
                _same_dtype(title, body, graph.buffers[node.output])
            _shape(title, graph.buffers[node.output], (*node.batch, *node.sizes))
            require(node.rhs.dtype.is_float, title, "floats")
        case Fourier():
            _fourier(title, node, graph, sizes)
        case Scatter():
            output, initial = graph.buffers[node.output], graph.buffers[node.initial]
            require(output.sizes == initial.sizes, title, "the sizes of its initial buffer")
            require(output.dtype is initial.dtype, title, "the dtype of its initial buffer")
            require(len(node.index) == len(output.sizes), title, "an index per dimension")
            for entry in node.index:
                _body(title, entry, [("i", node.ranges)], graph, sizes)
                require(entry.dtype is dtypes.int64, title, "int64 indices")
            _body(title, node.body, [("i", node.ranges)], graph, sizes)
            _same_dtype(title, node.body, output)
        case HostCall():
            require(node.target.count(".") == 2, title, "a target namespace.name.overload")


def _reduction(title: str, node: Reduction, buffer: Buffer) -> None:
    require(node.kind in REDUCTIONS, title, f"one of the reductions {REDUCTIONS}")
    wanted = dtypes.int64 if node.kind in ("argmin", "argmax") else node.body.dtype
    require(buffer.dtype is wanted, title, f"an output of {wanted}, not {buffer.dtype}")
    is_test = node.kind in ("any", "all")
    require(is_test == (node.body.dtype.kind is Kind.BOOL), title, "bool for any and all alone")


def _contraction(title: str, node: Contraction, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    batch, rows = ("b", node.batch), ("m", node.rows)
    columns, inner = ("n", node.columns), ("k", node.inner)
    _body(title, node.lhs, [batch, rows, inner], graph, sizes)
    _body(title, node.rhs, [batch, columns, inner], graph, sizes)
    dtype = node.lhs.dtype
    same = dtype is node.rhs.dtype and dtype in _CONTRACTED
    require(same, title, "float32, float64 or int32 operands")
    buffer = graph.buffers[node.output]
    require(len(node.index) == len(buffer.sizes), title, "an index per dimension")
    allowed = _symbols([batch, rows, columns]) | sizes
    used: set[Symbol] = set()
    for entry in node.index:
        _known(title, symbols_of(entry), allowed)
        used |= symbols_of(entry)
    for symbol in _symbols([batch, rows, columns]):
        extent = symbol.extent
        one = extent is not None and extent.is_constant and extent.constant == 1
        require(one or symbol in used, title, f"{symbol} in its output index")


def _attention(
    title: str, node: Attention | AttentionGradient, graph: LoopGraph, sizes: frozenset[Symbol]
) -> None:
    spaces = node.spaces
    for name, body in named_bodies(node).items():
        _body(title, body, spaces[name], graph, sizes)
        dtype = dtypes.bool_ if name == "replaced" else dtypes.float32
        require(body.dtype is dtype, title, f"a {dtype.name} {name}")
    output = graph.buffers[node.output]
    if isinstance(node, AttentionGradient):
        require(node.of in ("queries", "keys"), title, "queries or keys")
        _shape(title, output, node.output_sizes)
        return
    batch, heads, queries, *_ = node.sizes
    if node.parts > 1:
        _shape(title, output, (as_expr(node.parts), batch, heads, queries, node.wide + 4))
        alone = node.kept is None and node.logsumexp is None
        require(alone, title, "no dropout and no logsumexp with parts")
    if node.logsumexp is not None:
        statistic = graph.buffers[node.logsumexp]
        rows = (batch, heads, queries)
        _shape(title, statistic, rows if node.safe else (as_expr(2), *rows))
        require(statistic.dtype is dtypes.float32, title, "a float32 logsumexp")


def _fourier(title: str, node: Fourier, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    spaces = node.spaces
    for name, body in named_bodies(node).items():
        _body(title, body, spaces[name], graph, sizes)
        require(body.dtype is dtypes.float32, title, f"a float32 {name}")
    require(min(node.radices, default=0) > 1, title, "radices of at least 2")
    require((node.root_real is not None) == (len(node.radices) > 1), title, "roots of its stages")
    for name in ("root", "factor"):
        parts = [getattr(node, f"{name}_{part}") is None for part in ("real", "imaginary")]
        require(parts[0] == parts[1], title, f"both parts of its {name}")
    buffer = graph.buffers[node.output]
    require(buffer.dtype is dtypes.float32, title, "a float32 output")
    pairs = buffer.sizes[len(node.index) :]
    require(pairs in ((), (as_expr(2),)), title, "an index per dimension, but of a part")
    allowed = _symbols(spaces["factor_real"]) | sizes
    mirror = node.index if node.mirror is None else node.mirror
    require(len(mirror) == len(node.index), title, "an index per dimension of conjugates")
    for entry in (*node.index, *mirror):
        _known(title, symbols_of(entry), allowed)


def verify_output(
    position: int, output: GraphOutput, graph: LoopGraph, written: Iterable[str | None]
) -> None:
    """Raises VerificationError unless the output names a buffer that is declared and written.

    ``written`` are the buffers with contents: inputs, constants and results of nodes.
    """
    title = f"output {position}"
    if output.buffer is None:
        return
    require(output.buffer in graph.buffers, title, f"a declaration of {output.buffer}")
    buffer = graph.buffers[output.buffer]
    known = output.buffer in set(written) or is_empty(buffer)
    require(known, title, f"a node that writes {output.buffer}")
    require(len(output.sizes) == len(output.strides), title, "as many strides as sizes")
    require(output.offset is not None, title, "an offset")


def _body(
    title: str,
    body: Scalar,
    groups: Sequence[tuple[str, Sequence[Expr]]],
    graph: LoopGraph,
    sizes: frozenset[Symbol],
) -> None:
    _known(title, scalar_symbols(body), _symbols(groups) | sizes)
    for node in walk(body):
        match node:
            case Load(name, index, dtype):
                require(name in graph.buffers, title, f"a declaration of {name}")
                buffer = graph.buffers[name]
                require(len(index) == len(buffer.sizes), title, f"{buffer.sizes} to index {name}")
                require(dtype is buffer.dtype, title, f"{name} loaded as {buffer.dtype}")
                for entry in index:
                    require(entry.dtype is dtypes.int64, title, f"int64 indices into {name}")
            case Masked(condition, inner, other):
                require(condition.dtype is dtypes.bool_, title, "a bool condition in masked")
                require(inner.dtype is other.dtype, title, "one dtype in masked")
            case Checked(position, given, size, _):
                require(position.dtype is dtypes.int64, title, "an int64 to check")
                require(given.dtype.is_integer, title, "an integer that was given")
                require(isinstance(size, Index), title, "an index expression to check against")
            case Op(name, args, _):
                require(name in OPS, title, f"a known scalar op instead of {name}")
                require(len(args) == OPS[name].arity, title, f"{OPS[name].arity} args of {name}")


def _known(title: str, used: Iterable[Symbol], allowed: Iterable[Symbol]) -> None:
    unknown = sorted(s.name for s in set(used) - set(allowed))
    require(not unknown, title, f"symbols of its ranges, not {unknown}")


def _symbols(groups: Sequence[tuple[str, Sequence[Expr]]]) -> frozenset[Symbol]:
    return frozenset(
        key for prefix, ranges in groups for key in symbol_keys(iteration_symbols(prefix, ranges))
    )


def _size_symbols(graph: LoopGraph) -> frozenset[Symbol]:
    """Size symbols that inputs bind."""
    found: frozenset[Symbol] = frozenset()
    for spec in graph.inputs:
        if spec.size is not None:
            found |= symbols_of(spec.size)
        if spec.buffer is not None:
            for size in graph.buffers[spec.buffer].sizes:
                found |= symbols_of(size)
    return found


def _shape(title: str, buffer: Buffer, ranges: Sequence[Expr]) -> None:
    require(buffer.sizes == tuple(ranges), title, f"ranges {buffer.sizes} of its output")


def _same_dtype(title: str, body: Scalar, buffer: Buffer) -> None:
    require(body.dtype is buffer.dtype, title, f"a body of {buffer.dtype}, not {body.dtype}")


def is_empty(buffer: Buffer) -> bool:
    """Whether a size is known to be 0."""
    return any(size.is_constant and size.constant == 0 for size in buffer.sizes)


def _title(node: Node) -> str:
    ops = ", ".join(origin.op for origin in node.origins)
    return f"{type(node).__name__} {', '.join(outputs_of(node))} ({ops})"


def require(condition: bool, title: str, wanted: str) -> None:
    """Raises VerificationError with "``title`` needs ``wanted``" unless the condition holds."""
    if not condition:
        raise VerificationError(f"{title} needs {wanted}")
