"""What a random program calls: one function per family, which appends at most a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .programs import DIMS, DTYPES, Drawing, Value

Call = Callable[[Drawing], object]


def is_exact_or_integer(value: Value) -> bool:
    return value.exact and value.finite


_SMOOTH = (
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "torch.exp(torch.clamp({0}, max=3))",
    "torch.sin({0})",
    "torch.cos({0})",
    "torch.erf({0})",
    "torch.sqrt({0}.abs())",
    "torch.rsqrt({0}.abs() + 1)",
    "torch.log1p({0}.abs())",
    "torch.log({0}.abs() + 1)",
    "torch.expm1(torch.clamp({0}, max=3))",
    "torch.atan({0})",
    "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')",
    "F.silu({0})",
    "F.softplus({0})",
    "torch.reciprocal({0}.abs() + 0.5)",
)
_EXACT_UNARY = ("-{0}", "{0}.abs()", "torch.relu({0})", "{0} * 2", "{0} + 1", "torch.square({0})")
_STEPPED = (
    "torch.floor({0})",
    "torch.ceil({0})",
    "torch.trunc({0})",
    "torch.round({0})",
    "torch.sign({0})",
)


def unary(d: Drawing) -> object:
    """A function of one value."""
    value = d.value()
    assert value is not None
    if value.dtype is torch.bool:
        return d.step(f"~{value.name}", value, keeps_exact=True)
    if value.is_float and d.flag():
        if value.exact and d.flag():
            return d.step(d.choose(_STEPPED).format(value.name), value, keeps_exact=True)
        return d.step(d.choose(_SMOOTH).format(value.name), value)
    codes = _EXACT_UNARY if value.is_float else (*_EXACT_UNARY, "torch.bitwise_not({0})")
    return d.step(d.choose(codes).format(value.name), value, keeps_exact=True)


_ARITHMETIC = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})")
_MORE_ARITHMETIC = ("torch.minimum({0}, {1})", "torch.add({0}, {1}, alpha=2)")
_COMPARISONS = tuple(f"{{0}} {sign} {{1}}" for sign in ("==", "!=", "<", "<=", ">", ">="))
_INTEGER_BINARY = (
    "{0} & {1}",
    "{0} | {1}",
    "{0} ^ {1}",
    "{0} // ({1}.abs() + 1)",
    "{0} % ({1}.abs() + 1)",
    "torch.fmod({0}, {1}.abs() + 1)",
    "torch.div({0}, {1}.abs() + 1, rounding_mode='trunc')",
    "{0} // (-({1} * {1}) - 1)",
    "{0} % (-({1} * {1}) - 1)",
    "{0} << ({1} & 3)",
    "{0} >> ({1} & 7)",
)
_FLOAT_BINARY = (
    "{0} / ({1}.abs() + 0.5)",
    "torch.atan2({0}.abs() + 0.5, {1})",  # the sign of what is nearly zero may be open
    "torch.pow({0}.abs() + 0.5, torch.clamp({1}, -2, 2))",
    "torch.hypot({0}, {1})",
)


def binary(d: Drawing) -> object:
    """A function of two values that broadcast, or of a value and a number."""
    left = d.value()
    assert left is not None
    right = d.value(lambda v: broadcasts(v, left))
    if right is None or d.integer(0, 5) == 5:
        number = d.choose((2, -3, 0.5, True))
        return d.step(d.choose(_ARITHMETIC[:3]).format(left.name, number), left, keeps_exact=True)
    names = (left.name, right.name)
    kind = d.integer(0, 3)
    if kind == 1 and left.exact and right.exact:
        return d.step(d.choose(_COMPARISONS).format(*names), left, right, keeps_exact=True)
    if kind == 2 and not left.is_float and not right.is_float:
        # Tracing refuses shifts of bools, which eager takes.
        bools = torch.bool in (left.dtype, right.dtype)
        codes = _INTEGER_BINARY[:-2] if bools else _INTEGER_BINARY
        return d.step(d.choose(codes).format(*names), left, right, keeps_exact=True)
    if kind == 2 and left.is_float and right.is_float:
        return d.step(d.choose(_FLOAT_BINARY).format(*names), left, right)
    codes = _ARITHMETIC + _MORE_ARITHMETIC
    return d.step(d.choose(codes).format(*names), left, right, keeps_exact=True)


def broadcasts(a: Value, b: Value) -> bool:
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return True


def select(d: Drawing) -> object:
    """``where`` and masked filling."""
    mask = d.value(lambda v: v.dtype is torch.bool)
    if mask is None:
        source = d.value(is_exact_or_integer)
        if source is None:
            return None
        mask = d.step(f"{source.name} > 1", source, keeps_exact=True)
    value = None if mask is None else d.value(lambda v: broadcasts(v, mask))
    if mask is None or value is None:
        return None
    if d.flag():
        fill = d.choose((0, 1)) if not value.is_float else d.choose((0, "float('-inf')", 0.5))
        return d.step(
            f"{value.name}.masked_fill({mask.name}, {fill})", value, mask, keeps_exact=True
        )
    other = d.value(lambda v: broadcasts(v, value) and v.dtype is value.dtype)
    if other is None:
        return None
    code = f"torch.where({mask.name}, {value.name}, {other.name})"
    return d.step(code, mask, value, other, keeps_exact=True)


def convert(d: Drawing) -> object:
    """A conversion to another dtype."""
    value = d.value()
    assert value is not None
    dtype = d.choose(DTYPES)
    to_number = not dtype.is_floating_point
    if value.is_float and to_number and not (value.exact and value.finite):
        return None
    if dtype is torch.uint8 and value.is_float:
        return None  # negative floats to uint8 are undefined in C++
    return d.step(f"{value.name}.to({dtype})", value, keeps_exact=True)


_EXACT_REDUCTIONS = ("sum", "amax", "amin", "sum")
_POSITIONS = ("argmax", "argmin")
_SMOOTH_REDUCTIONS = ("mean", "var", "std", "logsumexp")


def reduce(d: Drawing) -> object:
    """A reduction over any set of dimensions."""
    value = d.value()
    assert value is not None
    if value.dtype is torch.bool and d.flag():
        return d.step(f"{value.name}.sum()", value, keeps_exact=True)
    keepdim = d.flag()
    tests = ("any", "all") if value.exact else ()
    names = _EXACT_REDUCTIONS + (_SMOOTH_REDUCTIONS if value.is_float else ()) + tests
    dims = [k for k in range(value.rank) if d.flag()]
    if value.exact and value.rank and d.integer(0, 4) == 4:
        dim = d.dim(value)
        code = f"{value.name}.{d.choose(_POSITIONS)}({dim}, keepdim={keepdim})"
        return d.step(code, value, keeps_exact=True)
    if value.rank and d.integer(0, 6) == 6:
        dim, name = d.dim(value), d.choose(("max", "min"))
        code = f"{value.name}.{name}({dim}, keepdim={keepdim}).values"
        return d.step(code, value, keeps_exact=True)
    name = d.choose(names)
    if not dims:
        return d.step(
            f"{value.name}.{name}()", value, keeps_exact=name in _EXACT_REDUCTIONS + tests
        )
    if name in ("any", "all"):
        code = f"{value.name}.{name}({dims[0]}, keepdim={keepdim})"
    else:
        code = f"{value.name}.{name}({tuple(dims)}, keepdim={keepdim})"
    return d.step(code, value, keeps_exact=name in _EXACT_REDUCTIONS + tests)


def normalize(d: Drawing) -> object:
    """Reductions together with what is computed from the same rows."""
    value = d.value(lambda v: v.is_float and v.rank >= 1 and v.magnitude < 64)
    if value is None:
        return None
    dim = d.dim(value)
    x = value.name
    codes = [
        f"torch.softmax({x}, {dim})",
        f"torch.log_softmax({x}, {dim})",
        f"F.layer_norm({x}, ({value.shape[-1]},), eps=0.1)",
        f"{x} - {x}.mean({dim}, keepdim=True)",
        f"{x} / (1 + {x}.abs().amax({dim}, keepdim=True))",
        f"{x} * torch.rsqrt({x}.pow(2).mean({dim}, keepdim=True) + 1e-5)",
        f"({x} - {x}.mean()) * torch.rsqrt({x}.var() + 1)",
    ]
    return d.step(d.choose(codes), value)


def view(d: Drawing) -> object:
    """A view, or a copy in another order."""
    value = d.value()
    assert value is not None
    x, shape, rank = value.name, value.shape, value.rank
    codes = [f"{x}.reshape(-1)", f"{x}.unsqueeze({d.integer(0, rank)})", f"{x}.squeeze()"]
    if rank:
        dim = d.dim(value)
        size = shape[dim]
        start, step = d.integer(0, max(0, size - 1)), d.integer(1, 3)
        order = d.draw_permutation(rank)
        codes += [
            f"{x}.permute({', '.join(map(str, order))})",
            f"{x}.flip({dim})",
            f"{x}[{start}:]",
            f"{x}[..., ::{step}]",
            f"{x}.narrow({dim}, {start if size else 0}, {max(0, size - start)})",
            f"{x}.permute({', '.join(map(str, order))}).reshape({_reshaped(d, value)})",
            f"{x}.reshape({_reshaped(d, value)})",
            f"{x}.roll({d.integer(-2, 5)}, {dim})",
            f"{x}.repeat({', '.join(str(d.integer(1, 2)) for _ in range(rank))})",
            f"{x}.unsqueeze({dim}).expand({_expanded(d, value, dim)})",
            f"{x}.contiguous()",
        ]
        if size:
            codes.append(f"{x}.select({dim}, {start})")
        if rank > 1:
            codes += [
                f"{x}.transpose({dim}, -1)",
                f"{x}.flatten(0, 1)",
                f"torch.tril({x}, {step - 2})",
            ]
    return d.step(d.choose(codes), value, keeps_exact=True)


def _expanded(d: Drawing, value: Value, dim: int) -> str:
    sizes = list(value.shape)
    at = dim % (value.rank + 1)
    sizes.insert(at, d.integer(1, 3))
    return ", ".join(map(str, sizes))


def _reshaped(d: Drawing, value: Value) -> tuple[int, ...]:
    """Another shape of as many elements."""
    numel = value.tensor.numel()
    if numel == 0:
        return (0, d.integer(1, 3))
    sizes, rest = [], numel
    for _ in range(d.integer(0, 2)):
        divisors = [k for k in range(1, rest + 1) if rest % k == 0]
        sizes.append(d.choose(divisors))
        rest //= sizes[-1]
    return (*sizes, rest)


def join(d: Drawing) -> object:
    """Concatenation, stacking and padding."""
    value = d.value()
    assert value is not None
    x = value.name
    if value.rank and d.flag():
        fill = 1 if value.dtype is torch.bool else d.choose((0, 1, 2))
        pads = [d.integer(-1, 3) for _ in range(2 * d.integer(1, min(2, value.rank)))]
        return d.step(f"F.pad({x}, {pads}, value={fill})", value, keeps_exact=True)
    if value.rank == 0 or d.flag():
        others = list(self_like(d, value))[:2]
        names = ", ".join(v.name for v in (value, *others))
        dim = d.integer(0, value.rank)
        return d.step(f"torch.stack([{names}], {dim})", value, *others, keeps_exact=True)
    dim = d.integer(0, value.rank - 1)
    others = [v for v in d.pool if v.rank == value.rank and _cats(v, value, dim)][-3:]
    chosen = [value, *(v for v in others if d.flag())]
    names = ", ".join(v.name for v in chosen)
    return d.step(f"torch.cat([{names}], {dim})", *chosen, keeps_exact=True)


def self_like(d: Drawing, value: Value) -> list[Value]:
    """Values of the same shape."""
    return [v for v in d.pool if v.shape == value.shape]


def _cats(a: Value, b: Value, dim: int) -> bool:
    same = [k for k in range(a.rank) if k != dim]
    return all(a.shape[k] == b.shape[k] for k in same)


def index(d: Drawing) -> object:
    """Reads, and writes, at computed positions."""
    value = d.value(lambda v: v.rank >= 1 and v.tensor.numel() > 0)
    if value is None:
        return None
    x, dim = value.name, d.integer(0, value.rank - 1)
    size = value.shape[dim]
    # A 0-d index would become a size that depends on data.
    source = d.value(lambda v: v.dtype is torch.int64 and v.rank > 0 and 0 < v.tensor.numel() < 200)
    if source is None:
        source = d.add_input((d.choose((3, 1, 5, 8)),), torch.int64)
    where = f"({source.name} % {size})"
    flat = f"{where}.reshape(-1)"
    codes = [
        f"{x}.index_select({dim}, {flat})",
        f"{x}[{'..., ' if d.flag() else ''}{where.replace(str(size), str(value.shape[0]))}]"
        if value.rank == 1
        else f"{x}[{'' if dim == 0 else ':, ' * dim}{where}]",
        f"torch.gather({x}, {dim}, {_gather_index(value, dim, source, where)})",
    ]
    if value.rank == 2:
        codes.append(f"F.embedding({source.name} % {value.shape[0]}, {x})")
    code = d.choose(codes)
    own = without_overlap(value)
    # Accumulation runs on the host in other dtypes.
    if value.exact and value.dtype in (torch.float32, torch.int32) and d.integer(0, 3) == 3:
        code = d.choose(
            (
                f"{x}.index_fill({dim}, {flat}, 1)",
                f"torch.slice_scatter({own}, {x}.narrow({dim}, 0, {max(1, size // 2)}) * 2, {dim}, "
                f"0, {max(1, size // 2)})",
                f"torch.select_scatter({own}, {x}.select({dim}, 0) + 1, {dim}, {size - 1})",
                f"{x}.index_add({dim}, {flat}, {x}.index_select({dim}, {flat}))",
            )
        )
    return d.step(code, value, source, keeps_exact=True)


def without_overlap(value: Value) -> str:
    """The value, copied if elements share memory: eager writes of `*_scatter` would meet there."""
    strides = zip(value.shape, value.tensor.stride(), strict=True)
    apart = [(size, stride) for size, stride in strides if stride]
    span = 1 + sum((size - 1) * stride for size, stride in apart)
    fits = math.prod(size for size, _ in apart) <= span
    return value.name if fits else f"{value.name}.contiguous()"


def _gather_index(value: Value, dim: int, source: Value, where: str) -> str:
    shape = list(value.shape)
    shape[dim] = source.tensor.numel()
    ones = [1] * value.rank
    ones[dim] = -1
    return f"{where}.reshape({tuple(ones)}).expand({tuple(shape)})"


def create(d: Drawing) -> object:
    """A tensor from nothing but sizes."""
    size = d.choose(DIMS)
    codes = (
        f"torch.arange({size})",
        f"torch.arange({size}, dtype=torch.float32) * 0.5",
        f"torch.ones({size}, dtype=torch.bool)",
        f"torch.full(({size}, 1), 3)",
        f"torch.eye({size})",
    )
    return d.step(d.choose(codes), keeps_exact=True)


FAMILIES: tuple[Call, ...] = (
    unary,
    binary,
    binary,
    reduce,
    view,
    view,
    select,
    convert,
    normalize,
    join,
    index,
    create,
)
