"""``webgpu::attention`` and its gradient as nodes of their own, defined in ``torch_ops``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.attention_nodes import Attention, AttentionGradient
from ..ir.scalar import Scalar, apply, cast, const, loads_of
from ..symbolic.sizes import ONE, ZERO, Expr, as_expr, contiguous_strides, floordiv, linearize
from ..torch_ops.attention_ops import AttentionOptions
from ..torch_ops.score_functions import parsed
from .builder import Builder, operand
from .joining import in_one_buffer
from .random import BITS, random_bits
from .registry import NotLowered, lowers
from .score_functions import lowered_function
from .value import IndexLike, Value, broadcast_index, positions, reshape, select

F32 = dtypes.float32


Options = AttentionOptions[Value]


@lowers(torch.ops.webgpu.attention.default)
def _attention(
    builder: Builder, query: Value, key: Value, value: Value, *options: Any, **named: Any
) -> tuple[Value | None, Value | None]:
    """The result and the logsumexp of attention; see `lower_attention`."""
    return lower_attention(builder, query, key, value, AttentionOptions(*options, **named))


def lower_attention(
    builder: Builder, query: Value, key: Value, value: Value, options: Options
) -> tuple[Value | None, Value | None]:
    """(softmax(query · keyᵀ · scale + bias) · value, its logsumexp), without scores in memory.

    Query [batch, heads, queries, size], key [batch, key heads, keys, size], value [batch, key
    heads, keys, value size]; the logsumexp is float32 [batch, heads, queries] and made only if it
    is read. Query heads share key heads: key head = head // (heads / key heads). All is computed in
    float32.

    Raises NotLowered: for float64, for a logsumexp without values, and where the driver bounds
    loops below what the keys take.
    """
    _check_dtype(query)
    batch, heads, queries, size = query.sizes
    _, key_heads, keys, value_size = value.sizes
    _check_loops(builder, keys)
    out = (batch, heads, queries, value_size)
    rows = (batch, heads, queries) if options.safe else (as_expr(2), batch, heads, queries)
    if any(n is ZERO for n in (*out, keys)):
        if value_size is ZERO and builder.is_used(1):
            raise NotLowered("the logsumexp of attention without values")
        lowest = const(float("-inf"), F32)
        return Value(query.dtype, out, const(0, query.dtype)), Value(F32, rows, lowest)
    b, h = positions((batch, heads), "b")
    m, n, k, d = _symbols(m=queries, n=keys, k=size, d=value_size)
    shared = h if heads is key_heads else floordiv(h, floordiv(heads, key_heads))
    buffer = builder.new_buffer(query.dtype, out, strides=_heads_inside(out))
    statistic = None
    if builder.is_used(1):
        statistic = builder.new_buffer(F32, rows, f"{builder.hint}_logsumexp")
    kept = _kept(options, (batch, heads, queries, keys), (b, h, m, n))
    node = Attention(
        output=buffer.name,
        sizes=(batch, heads, queries, keys, size, value_size),
        query=_float(query, [b, h, m, k]),
        key=_float(key, [b, shared, n, k]),
        value=_float(value, [b, shared, n, d]),
        bias=None if options.bias is None else _float(options.bias, [b, h, m, n]),
        causal=bool(options.causal),
        scale=operand(options.scale, (), F32),
        origins=(builder.origin,),
        kept=kept,
        logsumexp=None if statistic is None else statistic.name,
        replaced=None if options.replaced is None else _at(options.replaced, [b, h, m, n]),
        safe=bool(options.safe),
        score_mod=_score_function(builder, options, (batch, heads, queries, keys), (b, h, m, n)),
    )
    builder.nodes.append(node)
    return builder.load(buffer), None if statistic is None else builder.load(statistic)


@lowers(torch.ops.webgpu.attention_backward.default)
def _attention_backward(
    builder: Builder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    bias: Value | None,
    logsumexp: Value,
    delta: Value,
    *options: Any,
    **named: Any,
) -> tuple[Value | None, Value | None, Value | None]:
    """The gradients of query, key and value; see `lower_attention_backward`."""
    found = AttentionOptions(bias, *options, **named)
    return lower_attention_backward(builder, grad, query, key, value, found, logsumexp, delta)


def lower_attention_backward(
    builder: Builder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    options: Options,
    logsumexp: Value,
    delta: Value,
) -> tuple[Value | None, Value | None, Value | None]:
    """The gradients of query, key and value, from that of the result and from its logsumexp.

    Two nodes: one for the gradient of the query, one for those of key and value, which compute the
    weights again. ``delta`` is Σ grad · result of each query.

    Raises NotLowered: for float64, for heads of size 0, and where the driver bounds loops below
    what the keys or queries take.
    """
    _check_dtype(query)
    batch, heads, queries, size = query.sizes
    _, key_heads, keys, value_size = value.sizes
    if size is ZERO:
        raise NotLowered("attention of heads without elements")
    _check_loops(builder, keys, queries)
    if any(n is ZERO for n in (batch, heads, queries, keys, value_size)):
        empty = (Value(v.dtype, v.sizes, const(0, v.dtype)) for v in (query, key, value))
        return next(empty), next(empty), next(empty)
    group = ONE if heads is key_heads else floordiv(heads, key_heads)
    b, h = positions((batch, key_heads), "b")
    g, m, n, k, d = _symbols(g=group, m=queries, n=keys, k=size, d=value_size)
    head = h * group + g
    row = [b, head, m]
    scores = (batch, heads, queries, keys)
    options = _mask_within_bindings(builder, options, [query, key, value, grad])
    others = [query, key, value, grad, *_tensors(options)]
    rows = [logsumexp] if options.safe else [select(logsumexp, 0, ZERO), select(logsumexp, 0, ONE)]
    logsumexp, *rest, delta = _within_bindings(builder, [*rows, delta], others)
    node = AttentionGradient(
        outputs=(),
        of="queries",
        sizes=(batch, key_heads, group, queries, keys, size, value_size),
        query=_float(query, [*row, k]),
        key=_float(key, [b, h, n, k]),
        value=_float(value, [b, h, n, d]),
        gradient=_float(grad, [*row, d]),
        logsumexp=_float(logsumexp, row),
        delta=_float(delta, row),
        bias=None if options.bias is None else _float(options.bias, [*row, n]),
        kept=_kept(options, scores, (b, head, m, n)),
        causal=bool(options.causal),
        scale=operand(options.scale, (), F32),
        origins=(builder.origin,),
        replaced=None if options.replaced is None else _at(options.replaced, [*row, n]),
        rest=None if options.safe else _float(rest[0], row),
        score_mod=_score_function(builder, options, scores, (b, head, m, n)),
        score_grad=_score_function(builder, options, scores, (b, head, m, n), gradient=True),
    )
    grad_query = grad_key = grad_value = None
    if builder.is_used(0):
        (grouped,) = _append(builder, node, query.dtype)
        grad_query = reshape(grouped, query.sizes)
    if builder.is_used(1) or builder.is_used(2):
        grad_key, grad_value = _append(builder, replace(node, of="keys"), key.dtype)
    return grad_query, grad_key, grad_value


def _check_dtype(query: Value) -> None:
    if not query.dtype.is_float or query.dtype.itemsize > 4:
        raise NotLowered(f"attention computes in float32, not {query.dtype.name}")


def _check_loops(builder: Builder, *walked: Expr) -> None:
    """Raises NotLowered where loops over these sizes are longer than the driver allows."""
    limit = builder.target.max_loop_iterations // 2
    if limit and any(size.is_constant and int(size) > limit for size in walked):
        raise NotLowered("its keys are more than this driver's loops may have iterations for")


def _symbols(**extents: Expr) -> tuple[Expr, ...]:
    """One iteration symbol of each prefix."""
    return tuple(positions((extent,), prefix)[0] for prefix, extent in extents.items())


def _at(value: Value, index: list[Expr]) -> Scalar:
    entries: list[IndexLike] = list(index)
    return value.at(broadcast_index(value, entries))


def _float(value: Value, index: list[Expr]) -> Scalar:
    return cast(_at(value, index), F32)


def _heads_inside(sizes: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Strides of (batch, heads…, positions, size) with the heads inside of the positions.

    What follows nearly always joins the heads of a position, which is then a view of contiguous
    memory.
    """
    batch, *heads, length, size = sizes
    strides = contiguous_strides((batch, length, *heads, size))
    return (strides[0], *strides[2:-1], strides[1], strides[-1])


def _append(builder: Builder, node: AttentionGradient, dtype: DType) -> list[Value]:
    """Adds a node; its results."""
    names = ("queries",) if node.of == "queries" else ("keys", "values")
    buffers = [
        builder.new_buffer(dtype, sizes, f"{builder.hint}_{name}", strides=_heads_inside(sizes))
        for name, sizes in zip(names, node.output_sizes, strict=True)
    ]
    builder.nodes.append(replace(node, outputs=tuple(buffer.name for buffer in buffers)))
    return [builder.load(buffer) for buffer in buffers]


def _within_bindings(builder: Builder, rows: list[Value], others: list[Value]) -> list[Value]:
    """The statistics of rows; in one buffer where a kernel cannot bind as many as there are."""
    read = {o.buffer for value in (*rows, *others) for o in loads_of(value.body)}
    if len(read) + 2 <= builder.target.max_storage_buffers:  # two results
        return rows
    return in_one_buffer(builder, [row.cast(F32) for row in rows])


def _mask_within_bindings(builder: Builder, options: Options, inputs: list[Value]) -> Options:
    """Bias and `replaced` in one buffer where a kernel cannot bind both beside its other inputs."""
    bias, replaced = options.bias, options.replaced
    if bias is None or replaced is None:
        return options
    read = {o.buffer for value in (*inputs, *_tensors(options)) for o in loads_of(value.body)}
    if len(read) + 3 <= builder.target.max_storage_buffers:  # statistics and two results, too
        return options
    bias, holds = in_one_buffer(builder, [bias.cast(F32), replaced.cast(F32)])
    is_replaced = Value(dtypes.bool_, holds.sizes, apply("ne", holds.body, 0))
    return replace(options, bias=bias, replaced=is_replaced)


def _tensors(options: Options) -> list[Value]:
    numbers = options.scale, options.dropout
    found = options.bias, options.seed, options.replaced, *(options.operands or ()), *numbers
    return [v for v in found if isinstance(v, Value)]


def _score_function(
    builder: Builder,
    options: Options,
    sizes: tuple[Expr, ...],
    at: tuple[Expr, ...],
    gradient: bool = False,
) -> Scalar | None:
    """``score_mod`` as a scalar of the local ``score``; None without one.

    Args:
        sizes: batch, heads, queries and keys.
        at: the position in them, in the symbols of the node.
        gradient: instead its gradient, of the local ``gradient``, too.
    """
    if not options.score_mod:
        return None
    function = parsed(options.score_mod)
    found = function.gradient() if gradient else function
    return lowered_function(builder, found, options.operands or (), sizes, at)


def _kept(options: Options, sizes: tuple[Expr, ...], at: tuple[Expr, ...]) -> Scalar | None:
    """The factor of dropout for the weight at (batch, heads, queries, keys), float32.

    0 for a weight that is dropped, else 1 / (1 − probability); None without dropout.
    """
    if options.seed is None:
        return None
    if not isinstance(options.dropout, Value) and options.dropout >= 1.0:
        return const(0.0, F32)
    bits = random_bits(options.seed, linearize(at, contiguous_strides(sizes)))
    # The numbers are multiples of 2⁻²⁴: comparing them is comparing bits.
    probability = operand(options.dropout, (), F32)
    least = cast(apply("ceil", probability * const(2.0**BITS, F32)), dtypes.uint32)
    factor = const(1.0, F32) / (const(1.0, F32) - probability)
    return apply("where", apply("ge", bits, least), factor, const(0.0, F32))
