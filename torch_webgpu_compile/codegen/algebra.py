"""What a driver may make of a kernel's arithmetic on floats, and what keeps it from that.

Drivers compute as if floats were real numbers, which WGSL allows: NVIDIA's makes b of (a + b) - a,
a (b + c) of a b + a c, a of a b / b and max(a, b) of a > b ? a : b; with a fused multiply-add,
a b + a of a (b + 1). Where a NaN or an infinity is among the operands these are other results, and
PyTorch's users look for their NaN. In an operation that could be rewritten so, operands are made
opaque (`tw_opaque`), and so is what is computed and then tested for being finite: beside 64-bit
integers, tests are taken for always true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .wgsl.op_table import suffix
from .wgsl.values import Text

# A product of powers, by what is raised: a name, or the terms of a sum. The empty one is 1.
Product = frozenset[tuple[Any, float]]
# Products and what they are multiplied by; 0 where that is not known, nor whether it is there.
Sum = dict[Product, float]

_ONE: Product = frozenset()
_MOST_TERMS = 16
_DEEPEST = 4
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_POWERS = {"square": 2.0, "reciprocal": -1.0}
_ORDERS = ("lt", "le", "gt", "ge")


class Algebra:
    """What is known of a kernel's float values, as sums of products of other values.

    It finds operations that a driver could rewrite by rules of real numbers, which would lose NaN
    and infinities, and hides their operands from the driver.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._sums: dict[str, Sum] = {}
        self._compared: dict[str, frozenset[str]] = {}
        self._computed: set[str] = set()
        self._hidden: dict[str, int] = {}  # how often a value was made opaque

    def define(self, name: str, code: str) -> None:
        """Notes the statement ``let name = code``: names of the same code are the same value."""
        self._first[name] = self._first.setdefault(code, name)

    def guard(self, op: str, args: Sequence[Text]) -> list[Text]:
        """The arguments of a float operation; those that a driver could cancel are opaque."""
        if op in ("add", "sub"):
            positions = {1} if self._cancels(op, *args) else set()
        elif op in ("mul", "div", "exact_div"):
            positions = {1} if self._divides_out(op, *args) else self._overflowing(op, args)
        elif op in ("sqrt", "rsqrt", "reciprocal"):
            positions = {0} if _has_divisor(self._product(args[0])) else set()
        elif op in (*_ORDERS, "eq", "ne"):
            positions = {k for k, a in enumerate(args) if self._is_moved(a)}
        elif op in ("isnan", "isinf"):
            positions = {0} if self._name(args[0]) in self._computed else set()
        else:
            positions = {2} if op == "where" and self._is_extreme(*args) else set()
        if op in ("mul", "square") and all(_number(a.code) is None for a in args):
            positions |= {k for k, a in enumerate(args) if self._is_one_more(a)}
        if op in ("add", "sub", "mul") and positions == {1}:
            positions = {min((1, 0), key=lambda k: self._hidden.get(self._name(args[k]), 0))}
        return [self._opaque(a) if k in positions else a for k, a in enumerate(args)]

    def note(self, op: str, args: Sequence[Text], result: Text) -> None:
        """Notes what ``result``, which was just defined, is in terms of ``args``."""
        name = self._name(result)
        if op in _ORDERS:
            self._compared[name] = frozenset(self._name(a) for a in args)
            return
        self._computed.add(name)
        if op in ("opaque", "wide_div"):
            self._hide(args[-1])
        found = self._sum_of(op, args)
        if found is not None and len(found) <= _MOST_TERMS:
            self._sums[name] = found

    def _opaque(self, value: Text) -> Text:
        """An opaque float, another one each time: two that are equal would cancel."""
        for _ in range(min(self._hide(value), _DEEPEST)):
            value = opaque(value)
        return value

    def _hide(self, value: Text) -> int:
        name = self._name(value)
        self._hidden[name] = self._hidden.get(name, 0) + 1
        return self._hidden[name]

    def _name(self, value: Text) -> str:
        return self._first.get(value.code, value.code)

    def _sum(self, value: Text) -> Sum:
        number = _number(value.code)
        if number is not None:
            return {_ONE: number}
        name = self._name(value)
        return self._sums.get(name) or {frozenset({(name, 1.0)}): 1.0}

    def _product(self, value: Text) -> Product:
        """A value as one product; a sum of several is a single factor. Constants are left out."""
        terms = self._sum(value)
        if len(terms) == 1:
            return next(iter(terms))
        return frozenset({(frozenset(terms.items()), 1.0)})

    def _sum_of(self, op: str, args: Sequence[Text]) -> Sum | None:
        match op:
            case "add" | "sub":
                sign = -1.0 if op == "sub" else 1.0
                total = dict(self._sum(args[0]))
                for product, factor in self._sum(args[1]).items():
                    own = total.get(product)
                    is_known = factor and own != 0.0
                    total[product] = (own or 0.0) + sign * factor if is_known else 0.0
                return total
            case "abs" | "minimum" | "maximum" | "where":
                names = [a for a in args if a.dtype.is_float and not a.code.startswith("tw_")]
                return {p: 0.0 for name in names for p in self._sum(name) if p} or None
            case "neg":
                return _scaled(self._sum(args[0]), -1.0)
            case "wide_div" if _number(args[1].code) is None:
                divisor = frozenset({(("opaque", self._name(args[1])), 1.0)})
                return {_times(self._product(args[0]), divisor, -1.0): self._sign(args[0])}
            case "mul" | "div" | "wide_div":
                for value, other in (args, args[::-1]):
                    number = _number(other.code)
                    if number and (op == "mul" or other is args[1]):
                        return _scaled(self._sum(value), number if op == "mul" else 1 / number)
                power = 1.0 if op == "mul" else -1.0
                sign = self._sign(args[0]) * self._sign(args[1])
                return {_times(self._product(args[0]), self._product(args[1]), power): sign}
            case _ if op in _POWERS:
                sign = self._sign(args[0]) if op == "reciprocal" else 1.0
                return {_times(_ONE, self._product(args[0]), _POWERS[op]): sign}
        return None

    def _sign(self, value: Text) -> float:
        """The sign of the constant that `_product` leaves out."""
        terms = list(self._sum(value).values())
        return -1.0 if len(terms) == 1 and terms[0] < 0 else 1.0

    def _cancels(self, op: str, left: Text, right: Text) -> bool:
        """Whether two terms have a factor in common, so that they could be joined."""
        sign = -1.0 if op == "sub" else 1.0
        for product, factor in self._sum(left).items():
            bases = {base for base, _ in product}
            for other, other_factor in self._sum(right).items():
                if any(base in bases for base, _ in other) and not (
                    sign * factor * other_factor > 0 and _grow_together(product, other)
                ):
                    return True
        return False

    def _divides_out(self, op: str, left: Text, right: Text) -> bool:
        """Whether a driver could make a smaller power of a factor, one that overflows though the
        product does not, or a product of a quotient of quotients.
        """
        of_left, of_right = self._product(left), self._product(right)
        if op != "mul" and _has_divisor(of_right):
            return True
        are_powers = len(of_left) == len(of_right) == 1 or of_left == of_right
        powers = dict(of_left)
        sign = 1.0 if op == "mul" else -1.0
        for base, power in of_right:
            own = powers.get(base, 0.0)
            if own * sign * power < 0 or (own and not are_powers):
                return True
        return False

    def _overflowing(self, op: str, args: Sequence[Text]) -> set[int]:
        """Operands whose factor and the other one, a number, would make no finite number."""
        found = set()
        for position in (0,) if op != "mul" else (0, 1):
            number = _number(args[1 - position].code)
            factors = self._sum(args[position]).values() if number else ()
            for own in factors:
                joined = own * (number or 1.0) if op == "mul" else own / (number or 1.0)
                if own and abs(own) != 1.0 and not _SMALLEST < abs(joined) < _LARGEST:
                    found.add(position)
        return found

    def _is_moved(self, value: Text) -> bool:
        """Whether drivers compare other values: a < b c for a / b < c, a = b for a - b = 0."""
        terms = [product for product in self._sum(value) if product]
        return len(terms) > 1 or any(map(_has_divisor, terms))

    def _is_one_more(self, value: Text) -> bool:
        """Whether a value is b ± 1 or 1 - b."""
        terms = self._sum(value)
        return len(terms) > 1 and abs(terms.get(_ONE, 0.0)) == 1.0

    def _is_extreme(self, condition: Text, chosen: Text, other: Text) -> bool:
        """a > b ? a : b, whose NaN the larger of them is not; where b is a number, it has none."""
        compared = self._compared.get(self._name(condition))
        names = frozenset((self._name(chosen), self._name(other)))
        return compared == names and _number(other.code) is None


def unknown(value: Text) -> Text:
    """``value``, made opaque if it is a literal of a float.

    Of a choice between literals a driver knows the values. If one is 0, it drops a product with the
    choice, although the other factor may be infinite.
    """
    is_literal = value.dtype.is_float and _number(value.code) is not None
    return opaque(value) if is_literal else value


def opaque(value: Text) -> Text:
    """``value`` by a function that returns it unchanged, which the driver cannot find out."""
    return replace(value, code=f"tw_opaque{suffix(value.dtype, value.lanes)}({value.code})")


def _number(code: str) -> float | None:
    """The value of a literal."""
    try:
        return float(code.strip("()").removesuffix("f").removesuffix("l"))
    except ValueError:
        return None


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
