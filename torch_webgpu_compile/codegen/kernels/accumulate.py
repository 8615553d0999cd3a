"""Accumulators of reductions: identity, update by an element, merge of two, in WGSL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import dtypes
from ...dtypes import DType
from ...ir.scalar import neutral
from ...target import Target
from ..hardening.spelling import avoids_neutral, fast_exp, int64_of, suffix
from ..values import Text, choice
from ..wgsl.casts import converted
from ..wgsl.literals import literal
from ..wgsl.op_table import op_code

_COMBINE = {
    "sum": "add",
    "prod": "mul",
    "minimum": "minimum",
    "maximum": "maximum",
    "any": "bitwise_or",
    "all": "bitwise_and",
}


# Narrow integers are compared in the type that they are computed in.
_COMPUTED = {"i32": dtypes.int32, "u32": dtypes.uint32, "i64": dtypes.int64}


@dataclass(frozen=True, slots=True)
class AccumulatorVariable:
    """One variable of an accumulator. ``wide`` is the suffix of its four-lane form, or ""."""

    name: str
    type: str
    identity: str
    wide: str = ""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The WGSL of a running reduction.

    Attributes:
        kind: of the reduction, one of `ir.nodes.REDUCTIONS`.
        dtype: of the values that are reduced.
        lanes: values that one update takes in: 1 or 4.
        parts: the variables that hold its state.
        merges: statements that combine its state with that of another invocation, whose variables
            have the suffix ``_b``.
    """

    kind: str
    dtype: DType
    lanes: int
    parts: tuple[AccumulatorVariable, ...]
    merges: tuple[str, ...]

    @property
    def is_position(self) -> bool:
        """Whether it reduces to the position of an extreme (argmin, argmax)."""
        return self.kind in ("argmin", "argmax")

    def update(self, value: Text, predicate: str | None, position: str) -> list[str]:
        """Statements that take in one value, or four.

        Args:
            value: as many lanes as the accumulator.
            predicate: the WGSL condition under which the value counts; None for always.
            position: that of the (first) value, for argmin and argmax.
        """
        if self.is_position:
            return self._update_position(value, predicate, position)
        (part,) = self.parts
        name = part.name + part.wide
        code = value.widen(self.lanes)
        if predicate is not None and avoids_neutral(self.kind, self.dtype):
            together = combine(self.kind, self.dtype, name, code, self.lanes)
            return [f"{name} = {self._choice(predicate, together, name)};"]
        if predicate is not None:
            code = self._choice(predicate, code, part.identity)
        return [f"{name} = {combine(self.kind, self.dtype, name, code, self.lanes)};"]

    def _choice(self, predicate: str, yes: str, no: str) -> str:
        return choice(Text(predicate, 1, dtypes.bool_), yes, no, self.lanes, self.dtype)

    def _update_position(self, value: Text, predicate: str | None, position: str) -> list[str]:
        best, at = self.parts
        lines = []
        for lane in range(self.lanes):
            v, p = value.lane(lane), f"({position} + {lane})"
            better = _better(self.kind, self.dtype, v, p, best.name, at.name)
            guard = f"{predicate} && " if predicate else ""
            lines.append(f"if ({guard}({better})) {{ {best.name} = {v}; {at.name} = {p}; }}")
        return lines

    def close(self) -> list[str]:
        """Statements that reduce four lanes to one."""
        if self.is_position or self.lanes == 1:
            return []
        (part,) = self.parts
        wide = Text(part.name + part.wide, self.lanes, self.dtype)
        low, high = (
            combine(self.kind, self.dtype, wide.lane(k), wide.lane(k + 1), 1) for k in (0, 2)
        )
        return [f"var {part.name} = {combine(self.kind, self.dtype, low, high, 1)};"]

    def result(self, dtype: DType) -> str:
        """The reduced value as an expression of ``dtype``'s compute type."""
        name = self.parts[-1].name
        own = dtypes.int32 if self.is_position else self.dtype
        if own.compute == dtype.compute:
            return name
        is_widened = dtype is dtypes.int64 and own.compute in ("i32", "u32")
        return int64_of(name, dtype) if is_widened else converted(name, own, dtype)

    def narrow(self, dtype: DType) -> str:
        """The result as an i32 expression where `result` widens an i32 to i64; else ""."""
        is_int64 = dtype.is_integer and dtype.bits == 64
        widened = is_int64 and (self.is_position or self.dtype.compute == "i32")
        return self.parts[-1].name if widened else ""


@dataclass(frozen=True, slots=True)
class ExpSum:
    """A running maximum m of values v and Σ exp(v − m) (f32), so that one pass gives both.

    A larger maximum rescales the sum (Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018). While m is -inf the lowest finite number stands in for it, as -inf − -inf is
    NaN; a NaN among the values makes both NaN. ``parts`` are the maximum and the sum.
    """

    lanes: int
    parts: tuple[AccumulatorVariable, AccumulatorVariable]
    merges: tuple[str, ...]
    target: Target

    def update(self, values: Sequence[tuple[Text, str | None]]) -> list[str]:
        """Statements that take in all (value, predicate) of an iteration with one rescaling."""
        largest, total = self.parts
        wide = total.name + total.wide
        vector = "vec4<f32>({})" if self.lanes > 1 else "{}"
        exp, exps = fast_exp(self.target), fast_exp(self.target, self.lanes)
        lowest, zero = vector.format(largest.identity), vector.format("0.0f")
        peaks, terms = [], []
        for value, predicate in values:
            code = value.widen(self.lanes)
            term = f"{exps}({code} - {vector.format('shift')})"
            # Elements past the end are dropped after exp: they hold numbers of another row.
            peaks.append(f"select({lowest}, {code}, {predicate})" if predicate else code)
            terms.append(f"select({zero}, {term}, {predicate})" if predicate else term)
        lanes = [f"peak.{c}" for c in "xyzw"] if self.lanes > 1 else ["peak"]
        return [
            "{",
            f"  let peak = {_in_pairs(peaks, self.lanes)};",
            f"  let top = tw_maximum({largest.name}, {_in_pairs(lanes, 1)});",
            "  let shift = tw_above_ninf(top);",
            f"  let scale = {exp}(tw_above_ninf({largest.name}) - shift);",
            f"  {wide} = {wide} * scale + ({' + '.join(terms)});",
            f"  {largest.name} = top;",
            "}",
        ]

    def close(self) -> list[str]:
        """Statements that reduce four lanes to one."""
        _, total = self.parts
        wide = total.name + total.wide
        if self.lanes == 1:
            return []
        return [f"var {total.name} = (({wide}.x + {wide}.y) + ({wide}.z + {wide}.w));"]

    def total(self, shift: str) -> str:
        """Σ exp(v − shift) for a shift that is known after the pass.

        An infinite maximum decides alone: its own term is the NaN, infinity or 0 of the whole sum.
        """
        largest, total = (part.name for part in self.parts)
        if shift == largest:  # Mesa takes x − x for 0
            return f"select({total}, bitcast<f32>(tw_nan_bits), tw_isinf({largest}))"
        exp = fast_exp(self.target)
        return f"(select({total}, 1.0f, tw_isinf({largest})) * {exp}({largest} - {shift}))"


def _in_pairs(codes: Sequence[str], lanes: int) -> str:
    """The maximum of all: a balanced tree, so that few of its operations wait for each other."""
    while len(codes) > 1:
        pairs = [
            combine("maximum", dtypes.float32, a, b, lanes)
            for a, b in zip(codes[::2], codes[1::2], strict=False)
        ]
        codes = [*pairs, *codes[2 * len(pairs) :]]
    return codes[0]


def exp_sum(largest: str, total: str, lanes: int, target: Target) -> ExpSum:
    """The accumulator of a maximum and of the sum that is named ``total``."""
    exp = fast_exp(target)
    lowest = identity("maximum", dtypes.float32)
    zero, wide = ("vec4<f32>(0.0f)", "_4") if lanes > 1 else ("0.0f", "")
    parts = (
        AccumulatorVariable(largest, "f32", lowest),
        AccumulatorVariable(total, "f32", zero, wide),
    )
    merges = (
        f"let {largest}_top = tw_maximum({largest}, {largest}_b);",
        f"let {largest}_shift = tw_above_ninf({largest}_top);",
        f"{total} = {total} * {exp}(tw_above_ninf({largest}) - {largest}_shift)"
        f" + {total}_b * {exp}(tw_above_ninf({largest}_b) - {largest}_shift);",
        f"{largest} = {largest}_top;",
    )
    return ExpSum(lanes, parts, merges, target)


def combine(kind: str, dtype: DType, a: str, b: str, lanes: int) -> str:
    """The WGSL expression that merges two partial results."""
    return op_code(_COMBINE[kind], dtype, (a, b), lanes)


def _better(kind: str, dtype: DType, v: str, p: str, best: str, at: str) -> str:
    """Whether (v, p) replaces (best, at): NaN first, then the extreme, then the lower position."""
    beats, equal = f"{v} > {best}" if kind == "argmax" else f"{v} < {best}", f"{v} == {best}"
    if dtype is dtypes.bool_:
        beats = f"{v} && !{best}" if kind == "argmax" else f"!{v} && {best}"
    elif dtype is dtypes.int64_in_words:
        beats = op_code("gt" if kind == "argmax" else "lt", dtype, (v, best))
        equal = op_code("eq", dtype, (v, best))
    tie = f"({equal} && {p} < {at})"
    if not dtype.is_float:
        return f"({beats}) || {tie}"
    test = f"tw_isnan{suffix(dtype, 1)}"
    nan, other = f"{test}({v})", f"{test}({best})"
    return f"({nan} && (!{other} || {p} < {at})) || (!{other} && !{nan} && (({beats}) || {tie}))"


def identity(kind: str, dtype: DType) -> str:
    """The neutral element of a reduction as a WGSL expression."""
    return literal(neutral(kind, _COMPUTED.get(dtype.compute, dtype)))


def accumulator(name: str, kind: str, dtype: DType, lanes: int) -> Accumulator:
    """The accumulator of a reduction over values of ``dtype``."""
    start = identity(kind, dtype)
    if kind in ("argmin", "argmax"):
        best = AccumulatorVariable(f"{name}_best", dtype.compute, start)
        at = AccumulatorVariable(f"{name}_at", "i32", "2147483647i")
        better = _better(kind, dtype, f"{best.name}_b", f"{at.name}_b", best.name, at.name)
        move = f"{{ {best.name} = {best.name}_b; {at.name} = {at.name}_b; }}"
        return Accumulator(kind, dtype, lanes, (best, at), (f"if ({better}) {move}",))
    if lanes > 1:
        wide = Text(start, 1, dtype).widen(lanes)
        part = AccumulatorVariable(name, dtype.compute, wide, "_4")
    else:
        part = AccumulatorVariable(name, dtype.compute, start)
    merge = f"{name} = {combine(kind, dtype, name, f'{name}_b', 1)};"
    return Accumulator(kind, dtype, lanes, (part,), (merge,))
