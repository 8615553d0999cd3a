"""Sums, means and maxima of bags of embeddings. Source: ATen ``EmbeddingBag.cpp``.

Shapes: weight [N, D], indices [n], offsets [B], where bags start in ``indices`` (with
``include_last_offset`` one more, the end of the last bag); result [B, D].
"""

from __future__ import annotations

from typing import Any

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import Expr, IntLike
from .builder import Builder, masked
from .index_checks import data_index
from .promotion import compute_dtype
from .registry import NotLowered, lowers
from .scattering import are_few, scatter
from .sorting import binary_search
from .value import Value, positions, zeros

aten = torch.ops.aten

SUM, MEAN, MAX = range(3)


def _bags(builder: Builder, offsets: Value, count: Expr, bags: Expr | None = None) -> Value:
    """The bag of each of ``count`` samples: the last of ``bags`` that starts at or before it.

    With ``bags`` None, samples at or behind an end of the last bag are in a bag that is none.
    """
    bags = offsets.sizes[0] if bags is None else bags
    (at,) = positions((count,))

    def starts(position: Scalar) -> Scalar:
        return cast(offsets.at([position]), dtypes.int64) <= Index(at)

    body = binary_search(starts, bags) - 1
    return builder.pointwise(body, (count,), name="bags")


def _is_kept(row: Scalar, padding_idx: IntLike) -> Scalar:
    """Whether a sample counts: every one but a sample of the padding row."""
    if isinstance(padding_idx, int) and padding_idx < 0:
        return const(True, dtypes.bool_)
    assert isinstance(padding_idx, int)
    return apply("ne", row, padding_idx)


def _bag_sizes(
    builder: Builder, rows: Value, bags: Value, like: Value, padding_idx: IntLike
) -> Value:
    """How many samples of each bag count."""
    kept = cast(_is_kept(cast(rows.body, dtypes.int64), padding_idx), like.dtype)
    return scatter(
        builder, zeros(like.sizes, like.dtype), rows.sizes, [bags.body], kept, accumulate=True
    )


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def lower_embedding_bag(
    builder: Builder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: IntLike = -1,
) -> tuple[Value, Value, Value, Value]:
    """(result, bag of each sample, samples of each bag, rows of the maxima).

    The samples ``indices[offsets[b]:offsets[b + 1]]`` are bag b; the result [bags, columns] is the
    sum, mean or (``mode``) maximum of their rows of the weight, but for rows of ``padding_idx``.

    Raises NotLowered: for maxima with weights or over many or a symbolic number of samples, and
    where `scatter` does.
    """
    out, offset2bag, bag_size, max_indices = (builder.zeros(k) for k in range(4))
    if indices.is_empty or out.is_empty:
        return out, offset2bag, bag_size, max_indices
    # As PyTorch's kernels for the CPU have it: these are in the last bag, but for the fast kernel.
    is_fast = mode == SUM and isinstance(padding_idx, int) and padding_idx < 0
    bags = _bags(builder, offsets, indices.sizes[0], None if is_fast else out.sizes[0])
    if not offset2bag.is_empty:
        offset2bag = bags.cast(offset2bag.dtype)
    # Elsewhere than on the CPU, PyTorch's sizes have one of the last offset's bag, which is empty.
    sizes = _bag_sizes(builder, indices, bags, bag_size, padding_idx)
    if mode == MAX:
        if per_sample_weights is not None:
            raise NotLowered("the maximum of weighted embeddings")
        result, maxima = _maximum(builder, weight, indices, bags, out, padding_idx)
        max_indices = maxima.cast(max_indices.dtype)
    else:
        result = _sum(builder, weight, indices, bags, out, per_sample_weights, padding_idx)
        if mode == MEAN:
            bag, column = positions(out.sizes)
            size = apply("maximum", sizes.at([bag]), 1)
            mean = result.at([bag, column]) / cast(size, result.dtype)
            result = Value(result.dtype, out.sizes, mean)
        result = builder.pointwise(cast(result.body, out.dtype), out.sizes)
    return result, offset2bag, sizes, max_indices


def _sum(
    builder: Builder,
    weight: Value,
    indices: Value,
    bags: Value,
    out: Value,
    per_sample_weights: Value | None,
    padding_idx: IntLike,
) -> Value:
    """Every sample's row added to its bag, in the compute dtype."""
    dtype = compute_dtype(out.dtype)
    sizes = (indices.sizes[0], out.sizes[1])
    sample, column = positions(sizes)
    row = data_index(builder, indices.at([sample]), weight.sizes[0], 0)
    body = cast(weight.at([row, column]), dtype)
    if per_sample_weights is not None:
        body *= cast(per_sample_weights.at([sample]), dtype)
    body = masked(_is_kept(row, padding_idx), body, 0)
    initial = zeros(out.sizes, dtype)
    return scatter(builder, initial, sizes, [bags.at([sample]), column], body, accumulate=True)


def _maximum(
    builder: Builder, weight: Value, indices: Value, bags: Value, out: Value, padding_idx: IntLike
) -> tuple[Value, Value]:
    """(maxima, the rows that they are from); both 0 for empty bags."""
    count = indices.sizes[0]
    if not are_few(count):
        raise NotLowered(f"the maximum over bags of {count} samples")
    dtype = compute_dtype(out.dtype)
    bag, column = positions(out.sizes)
    (r,) = positions((count,), "r")
    row = data_index(builder, indices.at([r]), weight.sizes[0], 0)
    inside = apply("eq", bags.at([r]), Index(bag))
    inside &= _is_kept(row, padding_idx)
    lowest = const(float("-inf"), dtype)
    value = masked(inside, cast(weight.at([row, column]), dtype), lowest)
    place = builder.reduce("argmax", value, out.sizes, (count,), name="place")
    hits = builder.reduce("sum", cast(inside, dtypes.int32), out.sizes, (count,), name="hits")
    some = hits.body > 0
    row = data_index(builder, indices.at([place.body]), weight.sizes[0], 0)
    rows = builder.pointwise(where(some, row, 0), out.sizes, name="rows")
    best = masked(some, weight.at([rows.body, column]), 0)
    return builder.pointwise(best, out.sizes), rows


@lowers(aten._embedding_bag_backward.default)
def lower_backward(
    builder: Builder,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: IntLike,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    *rest: Any,
) -> Value:
    """[num_weights, columns]: each bag's gradient added to the rows that made the bag.

    Bags that are not given are found from ``offsets``; ``rest`` is that of `lower_dense_backward`.
    Raises NotLowered: for ``sparse`` or ``scale_grad_by_freq``, and where `scatter` does.
    """
    if sparse:
        raise NotLowered("sparse gradients")
    if offset2bag.is_empty and not indices.is_empty:
        offset2bag = _bags(builder, offsets, indices.sizes[0])
    sizes = offset2bag, bag_size, maximum_indices, num_weights
    return lower_dense_backward(builder, grad, indices, *sizes, scale_grad_by_freq, mode, *rest)


@lowers(aten._embedding_bag_dense_backward.default)
def lower_dense_backward(
    builder: Builder,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: IntLike,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: IntLike = -1,
) -> Value:
    """Every bag's gradient added to the rows of its samples, or to those of its maxima.

    Samples count with their weights, in mean mode divided by the size of the bag; the rows of
    ``padding_idx`` get nothing. Raises NotLowered: for ``scale_grad_by_freq``, and where `scatter`
    does.
    """
    if scale_grad_by_freq:
        raise NotLowered("scale_grad_by_freq")
    initial = builder.zeros(0)
    if grad.is_empty or indices.is_empty:
        return initial
    rows = initial.sizes[0]
    if mode == MAX:
        bag, column = positions(grad.sizes)
        some = bag_size.at([bag]) > 0
        body = masked(some, grad.body, 0)
        row = data_index(builder, maximum_indices.body, rows, 0)
        return scatter(builder, initial, grad.sizes, [row, column], body, accumulate=True)
    sizes = (indices.sizes[0], grad.sizes[1])
    sample, column = positions(sizes)
    row = data_index(builder, indices.at([sample]), rows, 0)
    own = cast(offset2bag.at([sample]), dtypes.int64)
    body = cast(grad.at([own, column]), compute_dtype(grad.dtype))
    if per_sample_weights is not None:
        body *= cast(per_sample_weights.at([sample]), body.dtype)
    if mode == MEAN:
        size = apply("maximum", bag_size.at([own]), 1)
        body /= cast(size, body.dtype)
    kept = _is_kept(row, padding_idx) & (own < Index(grad.sizes[0]))
    body = masked(kept, body, 0)
    return scatter(
        builder, initial, sizes, [row, column], cast(body, initial.dtype), accumulate=True
    )


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def lower_per_sample_weights_backward(
    builder: Builder,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: IntLike = -1,
) -> Value:
    """For each sample: Σ of its row of the weight times the gradient of its bag."""
    out = builder.out
    if indices.is_empty or grad.is_empty:
        return builder.zeros(0)
    bags = offset2bag
    if bags.is_empty:
        bags = _bags(builder, offsets, indices.sizes[0])
    dtype = compute_dtype(out.dtype)
    (sample,) = positions(out.sizes)
    (column,) = positions((weight.sizes[1],), "r")
    row = data_index(builder, indices.at([sample]), weight.sizes[0], 0)
    own = cast(bags.at([sample]), dtypes.int64)
    body = cast(weight.at([row, column]), dtype) * cast(grad.at([own, column]), dtype)
    kept = _is_kept(row, padding_idx) & (own < Index(grad.sizes[0]))
    body = masked(kept, body, 0)
    total = builder.reduce("sum", body, out.sizes, (weight.sizes[1],), name="sum")
    return builder.pointwise(cast(total.body, out.dtype), out.sizes)
