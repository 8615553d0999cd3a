"""How quirks of drivers are avoided in WGSL, where no scalar expression can say it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from ...dtypes import DType
from ...symbolic.sizes import ZERO, Expr
from ...target import Target
from ..values import Text

# Of what these give, drivers know too much: they take roots for positive (√-0 is -0, its reciprocal
# -∞) and that of x · x for |x|, a sigmoid for not 0, and multiply with a sign by choosing.
HIDDEN_RESULTS = ("sqrt", "rsqrt", "sigmoid", "sign")

# What templates print behind `entry_point`, and the variables that `hide_bits` hides there.
ENTRY = "  // the entry point begins"
_BITS = ("tw_zero_bits", "tw_nzero_bits", "tw_inf_bits", "tw_ninf_bits", "tw_nan_bits")


def suffix(dtype: DType, lanes: int) -> str:
    """The suffix in the name of a helper on ``lanes`` values of ``dtype``."""
    if dtype.compute == "f64":
        return "_f64" if lanes == 1 else "_f64x4"
    return "" if lanes == 1 else "4"


def opaque(value: Text) -> Text:
    """``value`` by a function that returns it unchanged, which the driver cannot find out."""
    return replace(value, code=f"tw_opaque{suffix(value.dtype, value.lanes)}({value.code})")


def opaque_results(rows: dict[str, str]) -> dict[str, str]:
    """Rows of the table of operations on floats, of which some give an opaque result."""
    return {
        name: f"tw_opaque{{v}}({row})" if name in HIDDEN_RESULTS else row
        for name, row in rows.items()
    }


def int64_of(code: str, lanes: int = 1) -> str:
    """A 32-bit integer as an i64 of which drivers do not know that 32 bits would hold it."""
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


def exchanged_type(compute: str) -> str:
    """The type in workgroup memory of elements of a WGSL type: booleans are words there."""
    return "u32" if compute == "bool" else compute


def exponentials(module: str, target: Target) -> str:
    """``module`` with the driver's ``exp`` for ``tw_fast_exp``, or this package's if NaN is lost.

    SwiftShader's exp of NaN is infinite, and a sigmoid of it 0.
    """
    if target.exp_keeps_nan:
        return re.sub(r"\btw_fast_exp4?\(", "exp(", module)
    return module.replace("tw_fast_exp", "tw_exp")


def all_of(conditions: Sequence[str]) -> str:
    """Their conjunction, without branches; "" of none."""
    if len(conditions) <= 1:
        return "".join(conditions)
    return f"({' & '.join(f'({condition})' for condition in conditions)})"


def hide_bits(text: str, helpers: Collection[str]) -> str:
    """``text``, whose entry point may change the variables that hold infinities, NaN and 0.

    No driver knows that a workgroup's index is less than how many there are (their greatest number,
    Mesa's knows). A float's bits and a 0 that may be another number make one of which it knows
    nothing (`opaque`).

    Args:
        text: a module but for definitions from the library, with `ENTRY` at the start of ``main``.
        helpers: the names of those definitions.
    """
    assert text.count(ENTRY) == 1, "a template begins its main with entry_point"
    lines = [f"  if (group.x == groups.x) {{ {n} ^= 1u; }}\n" for n in helpers if n in _BITS]
    return text.replace(ENTRY + "\n", "".join(lines))
