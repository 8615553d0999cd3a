"""Reads the text of the IR back: the inverse of `text`."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..dtypes import BY_SHORT
from ..sizes import Expr, IntLike, as_expr, contiguous_strides, symbol
from .attention_nodes import Attention, AttentionGradient
from .graph import Buffer, BufferOrigin, GraphInput, GraphOutput, LoopGraph
from .nodes import (
    BufferArgument,
    Contraction,
    Fourier,
    HostCall,
    Node,
    Pointwise,
    Reduction,
    Scatter,
    TriangularSolve,
)
from .parse_scalar import FLOATS, Names, ParseError
from .spaces import Origin, iteration_symbols

_ORIGINS = {
    "input": BufferOrigin.INPUT,
    "constant": BufferOrigin.CONSTANT,
    "prepared": BufferOrigin.PREPARED,
    "effect": BufferOrigin.EFFECT,
}


def parse_graph(text: str, constants: Mapping[str, Any] | None = None) -> LoopGraph:
    """A graph as `text.format_graph` writes it; the contents of constants are given apart."""
    return _GraphParser(constants or {}).parse(text)


class _GraphParser:
    def __init__(self, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.name = ""
        self.sizes: dict[str, Expr] = {}
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[GraphInput] = []
        self.nodes: list[Node] = []
        self.outputs: list[GraphOutput] = []

    def parse(self, text: str) -> LoopGraph:
        for line in text.splitlines():
            code, _, comment = line.partition("  # ")
            for statement in ast.parse(code).body:
                self._statement(statement, parse_origins(comment))
        return LoopGraph(
            self.name,
            self.buffers,
            tuple(self.nodes),
            tuple(self.inputs),
            tuple(self.outputs),
            dict(self.constants),
        )

    def _statement(self, tree: ast.stmt, origins: tuple[Origin, ...]) -> None:
        match tree:
            case ast.AnnAssign(
                target=ast.Name(id=name), annotation=shape, value=ast.Call() as call
            ):
                self._buffer(name, shape, call)
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=kind)) as call):
                if kind == "size" and isinstance(target, ast.Name):
                    (lower,) = call.args
                    self.sizes[target.id] = symbol(target.id, int(ast.literal_eval(lower)))
                else:
                    self.nodes.append(self._node(kind, _targets(target), call, origins))
            case ast.Expr(value=ast.Call(func=ast.Name(id=kind)) as call):
                self._interface(kind, call)
            case _:
                raise ParseError(ast.unparse(tree))

    def _buffer(self, name: str, shape: ast.expr, call: ast.Call) -> None:
        assert isinstance(shape, ast.Subscript)
        assert isinstance(shape.value, ast.Name)
        assert isinstance(call.func, ast.Name)
        names = Names(self.sizes, {})
        is_list = isinstance(shape.slice, ast.Tuple)
        sizes = names.exprs(shape.slice) if is_list else (names.expr(shape.slice),)
        keywords = {k.arg: k.value for k in call.keywords}
        strides = contiguous_strides(sizes)
        if "strides" in keywords:
            strides = names.exprs(keywords["strides"])
        offset = names.expr(keywords["offset"]) if "offset" in keywords else as_expr(0)
        origin = _ORIGINS.get(call.func.id, BufferOrigin.INTERMEDIATE)
        dtype = BY_SHORT[shape.value.id]
        self.buffers[name] = Buffer(name, dtype, sizes, strides, offset, origin)

    def _interface(self, kind: str, call: ast.Call) -> None:
        names = Names(self.sizes, {})
        keywords = {k.arg: k.value for k in call.keywords}
        first = call.args[0] if call.args else None
        if kind == "graph":
            assert first is not None
            self.name = ast.literal_eval(first)
        elif kind == "argument":
            size = keywords.get("size")
            is_size = size is not None and not _is_none(size)
            self.inputs.append(
                GraphInput(
                    buffer=first.id if isinstance(first, ast.Name) else None,
                    size=names.expr(size) if is_size and size is not None else None,
                    static="static" in keywords,
                )
            )
        elif isinstance(first, ast.Name) and first.id in self.buffers:
            mutates = keywords.get("mutates")
            self.outputs.append(
                GraphOutput(
                    first.id,
                    names.exprs(keywords["sizes"]),
                    names.exprs(keywords["strides"]),
                    names.expr(keywords["offset"]),
                    mutates=None if mutates is None else int(ast.literal_eval(mutates)),
                )
            )
        elif "size" in keywords:
            self.outputs.append(GraphOutput(size=names.expr(keywords["size"])))
        else:
            assert first is not None
            self.outputs.append(GraphOutput(constant=_constant(first)))

    def _node(
        self, kind: str, targets: tuple[str, ...], call: ast.Call, origins: tuple[Origin, ...]
    ) -> Node:
        names = Names(self.sizes, {name: b.dtype for name, b in self.buffers.items()})
        args = call.args
        if kind == "host":
            target, arguments, keywords = args
            call_arguments = self._argument(arguments)
            return HostCall(
                targets,
                ast.literal_eval(target),
                call_arguments,
                self._argument(keywords),
                origins,
            )
        if kind in ("attention", "unsafe_attention"):
            return self._attention(names, targets, call, origins)
        (output,) = targets
        match kind:
            case "pointwise":
                ranges = self._space(names, call, [("i", args[0])])
                return Pointwise(output, ranges[0], names.scalar(args[1]), origins)
            case "reduction":
                kept, reduced = self._space(names, call, [("i", args[1]), ("r", args[2])])
                reduction = ast.literal_eval(args[0])
                body = names.scalar(args[3])
                return Reduction(output, kept, reduced, reduction, body, origins)
            case "contraction":
                prefixes = zip("bmnk", args[:4], strict=True)
                batch, rows, columns, inner = self._space(names, call, list(prefixes))
                lhs, rhs = map(names.scalar, args[5:7])
                index = names.exprs(args[4])
                return Contraction(output, batch, rows, columns, inner, lhs, rhs, index, origins)
            case "scatter":
                ranges = self._space(names, call, [("i", args[1])])
                assert isinstance(args[0], ast.Name)
                assert isinstance(args[2], ast.List)
                at = tuple(map(names.scalar, args[2].elts))
                accumulate = bool(ast.literal_eval(args[4]))
                body = names.scalar(args[3])
                return Scatter(output, args[0].id, ranges[0], at, body, accumulate, origins)
            case "attention_gradient":
                return self._attention_gradient(names, output, call, origins)
            case "triangular_solve":
                return self._triangular_solve(names, output, call, origins)
            case "fourier":
                return self._fourier(names, output, call, origins)
        raise ParseError(f"unknown node {kind}")

    def _attention(
        self, names: Names, outputs: tuple[str, ...], call: ast.Call, origins: tuple[Origin, ...]
    ) -> Attention:
        sizes = names.exprs(call.args[0])
        batch, heads, queries, keys, size, value_size = sizes
        causal, scale, parts = (ast.literal_eval(arg) for arg in call.args[1:4])
        prefixes = ("b", (batch, heads)), *zip("mnkd", ([s] for s in sizes[2:]), strict=True)
        bodies = self._bodies(names, call, prefixes, call.args[4:], Attention.BODIES)
        return Attention(
            output=outputs[0],
            sizes=(batch, heads, queries, keys, size, value_size),
            causal=causal,
            scale=scale,
            origins=origins,
            parts=parts,
            logsumexp=outputs[1] if len(outputs) > 1 else None,
            safe=ast.unparse(call.func) == "attention",
            **bodies,
        )

    def _attention_gradient(
        self, names: Names, output: str, call: ast.Call, origins: tuple[Origin, ...]
    ) -> AttentionGradient:
        sizes = names.exprs(call.args[1])
        batch, heads, group, queries, keys, size, value_size = sizes
        of, causal, scale = (ast.literal_eval(call.args[k]) for k in (0, 2, 3))
        prefixes = ("b", (batch, heads)), *zip("gmnkd", ([s] for s in sizes[2:]), strict=True)
        bodies = self._bodies(names, call, prefixes, call.args[4:], AttentionGradient.BODIES)
        return AttentionGradient(
            output=output,
            of=of,
            sizes=(batch, heads, group, queries, keys, size, value_size),
            causal=causal,
            scale=scale,
            origins=origins,
            **bodies,
        )

    def _triangular_solve(
        self, names: Names, output: str, call: ast.Call, origins: tuple[Origin, ...]
    ) -> TriangularSolve:
        batch, (rows, columns) = names.exprs(call.args[0]), names.exprs(call.args[1])
        prefixes = ("b", batch), ("m", (rows,)), ("k", (rows,)), ("n", (columns,))
        bodies = self._bodies(names, call, prefixes, call.args[3:], TriangularSolve.BODIES)
        unit = bool(ast.literal_eval(call.args[2]))
        return TriangularSolve(output, batch, (rows, columns), unit=unit, origins=origins, **bodies)

    def _fourier(
        self, names: Names, output: str, call: ast.Call, origins: tuple[Origin, ...]
    ) -> Fourier:
        radices, forward, scale = (ast.literal_eval(arg) for arg in call.args[1:4])
        ranges, n = names.exprs(call.args[0]), as_expr(math.prod(radices))
        prefixes = ("i", ranges), ("j", [n]), ("k", [n]), ("w", [n - radices[0]])
        bodies = self._bodies(names, call, prefixes, call.args[6:], Fourier.BODIES)
        index = names.exprs(call.args[4])
        mirror = None if _is_none(call.args[5]) else names.exprs(call.args[5])
        return Fourier(
            output,
            ranges,
            radices,
            forward,
            scale,
            index,
            mirror=mirror,
            origins=origins,
            **bodies,
        )

    def _bodies(
        self,
        names: Names,
        call: ast.Call,
        spaces: Sequence[tuple[str, Sequence[Expr]]],
        trees: Sequence[ast.expr],
        fields: Sequence[str],
    ) -> dict[str, Any]:
        """The scalars of a node by field; None for those that are not there."""
        for prefix, ranges in spaces:
            _add_symbols(names, prefix, ranges)
        names.define(call.keywords)
        found = dict.fromkeys(fields, None) | dict(zip(fields, trees, strict=False))
        return {
            field: None if tree is None or _is_none(tree) else names.scalar(tree)
            for field, tree in found.items()
        }

    def _space(
        self, names: Names, call: ast.Call, groups: Sequence[tuple[str, ast.expr]]
    ) -> list[tuple[Expr, ...]]:
        """The ranges of each group; their symbols and the shared definitions become known."""
        spaces = []
        for prefix, tree in groups:
            ranges = names.exprs(tree)
            _add_symbols(names, prefix, ranges)
            spaces.append(ranges)
        names.define(call.keywords)
        return spaces

    def _argument(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Tuple(elts=items):
                return tuple(self._argument(item) for item in items)
            case ast.Call(func=ast.Name(id="argument"), args=[ast.Name(id=name)]):
                return BufferArgument(name)
            case ast.Call(func=ast.Name(id="index"), args=[expr]):
                return Names(self.sizes, {}).expr(expr)
            case _:
                return _constant(tree)


def _add_symbols(names: Names, prefix: str, ranges: Sequence[IntLike]) -> None:
    for position, expr in enumerate(iteration_symbols(prefix, ranges)):
        names.symbols[f"{prefix}{position}"] = expr


def _targets(tree: ast.expr) -> tuple[str, ...]:
    items = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return tuple(item.id for item in items if isinstance(item, ast.Name))


def _is_none(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Constant) and tree.value is None


def _constant(tree: ast.expr) -> Any:
    match tree:
        case ast.Name(id=name) if name in FLOATS:
            return FLOATS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -FLOATS["inf"]
        case _:
            return ast.literal_eval(tree)


def parse_origins(comment: str) -> tuple[Origin, ...]:
    """``op "source", op "source"`` of a node's comment."""
    origins, decoder = [], json.JSONDecoder()
    while comment:
        op, _, rest = comment.partition(" ")
        source, end = decoder.raw_decode(rest)
        origins.append(Origin(op, source))
        comment = rest[end:].removeprefix(", ")
    return tuple(origins)
