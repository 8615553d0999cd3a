"""The inputs of a captured call: fake tensors with constant or symbolic sizes, and their guards.

0 and 1 are constants, every other size is a symbol of its own within a class (`size_classes`), and
a guard holds what the trace assumed. Strides that follow from the sizes stay expressions of them.

What is a symbol, and of which class, follows from the call alone. So does the graph: another call
that its guards accept would have been traced alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UnsupportedOp
from ...symbolic.size_classes import SizeClass, size_class
from ...torch_private import (
    ConstantSource,
    DimDynamic,
    FakeTensor,
    FakeTensorMode,
    PythonPrinter,
    ShapeEnv,
    ValueRanges,
    int_oo,
)
from .arguments import MAX_INT, key_of, overlap
from .calls import TensorSpec

_CPU = torch.device("cpu")

Int = int | torch.SymInt

_LISTS = ("sizes", "strides")  # of a `TensorSpec`


@dataclass(frozen=True, slots=True)
class _LeafSource:
    """Where an integer or number is found among the leaves of a call."""

    leaf: int
    field: str = ""
    dim: int | None = None

    def read(self, leaves: Sequence[Any]) -> Any:
        return self.of(leaves[self.leaf])

    def of(self, value: Any) -> Any:
        if self.field:
            value = getattr(value, self.field)
        return value if self.dim is None else value[self.dim]

    def __str__(self) -> str:
        return f"leaf{self.leaf}{self.field}{'' if self.dim is None else self.dim}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which sizes of a call are symbols.

    Attributes:
        by_magnitude: whether the code depends on about how large they are.
        integers: the leaves that are sizes themselves.
        fixed: (leaf, dimension) of those that choose the code, which are constants.
        alike: by leaf, the first of equally shaped tensors, which have its symbols.
    """

    by_magnitude: bool = True
    integers: frozenset[int] = frozenset()
    fixed: frozenset[tuple[int, int]] = frozenset()
    alike: Mapping[int, int] = field(default_factory=dict)


class _Environment(ShapeEnv):
    """Symbols and guards, without the lines of code that they come from, which nobody reads here.

    PyTorch looks for a line outside of its own files at each symbol and guard. The list of these
    files imports `torch.export` and Inductor, which takes as long as dozens of traces.
    """

    def _get_user_frame(self) -> None:
        return None


class Inputs:
    """Inputs, with symbols in place of some sizes and numbers.

    Attributes:
        mode: the mode of the fake tensors.
        leaves: which leaf each placeholder is.
        values: a fake tensor or a SymInt per placeholder.
        offsets: by placeholder, where not 0.
        numbers: symbolic numbers by leaf, which have no placeholder of their own.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        chosen: Mapping[int, frozenset[float]],
        sizes: Sizes | None,
    ) -> None:
        """Makes the inputs.

        Args:
            leaves: of the call.
            chosen: the leaves with numbers that are symbols, with the values that these may not
                have.
            sizes: which sizes, strides and offsets are symbols; None: all are constants.
        """
        self._all = leaves
        self._chosen = chosen
        self._sizes = sizes
        self._env: Any = None
        if sizes is not None or chosen:  # it takes longer to make than all the rest
            self._env = _Environment(
                allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
            )
        self.mode = FakeTensorMode(shape_env=self._env)
        if sizes is not None:
            self.mode.cache_enabled = False  # it doubles the time of a call that is traced once
        self._symbols: dict[str, _LeafSource] = {}
        self._classes: dict[str, SizeClass] = {}
        self._derived: list[tuple[_LeafSource, torch.SymInt]] = []
        self.values: list[Any] = []
        self.offsets: dict[int, Int] = {}
        self.numbers: dict[int, torch.SymFloat] = {}
        self._taken = taken = list[int]()
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, TensorSpec):
                if leaf.offset:
                    self.offsets[len(taken)] = self._offset(leaf.offset, k)
                self.values.append(self._tensor(leaf, k))
                taken.append(k)
            elif k in chosen and type(leaf) is int:
                symbol = self._whole_number(leaf, k)
                if isinstance(symbol, torch.SymInt):
                    self.values.append(symbol)
                    taken.append(k)
            elif k in chosen:
                self.numbers[k] = self._number(leaf, _LeafSource(k))
        self.leaves = tuple(taken)
        self._constant = [self._constants(k) for k in range(len(leaves))]

    def _whole_number(self, value: int, leaf: int) -> Int:
        """A symbol for an integer argument; of a size one within its class, or a constant."""
        place = _LeafSource(leaf)
        if self._sizes is not None and leaf in self._sizes.integers:
            return self._size(value, place)
        symbol = self._symbol(value, place)
        if value < 0:
            self._env.var_to_range[symbol.node.expr] = ValueRanges(-MAX_INT, -1)
        return symbol

    def _size(self, value: int, place: _LeafSource) -> Int:
        """A symbol within the size's class, or a multiple of one; or a constant."""
        if self._sizes is None or (place.leaf, place.dim) in self._sizes.fixed:
            return value
        found = size_class(value, self._sizes.by_magnitude) if value <= MAX_INT else None
        return value if found is None else self._classified(value, found, place)

    def _offset(self, value: int, leaf: int) -> Int:
        """A symbol for an offset that is not 0: no other matters to the code, but as a multiple."""
        place = _LeafSource(leaf, "offset")
        found = None if self._sizes is None else size_class(value, False, least=1)
        return value if found is None else self._classified(value, found, place)

    def _classified(self, value: int, found: SizeClass, place: _LeafSource) -> Int:
        count = value // found.unit
        symbol = self._symbol(count, place)
        expr = symbol.node.expr
        self._classes[str(expr)] = found
        most = int_oo if found.most is None else found.most
        self._env.var_to_range[expr] = ValueRanges(found.lower, most)
        return symbol * found.unit if found.unit > 1 else symbol

    def _symbol(self, value: int, place: _LeafSource) -> torch.SymInt:
        source, kind = ConstantSource(str(place)), DimDynamic.DYNAMIC
        symbol = self._env.create_symbol(
            value,
            source,
            dynamic_dim=kind,
            positive=True if value >= 0 else None,
            do_not_specialize_zero_one=value in (0, 1),
        )
        self._symbols[str(symbol)] = place
        made = self._env.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    def _number(self, value: float, place: _LeafSource) -> torch.SymFloat:
        source = ConstantSource(str(place))
        symbol = self._env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self._symbols[str(symbol)] = place
        made = self._env.create_symfloatnode(symbol, hint=value, source=source)
        assert isinstance(made, torch.SymFloat)
        return made

    def _tensor(self, spec: TensorSpec, leaf: int) -> FakeTensor:
        if self._sizes is None or 0 in spec.sizes:
            return _fake(self.mode, spec.dtype, spec.sizes, spec.strides)
        first = self._sizes.alike.get(leaf, leaf)
        if first != leaf:
            return self._like(self.values[self._taken.index(first)], spec, leaf)
        sizes = [
            self._size(size, _LeafSource(leaf, "sizes", dim)) for dim, size in enumerate(spec.sizes)
        ]
        return _fake(self.mode, spec.dtype, sizes, self._strides(spec, leaf, sizes))

    def _like(self, first: FakeTensor, spec: TensorSpec, leaf: int) -> FakeTensor:
        """A tensor of another one's sizes and strides, symbols or not."""
        for name, values in zip(_LISTS, (first.shape, first.stride()), strict=True):
            for dim, value in enumerate(values):
                if isinstance(value, torch.SymInt):
                    self._derived.append((_LeafSource(leaf, name, dim), value))
        return _fake(self.mode, spec.dtype, first.shape, first.stride())

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
                strides[dim] = self._size(value, place)
            products.setdefault(value * spec.sizes[dim], strides[dim] * sizes[dim])
        return [strides[dim] for dim in range(len(sizes))]

    @property
    def leaf_symbols(self) -> dict[str, int]:
        """The leaf that each symbol is which stands for one, and not for a part of it."""
        parts = {name for name, found in self._classes.items() if found.unit > 1}
        leaves = {name: place.leaf for name, place in self._symbols.items() if not place.field}
        return {name: leaf for name, leaf in leaves.items() if name not in parts}

    # ---- guards

    @property
    def _guards(self) -> Sequence[Any]:
        return () if self._env is None else self._env.guards

    @property
    def free_numbers(self) -> frozenset[int]:
        """The leaves with symbolic numbers of which the trace assumes nothing: any will do."""
        # By name: a symbol that was compared with a constant has that constant as its expression.
        assumed = {str(s) for guard in self._guards for s in guard.expr.free_symbols}
        places = {place.leaf for name, place in self._symbols.items() if name not in assumed}
        return frozenset(k for k in places & self.numbers.keys() if not self._chosen[k])

    def guard(self, mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
        """Whether the graph holds for other leaves: every assumption of the trace, evaluated."""
        readers = [
            _reader_of(place, self._classes.get(name), place.read(self._all))
            for name, place in self._symbols.items()
        ]
        derived = [place for place, _ in self._derived]
        condition, strides = self._compiled()
        constant = self._constant

        def accepts(leaves: Sequence[Any]) -> bool:
            if len(leaves) != len(constant):
                return False
            if not all(same(leaf) for same, leaf in zip(constant, leaves, strict=True)):
                return False
            values = [read(leaves) for read in readers]
            if None in values or not condition(*values):
                return False
            if [place.read(leaves) for place in derived] != strides(*values):
                return False
            return not overlap([leaves[k] for k in mutated])

        return accepts

    def _compiled(self) -> tuple[Callable[..., bool], Callable[..., list[int]]]:
        """The guards, and the strides that follow from sizes, as functions of the symbols."""
        printer = PythonPrinter()
        names = ", ".join(self._symbols)
        guards = [f"({printer.doprint(guard.expr)})" for guard in self._guards]
        strides = [printer.doprint(stride.node.expr) for _, stride in self._derived]
        scope = {"math": math, "torch": torch}
        condition = eval(f"lambda {names}: {' and '.join(guards) or 'True'}", scope)
        return condition, eval(f"lambda {names}: [{', '.join(strides)}]", scope)

    def _constants(self, leaf: int) -> Callable[[Any], bool]:
        """Whether another leaf agrees with what is not a symbol in one of ours."""
        own = self._all[leaf]
        places = (*self._symbols.values(), *(place for place, _ in self._derived))
        symbolic = {place for place in places if place.leaf == leaf}
        if _LeafSource(leaf) in symbolic:
            kind, special = type(own), self._chosen[leaf]
            return lambda other: type(other) is kind and other not in special
        if not symbolic:
            wanted = key_of(own)
            return lambda other: bool(key_of(other) == wanted)
        rank, elements = len(own.sizes), (own.dtype, own.conj, own.neg)
        parts = [_LeafSource(leaf, name, dim) for name in _LISTS for dim in range(rank)]
        parts.append(_LeafSource(leaf, "offset"))
        fixed = [(place, place.of(own)) for place in parts if place not in symbolic]

        def agrees(other: Any) -> bool:
            return (
                isinstance(other, TensorSpec)
                and (other.dtype, other.conj, other.neg) == elements
                and len(other.sizes) == rank
                and all(place.of(other) == value for place, value in fixed)
            )

        return agrees


class LaneInputs(Inputs):
    """Inputs of which many have one first size, which is a symbol; the other sizes are constants.

    Offsets are symbols where they are not 0. What the trace assumes of the symbol is for every
    value above 1.

    Args:
        leaves, chosen: see `Inputs`.
        length: that size.
    """

    def __init__(
        self, leaves: Sequence[Any], chosen: Mapping[int, frozenset[float]], length: int
    ) -> None:
        self._length = length
        self._shared: Int | None = None
        super().__init__(leaves, chosen, Sizes())

    def _offset(self, value: int, leaf: int) -> Int:
        return self._symbol(value, _LeafSource(leaf, "offset"))

    def _size(self, value: int, place: _LeafSource) -> Int:
        if (place.field, place.dim, value) != ("sizes", 0, self._length):
            return value
        if self._shared is None:
            self._shared = self._symbol(value, place)
        return self._shared

    def guard(self, mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
        """Nothing is asked: lanes that a graph serves are told by their layouts.

        Raises:
            UnsupportedOp: the trace assumed something of the size.
        """
        names = {name for name, place in self._symbols.items() if place.field}
        if any(str(s) in names for guard in self._guards for s in guard.expr.free_symbols):
            raise UnsupportedOp("a call on lists", "it depends on the size", "give it")
        return lambda leaves: True


def _reader_of(
    place: _LeafSource, known: SizeClass | None, own: float
) -> Callable[[Sequence[Any]], int | float | None]:
    """Reads the value that a symbol stands for; None where it cannot stand for what is there.

    Of integers that are no sizes, 0 and 1 are never symbols, negative ones are a class of their
    own, and all fit into a kernel's parameter. Floats are finite.
    """

    def read(leaves: Sequence[Any]) -> int | float | None:
        value = place.read(leaves)
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if known is not None:
            return known.count(value) if value <= MAX_INT else None
        alike = -MAX_INT <= value < 0 if own < 0 else 2 <= value <= MAX_INT
        return value if alike else None

    return read


def _fake(
    mode: FakeTensorMode, dtype: torch.dtype, sizes: Sequence[Int], strides: Sequence[Int]
) -> FakeTensor:
    meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, _CPU)
