"""Graph outputs with exactly the strides that PyTorch expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..ir.buffers import Buffer, BufferOrigin
from ..ir.graph import GraphOutput
from ..ir.nodes import HostCall, Pointwise
from ..ir.scalar import Index, Load, scalar_symbols
from ..ir.spaces import numbered
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_symbol,
    contiguous_strides,
    linearize,
    symbols_of,
)
from .builder import Builder
from .value import Value, has_no_elements, positions, view


@dataclass
class OutputLayouts:
    """Chooses layouts of returned buffers.

    ``owners`` maps a returned buffer to the storage (of the fake tensors) that it stands for: two
    outputs may share a buffer only if PyTorch's tensors share memory.
    """

    builder: Builder
    owners: dict[str, int] = field(default_factory=dict)

    def output(
        self, value: Value, strides: Sequence[Expr], storage: int, mutates: int | None = None
    ) -> GraphOutput:
        """How ``value`` is returned with ``strides``, in elements."""
        if _overlap(value, strides):
            # PyTorch 2.11's fake tensors: slice_scatter of an expanded tensor is not expanded.
            strides = contiguous_strides(value.sizes)
        found = self._as_view(value, tuple(strides), storage)
        if found is None:
            found = self._copy(value, tuple(strides), storage)
        return replace(found, mutates=mutates)

    def _as_view(self, value: Value, strides: tuple[Expr, ...], storage: int) -> GraphOutput | None:
        if not isinstance(value.body, Load):
            return None
        buffer = self.builder.buffers[value.body.buffer]
        if buffer.origin is not BufferOrigin.INTERMEDIATE:
            return None
        if self.owners.get(buffer.name, storage) != storage:
            return None
        if any(not isinstance(entry, Index) for entry in value.body.index):
            return None
        index = [entry.expr for entry in value.body.index if isinstance(entry, Index)]
        if buffer.name not in self.owners:
            self._permute_layout(buffer, value, index, strides)
            buffer = self.builder.buffers[buffer.name]
        flat = linearize(index, buffer.strides) + buffer.offset
        offset = _affine_offset(flat, value.sizes, strides)
        if offset is None:
            return None
        self.owners[buffer.name] = storage
        return GraphOutput(buffer.name, value.sizes, strides, offset)

    def _permute_layout(
        self, buffer: Buffer, value: Value, index: Sequence[Expr], strides: tuple[Expr, ...]
    ) -> None:
        """Gives ``buffer`` the strides of an output that shows all of it."""
        symbols = positions(value.sizes)
        wanted = []
        for size, entry in zip(buffer.sizes, index, strict=True):
            if size is ONE:
                wanted.append(ONE)
            elif as_symbol(entry) is not None and entry in symbols:
                dim = symbols.index(entry)
                if value.sizes[dim] is not size:
                    return
                wanted.append(strides[dim])
            else:
                return
        shown = [entry for entry in index if entry is not ZERO]
        if len(set(shown)) == len(shown) and is_dense_layout(buffer.sizes, wanted):
            self.builder.buffers[buffer.name] = replace(buffer, strides=tuple(wanted))

    def _copy(self, value: Value, strides: tuple[Expr, ...], storage: int) -> GraphOutput:
        builder = self.builder
        sizes = tuple(
            ONE if stride is ZERO and size is not ZERO else size
            for size, stride in zip(value.sizes, strides, strict=True)
        )
        compact = view(value, sizes, positions(sizes)) if sizes != value.sizes else value
        if not builder.target.supports(value.dtype):
            source = builder.materialize(value)
            made = builder.new_buffer(value.dtype, sizes, "output", strides=strides)
            builder.nodes.append(
                HostCall((made.name,), "aten.clone.default", (HostBuffer(source.name),), ())
            )
        else:
            made = builder.new_buffer(value.dtype, sizes, "output", strides=strides)
            if not value.is_empty:
                node = Pointwise(made.name, sizes, compact.body, origins=(builder.origin,))
                builder.nodes.append(node)
        self.owners[made.name] = storage
        return GraphOutput(made.name, value.sizes, strides, ZERO)


def _overlap(value: Value, strides: Sequence[Expr]) -> bool:
    """Whether different elements of ``value`` would be one element in memory."""
    repeated = [
        as_symbol(position)
        for position, stride in zip(positions(value.sizes), strides, strict=True)
        if stride is ZERO
    ]
    return bool(repeated) and not scalar_symbols(value.body).isdisjoint(repeated)


def _affine_offset(flat: Expr, sizes: Sequence[Expr], strides: Sequence[Expr]) -> Expr | None:
    """The constant part of ``flat`` if the rest is Σ index · stride over ``sizes``."""
    if has_no_elements(sizes):
        return ZERO
    symbols = positions(sizes)
    rest = flat - linearize(symbols, strides)
    keys: set[Symbol] = set(numbered("i", sizes))
    if symbols_of(rest).isdisjoint(keys):
        return rest
    # A dimension of size 1 has no symbol in the index, whatever its stride.
    return None


def is_dense_layout(sizes: Sequence[Expr], strides: Sequence[Expr]) -> bool:
    """Whether the layout is a permutation of a contiguous one (without size-1 dimensions)."""
    left = {
        k: stride
        for k, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if size is not ONE
    }
    expected = ONE
    while left:
        found = next((k for k, stride in left.items() if stride is expected), None)
        if found is None:
            return False
        del left[found]
        expected = expected * sizes[found]
    return True
