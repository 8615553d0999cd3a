"""Attention as people write it out: functions of query, key, value and what masks it.

Query, key and value are (batch, heads, length, size) unless ``SHAPES`` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOWEST = torch.finfo(torch.float32).min


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1) @ v


def scaled_query(q, k, v):
    q = q * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(torch.matmul(q, k.mT), dim=-1), v)


def scaled_both(q, k, v):
    root = q.shape[-1] ** -0.25
    return (q * root).matmul((k * root).transpose(2, 3)).softmax(-1).matmul(v)


def scaled_after(q, k, v):
    return nn.Softmax(dim=3)(0.3 * torch.matmul(q, k.permute(0, 1, 3, 2))).matmul(v)


def scaled_by_a_tensor(q, k, v):
    scale = torch.sqrt(torch.tensor(q.size(-1), dtype=q.dtype, device=q.device))
    return F.softmax(q @ k.transpose(-1, -2) / scale, -1) @ v


def scaled_by_an_array(q, k, v):
    scale = torch.sqrt(torch.FloatTensor([q.size(-1)]).to(q.device)).to(q.dtype)
    return F.softmax((q @ k.transpose(-1, -2)) / scale, -1) @ v


def scaled_in_place(q, k, v):
    scores = q @ k.transpose(-1, -2)
    scores /= 3.0
    scores *= 0.5
    return scores.softmax(-1) @ v


def einsums(q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.25).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def einsums_of_lengths_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    out = torch.einsum("nhql,nlhd->nqhd", [torch.softmax(scores / 4.0, dim=3), v])
    return out.reshape(out.shape[0], out.shape[1], -1)


def einsums_with_dots(q, k, v):
    weights = (torch.einsum("... i d, ... j d -> ... i j", q, k) * 0.3).softmax(dim=-1)
    return torch.einsum("... i j, ... j d -> ... i d", weights, v)


def joined_heads(q, k, v):
    """As BART and OPT write it."""
    batch, heads, length, size = q.shape
    q, k, v = (x.reshape(batch * heads, -1, size) for x in (q * size**-0.5, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, v).view(batch, heads, length, size)


def joined_heads_with_mask(q, k, v, mask):
    batch, heads, length, size = q.shape
    q, k, v = (x.reshape(batch * heads, -1, size) for x in (q * size**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2))
    weights = weights.view(batch, heads, length, k.size(1)) + mask
    weights = weights.view(batch * heads, length, k.size(1))
    weights = F.dropout(F.softmax(weights, dim=-1), p=0.1, training=False)
    return torch.bmm(weights, v).view(batch, heads, length, size).transpose(1, 2)


def added_product(q, k, v, mask):
    """As BLOOM writes it: heads joined, a bias of heads, and a mask after that."""
    batch, heads, length, size = q.shape
    q, k, v = (x.reshape(batch * heads, -1, size) for x in (q, k, v))
    slopes = torch.arange(batch * heads, device=q.device)[:, None, None]
    alibi = (torch.arange(k.size(1), device=q.device) * slopes * 0.01).to(q.dtype)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.5, alpha=0.25)
    scores = scores.view(batch, heads, length, k.size(1)) + mask
    weights = F.softmax(scores, dim=-1).view(batch * heads, length, k.size(1))
    return torch.bmm(weights, v)


def functions_of_aten(q, k, v, mask):
    aten = torch.ops.aten
    scores = aten.mul.Scalar(aten.matmul.default(q, k.transpose(-1, -2)), 0.25)
    weights = aten._softmax.default(aten.add.Tensor(scores, mask), -1, False)
    return aten.matmul.default(weights, v)


def additive(q, k, v, mask):
    return (q @ k.transpose(2, 3) * 0.25 + mask).softmax(-1) @ v


def additive_in_float32(q, k, v, mask):
    """As transformers writes it."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def subtracted(q, k, v, mask):
    scores = q @ k.transpose(2, 3)
    scores = (scores.float() - 0.5 * mask) * 0.5
    return scores.softmax(-1).type_as(q) @ v


def filled(value, invert: Callable[[Tensor], Tensor] = lambda keep: keep == 0):
    """``masked_fill`` where a mask does not keep."""

    def f(q, k, v, keep):
        scores = q @ k.transpose(-2, -1) * 0.25
        return scores.masked_fill(invert(keep), value).softmax(-1) @ v

    return f


def filled_in_place(q, k, v, keep):
    scores = q @ k.transpose(-2, -1) * 0.25
    scores.masked_fill_(~keep, -1e4)
    return scores.softmax(-1) @ v


def chosen(q, k, v, keep):
    """As GPT-2 was written."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], q.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=q.dtype, device=q.device)
    scores = torch.where(keep, scores.to(q.dtype), lowest)
    return torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)


def chosen_value(q, k, v, keep):
    return torch.where(~keep, -1e9, q @ k.mT).softmax(-1) @ v


def chosen_method(q, k, v, keep):
    return (q @ k.mT).where(keep, torch.tensor(-math.inf, device=q.device)).softmax(-1) @ v


def filled_then_added(q, k, v, keep):
    scores = (q @ k.mT).masked_fill(~keep, -1e4) * 0.5
    bias = torch.where(keep, 0.0, -3.0) + keep.float().cumsum(-1) * 0.1
    return (scores + bias.to(q.dtype)).softmax(-1) @ v


def sliced_buffer(q, k, v):
    """As nanoGPT and minGPT write it."""
    buffer = torch.tril(torch.ones(64, 64, device=q.device)).view(1, 1, 64, 64)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(buffer[:, :, : q.size(2), : k.size(2)] == 0, float("-inf"))
    scores = F.softmax(scores, dim=-1)
    scores = nn.Dropout(0.0)(scores)
    return (scores @ v).transpose(1, 2).contiguous().view(q.size(0), q.size(2), -1)


def triangle_above(q, k, v):
    mask = torch.triu(torch.ones(q.size(2), k.size(2), device=q.device), diagonal=1).bool()
    return (q @ k.mT).masked_fill(mask, -1e9).softmax(-1) @ v


def additive_triangle(q, k, v):
    mask = torch.full((q.size(2), k.size(2)), LOWEST, device=q.device).triu(1)
    return ((q @ k.mT).float() + mask).softmax(-1).to(v.dtype) @ v


def repeated(q, k, v):
    """As transformers repeats keys and values for the heads that share them."""
    batch, heads, length, size = k.shape
    groups = q.shape[1] // heads
    k, v = (x[:, :, None, :, :].expand(batch, heads, groups, length, size) for x in (k, v))
    k, v = (x.reshape(batch, heads * groups, length, size) for x in (k, v))
    return F.softmax(q @ k.transpose(2, 3) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def interleaved(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (q @ k.transpose(2, 3) * 0.25).softmax(-1) @ v


def two_dimensions(q, k, v):
    return torch.mm(F.softmax(q @ k.T / 4.0, dim=1), v)


def of_products_too(q, k, v):
    """Two products make scores: one becomes the bias."""
    position = q.roll(1, -1) @ k.transpose(-1, -2)
    return ((q @ k.transpose(-1, -2) + position) * 0.25).softmax(-1) @ v


FORMS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        *(plain, scaled_query, scaled_both, scaled_after, scaled_by_a_tensor),
        *(scaled_by_an_array, scaled_in_place, einsums, einsums_of_lengths_first),
        *(einsums_with_dots, joined_heads, sliced_buffer, triangle_above, additive_triangle),
        *(repeated, interleaved, two_dimensions, of_products_too),
    )
}
SHAPES: dict[str, Any] = {
    "repeated": ((2, 6, 5, 16), (2, 2, 7, 16)),
    "interleaved": ((2, 6, 5, 16), (2, 2, 7, 16)),
    "two_dimensions": ((5, 16), (7, 16)),
}
SHAPE = (2, 4, 5, 16), (2, 4, 7, 16)

# With a float mask, which is added, and with a bool mask of what is kept.
ADDED: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        *(joined_heads_with_mask, added_product, functions_of_aten, additive),
        *(additive_in_float32, subtracted),
    )
}
KEPT: dict[str, Callable[..., Tensor]] = {
    "filled -inf": filled(-math.inf),
    "filled lowest": filled(LOWEST, torch.logical_not),
    "filled -1e9": filled(-1e9, lambda keep: ~keep),
    "filled -1e4": filled(-1e4),
    "filled 0.5": filled(0.5),
} | {
    f.__name__: f for f in (filled_in_place, chosen, chosen_value, chosen_method, filled_then_added)
}


def tensors(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of a form, which need gradients."""
    queries, keys = SHAPES.get(name, SHAPE)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (queries, keys, keys)]


def padding(rows: int = 5, columns: int = 7, batch: int = 2) -> Tensor:
    """What causal attention keeps of padded documents: the first queries have no key."""
    keep = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows).repeat(batch, 1, 1, 1)
    keep[0, ..., :4] = False
    return keep
