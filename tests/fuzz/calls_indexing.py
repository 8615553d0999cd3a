"""Reads and writes at computed positions, and embeddings.

Several writes to one place have one answer only if they are combined or equal: plain writes go to
distinct places.
"""

from __future__ import annotations

import torch

from .calls import Call, without_overlap
from .programs import Drawing, Value

_REDUCTIONS = ("sum", "prod", "amax", "amin", "mean")


def _indexed(d: Drawing) -> Value | None:
    return d.value(lambda v: v.rank >= 1 and v.tensor.numel() > 0)


def _positions(d: Drawing) -> Value:
    """Integers of any sign; tracing would make a size of a 0-d index."""
    found = d.value(lambda v: v.dtype is torch.int64 and v.rank > 0 and 0 < v.tensor.numel() < 200)
    return found or d.add_input((d.choose((3, 1, 5, 8)),), torch.int64)


def _along(value: Value, dim: int, count: int, flat: str) -> str:
    """Positions along a dimension, the same for all others."""
    ones, shape = [1] * value.rank, list(value.shape)
    ones[dim], shape[dim] = -1, count
    return f"{flat}.reshape({tuple(ones)}).expand({tuple(shape)})"


def gather(d: Drawing) -> object:
    """Reads."""
    value = _indexed(d)
    if value is None:
        return None
    source = _positions(d)
    x, dim = value.name, d.integer(0, value.rank - 1)
    size, numel = value.shape[dim], value.tensor.numel()
    flat = f"({source.name} % {size}).reshape(-1)"
    along = _along(value, dim, source.tensor.numel(), flat)
    codes = [
        f"torch.take({x}, {source.name} % {numel})",
        f"torch.take_along_dim({x}, {along}, {dim})",
        f"torch.gather({x}, {dim}, {along})",
        f"{x}[..., ({source.name} % {2 * value.shape[-1]}) - {value.shape[-1]}]",
    ]
    if value.rank >= 2:
        first = f"{source.name} % {value.shape[0]}"
        codes += [
            f"{x}[{first}, {source.name} % {value.shape[1]}]",
            f"{x}[{first}, ..., {source.name} % {value.shape[-1]}]",
            f"{x}[:, None, {source.name} % {value.shape[1]}]",
        ]
    return d.step(d.choose(codes), value, source, keeps_exact=True)


def scatter(d: Drawing) -> object:
    """Writes to distinct places, or of one number."""
    value = _indexed(d)
    if value is None:
        return None
    source = _positions(d)
    x, dim = value.name, d.integer(0, value.rank - 1)
    size, count = value.shape[dim], source.tensor.numel()
    flat = f"({source.name} % {size}).reshape(-1)"
    number = d.choose((1, 0)) if value.dtype is torch.bool else d.choose((1, 2))
    once = f"{source.name}.reshape(-1).argsort(stable=True)"  # a permutation
    if count > size:
        once, count = f"torch.arange({size}).flip(0)", size
    part = f"{x}.narrow({dim}, 0, {count})"
    codes = [
        f"{x}.scatter({dim}, {_along(value, dim, source.tensor.numel(), flat)}, {number})",
        f"{x}.index_fill({dim}, {flat}, {number})",
        f"{x}.scatter({dim}, {_along(value, dim, count, once)}, {part})",
        f"{x}.index_copy({dim}, {once}, {part})",
        f"{x}.index_put(({source.name} % {value.shape[0]},), torch.ones((), dtype={value.dtype}))",
        f"{x}.masked_scatter({x} == {x}, {x}.flip(0))",
    ]
    if value.rank >= 2:
        codes.append(f"torch.diagonal_scatter({without_overlap(value)}, {x}.diagonal() * {number})")
    return d.step(d.choose(codes), value, source, keeps_exact=True)


def accumulate(d: Drawing) -> object:
    """Writes that are combined with what is there."""
    value = d.value(lambda v: v.rank >= 1 and v.tensor.numel() > 0 and v.dtype is not torch.bool)
    if value is None:
        return None
    source = _positions(d)
    x, dim = value.name, d.integer(0, value.rank - 1)
    size, count = value.shape[dim], source.tensor.numel()
    flat = f"({source.name} % {size}).reshape(-1)"
    along = _along(value, dim, count, flat)
    read = f"torch.gather({x}, {dim}, {along})"
    rows = f"{x}.index_select({dim}, {flat})"
    own, name = d.flag(), d.choose(_REDUCTIONS)
    index_names = [n for n in _REDUCTIONS if n != "sum"]
    numel = value.tensor.numel()
    codes = [
        f"{x}.scatter_add({dim}, {along}, {read})",
        f"{x}.scatter_reduce({dim}, {along}, {read}, '{name}', include_self={own})",
        f"{x}.index_add({dim}, {flat}, {rows}, alpha={d.choose((1, 2))})",
        f"{x}.index_reduce({dim}, {flat}, {rows}, '{d.choose(index_names)}', include_self={own})",
        f"{x}.put({source.name} % {numel}, torch.take({x}, {source.name} % {numel}), True)",
        f"{x}.index_put(({source.name} % {value.shape[0]},), {x}[0], accumulate=True)",
        f"{x}.scatter({dim}, {along}, 2, reduce='{d.choose(('add', 'multiply'))}')",
    ]
    if value.rank >= 2:
        last = f"{source.name} % {value.shape[1]}"
        codes.append(
            f"{x}.index_put(({source.name} % {value.shape[0]}, {last}), {x}[0, 0], accumulate=True)"
        )
    code = d.choose(codes)
    if "prod" in code and value.magnitude > 4:
        return None  # products of many large numbers amplify
    return d.step(code, value, source, keeps_exact=True)


def embedding(d: Drawing) -> object:
    """Rows of a table, and sums of them."""
    table = d.value(lambda v: v.rank == 2 and v.is_float and v.tensor.numel() > 0)
    if table is None:
        table = d.add_input((d.choose((5, 3, 8, 17)), d.choose((4, 1, 3, 16))), torch.float32)
    source = _positions(d)
    w, rows, count = table.name, table.shape[0], source.tensor.numel()
    where = f"{source.name} % {rows}"
    padding = d.choose(("", ", padding_idx=0"))
    kind = d.integer(0, 2)
    if kind == 0:
        return d.step(f"F.embedding({where}, {w}{padding})", table, source, keeps_exact=True)
    mode = d.choose(("sum", "mean", "max"))
    options = f"mode='{mode}'{padding}"
    if mode == "max" and not (table.exact and table.finite):
        return None
    if kind == 1 and source.rank == 2:
        return d.step(f"F.embedding_bag({where}, {w}, {options})", table, source)
    flat = f"({where}).reshape(-1)"
    bags = d.integer(1, 4)
    offsets = d.add_input((bags,), torch.int64)
    at = f"({offsets.name} % {count + 1}).sort().values * (torch.arange({bags}) > 0)"
    if mode == "sum" and d.flag():
        weights = d.add_input((count,), table.dtype)
        options += f", per_sample_weights={weights.name}"
    return d.step(f"F.embedding_bag({flat}, {w}, {at}, {options})", table, source, offsets)


FAMILIES: tuple[Call, ...] = (gather, scatter, scatter, accumulate, accumulate, embedding)
