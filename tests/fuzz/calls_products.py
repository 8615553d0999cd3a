"""Matrix products, triangular solves, attention and distances."""

from __future__ import annotations

import torch

from .calls import Call
from .programs import FLOATS, Drawing, Value


def matmul(d: Drawing) -> object:
    """A matrix product, perhaps with an epilogue that permutes."""
    left = d.value(lambda v: v.is_float and 1 <= v.rank <= 4 and v.magnitude < 64)
    if left is None:
        return None
    k = left.shape[-1]
    right = d.value(lambda v: v.dtype is left.dtype and v.rank == 2 and v.shape[-1] == k)
    if right is None:
        right = d.add_input((d.choose((5, 4, 1, 8, 17)), k), left.dtype)
    a, b = left.name, right.name
    codes = [f"{a} @ {b}.t()", f"F.linear({a}, {b})"]
    if left.rank == 2:
        codes += [f"({a} @ {b}.t()).t()", f"({b} @ {a}.t())"]
    if left.rank == 3:
        codes += [f"torch.bmm({a}, {a}.transpose(1, 2))", f"({a} @ {b}.t()).permute(2, 0, 1)"]
        codes += [f"torch.relu({a} @ {b}.t()).transpose(0, 1).reshape(-1)"]
    if left.rank == 4:
        codes += [f"({a} @ {a}.transpose(-1, -2)).transpose(1, 2)"]
    return d.step(d.choose(codes), left, right, keeps_exact=True)


def _matrix(d: Drawing, rows: int, columns: int, dtype: torch.dtype) -> Value:
    found = d.value(lambda v: v.shape == (rows, columns) and v.dtype is dtype and v.magnitude < 64)
    return found or d.add_input((rows, columns), dtype)


def product(d: Drawing) -> object:
    """Products with something added, outer products, contractions."""
    left = d.value(lambda v: v.is_float and v.rank in (2, 3) and 0 < v.tensor.numel() < 2000)
    if left is None or left.magnitude >= 64:
        left = d.add_input((d.choose((3, 5, 17)), d.choose((4, 7, 16))), d.choose(FLOATS))
    rows, inner = left.shape[-2:]
    right = _matrix(d, inner, d.choose((3, 8, 1)), left.dtype)
    columns = right.shape[1]
    a, b = left.name, right.name
    scale = f"beta={d.choose((1, 0.5, 0))}, alpha={d.choose((1, 2))}"
    if left.rank == 3:
        batch = left.shape[0]
        wide = f"{b}.expand({batch}, {inner}, {columns})"
        added = d.add_input((columns,), left.dtype)
        codes = [
            f"torch.baddbmm({added.name}, {a}, {wide}, {scale})",
            f"torch.addbmm({added.name}, {a}, {wide}, {scale})",
            f"torch.einsum('bij,jk->bki', {a}, {b})",
            f"torch.einsum('bij,bkj->ik', {a}, {a})",
            f"torch.tensordot({a}, {b}, dims=1)",
            f"F.linear({a}, {b}.t(), {added.name})",
        ]
        return d.step(d.choose(codes), left, right, added, keeps_exact=True)
    vector, added = d.add_input((inner,), left.dtype), _matrix(d, rows, columns, left.dtype)
    v = vector.name
    codes = [
        f"torch.addmm({added.name}, {a}, {b}, {scale})",
        f"torch.addmv({a}[:, 0], {a}, {v}, {scale})",
        f"torch.addr({a}, {a}[:, 0], {v}, {scale})",
        f"torch.outer({v}, {a}[0])",
        f"torch.inner({v}, {a})",
        f"torch.dot({v}, {a}[-1])",
        f"torch.mv({a}, {v})",
        f"torch.einsum('ij,jk->ki', {a}, {b})",
        f"torch.einsum('ij,ij->i', {a}, {a})",
        f"torch.linalg.multi_dot([{a}, {b}, {b}.t()])",
        f"torch.kron({a}[:2, :3].contiguous(), {b}[:2, :2].contiguous())",
        f"torch.trace({a} @ {a}.t())",
        f"F.bilinear({a}, {a}, {b}.new_ones(2, {inner}, {inner}))",
    ]
    return d.step(d.choose(codes), left, right, vector, added, keeps_exact=True)


def triangular(d: Drawing) -> object:
    """Solves with a matrix whose diagonal dominates, or one of its triangles."""
    size = d.choose((4, 1, 7, 17))
    matrix = _matrix(d, size, size, torch.float32)
    right = _matrix(d, size, d.choose((2, 1, 5)), torch.float32)
    upper, unit = d.flag(), d.flag()
    a = f"(torch.tanh({matrix.name}) * {0.5 / size} + 2 * torch.eye({size}))"
    b = right.name
    options = f"upper={upper}, unitriangular={unit}"
    codes = (
        f"torch.linalg.solve_triangular({a}, {b}, {options})",
        f"torch.linalg.solve_triangular({a}, {b}.t(), left=False, {options})",
        f"torch.cholesky_solve({b}, {a}, upper={upper})",
        f"torch.linalg.solve_triangular({a}.expand(2, {size}, {size}), {b}, {options})",
        f"torch.linalg.solve_ex({a}, {b})[0]",
        f"torch.linalg.inv_ex({a}.mT)[0] @ {b}",
        f"torch.linalg.det({a})",
        f"torch.linalg.cholesky_ex({a} @ {a}.mT, upper={upper})[0]",
    )
    return d.step(d.choose(codes), matrix, right)


def attention(d: Drawing) -> object:
    """Attention as one call and written out."""
    batch, heads, head = d.integer(1, 2), d.integer(1, 3), d.choose((4, 8, 16, 3))
    queries, keys = d.choose((5, 1, 8, 17)), d.choose((5, 7, 17, 33))
    dtype = d.choose((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    shape = (batch, heads, queries, head)
    query = d.value(
        lambda v: v.shape == shape and v.dtype is dtype and v.finite and v.magnitude < 8
    )
    query = query or d.add_input(shape, dtype)
    key = d.add_input((batch, heads, keys, head), dtype)
    value = d.add_input((batch, heads, keys, head), dtype)
    q, k, v = query.name, key.name, value.name
    kind = d.integer(0, 4)
    options, bias = "", ""
    mask: tuple[Value, ...] = ()
    if kind == 1:
        options = ", is_causal=True"
        lower = f"torch.ones({queries}, {keys}, dtype=torch.bool).tril()"
        bias = f".masked_fill(~{lower}, float('-inf'))"
    elif kind == 2:
        mask = (d.add_input((queries, keys), dtype),)
        options, bias = f", attn_mask={mask[0].name}", f" + {mask[0].name}"
    elif kind == 3:
        mask = (d.add_input((batch, 1, queries, keys), torch.bool),)
        # A row without a key has no answer that all implementations agree on.
        seen = f"({mask[0].name} | (torch.arange({keys}) == 0))"
        options, bias = f", attn_mask={seen}", f".masked_fill(~{seen}, float('-inf'))"
    elif kind == 4:
        options = ", scale=0.25"
    scale = 0.25 if kind == 4 else head**-0.5
    codes = (
        f"F.scaled_dot_product_attention({q}, {k}, {v}{options})",
        f"torch.softmax(({q} @ {k}.transpose(-2, -1) * {scale}){bias}, -1) @ {v}",
        f"(torch.softmax(torch.matmul({q}, {k}.mT).mul({scale}){bias}, -1) @ {v})"
        f".transpose(1, 2).reshape({batch}, {queries}, {heads * head})",
    )
    return d.step(d.choose(codes), query, key, value, *mask)


def distance(d: Drawing) -> object:
    """Distances of rows."""
    left = d.value(lambda v: v.dtype is torch.float32 and v.rank >= 2 and v.magnitude < 32)
    if left is None or not left.tensor.numel():
        left = d.add_input((d.choose((5, 3, 17)), d.choose((4, 3, 8))), torch.float32)
    right = d.add_input((d.choose((4, 1, 7)), left.shape[-1]), torch.float32)
    a, b = left.name, right.name
    # The product form of p = 2 amplifies where rows are nearly equal.
    exact_form = "compute_mode='donot_use_mm_for_euclid_dist'"
    codes = [
        f"torch.cdist({a}, {b}, 1)",
        f"torch.cdist({a}, {b}, 2, {exact_form})",
        f"torch.cdist({a}, {b}, 3)",
        f"torch.cdist({a}, {b}, float('inf'))",
        f"torch.dist({a}, {a} * 0.5, {d.choose((2, 1, 3))})",
        f"F.pairwise_distance({a}, {b}[0], 2)",
        f"F.cosine_similarity({a}, {b}[0], -1, 0.5)",
    ]
    if left.exact:
        codes.append(f"torch.cdist({a}, {b}, 0)")
    if left.rank == 2:
        codes.append(f"F.pdist({a}, 1)")
    return d.step(d.choose(codes), left, right)


FAMILIES: tuple[Call, ...] = (matmul, matmul, product, product, triangular, attention, distance)
