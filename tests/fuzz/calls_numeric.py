"""Bits, division, ternary and logical calls, reductions and rearrangements."""

from __future__ import annotations

import torch

from .calls import Call, broadcasts
from .programs import Drawing, Value

_BITS = (
    "{0} & {1}",
    "{0} | {1}",
    "{0} ^ {1}",
    "~({0} & {1})",
    "torch.bitwise_left_shift({0}, {1} & 3)",
    "torch.bitwise_right_shift({0}, {1} & 7)",
    "torch.gcd({0}, {1})",
    "torch.lcm({0}, {1})",
    "({0} & 7) << 2",
    "{0} >> 1",
)
# Divisors are not zero: PyTorch's integers raise there.
_DIVISIONS = (
    "torch.div({0}, {1}.abs() + 1, rounding_mode='floor')",
    "torch.div({0}, {1}.abs() + 1, rounding_mode='trunc')",
    "torch.div({0}, -{1}.abs() - 2, rounding_mode='floor')",
    "torch.div({0}, -{1}.abs() - 2, rounding_mode='trunc')",
    "torch.remainder({0}, {1}.abs() + 1)",
    "torch.remainder({0}, -{1}.abs() - 2)",
    "torch.fmod({0}, {1}.abs() + 1)",
    "torch.fmod({0}, -{1}.abs() - 2)",
    "torch.floor_divide({0}, {1}.abs() + 1)",
    "{0} // 3 + {1} % 5",
    "torch.remainder(7, {0}.abs() + 1) + torch.fmod({1}, -3)",
    "{0} / ({1}.abs() + 1)",
)


def _number(value: Value) -> bool:
    return value.dtype is not torch.bool and value.exact and value.finite


def bits(d: Drawing) -> object:
    """Bitwise operators, shifts and divisors of integers."""
    left = d.value(lambda v: not v.is_float and v.dtype is not torch.bool)
    if left is None:
        left = d.add_input((d.choose((5, 17)),), torch.int32)
    right = d.value(lambda v: not v.is_float and _number(v) and broadcasts(v, left))
    assert right is not None  # the value itself
    return d.step(d.choose(_BITS).format(left.name, right.name), left, right, keeps_exact=True)


def divide(d: Drawing) -> object:
    """Quotients and remainders of exact values in every rounding mode."""
    left = d.value(_number)
    right = left and d.value(lambda v: _number(v) and broadcasts(v, left))
    if left is None or right is None:
        return None
    code = d.choose(_DIVISIONS).format(left.name, right.name)
    return d.step(code, left, right, keeps_exact=True)


def ternary(d: Drawing) -> object:
    """Calls of three values of one dtype that broadcast."""
    a = d.value(lambda v: v.magnitude < 64 and v.dtype is not torch.bool)
    b = a and d.value(lambda v: broadcasts(v, a) and v.dtype is a.dtype and v.magnitude < 64)
    if a is None or b is None:
        return None
    c = d.value(lambda v: v.shape in (a.shape, b.shape) and v.dtype is a.dtype)
    if c is None or c.magnitude >= 64:
        c = a
    codes = [
        f"torch.addcmul({a.name}, {b.name}, {c.name}, value=2)",
        f"torch.clamp({a.name}, {b.name}, {c.name})",
        f"torch.clamp({a.name}, min={b.name})",
        f"torch.clamp({a.name}, {d.integer(-2, 0)}, {d.integer(1, 3)})",
        f"torch.clamp_max({a.name}, {c.name}) + torch.clamp_min({b.name}, 1)",
        f"torch.rsub({a.name}, {b.name}, alpha=2)",
    ]
    if a.is_float:
        codes += [
            f"torch.lerp({a.name}, {b.name}, {d.choose((0.25, 0.75))})",
            f"torch.addcdiv({a.name}, {b.name}, {c.name}.abs() + 0.5, value=0.5)",
            f"torch.lerp({a.name}, {b.name}, torch.sigmoid({c.name}))",
        ]
    if a.exact and b.exact:
        codes += [
            f"torch.where({a.name} > {b.name}, {a.name}, 2)",
            f"torch.where({a.name} > {b.name}, 0, {c.name})",
            f"torch.heaviside({a.name}, {b.name})",
            f"torch.copysign({a.name}, {b.name}.nan_to_num() + 0.5)",
        ]
    return d.step(d.choose(codes), a, b, c, keeps_exact=True)


_TESTS = (
    "torch.logical_and({0}, {1})",
    "torch.logical_or({0}, {1})",
    "torch.logical_xor({0}, {1})",
    "torch.logical_not({0})",
    "torch.signbit({0}) & ({0} != 0)",  # a sum that is 0 has the sign of its first step
    "torch.isnan({0})",
    "torch.isfinite({0}) & ({1} == {1})",
    "torch.isinf({0})",
    "torch.isclose({0}, {1})",
    "torch.eq({0}, 1)",
    "torch.ge({0}, {1}).all()",
    "torch.count_nonzero({0})",
)


def logic(d: Drawing) -> object:
    """Tests of exact values."""
    left = d.value(lambda v: v.exact)
    right = left and d.value(lambda v: v.exact and broadcasts(v, left))
    if left is None or right is None:
        return None
    code = d.choose(_TESTS).format(left.name, right.name)
    if "isclose" in code and left.dtype is not right.dtype:
        return None
    return d.step(code, left, right, keeps_exact=True)


_ORDERS = (2, 1, 3, 0.5, "float('inf')", "-float('inf')")


def moments(d: Drawing) -> object:
    """Variances, norms and products over dimensions."""
    value = d.value(lambda v: v.is_float and v.magnitude < 64)
    if value is None:
        return None
    x, keep = value.name, d.flag()
    dims = tuple(k for k in range(value.rank) if d.flag()) or None
    if dims is None and value.rank:
        dims = (0,)
    over = f"{dims}, keepdim={keep}" if dims else f"None, keepdim={keep}"
    codes = [
        f"torch.var({x}, {dims}, correction={d.integer(0, 2)}, keepdim={keep})",
        f"torch.std({x}, {dims}, correction=0, keepdim={keep}) + 1",
        f"torch.var_mean({x}, {dims}, keepdim={keep})[0]",
        f"torch.var_mean({x}.nan_to_num(0, 0, 0), {dims}, keepdim={keep})[1]",
        f"torch.linalg.vector_norm({x}, {d.choose(_ORDERS)}, {over})",
        f"{x}.abs().amax({dims or ()}, keepdim={keep})",
        f"torch.nansum({x}, {over})",
        f"torch.nanmean({x}, {over})",
        f"{x}.logsumexp({dims or 0}, keepdim={keep})",
        f"torch.aminmax({x}).max - torch.aminmax({x}).min",
    ]
    if dims:
        codes += [
            f"torch.tanh({x}).prod({dims[0]}, keepdim={keep})",
            f"F.normalize({x}, dim={dims[0]}, eps=0.5)",
            f"F.rms_norm({x}, ({value.shape[-1]},), eps=0.1)",
            f"F.layer_norm({x}, {tuple(value.shape[dims[0] :])}, eps=0.1)",
        ]
    return d.step(d.choose(codes), value)


def rearrange(d: Drawing) -> object:
    """Views and copies of a value in another order."""
    value = d.value(lambda v: v.rank >= 1)
    if value is None:
        return None
    x, dim, n = value.name, d.dim(value), d.integer(-2, 3)
    size = value.shape[dim]
    codes = [
        f"torch.roll({x}, ({n}, 1), (0, {dim}))",
        f"torch.flip({x}, (0,{f' {value.rank - 1}' if value.rank > 1 else ''}))",
        f"torch.repeat_interleave({x}, {d.integer(1, 3)}, {dim})",
        f"torch.tile({x}, (2, 1))",
        f"torch.diag_embed({x}, {n})",
        f"torch.tensor_split({x}, {d.integer(1, 3)}, {dim})[0]",
        f"torch.chunk({x}, 2, {dim})[-1]",
        f"{x}.unfold({dim}, {max(1, size // 2)}, {d.integer(1, 2)})",
        f"torch.vstack([{x}, {x}])",
        f"torch.meshgrid({x}.reshape(-1), {x}.reshape(-1)[:3], indexing='ij')[{d.integer(0, 1)}]",
        f"torch.stack({x}.unbind({dim}), {dim})",
        f"torch.column_stack([{x}, {x}])",
    ]
    if value.rank >= 2:
        codes += [
            f"torch.tril({x}, {n})",
            f"torch.triu({x}, {n})",
            f"torch.rot90({x}, {n}, (0, 1))",
            f"torch.rot90({x}, {n}, (-1, 0))",
            f"torch.diagonal({x}, {n}, -1, 0)",
            f"torch.movedim({x}, 0, {dim})",
            f"torch.triu({x}.transpose(-1, -2), {n}).transpose(-1, -2)",
        ]
    return d.step(d.choose(codes), value, keeps_exact=True)


FAMILIES: tuple[Call, ...] = (bits, divide, ternary, logic, moments, moments, rearrange, rearrange)
