"""How quirks of drivers are avoided in WGSL, where no scalar expression can say it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...dtypes import DType, float32, int64_in_words
from ...symbolic.sizes import ZERO, Expr
from ...target import Target
from ..values import Text

# Of what these give, drivers know too much: they take roots for positive (√-0 is -0, its reciprocal
# -∞) and that of x · x for |x|, a sigmoid for not 0, and multiply with a sign by choosing.
HIDDEN_RESULTS = ("sqrt", "rsqrt", "sigmoid", "sign")

_BITS = ("tw_zero_bits", "tw_nzero_bits", "tw_inf_bits", "tw_ninf_bits", "tw_nan_bits")


def suffix(dtype: DType, lanes: int) -> str:
    """The suffix in the name of a helper on ``lanes`` values of ``dtype``."""
    if dtype.compute == "f64":
        return "_f64" if lanes == 1 else "_f64x4"
    many = "_x4" if dtype is int64_in_words else "4"
    return "" if lanes == 1 else many


def opaque(value: Text) -> Text:
    """``value`` by a function that returns it unchanged, which the driver cannot find out."""
    return replace(value, code=f"tw_opaque{suffix(value.dtype, value.lanes)}({value.code})")


def opaque_results(rows: dict[str, str]) -> dict[str, str]:
    """Rows of the table of operations on floats, of which some give an opaque result."""
    return {
        name: f"tw_opaque{{v}}({row})" if name in HIDDEN_RESULTS else row
        for name, row in rows.items()
    }


def int64_of(code: str, int64: DType, lanes: int = 1) -> str:
    """An i32 as an int64 of which drivers do not know that 32 bits would hold it.

    They know nothing of two words; see `Target.in_wgsl` for ``int64``.
    """
    if int64 is int64_in_words:
        return f"tw_words_of_i32{suffix(int64, lanes)}({code})"
    return f"tw_opaque_i64(i64({code}))" if lanes == 1 else f"tw_opaque_i64x4(vec4<i64>({code}))"


def known_number(value: Text) -> Text:
    """A literal that a choice gives, opaque if it is a float: a driver multiplies by choosing."""
    return opaque(value) if value.dtype.is_float else value


def position_as_float(value: Text, positions: Sequence[Expr]) -> Text:
    """A position converted to ``value``, opaque if it is a float and known to be 0 in a lane."""
    return opaque(value) if value.dtype.is_float and ZERO in positions else value


def is_known_sum(reduction: str | None, dtype: DType, invocations: int) -> bool:
    """Whether a driver may see what a row's sum or product, made by so many invocations, is of."""
    return invocations == 1 and dtype.compute == "f32" and reduction in ("sum", "prod")


def avoids_neutral(reduction: str, dtype: DType) -> bool:
    """Whether what does not count is to be left out of a reduction, instead of its neutral element
    being taken in: beside the lowest integer a driver got lost in negated ones."""
    return dtype.is_integer and reduction in ("maximum", "minimum")


def fast_exp(target: Target, lanes: int = 1) -> str:
    """The name of e to the a: the driver's own, or this package's if it loses NaN.

    SwiftShader's exp of NaN is infinite, and a sigmoid of it 0.
    """
    return "exp" if target.exp_keeps_nan else f"tw_exp{suffix(float32, lanes)}"


def all_of(conditions: Sequence[str]) -> str:
    """Their conjunction, without branches; "" of none. One that is "" always holds."""
    conditions = [condition for condition in conditions if condition]
    if len(conditions) <= 1:
        return "".join(conditions)
    return f"({' & '.join(f'({condition})' for condition in conditions)})"


def changed_bits(names: Iterable[str]) -> list[str]:
    """Statements at the start of ``main`` that may change variables with infinities, NaN and 0.

    No driver knows that a workgroup's index is less than how many there are (their greatest number,
    Mesa's knows). A float's bits and a 0 that may be another number make one of which it knows
    nothing (`opaque`).

    Args:
        names: of all definitions from the library that the kernel has.
    """
    return [f"  if (group.x == groups.x) {{ {name} ^= 1u; }}" for name in names if name in _BITS]
