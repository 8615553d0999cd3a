"""The inputs of a captured call: fake tensors with constant or symbolic sizes, and their guards.

0 and 1 are constants, every other size is a symbol of its own within a class (`size_classes`), and
a guard holds what the trace assumed. Strides that follow from the sizes stay expressions of them.

What is a symbol, and of which class, follows from the call alone. So does the graph: another call
that its guards accept would have been traced alike.
"""

from __future__ import annotations

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
from .arguments import MAX_INT, key_of
from .calls import TensorSpec
from .guards import (
    Alike,
    AlikeLeaf,
    AlikeNumber,
    AlikeTensor,
    Guard,
    LeafSource,
    LeafSymbol,
    all_leaves,
)

_CPU = torch.device("cpu")

Int = int | torch.SymInt

_LISTS = ("sizes", "strides")  # of a `TensorSpec`


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
        self._symbols: dict[str, LeafSource] = {}
        self._classes: dict[str, SizeClass] = {}
        self._derived: list[tuple[LeafSource, torch.SymInt]] = []
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
                self.numbers[k] = self._number(leaf, LeafSource(k))
        self.leaves = tuple(taken)

    def _whole_number(self, value: int, leaf: int) -> Int:
        """A symbol for an integer argument; of a size one within its class, or a constant."""
        place = LeafSource(leaf)
        if self._sizes is not None and leaf in self._sizes.integers:
            return self._size(value, place)
        symbol = self._symbol(value, place)
        if value < 0:
            self._env.var_to_range[symbol.node.expr] = ValueRanges(-MAX_INT, -1)
        return symbol

    def _size(self, value: int, place: LeafSource) -> Int:
        """A symbol within the size's class, or a multiple of one; or a constant."""
        if self._sizes is None or (place.leaf, place.dim) in self._sizes.fixed:
            return value
        found = size_class(value, self._sizes.by_magnitude) if value <= MAX_INT else None
        return value if found is None else self._classified(value, found, place)

    def _offset(self, value: int, leaf: int) -> Int:
        """A symbol for an offset that is not 0: no other matters to the code, but as a multiple."""
        place = LeafSource(leaf, "offset")
        found = None if self._sizes is None else size_class(value, False, least=1)
        return value if found is None else self._classified(value, found, place)

    def _classified(self, value: int, found: SizeClass, place: LeafSource) -> Int:
        count = value // found.unit
        symbol = self._symbol(count, place)
        expr = symbol.node.expr
        self._classes[str(expr)] = found
        most = int_oo if found.most is None else found.most
        self._env.var_to_range[expr] = ValueRanges(found.lower, most)
        return symbol * found.unit if found.unit > 1 else symbol

    def _symbol(self, value: int, place: LeafSource) -> torch.SymInt:
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

    def _number(self, value: float, place: LeafSource) -> torch.SymFloat:
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
            self._size(size, LeafSource(leaf, "sizes", dim)) for dim, size in enumerate(spec.sizes)
        ]
        return _fake(self.mode, spec.dtype, sizes, self._strides(spec, leaf, sizes))

    def _like(self, first: FakeTensor, spec: TensorSpec, leaf: int) -> FakeTensor:
        """A tensor of another one's sizes and strides, symbols or not."""
        for name, values in zip(_LISTS, (first.shape, first.stride()), strict=True):
            for dim, value in enumerate(values):
                if isinstance(value, torch.SymInt):
                    self._derived.append((LeafSource(leaf, name, dim), value))
        return _fake(self.mode, spec.dtype, first.shape, first.stride())

    def _strides(self, spec: TensorSpec, leaf: int, sizes: Sequence[Int]) -> list[Int]:
        """Strides as products of sizes where they are, innermost first."""
        strides: dict[int, Int] = {}
        products: dict[int, Int] = {}
        for dim in sorted(range(len(sizes)), key=lambda d: (spec.strides[d], spec.sizes[d], -d)):
            value, place = spec.strides[dim], LeafSource(leaf, "strides", dim)
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
        """Whether the graph holds for other leaves: every assumption of the trace."""
        printer = PythonPrinter()
        symbols = tuple(
            LeafSymbol(name, place, self._classes.get(name), place.read(self._all) < 0)
            for name, place in self._symbols.items()
        )
        guard = Guard(
            tuple(map(self._constants, range(len(self._all)))),
            symbols,
            tuple(printer.doprint(guard.expr) for guard in self._guards),
            tuple((place, printer.doprint(size.node.expr)) for place, size in self._derived),
            tuple(mutated),
        )
        return guard.accepts

    def _constants(self, leaf: int) -> Alike:
        """What another leaf has to have in common with one of ours: all that is not a symbol."""
        own = self._all[leaf]
        places = (*self._symbols.values(), *(place for place, _ in self._derived))
        symbolic = {place for place in places if place.leaf == leaf}
        if LeafSource(leaf) in symbolic:
            return AlikeNumber(type(own), self._chosen[leaf])
        if not symbolic:
            return AlikeLeaf(key_of(own))
        parts = [LeafSource(leaf, name, k) for name in _LISTS for k in range(len(own.sizes))]
        parts.append(LeafSource(leaf, "offset"))
        fixed = tuple((place, place.of(own)) for place in parts if place not in symbolic)
        return AlikeTensor((own.dtype, own.conj, own.neg), len(own.sizes), fixed)


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
        return self._symbol(value, LeafSource(leaf, "offset"))

    def _size(self, value: int, place: LeafSource) -> Int:
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
        return all_leaves


def _fake(
    mode: FakeTensorMode, dtype: torch.dtype, sizes: Sequence[Int], strides: Sequence[Int]
) -> FakeTensor:
    meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, _CPU)
