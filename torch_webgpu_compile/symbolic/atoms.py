"""What expressions are polynomials of: symbols, and divisions that are not simplifiable further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from .interning import InternTable, reduced

if TYPE_CHECKING:
    from .expressions import Expr

_table = InternTable()
_references = _table.references


class Interned(type):
    """Equal arguments give the same object, so equality and hashing are by identity."""

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *args)
        reference = _references.get(key)
        found = None if reference is None else reference()
        return _table.add(key, super().__call__(*args)) if found is None else found


class Symbol(metaclass=Interned):
    """An unknown integer in [lower, extent), or ≥ lower when ``extent`` is None."""

    __slots__ = ("__weakref__", "extent", "key", "lower", "name")
    key: str
    __reduce__ = reduced

    def __init__(self, name: str, lower: int, extent: Expr | None) -> None:
        self.name = name
        self.lower = lower
        self.extent = extent
        self.key = f"0{name}<{'' if extent is None else extent.key}"

    def __repr__(self) -> str:
        return self.name


class FloorDiv(metaclass=Interned):
    """⌊numerator / denominator⌋ with a positive denominator, not simplifiable further."""

    __slots__ = ("__weakref__", "denominator", "key", "numerator")
    key: str
    __reduce__ = reduced

    def __init__(self, numerator: Expr, denominator: Expr) -> None:
        self.numerator = numerator
        self.denominator = denominator
        self.key = f"1({numerator.key}//{denominator.key})"

    def __repr__(self) -> str:
        return f"{_operand(self.numerator)}//{_operand(self.denominator)}"


class Mod(metaclass=Interned):
    """numerator − denominator · ⌊numerator / denominator⌋, with a positive denominator."""

    __slots__ = ("__weakref__", "denominator", "key", "numerator")
    key: str
    __reduce__ = reduced

    def __init__(self, numerator: Expr, denominator: Expr) -> None:
        self.numerator = numerator
        self.denominator = denominator
        self.key = f"2({numerator.key}%{denominator.key})"

    def __repr__(self) -> str:
        return f"{_operand(self.numerator)}%{_operand(self.denominator)}"


Atom = Union[Symbol, FloorDiv, Mod]
Monomial = tuple[Atom, ...]


def factor_text(atom: Atom) -> str:
    """An atom as it is written in a product."""
    return atom.name if isinstance(atom, Symbol) else f"({atom!r})"


def _operand(expr: Expr) -> str:
    simple = expr.is_constant or (
        expr.constant == 0 and len(expr.terms) == 1 and expr.terms[0][1] == 1
    )
    return repr(expr) if simple and len(expr.terms[:1] and expr.terms[0][0]) <= 1 else f"({expr!r})"
