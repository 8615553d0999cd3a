"""``webgpu::attention`` as one `Attention` node. Its definition and gradient: ``custom_ops``."""

from __future__ import annotations

import torch

from .. import custom_ops as custom_ops  # defines the operator
from .. import dtypes
from ..ir.nodes import Attention
from ..ir.scalar import cast, const
from ..sizes import ZERO, contiguous_strides, floordiv
from .builder import Builder
from .registry import NotLowered, lowers
from .value import Value, broadcast_index, positions


@lowers(torch.ops.webgpu.attention.default)
def lower_attention(
    builder: Builder,
    query: Value,
    key: Value,
    value: Value,
    bias: Value | None,
    causal: bool,
    scale: float,
) -> Value:
    """Queries of several heads may share a key head: key head = head // (heads / key heads)."""
    if not query.dtype.is_float or query.dtype.itemsize > 4:
        raise NotLowered(f"attention computes in float32, not {query.dtype.name}")
    batch, heads, queries, size = query.sizes
    _, key_heads, keys, value_size = value.sizes
    out = (batch, heads, queries, value_size)
    if any(n is ZERO for n in (*out, keys)):
        return Value(query.dtype, out, const(0, query.dtype))
    f32 = dtypes.float32
    b, h = positions((batch, heads), "b")
    (m,), (n,), (k,), (d,) = (
        positions((extent,), prefix)
        for extent, prefix in ((queries, "m"), (keys, "n"), (size, "k"), (value_size, "d"))
    )
    shared = h if heads is key_heads else floordiv(h, floordiv(heads, key_heads))
    # Heads inside of queries: what follows nearly always joins the heads of a query, which is then
    # a view of contiguous memory.
    strides = contiguous_strides((batch, queries, heads, value_size))
    buffer = builder.new_buffer(
        query.dtype, out, strides=(strides[0], strides[2], strides[1], strides[3])
    )
    node = Attention(
        output=buffer.name,
        sizes=(batch, heads, queries, keys, size, value_size),
        query=cast(query.at([b, h, m, k]), f32),
        key=cast(key.at([b, shared, n, k]), f32),
        value=cast(value.at([b, shared, n, d]), f32),
        bias=None if bias is None else cast(bias.at(broadcast_index(bias, [b, h, m, n])), f32),
        causal=bool(causal),
        scale=float(scale),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return builder.load(buffer)
