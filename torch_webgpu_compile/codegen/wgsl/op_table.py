"""How each scalar op is written in WGSL: one row per op, per kind of arithmetic.

A row is a format string over the argument texts ``{0}``, ``{1}``, ``{2}``; ``{T}`` is the WGSL type
of the result, ``{s}`` that of one lane of the arguments and ``{v}`` the suffix of a helper for them
(`hardening.spelling.suffix`); ``{exp}`` is the target's `hardening.spelling.fast_exp`. Helpers
named ``tw_…`` are defined in ``templates/math*.wgsl.jinja`` and included when used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...dtypes import DType, Kind, int64_in_words
from ...ir.scalar import POLYNOMIALS
from ..hardening.spelling import opaque_results, suffix
from ..values import vector_type

# Those that WGSL has operators for: of numbers, and of integers alone.
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}


def _infix(signs: Mapping[str, str]) -> dict[str, str]:
    return {name: f"({{0}} {sign} {{1}})" for name, sign in signs.items()}


# Of floats: helpers of the op's name, of one argument and of two.
_HELPERS = (
    "sign exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh "
    "tanh asinh acosh atanh erf erfc isnan isinf opaque"
)
_PAIR_HELPERS = (
    "floor_divide trunc_divide remainder fmod minimum maximum pow atan2 copysign nextafter ne zeta"
)
_FLOAT = {
    **_infix(OPERATORS | COMPARISONS),
    **{name: f"tw_{name}{{v}}({{0}})" for name in _HELPERS.split()},
    **{name: f"tw_{name}{{v}}({{0}}, {{1}})" for name in f"{_PAIR_HELPERS} {POLYNOMIALS}".split()},
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "square": "({0} * {0})",
    "reciprocal": "({T}(1.0) / {0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "{T}(1.0) / sqrt({0})",
    "fast_exp": "{exp}({0})",
    "sigmoid": "{T}(1.0) / ({T}(1.0) + {exp}(-{0}))",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "round({0})",  # WGSL rounds half to even, as PyTorch does
    "where": "select({2}, {1}, {0})",
}
_SINGLE = {
    **opaque_results(_FLOAT),
    "exact_div": "tw_divide{v}({0}, {1})",
    "wide_div": "tw_quotient{v}({0}, {1})",
    "igamma": "tw_igamma{v}({0}, {1})",
    "igammac": "tw_igammac{v}({0}, {1})",
}

# WGSL's own functions of f64 are those of GLSL.std.450, which has these for 16 and 32 bits only.
_OWN_DOUBLE = "sigmoid trunc round"
_DOUBLE = {
    **opaque_results(_FLOAT),
    **{name: f"tw_{name}{{v}}({{0}})" for name in _OWN_DOUBLE.split()},
    "fast_exp": "tw_exp{v}({0})",
    "trunc_divide": "tw_trunc{v}({0} / {1})",
}

_INTEGER = {
    **_infix(OPERATORS | COMPARISONS | _BITWISE),
    "trunc_divide": "({0} / {1})",
    "fmod": "({0} % {1})",
    "minimum": "min({0}, {1})",
    "maximum": "max({0}, {1})",
    "bitwise_not": "(~{0})",
    "abs": "abs({0})",
    "sign": "sign({0})",
    "square": "({0} * {0})",
    "floor": "{0}",
    "ceil": "{0}",
    "trunc": "{0}",
    "round": "{0}",
    "where": "select({2}, {1}, {0})",
}

_SIGNED = {
    **_INTEGER,
    "neg": "(-{0})",
    "trunc_divide": "tw_trunc_divide_{s}{v}({0}, {1})",
    "floor_divide": "tw_floor_divide_{s}{v}({0}, {1})",
    "fmod": "tw_fmod_{s}{v}({0}, {1})",
    "remainder": "tw_remainder_{s}{v}({0}, {1})",
    "pow": "tw_pow_{s}{v}({0}, {1})",
    "gcd": "tw_gcd_{s}{v}({0}, {1})",
}

_UNSIGNED = {
    **_INTEGER,
    "neg": "({T}(0u) - {0})",
    "abs": "{0}",
    "sign": "min({0}, {T}(1u))",
    "floor_divide": "({0} / {1})",
    "remainder": "({0} % {1})",
    "pow": "tw_pow_{s}{v}({0}, {1})",
    "gcd": "tw_gcd_{s}{v}({0}, {1})",
}

_SHIFTS = {
    "shift_left": "tw_shift_left_{s}{v}({0}, {1})",
    "shift_right": "tw_shift_right_{s}{v}({0}, {1})",
}

_BOOL = {
    "bitwise_and": "tw_and{v}({0}, {1})",
    "bitwise_or": "tw_or{v}({0}, {1})",
    "bitwise_xor": "({0} != {1})",
    "bitwise_not": "(!{0})",
    "minimum": "tw_and{v}({0}, {1})",
    "maximum": "tw_or{v}({0}, {1})",
    "add": "tw_or{v}({0}, {1})",
    "mul": "tw_and{v}({0}, {1})",
    "sub": "({0} != {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "tw_and{v}(!{0}, {1})",
    "gt": "tw_and{v}({0}, !{1})",
    "le": "tw_or{v}(!{0}, {1})",
    "ge": "tw_or{v}({0}, !{1})",
    "where": "select({2}, {1}, {0})",
}

# Of int64 in words, which WGSL's operators would take for vectors.
_NAMED = "neg abs sign bitwise_not"
_NAMED_PAIRS = (
    "add sub mul trunc_divide floor_divide fmod remainder pow gcd minimum maximum shift_left "
    "shift_right bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge"
)
_WORDS = {
    **{name: f"tw_words_{name}{{v}}({{0}})" for name in _NAMED.split()},
    **{name: f"tw_words_{name}{{v}}({{0}}, {{1}})" for name in _NAMED_PAIRS.split()},
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), "{0}"),
    "square": "tw_words_mul{v}({0}, {0})",
    "where": "tw_words_where{v}({0}, {1}, {2})",
}

_TABLES = {
    Kind.FLOAT: _SINGLE,
    Kind.SIGNED: {**_SIGNED, **_SHIFTS},
    Kind.UNSIGNED: {**_UNSIGNED, **_SHIFTS},
    Kind.BOOL: _BOOL,
}

# Narrow integers compute in 32 bits; these ops can leave their range and are wrapped back.
WRAPPING = frozenset(
    {"add", "sub", "mul", "neg", "square", "shift_left", "pow", "bitwise_not", "abs", "gcd"}
)


def op_row(name: str, dtype: DType) -> str | None:
    """The format string for an op on arguments of ``dtype``, or None when there is none."""
    table = _DOUBLE if dtype.compute == "f64" else _TABLES[dtype.kind]
    return (_WORDS if dtype is int64_in_words else table).get(name)


def op_code(name: str, dtype: DType, args: Sequence[str], lanes: int = 1) -> str:
    """An op that has a row, and no exponential in it, on values of one dtype."""
    row = op_row(name, dtype)
    assert row is not None, (name, dtype)
    return row.format(*args, T=vector_type(dtype, lanes), v=suffix(dtype, lanes), s=dtype.compute)
