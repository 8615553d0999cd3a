"""The inputs of a captured call: fake tensors with constant or symbolic sizes, and their guards.

Symbols follow Dynamo's rules: 0 and 1 are constants, every other size is a symbol of its own, and a
guard holds what the trace assumed. Strides that follow from the sizes stay expressions of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from ...errors import UnsupportedOp
from .arguments import MAX_INT, exact_match, key_of, overlap
from .calls import TensorSpec

_CPU = torch.device("cpu")

Int = int | torch.SymInt


class StaticInputs:
    """Inputs with the sizes that the leaves have.

    Attributes:
        mode: the mode of the fake tensors.
        leaves: which leaf each placeholder is.
        values: a fake tensor per placeholder.
        offsets: by placeholder, where not 0.
        numbers: symbolic numbers by leaf: none.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._all = leaves
        self.mode = FakeTensorMode()
        self.leaves = tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, TensorSpec))
        specs = [leaves[k] for k in self.leaves]
        self.values: list[Any] = [
            _fake(self.mode, spec.dtype, spec.sizes, spec.strides) for spec in specs
        ]
        self.offsets: dict[int, Int] = {k: s.offset for k, s in enumerate(specs) if s.offset}
        self.numbers: dict[int, torch.SymFloat] = {}

    free_numbers: frozenset[int] = frozenset()

    def guard(self, mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
        """Whether other leaves are equal; see `exact_match`."""
        return exact_match(self._all, mutated)


@dataclass(frozen=True, slots=True)
class _LeafSource:
    """Where an integer or number is found among the leaves of a call."""

    leaf: int
    field: str = ""
    dim: int | None = None

    def read(self, leaves: Sequence[Any]) -> Any:
        value = leaves[self.leaf]
        if self.field:
            value = getattr(value, self.field)
        return value if self.dim is None else value[self.dim]

    def __str__(self) -> str:
        return f"leaf{self.leaf}{self.field}{'' if self.dim is None else self.dim}"


class SymbolicInputs:
    """Inputs with symbols.

    Attributes: those of `StaticInputs`. A placeholder is a fake tensor or a SymInt; ``numbers`` are
    SymFloats, which have no placeholder of their own.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        chosen: frozenset[int],
        sizes: bool,
        like: Sequence[Sequence[Any]],
    ) -> None:
        """Makes the inputs.

        Args:
            leaves: of the call.
            chosen: the leaves with numbers that may be symbols.
            sizes: whether sizes, strides and offsets are symbols.
            like: leaves of earlier calls: what is equal in all of them is a constant.
        """
        self._all = leaves
        self._sizes = sizes
        self._like = [earlier for earlier in like if len(earlier) == len(leaves)]
        self._env = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
        )
        self.mode = FakeTensorMode(shape_env=self._env)
        if sizes:
            self.mode.cache_enabled = False  # it doubles the time of a call that is traced once
        self._symbols: dict[str, _LeafSource] = {}
        self._derived: list[tuple[_LeafSource, torch.SymInt]] = []
        self.values: list[Any] = []
        self.offsets: dict[int, Int] = {}
        self.numbers: dict[int, torch.SymFloat] = {}
        taken: list[int] = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, TensorSpec):
                self.offsets[len(taken)] = self._offset(leaf.offset, k)
                self.values.append(self._tensor(leaf, k))
                taken.append(k)
            elif k in chosen and type(leaf) is int:
                symbol = self._integer(leaf, _LeafSource(k))
                if isinstance(symbol, torch.SymInt):
                    self.values.append(symbol)
                    taken.append(k)
            elif k in chosen and self._varies(_LeafSource(k)):
                self.numbers[k] = self._number(leaf, _LeafSource(k))
        self.leaves = tuple(taken)
        self._constant = [self._constants(k) for k in range(len(leaves))]

    def _varies(self, place: _LeafSource) -> bool:
        """Whether the value there may differ from call to call."""
        if not self._like:
            return True
        own = place.read(self._all)
        try:
            return any(place.read(earlier) != own for earlier in self._like)
        except (AttributeError, IndexError):  # not the same kind of call
            return True

    def _integer(self, value: int, place: _LeafSource) -> Int:
        """A symbol for a size, or a constant."""
        if value < 2 or not (self._sizes or not place.field) or not self._varies(place):
            return value
        return self._symbol(value, place)

    def _offset(self, value: int, leaf: int) -> Int:
        """A symbol for an offset: 0 and 1 are values like any other, as nothing branches on it."""
        place = _LeafSource(leaf, "offset")
        if not (self._sizes and self._varies(place)):
            return value
        return self._symbol(value, place, specialize=False)

    def _symbol(self, value: int, place: _LeafSource, *, specialize: bool = True) -> Int:
        source, kind = ConstantSource(str(place)), DimDynamic.DYNAMIC
        symbol = self._env.create_symbol(
            value, source, dynamic_dim=kind, do_not_specialize_zero_one=not specialize
        )
        self._symbols[str(symbol)] = place
        made: Int = self._env.create_symintnode(symbol, hint=value, source=source)
        return made

    def _number(self, value: float, place: _LeafSource) -> torch.SymFloat:
        source = ConstantSource(str(place))
        symbol = self._env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self._symbols[str(symbol)] = place
        made = self._env.create_symfloatnode(symbol, hint=value, source=source)
        assert isinstance(made, torch.SymFloat)
        return made

    def _tensor(self, spec: TensorSpec, leaf: int) -> FakeTensor:
        if 0 in spec.sizes:
            return _fake(self.mode, spec.dtype, spec.sizes, spec.strides)
        sizes = [
            self._integer(size, _LeafSource(leaf, "sizes", dim))
            for dim, size in enumerate(spec.sizes)
        ]
        return _fake(self.mode, spec.dtype, sizes, self._strides(spec, leaf, sizes))

    def _strides(self, spec: TensorSpec, leaf: int, sizes: Sequence[Int]) -> list[Int]:
        """Strides as products of sizes where they are, innermost first."""
        strides: dict[int, Int] = {}
        products: dict[int, Int] = {}
        for dim in sorted(range(len(sizes)), key=lambda d: (spec.strides[d], spec.sizes[d], -d)):
            value, place = spec.strides[dim], _LeafSource(leaf, "strides", dim)
            found = products.get(value)
            if value < 2 or isinstance(found, int):
                strides[dim] = value
            elif found is not None:
                strides[dim] = found
                self._derived.append((place, found))
            else:
                strides[dim] = self._integer(value, place)
            products.setdefault(value * spec.sizes[dim], strides[dim] * sizes[dim])
        return [strides[dim] for dim in range(len(sizes))]

    # ---- guards

    @property
    def free_numbers(self) -> frozenset[int]:
        """The leaves with symbolic numbers of which the trace assumes nothing: any will do."""
        # By name: a symbol that was compared with a constant has that constant as its expression.
        assumed = {str(s) for guard in self._env.guards for s in guard.expr.free_symbols}
        places = {place.leaf for name, place in self._symbols.items() if name not in assumed}
        return frozenset(places & self.numbers.keys())

    def guard(self, mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
        """Whether the graph holds for other leaves: every assumption of the trace, evaluated."""
        places = list(self._symbols.values())
        derived = [place for place, _ in self._derived]
        condition, strides = self._compiled()
        constant = self._constant

        def accepts(leaves: Sequence[Any]) -> bool:
            if len(leaves) != len(constant):
                return False
            if not all(same(leaf) for same, leaf in zip(constant, leaves, strict=True)):
                return False
            values = [place.read(leaves) for place in places]
            if not all(map(_is_in_range, values, places)) or not condition(*values):
                return False
            if [place.read(leaves) for place in derived] != strides(*values):
                return False
            return not overlap([leaves[k] for k in mutated])

        return accepts

    def _compiled(self) -> tuple[Callable[..., bool], Callable[..., list[int]]]:
        """The guards, and the strides that follow from sizes, as functions of the symbols."""
        printer = PythonPrinter()
        names = ", ".join(self._symbols)
        guards = [f"({printer.doprint(guard.expr)})" for guard in self._env.guards]
        strides = [printer.doprint(stride.node.expr) for _, stride in self._derived]
        scope = {"math": math, "torch": torch}
        condition = eval(f"lambda {names}: {' and '.join(guards) or 'True'}", scope)
        return condition, eval(f"lambda {names}: [{', '.join(strides)}]", scope)

    def _constants(self, leaf: int) -> Callable[[Any], bool]:
        """Whether another leaf agrees with what is not a symbol in one of ours."""
        own = self._all[leaf]
        if leaf in self.numbers or leaf in {p.leaf for p in self._symbols.values() if not p.field}:
            kind = type(own)
            return lambda other: type(other) is kind
        if not isinstance(own, TensorSpec):
            wanted = key_of(own)
            return lambda other: bool(key_of(other) == wanted)
        known = {p for p in self._symbols.values() if p.leaf == leaf}
        known |= {place for place, _ in self._derived if place.leaf == leaf}
        fixed = _fixed(own, leaf, known)
        rank, elements = len(own.sizes), (own.dtype, own.conj, own.neg)

        def agrees(other: Any) -> bool:
            return (
                isinstance(other, TensorSpec)
                and (other.dtype, other.conj, other.neg) == elements
                and len(other.sizes) == rank
                and all(place_read(other) == value for place_read, value in fixed)
            )

        return agrees


class LaneInputs(SymbolicInputs):
    """Inputs of which many have one first size, which is a symbol; the other sizes are constants.

    Offsets are symbols where they are not 0. What the trace assumes of the symbol is for every
    value above 1.

    Args:
        leaves, chosen: see `SymbolicInputs`.
        length: that size.
    """

    def __init__(self, leaves: Sequence[Any], chosen: frozenset[int], length: int) -> None:
        self._length = length
        self._shared: Int | None = None
        super().__init__(leaves, chosen, True, ())

    def _offset(self, value: int, leaf: int) -> Int:
        return super()._offset(value, leaf) if value else 0

    def _tensor(self, spec: TensorSpec, leaf: int) -> FakeTensor:
        if spec.sizes[:1] != (self._length,):
            return _fake(self.mode, spec.dtype, spec.sizes, spec.strides)
        if self._shared is None:
            self._shared = self._symbol(self._length, _LeafSource(leaf, "sizes", 0))
        return _fake(self.mode, spec.dtype, [self._shared, *spec.sizes[1:]], spec.strides)

    def guard(self, mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
        """Nothing is asked: lanes that a graph serves are told by their layouts.

        Raises:
            UnsupportedOp: the trace assumed something of the size.
        """
        names = {name for name, place in self._symbols.items() if place.field}
        if any(str(s) in names for guard in self._env.guards for s in guard.expr.free_symbols):
            raise UnsupportedOp("a call on lists", "it depends on the size", "give it")
        return lambda leaves: True


def _fixed(
    spec: TensorSpec, leaf: int, symbolic: set[_LeafSource]
) -> list[tuple[Callable[[TensorSpec], int], int]]:
    """(how to read it, value) of each size, stride and offset that is a constant."""
    places = [_LeafSource(leaf, "offset")]
    for dim in range(len(spec.sizes)):
        places += [_LeafSource(leaf, "sizes", dim), _LeafSource(leaf, "strides", dim)]
    readers = [_reader(place) for place in places if place not in symbolic]
    return [(read, read(spec)) for read in readers]


def _reader(place: _LeafSource) -> Callable[[TensorSpec], int]:
    field, dim = place.field, place.dim
    if dim is None:
        return lambda spec: int(getattr(spec, field))
    return lambda spec: int(getattr(spec, field)[dim])


def _is_in_range(value: float, place: _LeafSource) -> bool:
    """0 and 1 are never symbols but as offsets; an integer fits into a kernel's parameter."""
    if isinstance(value, int):
        return (0 if place.field == "offset" else 2) <= value <= MAX_INT
    return isinstance(value, float) and math.isfinite(value)


def _fake(
    mode: FakeTensorMode, dtype: torch.dtype, sizes: Sequence[Int], strides: Sequence[Int]
) -> FakeTensor:
    meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, _CPU)
