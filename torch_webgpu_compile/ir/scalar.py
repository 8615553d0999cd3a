"""Scalar expressions: the computation of one element of a buffer.

The nodes form a DAG and are interned: structurally equal expressions are the same object, so a
dictionary keyed by node is common-subexpression elimination. They are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Union

import numpy as np

from .. import dtypes
from ..dtypes import DType, Kind
from ..errors import IndexCheck
from ..symbolic.interning import InternTable, reduced
from ..symbolic.sizes import Expr, IntLike, Symbol, as_expr, substitute, symbols_of
from ..user_wgsl.modules import WgslFunction
from . import float8

_table = InternTable()
_references = _table.references


class _InternedScalar(type):
    def __call__(cls, *args: Any) -> Any:
        key = (cls, *(_distinct(a) for a in args))
        reference = _references.get(key)
        found = None if reference is None else reference()
        return _table.add(key, super().__call__(*args)) if found is None else found


def _distinct(value: Any) -> Any:
    # 1, True, 1.0 and 0.0, -0.0 are equal keys in Python but different constants; nan != nan.
    return (type(value), repr(value)) if isinstance(value, (bool, int, float)) else value


def _operator(name: str) -> Callable[[Any, Scalar | float], Scalar]:
    return lambda left, right: apply(name, left, right)


def _reflected(name: str) -> Callable[[Any, float], Scalar]:
    return lambda right, left: apply(name, left, right)


def _unary(name: str) -> Callable[[Any], Scalar]:
    return lambda operand: apply(name, operand)


class _Arithmetic:
    """Python's operators on scalars: ``a + 1`` is ``apply("add", a, 1)``.

    ``==`` is identity; the scalar op is ``apply("eq", a, b)``.
    """

    __slots__ = ()

    __reduce__ = reduced

    def __repr__(self) -> str:
        return _shown(self, 4)

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __floordiv__, __mod__ = _operator("floor_divide"), _operator("remainder")
    __and__, __or__, __xor__ = map(_operator, ("bitwise_and", "bitwise_or", "bitwise_xor"))
    __lshift__, __rshift__ = _operator("shift_left"), _operator("shift_right")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __neg__, __abs__, __invert__ = map(_unary, ("neg", "abs", "bitwise_not"))


def _shown(value: Any, levels: int) -> str:
    """Text of a field. Without a limit what is used twice would be there twice, at every level."""
    if isinstance(value, tuple):
        return f"({', '.join(_shown(entry, levels) for entry in value)})"
    if not isinstance(value, _Arithmetic):
        return repr(value)
    if not levels:
        return "…"
    entries = (_shown(getattr(value, f.name), levels - 1) for f in fields(value))  # type: ignore[arg-type]
    return f"{type(value).__name__}({', '.join(entries)})"


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Const(_Arithmetic, metaclass=_InternedScalar):
    """A literal of the given dtype, infinities and NaN included; see `const`."""

    value: bool | int | float
    dtype: DType


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Index(_Arithmetic, metaclass=_InternedScalar):
    """The value of an index expression as an int64."""

    dtype: ClassVar[DType] = dtypes.int64

    expr: Expr


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Load(_Arithmetic, metaclass=_InternedScalar):
    """An element of a buffer at a logical index, one int64 scalar per dimension.

    An `Index` entry is arithmetic on symbols. Any other entry is computed from data (a gather): its
    value is proven to lie in [0, size), or it is `Checked`.
    """

    buffer: str
    index: tuple[Scalar, ...]
    dtype: DType


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Op(_Arithmetic, metaclass=_InternedScalar):
    """A row of `OPS` applied to arguments."""

    name: str
    args: tuple[Scalar, ...]
    dtype: DType


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Masked(_Arithmetic, metaclass=_InternedScalar):
    """``body`` where ``condition`` holds, else ``other``; ``body`` loads nothing elsewhere."""

    condition: Scalar
    body: Scalar
    other: Scalar

    @property
    def dtype(self) -> DType:
        """The dtype of both branches."""
        return self.body.dtype


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Checked(_Arithmetic, metaclass=_InternedScalar):
    """``position`` where it lies in [0, size), else -1; the kernel reports the latter to the host.

    A load at -1 may load any element, and a scatter to -1 changes none. Unused positions need not
    be checked, and a position that several kernels use may be reported by each of them.

    Attributes:
        position: an int64 from data.
        given: the integer that ``position`` was made from: the index that the report names.
        size: an int64 that is the same at all points.
        check: the operator, dimension and line of code that the report names.
    """

    dtype: ClassVar[DType] = dtypes.int64

    position: Scalar
    given: Scalar
    size: Scalar
    check: IndexCheck


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class FunctionCall(_Arithmetic, metaclass=_InternedScalar):
    """A result of a function in WGSL that a user has written, or this package for an operator.

    Attributes:
        function: what is called.
        args: as many as it has parameters, of the dtypes that `CALL_DTYPES` has for their types.
        result: which of the function's results it is.
    """

    function: WgslFunction
    args: tuple[Scalar, ...]
    result: int

    @property
    def dtype(self) -> DType:
        """The dtype of the result's type in `CALL_DTYPES`."""
        return CALL_DTYPES[self.function.results[self.result][1]]


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Local(_Arithmetic, metaclass=_InternedScalar):
    """A number that a node has computed at each point before this body of it: see `Node.locals`."""

    name: str
    dtype: DType


CALL_DTYPES: dict[str, DType] = {
    "f32": dtypes.float32,
    "f16": dtypes.float32,  # as float16 is computed elsewhere; rounded on its way in and out
    "i32": dtypes.int32,
    "u32": dtypes.uint32,
    "bool": dtypes.bool_,
}
"""What the arguments and results of a `FunctionCall` are, by their WGSL types."""

Scalar = Union[Const, Index, Load, Op, Masked, Checked, FunctionCall, Local]
SCALARS = (Const, Index, Load, Op, Masked, Checked, FunctionCall, Local)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """A row of `OPS`: the signature and properties of a scalar op.

    Attributes:
        arity: the number of arguments.
        result: its dtype: "same" (that of the arguments, which must agree), "bool", or "given"
            (chosen by the caller).
        meaning: what it computes of the arguments a, b and c.
        cost: of one evaluation, in multiplications.
    """

    arity: int
    result: str
    meaning: str
    cost: int = 1


# The cost of a transcendental function on a GPU, in multiplications.
_EXPENSIVE = 8

# The cost of a function that loops until it converges, or once per degree.
_LOOPING = 64

CALL_COST, LOOPING_CALL_COST = 2 * _EXPENSIVE, _LOOPING
"""Of a function in WGSL of which nothing is known but that it has loops, or none."""

_CHEAP_UNARY = "neg abs sign square reciprocal sqrt rsqrt floor ceil trunc round bitwise_not"
_EXPENSIVE_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc sigmoid"
)
_CHEAP_BINARY = {
    "add": "a + b, integers wrap",
    "sub": "a - b, integers wrap",
    "mul": "a * b, integers wrap",
    "div": "a / b of floats",
    "trunc_divide": "trunc(a / b)",
    "minimum": "the smaller, NaN if either is NaN",
    "maximum": "the larger, NaN if either is NaN",
    "bitwise_and": "bits, or logical and of bools",
    "bitwise_or": "bits, or logical or of bools",
    "bitwise_xor": "bits, or logical xor of bools",
    "shift_left": "a << b",
    "shift_right": "a >> b, arithmetic for signed",
    "copysign": "|a| with b's sign",
    "nextafter": "the float after a towards b",
}
_EXPENSIVE_BINARY = {
    "floor_divide": "floor(a / b)",
    "remainder": "a - b*floor(a/b): the divisor's sign",
    "fmod": "a - b*trunc(a/b): the dividend's sign",
    "pow": "a to the b",
    "atan2": "the angle of (b, a)",
}

# Polynomials in a of degree b.
POLYNOMIALS = (
    "chebyshev_t chebyshev_u chebyshev_v chebyshev_w shifted_chebyshev_t shifted_chebyshev_u "
    "shifted_chebyshev_v shifted_chebyshev_w hermite_h hermite_he laguerre legendre"
)
_LOOPING_BINARY = {
    **{name: f"the polynomial {name} of degree b at a" for name in POLYNOMIALS.split()},
    "gcd": "the greatest common divisor of |a| and |b|",
    "zeta": "Hurwitz's zeta function of exponent a at b",
    "igamma": "the regularized lower incomplete gamma function of parameter a at b",
    "igammac": "the regularized upper incomplete gamma function of parameter a at b",
}

# What `codegen.hardening` writes of floats: on the host they are what they are made of.
_HARDENED = {
    "opaque": OpInfo(1, "same", "a, of which the driver's compiler knows nothing"),
    "exact_div": OpInfo(2, "same", "a / b of floats, rounded correctly"),
    "wide_div": OpInfo(2, "same", "a / b of floats, for every b"),
}

OPS: dict[str, OpInfo] = {
    **{name: OpInfo(2, "same", text) for name, text in _CHEAP_BINARY.items()},
    **{name: OpInfo(2, "same", text, _EXPENSIVE) for name, text in _EXPENSIVE_BINARY.items()},
    **{name: OpInfo(2, "same", text, _LOOPING) for name, text in _LOOPING_BINARY.items()},
    **{name: OpInfo(1, "same", name) for name in _CHEAP_UNARY.split()},
    **{name: OpInfo(1, "same", name, _EXPENSIVE) for name in _EXPENSIVE_UNARY.split()},
    "fast_exp": OpInfo(1, "same", "e to the a; its relative error may grow with |a|", _EXPENSIVE),
    **{name: OpInfo(2, "bool", name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: OpInfo(1, "bool", name) for name in ("isnan", "isinf")},
    "where": OpInfo(3, "same", "b where the bool a holds, else c; both are evaluated"),
    "cast": OpInfo(1, "given", "PyTorch's conversion between dtypes"),
    "bitcast": OpInfo(1, "given", "the same bits as another dtype of the same size"),
    **_HARDENED,
}


def neutral(kind: str, dtype: DType) -> Const:
    """The neutral element of a reduction or scan: its result for no elements.

    Args:
        kind: a `Reduction.kind` or ``logsumexp``.
        dtype: of the elements.
    """
    match kind:
        case "sum" | "any":
            return const(0, dtype)
        case "prod" | "all":
            return const(1, dtype)
        case "minimum" | "argmin":
            return const(dtype.highest, dtype)
        case "maximum" | "argmax" | "logsumexp":
            return const(dtype.lowest, dtype)
        case _:
            raise ValueError(f"{kind} has no neutral element")


def const(value: bool | int | float, dtype: DType) -> Const:
    """``value`` as a constant of ``dtype``.

    Integers wrap to the dtype's range, a float of 8 bits is rounded to its nearest value, and bool
    is whether the value is nonzero.
    """
    if dtype.kind is Kind.BOOL:
        return Const(bool(value), dtype)
    if dtype.is_float8:
        return Const(float(float8.rounded(np.asarray(value), dtype)), dtype)
    if dtype.is_float:
        return Const(float(value), dtype)
    bits = dtype.bits
    wrapped = int(value) & ((1 << bits) - 1)
    if dtype.kind is Kind.SIGNED and wrapped >> (bits - 1):
        wrapped -= 1 << bits
    return Const(wrapped, dtype)


def index(expr: IntLike) -> Index:
    """An index expression as a scalar."""
    return Index(as_expr(expr))


def apply(name: str, *operands: Scalar | float, dtype: DType | None = None) -> Scalar:
    """The scalar op ``name`` of ``operands``, which is folded where that is trivial.

    Args:
        operands: scalars; a Python number is a constant of the dtype of the others.
        dtype: of the result, for "cast" and "bitcast" only.

    Raises:
        ValueError: the number or the dtypes of the operands do not fit the row of `OPS`.
    """
    info = OPS[name]
    if len(operands) != info.arity:
        raise ValueError(f"{name} takes {info.arity} arguments, got {len(operands)}")
    args = _with_constants(name, operands)
    if info.result == "given":
        if dtype is None:
            raise ValueError(f"{name} needs a dtype")
        if args[0].dtype is dtype:
            return args[0]
        if name == "cast" and isinstance(args[0], Const):
            return _cast_const(args[0], dtype)
        return Op(name, args, dtype)
    compared = args[1:] if name == "where" else args
    if any(a.dtype is not compared[0].dtype for a in compared):
        raise ValueError(f"{name} of different dtypes: {[a.dtype for a in args]}")
    if name == "where" and args[0].dtype.kind is not Kind.BOOL:
        raise ValueError(f"where needs a bool condition, got {args[0].dtype}")
    if name == "where" and args[1] is args[2]:
        return args[1]
    return Op(name, args, dtypes.bool_ if info.result == "bool" else compared[0].dtype)


def _with_constants(name: str, operands: tuple[Scalar | float, ...]) -> tuple[Scalar, ...]:
    compared = operands[1:] if name == "where" else operands
    dtype = next((a.dtype for a in compared if not isinstance(a, (int, float))), None)
    if dtype is None:
        raise ValueError(f"{name} needs a scalar besides numbers, got {operands}")
    return tuple(const(a, dtype) if isinstance(a, (int, float)) else a for a in operands)


def where(condition: Scalar, yes: Scalar | float, no: Scalar | float) -> Scalar:
    """``yes`` where the bool scalar holds, else ``no``; both are evaluated. See `apply`."""
    return apply("where", condition, yes, no)


def _cast_const(value: Const, dtype: DType) -> Scalar:
    number = value.value
    if isinstance(number, float) and not dtype.is_float and not math.isfinite(number):
        return Op("cast", (value,), dtype)  # not a number in Python: leave it to the kernel
    if dtype.kind is Kind.BOOL:
        return const(number != 0, dtype)
    return const(number if dtype.is_float else int(number), dtype)


def cast(value: Scalar, dtype: DType) -> Scalar:
    """``value`` converted to ``dtype`` as PyTorch converts; itself if it has that dtype."""
    return apply("cast", value, dtype=dtype)


def children(node: Scalar) -> tuple[Scalar, ...]:
    """Direct operands."""
    kind = node.__class__
    if kind is Op or kind is FunctionCall:
        return node.args  # type: ignore[union-attr]
    if kind is Load:
        return node.index  # type: ignore[union-attr]
    match node:
        case Masked():
            return (node.condition, node.body, node.other)
        case Checked():
            return (node.position, node.given, node.size)
        case _:
            return ()


# Passes, and checks after them, go through the same scalars again and again.
@lru_cache(maxsize=1 << 13)
def walk(root: Scalar) -> tuple[Scalar, ...]:
    """Every distinct node under ``root``, operands first."""
    found: list[Scalar] = []
    seen: set[Scalar] = set()
    stack: list[Scalar | None] = [root]
    while stack:
        node = stack.pop()
        if node is None:  # what is below it has been through
            found.append(stack.pop())  # type: ignore[arg-type]
        elif node not in seen:
            seen.add(node)
            below = children(node)
            if below:
                stack += (node, None, *reversed(below))
            else:
                found.append(node)
    return tuple(found)


def rewrite(
    root: Scalar,
    change: Callable[[Scalar], Scalar | None],
    keep: Callable[[Scalar], bool] | None = None,
) -> Scalar:
    """``root`` rebuilt from its operands up.

    Args:
        change: gets every rebuilt node; returns another one in its place, or None to leave it.
        keep: holds for nodes that stay as they are, with everything under them.
    """
    done: dict[Scalar, Scalar] = {}
    for node in walk(root):
        if keep is not None and keep(node):
            done[node] = node
            continue
        before = children(node)
        operands = tuple([done[operand] for operand in before])
        built = node if operands == before else _with_operands(node, operands)
        changed = change(built)
        done[node] = built if changed is None else changed
    return done[root]


def _with_operands(node: Scalar, operands: tuple[Scalar, ...]) -> Scalar:
    """``node`` with others in place of its `children`."""
    match node:
        case Load(buffer, _, dtype):
            return Load(buffer, operands, dtype)
        case Op(name, _, dtype):
            return Op(name, operands, dtype)
        case Masked():
            condition, body, other = operands
            return Masked(condition, body, other)
        case Checked(check=check):
            position, given, size = operands
            return Checked(position, given, size, check)
        case FunctionCall(function, _, result):
            return FunctionCall(function, operands, result)
        case _:
            return node


def substitute_symbols(root: Scalar, values: Mapping[Symbol, Expr]) -> Scalar:
    """``root`` with index symbols replaced."""
    if scalar_symbols(root).isdisjoint(values):
        return root

    def change(node: Scalar) -> Scalar | None:
        return Index(substitute(node.expr, values)) if isinstance(node, Index) else None

    return rewrite(root, change)


@lru_cache(maxsize=1 << 13)
def loads_of(root: Scalar) -> tuple[Load, ...]:
    """Every distinct load under ``root``."""
    return tuple(node for node in walk(root) if isinstance(node, Load))


@lru_cache(maxsize=1 << 13)
def checks_of(root: Scalar) -> tuple[Checked, ...]:
    """Every distinct `Checked` under ``root``."""
    return tuple(node for node in walk(root) if isinstance(node, Checked))


def functions_of(root: Scalar) -> list[WgslFunction]:
    """Every distinct function in WGSL that is called under ``root``."""
    calls = (node.function for node in walk(root) if isinstance(node, FunctionCall))
    return list(dict.fromkeys(calls))


@lru_cache(maxsize=1 << 13)
def scalar_symbols(root: Scalar) -> frozenset[Symbol]:
    """Every symbol in the index expressions under ``root``."""
    found: frozenset[Symbol] = frozenset()
    for node in walk(root):
        if isinstance(node, Index):
            found |= symbols_of(node.expr)
    return found


def is_host_float(root: Scalar) -> bool:
    """Whether ``root`` makes a float32 of a host number of sizes: one that the host hands over."""
    if not isinstance(root, Op) or root.name != "cast" or root.dtype.compute != "f32":
        return False
    (value,) = root.args
    is_exact = isinstance(value, Index) or value.dtype is dtypes.float64
    return is_exact and is_host_number(value) and bool(scalar_symbols(value))


_HOST_OPS = frozenset({"neg", "sqrt", "add", "sub", "mul", "div", "pow"})


def is_host_number(root: Scalar) -> bool:
    """Whether the host can compute ``root`` before a call.

    It can if it is float64 arithmetic on sizes and constants, without index symbols and loads.
    """
    for node in walk(root):
        match node:
            case Index(expr):
                if any(s.extent is not None for s in symbols_of(expr)):
                    return False
            case Const():
                pass
            case Op("cast", (inner,), dtypes.float64) if not inner.dtype.is_float:
                if not isinstance(inner, (Const, Index)):
                    return False
            case Op(name, _, dtypes.float64) if name in _HOST_OPS:
                pass
            case _:
                return False
    return True
