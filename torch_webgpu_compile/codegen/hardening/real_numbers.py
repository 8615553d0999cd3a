"""Operands that drivers must not see through, as they compute as on real numbers.

WGSL allows it: NVIDIA's and Mesa's compilers make b of (a + b) - a, a (b + c) of a b + a c, a of
a b / b and max(a, b) of a > b ? a : b; with a fused multiply-add, a b + a of a (b + 1). Where a NaN
or an infinity is among the operands these are other results, and PyTorch's users look for their
NaN. Each function here finds operands of one kind of operation on float32 by which it could be
rewritten so: the pass makes them opaque.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

from ...ir.scalar import Const, Load, Op, Scalar

# A product of powers, by what is raised: a value, or the terms of a sum. The empty one is 1.
Product = frozenset[tuple[Any, float]]
# Products and what they are multiplied by; 0 where that is not known, nor whether it is there.
Sum = dict[Product, float]

_ONE: Product = frozenset()
_MOST_TERMS = 16
_DEEPEST = 4
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_POWERS = {"square": 2.0, "reciprocal": -1.0}
_ORDERS = ("lt", "le", "gt", "ge")


class Values:
    """A kernel's float values as sums of products of other values, as far as they are known.

    ``members``: the hardened bodies of what the kernel computes, by the buffers that its other
    bodies load.
    """

    def __init__(self) -> None:
        self.members: dict[str, Scalar] = {}
        self._sums: dict[Scalar, Sum] = {}
        self._compared: dict[Scalar, frozenset[Scalar]] = {}
        self._computed: set[Scalar] = set()
        self._hidden: dict[Scalar, int] = {}  # how often a value was made opaque

    def note(self, node: Op) -> None:
        """Notes what an operation on float32, whose operands are hardened, is in terms of them."""
        if node.name in _ORDERS:
            self._compared[node] = frozenset(map(self.same, node.args))
            return
        self._computed.add(node)
        if node.name in ("opaque", "wide_div"):
            self._hide(node.args[-1])
        found = self._sum_of(node.name, node.args)
        if found is not None and len(found) <= _MOST_TERMS:
            self._sums[node] = found

    def opaque(self, value: Scalar) -> Scalar:
        """An opaque float, another one each time: two that are equal would cancel."""
        for _ in range(min(self._hide(value), _DEEPEST)):
            value = Op("opaque", (value,), value.dtype)
        return value

    def hidden(self, value: Scalar) -> int:
        """How often a value was made opaque."""
        return self._hidden.get(self.same(value), 0)

    def _hide(self, value: Scalar) -> int:
        count = self._hidden[self.same(value)] = self.hidden(value) + 1
        return count

    def same(self, value: Scalar) -> Scalar:
        """The value behind loads from the kernel itself and mere conversions
        of a type that kernels compute in float32."""
        while True:
            match value:
                case Load(buffer) if buffer in self.members:
                    value = self.members[buffer]
                case Op("cast", (inner,)) if _is_same(inner, value):
                    value = inner
                case _:
                    return value

    def is_computed(self, value: Scalar) -> bool:
        """Whether a value is the result of an operation on float32."""
        return self.same(value) in self._computed

    def compared(self, condition: Scalar) -> frozenset[Scalar] | None:
        """The floats that a condition orders, if it does."""
        return self._compared.get(self.same(condition))

    def sum(self, value: Scalar) -> Sum:
        """A value as the sum of its terms."""
        constant = number(value)
        if constant is not None:
            return {_ONE: constant}
        value = self.same(value)
        return self._sums.get(value) or {frozenset({(value, 1.0)}): 1.0}

    def product(self, value: Scalar) -> Product:
        """A value as one product; a sum of several is a single factor. Constants are left out."""
        terms = self.sum(value)
        if len(terms) == 1:
            return next(iter(terms))
        return frozenset({(frozenset(terms.items()), 1.0)})

    def _sign(self, value: Scalar) -> float:
        """The sign of the constant that `product` leaves out."""
        terms = list(self.sum(value).values())
        return -1.0 if len(terms) == 1 and terms[0] < 0 else 1.0

    def _sum_of(self, op: str, args: tuple[Scalar, ...]) -> Sum | None:
        match op:
            case "add" | "sub":
                sign = -1.0 if op == "sub" else 1.0
                total = dict(self.sum(args[0]))
                for product, factor in self.sum(args[1]).items():
                    own = total.get(product)
                    is_known = factor and own != 0.0
                    total[product] = (own or 0.0) + sign * factor if is_known else 0.0
                return total
            case "abs" | "minimum" | "maximum" | "where":
                seen = [a for a in args if a.dtype.is_float and not _is_opaque(a)]
                return {p: 0.0 for value in seen for p in self.sum(value) if p} or None
            case "neg":
                return _scaled(self.sum(args[0]), -1.0)
            case "wide_div" if number(args[1]) is None:
                divisor = frozenset({(("opaque", self.same(args[1])), 1.0)})
                return {_times(self.product(args[0]), divisor, -1.0): self._sign(args[0])}
            case "mul" | "div" | "wide_div":
                for value, other in (args, args[::-1]):
                    constant = number(other)
                    if constant and (op == "mul" or other is args[1]):
                        factor = constant if op == "mul" else 1 / constant
                        return _scaled(self.sum(value), factor)
                power = 1.0 if op == "mul" else -1.0
                sign = self._sign(args[0]) * self._sign(args[1])
                return {_times(self.product(args[0]), self.product(args[1]), power): sign}
            case _ if op in _POWERS:
                sign = self._sign(args[0]) if op == "reciprocal" else 1.0
                return {_times(_ONE, self.product(args[0]), _POWERS[op]): sign}
        return None


# ---- which operands are hidden: positions among those of an operation on float32


def of_sums(node: Op, values: Values) -> Iterable[int]:
    """b of (a + b) - a: two terms that have a factor in common, and could be joined."""
    if node.name not in ("add", "sub"):
        return
    left, right = map(values.sum, node.args)
    sign = -1.0 if node.name == "sub" else 1.0
    for product, factor in left.items():
        bases = {base for base, _ in product}
        for other, other_factor in right.items():
            if any(base in bases for base, _ in other) and not (
                sign * factor * other_factor > 0 and _grow_together(product, other)
            ):
                yield 1


def of_products(node: Op, values: Values) -> Iterable[int]:
    """a of a · b / b, x · y² of (x · y) · y, a · b of a / (1 / b).

    A smaller power of a factor, one that overflows though the product does not, or a product of a
    quotient of quotients.
    """
    if node.name not in ("mul", "div", "exact_div"):
        return
    left, right = map(values.product, node.args)
    is_quotient = node.name != "mul"
    sign = -1.0 if is_quotient else 1.0
    are_powers = len(left) == len(right) == 1 or left == right
    powers = dict(left)
    own = [(powers.get(base, 0.0), power) for base, power in right]
    if (is_quotient and _has_divisor(right)) or any(
        one * sign * power < 0 or (one and not are_powers) for one, power in own
    ):
        yield 1


def of_constant_factors(node: Op, values: Values) -> Iterable[int]:
    """(c · d) x of c (d · x), where c · d or c / d is no normal number."""
    if node.name not in ("mul", "div", "exact_div") or any(of_products(node, values)):
        return
    for position in (0, 1) if node.name == "mul" else (0,):
        constant = number(node.args[1 - position])
        factors = values.sum(node.args[position]).values() if constant else ()
        for own in factors:
            joined = own * (constant or 1.0) if node.name == "mul" else own / (constant or 1.0)
            if own and abs(own) != 1.0 and not _SMALLEST < abs(joined) < _LARGEST:
                yield position


def of_one_more(node: Op, values: Values) -> Iterable[int]:
    """a b + a of a (b + 1), which is NaN where a (b + 1) is infinite; so for b - 1 and 1 - b."""
    if node.name in ("mul", "square") and all(number(a) is None for a in node.args):
        for position, value in enumerate(node.args):
            terms = values.sum(value)
            if len(terms) > 1 and abs(terms.get(_ONE, 0.0)) == 1.0:
                yield position


def of_roots(node: Op, values: Values) -> Iterable[int]:
    """1 / √x of √(1 / x), x of 1 / (1 / x)."""
    if node.name in ("sqrt", "rsqrt", "reciprocal") and _has_divisor(values.product(node.args[0])):
        yield 0


def of_comparisons(node: Op, values: Values) -> Iterable[int]:
    """a < b c for a / b < c, a = b for a - b = 0."""
    if node.name in (*_ORDERS, "eq", "ne"):
        for position, value in enumerate(node.args):
            terms = [product for product in values.sum(value) if product]
            if len(terms) > 1 or any(map(_has_divisor, terms)):
                yield position


def of_tests(node: Op, values: Values) -> Iterable[int]:
    """Operands of isnan and isinf that are computed, of which drivers answer "never"."""
    if node.name in ("isnan", "isinf") and values.is_computed(node.args[0]):
        yield 0


def of_extremes(node: Op, values: Values) -> Iterable[int]:
    """The larger one of a > b ? a : b, whose NaN that is not; where b is a number, it has none."""
    if node.name == "where" and number(node.args[2]) is None:
        condition, *chosen = node.args
        if values.compared(condition) == frozenset(map(values.same, chosen)):
            yield 2


def number(value: Scalar) -> float | None:
    """A finite constant of a float dtype as a kernel has it; None for anything else."""
    if not isinstance(value, Const) or not value.dtype.is_float:
        return None
    found = float(value.value)
    if value.dtype.compute == "f32":
        try:
            (found,) = struct.unpack("f", struct.pack("f", found))
        except OverflowError:
            return None
    return found if math.isfinite(found) else None


def _is_same(inner: Scalar, converted: Scalar) -> bool:
    """Whether a conversion is nothing in a kernel."""
    dtype = converted.dtype
    same = dtype.is_float and inner.dtype.compute == dtype.compute
    return same and (inner.dtype is dtype or not dtype.is_float8)


def _is_opaque(value: Scalar) -> bool:
    return isinstance(value, Op) and value.name == "opaque"


def _scaled(terms: Sum, factor: float) -> Sum:
    return {product: factor * own for product, own in terms.items()}


def _times(left: Product, right: Product, power: float) -> Product:
    """left · rightᵖ."""
    powers = dict(left)
    for base, own in right:
        powers[base] = powers.get(base, 0.0) + power * own
    return frozenset((base, own) for base, own in powers.items() if own)


def _has_divisor(product: Product) -> bool:
    return any(power < 0 for _, power in product)


def _grow_together(left: Product, right: Product) -> bool:
    """Whether two products are infinite together, and of one sign: x and x³, or the same."""
    if left == right:
        return True
    if len(left) != 1 or len(right) != 1:
        return False
    ((base, power),), ((other_base, other_power),) = left, right
    are_positive = power > 0 and other_power > 0
    return base == other_base and are_positive and (power - other_power) % 2 == 0
