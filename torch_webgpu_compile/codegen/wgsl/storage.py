"""How elements are loaded from and stored to bindings: packing, vectors, windows.

A kernel names each buffer access by a function call (``load_x``, ``store_x``, for pairs ``load2_x``
and ``store2_x``, for vectors ``load4_x`` and ``store4_x``); `Bindings` remembers which were used
and declares bindings and functions that fit all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ... import dtypes
from ...dtypes import DType
from ...errors import AdapterError, IndexCheck, OutOfMemoryError
from ...ir.buffers import Buffer
from ...ir.scalar import Load, scalar_symbols
from ...plan.model import STATUS, STATUS_NBYTES, Binding, KernelBinding
from ...symbolic.sizes import INT32, ZERO, Expr, Symbol, as_expr, mod, product, upper_bound
from ...target import Target, Window
from ...user_wgsl.modules import WgslFunction
from ..values import Text
from .buffer_access import Use, access_function, element_type, function_by_part, words_of
from .casts import converted


@dataclass
class Bindings:
    """The storage bindings of one kernel, in order of first use.

    ``narrow`` are integers made from sizes that its arithmetic takes for 32-bit ones. ``functions``
    are those of users that it calls, by their text. ``twins`` are, for a buffer of the first of
    several parts whose code is the first one's, those of all parts: what code accesses is that of
    the part whose number is in ``tw_part``.
    """

    target: Target
    buffers: dict[str, Buffer]
    checks: dict[IndexCheck, int] = field(default_factory=dict)
    narrow: dict[Expr, None] = field(default_factory=dict)
    functions: dict[str, WgslFunction] = field(default_factory=dict)
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _uses: dict[str, Use] = field(default_factory=dict)
    _by_part: dict[tuple[str, str], list[Use]] = field(default_factory=dict)

    def report(self, check: IndexCheck, first: str, index: Text, size: str) -> str:
        """A statement that reports an index out of range.

        Args:
            first: the number of the kernel's first check.
            index: an integer.
            size: an i32.
        """
        number = self.checks.setdefault(check, len(self.checks))
        given, int64 = index.code, self.target.in_wgsl(dtypes.int64)
        if index.dtype.compute != int64.compute:
            given = converted(given, index.dtype, int64)
        return f"tw_report({first} + {number}, {given}, {size});"

    def are_sizes(self, symbols: Iterable[Symbol]) -> bool:
        """Whether symbols are sizes of tensors, and so below 2³¹: not other numbers of a caller."""
        return all(s.extent is not None or s.most is not None or s in self._sizes for s in symbols)

    @cached_property
    def _sizes(self) -> frozenset[Symbol]:
        """Symbols of which a size is one, or a multiple."""
        given = {size for buffer in self.buffers.values() for size in buffer.sizes}
        single = (size.terms[0][0] for size in given if len(size.terms) == 1 and not size.constant)
        return frozenset(
            atoms[0] for atoms in single if len(atoms) == 1 and isinstance(atoms[0], Symbol)
        )

    def is_count(self, expr: Expr) -> bool:
        """Whether sizes make the number of elements of a buffer, or of a part: one below 2³¹.

        The runtime checks it, as it is computed in 32 bits then.
        """
        numels = [buffer.numel for buffer in self.buffers.values()]
        if not any(n is not ZERO and mod(n, expr) is ZERO for n in numels):
            return False
        self.narrow[expr] = None
        return True

    def function(self, buffer: str, verb: str) -> str:
        """The WGSL name of an access to a buffer.

        ``verb``: ``load``, ``store``, with a 4 for vectors and a 2 for pairs, or ``add``.
        """
        uses = self._used(buffer)
        for use in uses:
            use.functions.add(verb)
        if len(uses) == 1:
            return f"{verb}_{uses[0].alias}"
        self._by_part[verb, uses[0].alias] = uses
        return f"{verb}_any_{uses[0].alias}"

    def _used(self, buffer: str) -> list[Use]:
        """The uses of a buffer, or of its twins."""
        memory = self._memory(buffer)
        names = self.twins.get(memory, (memory,))
        names = names if len({*names}) > 1 else names[:1]
        for name in names:
            if name not in self._uses:
                used = self.buffers[name]
                dtype = self.target.in_wgsl(used.dtype)
                used = used if dtype is used.dtype else replace(used, dtype=dtype)
                self._uses[name] = Use(used, f"x{len(self._uses)}")
        return [self._uses[name] for name in names]

    def touch(self, buffer: str, numel: Expr) -> None:
        """Says how many elements of a buffer that it uses a kernel moves, where not all."""
        for use in self._used(buffer):
            use.touched = numel

    def gather(self, load: Load, is_gather: bool) -> None:
        """Says of a load, whose function has been named, whether data decide what it reads.

        A gather reads at most one element for each value of the symbols in its index.
        """
        symbols = {s for entry in load.index for s in scalar_symbols(entry)} if is_gather else ()
        for use in self._used(load.buffer):
            if not is_gather:
                use.walked = True
            elif load not in use.gathered:
                use.gathered[load] = product(s.extent for s in symbols if s.extent is not None)

    def can_vectorize(self, dtype: DType) -> bool:
        """Whether four elements of a dtype are one access (a vec4, or whole words when packed)."""
        return dtype.itemsize <= 4

    def can_pair(self, dtype: DType) -> bool:
        """Whether two elements of a dtype are one access."""
        return dtype.packing == 1 and dtype.itemsize <= 4

    def _memory(self, buffer: str) -> str:
        """The buffer whose binding all that share its memory have."""
        while (shared := self.buffers[buffer].shares) is not None:
            buffer = shared
        return buffer

    def windows(self, buffer: Buffer) -> tuple[Window, ...]:
        """Bindings through which the whole buffer is reached.

        Raises:
            AdapterError: a buffer has more elements than 32-bit index arithmetic reaches.
            OutOfMemoryError: no buffer of the GPU is that large.
        """
        self._check_index_range(buffer)
        nbytes = buffer.nbytes
        if nbytes.is_constant and nbytes.constant > self.target.max_buffer_nbytes:
            raise OutOfMemoryError(
                f"buffer {buffer.name} needs {nbytes.constant:,} bytes, the largest buffer that "
                f"{self.target.name} allows has {self.target.max_buffer_nbytes:,}; use smaller "
                "batches or a narrower dtype"
            )
        return buffer.windows(self.target)

    def declarations(self) -> tuple[list[str], list[str]]:
        """WGSL lines: binding declarations, then access functions."""
        declared: list[str] = []
        functions: list[str] = []
        slot = 0
        for use in self._uses.values():
            element = element_type(use)
            access = "read_write" if use.writes else "read"
            windows = self.windows(use.buffer)
            for number in range(len(windows)):
                name = use.alias if len(windows) == 1 else f"{use.alias}_w{number}"
                sizes = "×".join(map(repr, use.buffer.sizes)) or "scalar"
                declared.append(
                    f"@group(0) @binding({slot}) var<storage, {access}> {name}: "
                    f"array<{element}>;  // {use.buffer.dtype} {sizes}"
                )
                slot += 1
            for verb in sorted(use.functions):
                functions += access_function(use, verb, element, windows)
        for (verb, _), uses in self._by_part.items():
            functions += function_by_part(uses, verb)
        if self._by_part:
            declared.append("var<private> tw_part: i32;")
        if self.checks:
            declared.append(
                f"@group(0) @binding({slot}) var<storage, read_write> device_status: "
                f"array<atomic<u32>, {STATUS_NBYTES // 4}>;"
            )
            functions += _report_function(self.target.in_wgsl(dtypes.int64))
        return declared, functions

    @property
    def count(self) -> int:
        """Storage bindings used."""
        return sum(len(self.windows(use.buffer)) for use in self._uses.values()) + bool(self.checks)

    def _check_index_range(self, buffer: Buffer) -> None:
        span = buffer.span
        high = upper_bound(span)
        if high is not None and high in INT32:
            return
        if span.is_constant:
            raise AdapterError(
                f"buffer {buffer.name} spans {high} elements; kernels address less than 2**31: "
                "split it"
            )
        if self.target.max_buffer_nbytes // buffer.dtype.itemsize not in INT32:
            self.narrow[span] = None

    def plan_bindings(self) -> tuple[tuple[Binding, ...], tuple[KernelBinding, ...]]:
        """The same bindings for the plan."""
        bindings: list[Binding] = []
        kernel: list[KernelBinding] = []
        for name, use in self._uses.items():
            for window in self.windows(use.buffer):
                nbytes = None if window.nbytes is None else as_expr(window.nbytes)
                bindings.append(Binding(name, window.offset_nbytes, nbytes))
                kernel.append(KernelBinding(use.writes))
        if self.checks:
            bindings.append(Binding(STATUS))
            kernel.append(KernelBinding(writable=True))
        return tuple(bindings), tuple(kernel)

    def traffic(self) -> tuple[tuple[Expr, Expr], ...]:
        """(bytes read, bytes written) through each binding when what is touched moves once.

        What goes through several windows counts as moved through the first.
        """
        found: list[tuple[Expr, Expr]] = []
        for use in self._uses.values():
            nbytes = use.numel * use.buffer.dtype.itemsize
            read = nbytes if use.reads or not use.writes else ZERO
            found.append((read, nbytes if use.writes else ZERO))
            found += [(ZERO, ZERO)] * (len(self.windows(use.buffer)) - 1)
        return (*found, (ZERO, ZERO)) if self.checks else tuple(found)


def _report_function(int64: DType) -> list[str]:
    """Sets the device's status (`plan.model.Kernel`) unless it is set."""
    values = ("u32(check)", *words_of(int64, "index", "bitcast<u64>(index)"), "u32(size)")
    return [
        f"fn tw_report(check: i32, index: {int64.compute}, size: i32) {{",
        # The load spares the others an atomic each where many are wrong.
        "  if (atomicLoad(&device_status[0]) != 0u) { return; }",
        "  if (atomicAdd(&device_status[0], 1u) != 0u) { return; }",
        *(f"  atomicStore(&device_status[{k}], {v});" for k, v in enumerate(values, 1)),
        "}",
    ]
