"""Checks of loop graphs between passes. A failure is a bug of the pass before.

`verify_loop_graph` raises `VerificationError`, naming the node; for schedules see
`verify_schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from .. import dtypes
from ..errors import VerificationError
from ..symbolic.sizes import Expr, Symbol, symbols_of
from .buffers import BufferOrigin
from .graph import GraphOutput, LoopGraph, is_effect
from .nodes import computed_at, inputs_of, outputs_of
from .scalar import (
    CALL_DTYPES,
    OPS,
    Checked,
    FunctionCall,
    Index,
    Load,
    Local,
    Masked,
    Op,
    Scalar,
    scalar_symbols,
    walk,
)
from .spaces import Node, symbols_in


def verify_loop_graph(graph: LoopGraph, verified: LoopGraph | None = None) -> None:
    """Raises VerificationError unless every rule of the loop IR holds.

    Args:
        graph: what to look at.
        verified: a graph in which they hold. Nodes that it has too, over the same buffers, are
            known to be right.
    """
    unchanged: set[int] = set()
    if verified is not None and verified.inputs == graph.inputs:  # they declare symbols
        unchanged = {id(node) for node in verified.nodes}
    before = {} if verified is None else verified.buffers
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
                name in written or graph.buffers[name].is_empty,
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
        names = (*inputs_of(node), *outputs_of(node))
        same = all(graph.buffers[name] == before.get(name) for name in names)
        if id(node) not in unchanged or not same:
            verify_node(node, graph, sizes)
    for position, output in enumerate(graph.outputs):
        verify_output(position, output, graph, written)


def verify_node(node: Node, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    """Raises VerificationError unless a node fits the declared buffers and size symbols.

    Its scalars and index expressions are looked at in their spaces, then its own rules.
    """
    title = _title(node)
    for field, space, value in computed_at(node):
        allowed = {*symbols_in(space), *sizes}
        if isinstance(value, Expr):
            _known(title, symbols_of(value), allowed)
        else:
            _body(title, value, graph, allowed, node.locals.get(field, ()))
    for holds, wanted in node.rules(graph.buffers):
        require(holds, title, wanted)


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
    known = output.buffer in set(written) or buffer.is_empty
    require(known, title, f"a node that writes {output.buffer}")
    require(len(output.sizes) == len(output.strides), title, "as many strides as sizes")
    require(output.offset is not None, title, "an offset")


def _body(
    title: str,
    body: Scalar,
    graph: LoopGraph,
    allowed: AbstractSet[Symbol],
    local: Sequence[str],
) -> None:
    _known(title, scalar_symbols(body), allowed)
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
            case Local(name, _):
                require(name in local, title, f"a body that follows {name}")
            case Op(name, args, _):
                require(name in OPS, title, f"a known scalar op instead of {name}")
                require(len(args) == OPS[name].arity, title, f"{OPS[name].arity} args of {name}")
            case FunctionCall(function, args, result):
                wanted = [CALL_DTYPES[type] for _, type in function.parameters]
                fits = [a.dtype for a in args] == wanted
                require(fits, title, f"operands of {wanted} for {function.name}")
                require(result < len(function.results), title, f"a result of {function.name}")


def _known(title: str, used: AbstractSet[Symbol], allowed: AbstractSet[Symbol]) -> None:
    unknown = sorted(s.name for s in used - allowed)
    require(not unknown, title, f"symbols of its ranges, not {unknown}")


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


def _title(node: Node) -> str:
    ops = ", ".join(origin.op for origin in node.origins)
    return f"{type(node).__name__} {', '.join(outputs_of(node))} ({ops})"


def require(condition: bool, title: str, wanted: str) -> None:
    """Raises VerificationError with "``title`` needs ``wanted``" unless the condition holds."""
    if not condition:
        raise VerificationError(f"{title} needs {wanted}")
