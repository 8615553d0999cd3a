"""Scans, orders, order statistics and searches.

Values are continuous in their arguments, positions are not: those are only taken of exact values,
and only where ties have one answer (stable orders). Where they have not, the values at the
positions are.
"""

from __future__ import annotations

import torch

from .calls import Call, is_exact_or_integer
from .programs import Drawing, Value

_SCANS = ("cumsum({1})", "cumprod({1})", "cummax({1}).values", "cummin({1}).values")
_SMOOTH_SCANS = ("logcumsumexp({1})", "cumsum({1}).flip({1})", "cumsum({1}).tanh()")
_SCAN_POSITIONS = ("cummax({1}).indices", "cummin({1}).indices")


def scan(d: Drawing) -> object:
    """A running sum, product, extreme or logarithm of a sum."""
    value = d.value(lambda v: v.rank >= 1)
    if value is None:
        return None
    x, dim = value.name, d.dim(value)
    if value.exact and value.finite and d.integer(0, 3) == 3:
        return d.step(f"{x}." + d.choose(_SCAN_POSITIONS).format(x, dim), value, keeps_exact=True)
    if value.is_float and value.magnitude <= 32 and d.integer(0, 3) == 3:
        return d.step(f"{x}." + d.choose(_SMOOTH_SCANS).format(x, dim), value)
    codes = [f"{x}." + code.format(x, dim) for code in _SCANS]
    codes += [f"torch.diff({x}, dim={dim})", f"{x}.cumsum({dim}, dtype=torch.float32)"]
    if value.is_float:
        codes += [f"torch.trapezoid({x}, dim={dim})"]
    return d.step(d.choose(codes), value, keeps_exact=True)


def sort(d: Drawing) -> object:
    """An order, its first elements or one of them."""
    value = d.value(lambda v: v.rank >= 1 and v.tensor.numel() > 0)
    if value is None:
        return None
    x, dim = value.name, d.dim(value)
    size = value.shape[dim]
    k, flag = d.integer(1, size), d.flag()
    copy = f"{x}.contiguous()"  # eager selects within the memory of an expanded tensor
    codes = [
        f"torch.sort({x}, dim={dim}, descending={flag}).values",
        f"torch.sort({x}, dim={dim}, descending={flag}, stable=True).values",
        f"torch.topk({x}, {k}, {dim}, largest={flag}).values",
        f"{x}.gather({dim}, torch.topk({x}, {k}, {dim}, largest={flag}).indices)",
        f"{x}.gather({dim}, torch.sort({x}, {dim}, {flag}).indices)",
        f"torch.kthvalue({copy}, {k}, {dim}, keepdim={flag}).values",
        f"torch.median({copy}, {dim}, keepdim={flag}).values",
        f"torch.nanmedian({copy}, {dim}).values",
        f"torch.median({copy})",
        f"torch.msort({x})",
    ]
    if value.exact and value.finite:
        codes += [
            f"torch.sort({x}, dim={dim}, descending={flag}, stable=True).indices",
            f"torch.argsort({x}, dim={dim}, descending={flag}, stable=True)",
            f"torch.argsort(torch.argsort({x}, dim={dim}, stable=True), dim={dim}, stable=True)",
            f"torch.mode({x}, {dim}, keepdim={flag}).values",
        ]
    if value.dtype is torch.float32:
        codes += [f"torch.quantile({x}, {d.choose((0.5, 0.25, 1.0))}, {dim}, keepdim={flag})"]
    return d.step(d.choose(codes), value, keeps_exact=True)


def search(d: Drawing) -> object:
    """Positions among boundaries, and counts."""
    value = d.value(is_exact_or_integer)
    edges = d.value(lambda v: is_exact_or_integer(v) and 0 < v.tensor.numel() <= 64)
    if value is None or edges is None or torch.bool in (value.dtype, edges.dtype):
        return None
    x, flag = value.name, d.flag()
    flat = f"torch.sort({edges.name}.reshape(-1)).values"
    codes = [
        f"torch.bucketize({x}, {flat}, right={flag})",
        f"torch.searchsorted({flat}, {x}, right={flag})",
        f"torch.bucketize({x}, {flat}, out_int32=True)",
    ]
    if _ranks_match(edges, value):
        rows = f"torch.sort({edges.name}, -1).values"
        codes.append(f"torch.searchsorted({rows}, {x}.contiguous(), right={flag})")
    if value.dtype is torch.float32:
        # Bins whose edges are exact: an element on an edge has one answer.
        codes += [f"torch.histc({x}, {d.choose((4, 8, 16))}, -4, 4)"]
    if value.is_float and edges.is_float and value.dtype is edges.dtype:
        codes += [f"torch.isin({x}, {edges.name})"]
    return d.step(d.choose(codes), value, edges, keeps_exact=True)


def _ranks_match(edges: Value, value: Value) -> bool:
    return edges.rank == value.rank > 1 and edges.shape[:-1] == value.shape[:-1]


FAMILIES: tuple[Call, ...] = (scan, scan, sort, sort, search)
