"""How elements are loaded from and stored to bindings: packing, vectors, windows.

A kernel names each buffer access by a function call (``load_x``, ``store_x``, for pairs ``load2_x``
and ``store2_x``, for vectors ``load4_x`` and ``store4_x``); `Bindings` remembers which were used
and declares bindings and functions that fit all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import dtypes
from ..checks import IndexCheck
from ..dtypes import DType, Kind
from ..errors import AdapterError
from ..ir.graph import Buffer
from ..plan.model import STATUS, STATUS_NBYTES, Binding, KernelBinding
from ..sizes import Expr, as_expr, upper_bound
from ..target import Target
from .values import Text

VECTOR = 4
PAIR = 2


@dataclass
class _Use:
    """What a kernel does with one buffer."""

    buffer: Buffer
    alias: str
    functions: set[str] = field(default_factory=set)
    touched: Expr | None = None

    @property
    def reads(self) -> bool:
        return any(f.startswith(("load", "add")) for f in self.functions)

    @property
    def writes(self) -> bool:
        return any(f.startswith(("store", "add")) for f in self.functions)


@dataclass
class Bindings:
    """The storage bindings of one kernel, in order of first use."""

    target: Target
    buffers: dict[str, Buffer]
    checks: dict[IndexCheck, int] = field(default_factory=dict)
    _uses: dict[str, _Use] = field(default_factory=dict)

    def report(self, check: IndexCheck, first: str, index: Text, size: str) -> str:
        """A statement that reports an index out of range.

        Args:
            first: the number of the kernel's first check.
            index: an i32 or i64.
            size: an i32.
        """
        number = self.checks.setdefault(check, len(self.checks))
        given = index.code
        if index.dtype.compute != self._reported:
            given = f"{self._reported}({given})"
        return f"tw_report({first} + {number}, {given}, {size});"

    @property
    def _reported(self) -> str:
        """The type in which indices are reported."""
        return "i64" if self.target.supports(dtypes.int64) else "i32"

    def function(self, buffer: str, verb: str) -> str:
        """The WGSL name of an access to a buffer.

        ``verb``: ``load``, ``store``, with a 4 for vectors and a 2 for pairs, or ``add``.
        """
        memory = self._memory(buffer)
        use = self._uses.get(memory)
        if use is None:
            use = _Use(self.buffers[memory], f"x{len(self._uses)}")
            self._uses[memory] = use
        use.functions.add(verb)
        return f"{verb}_{use.alias}"

    def touch(self, buffer: str, numel: Expr) -> None:
        """Says how many elements of a buffer that it uses a kernel moves, where not all."""
        self._uses[self._memory(buffer)].touched = numel

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

    def windows(self, buffer: Buffer) -> int:
        """Bindings through which the whole buffer is reached."""
        if not buffer.nbytes.is_constant:
            return 1
        nbytes = int(buffer.nbytes)
        if nbytes > self.target.max_buffer_nbytes:
            raise AdapterError(
                f"buffer {buffer.name} needs {nbytes} bytes, the adapter's largest buffer has "
                f"{self.target.max_buffer_nbytes}; use smaller batches or a narrower dtype"
            )
        return max(1, -(-nbytes // self.window_nbytes))

    @property
    def window_nbytes(self) -> int:
        """Bytes per window: the binding limit, rounded down to an offset allowed everywhere."""
        return self.target.max_binding_nbytes // 256 * 256

    def declarations(self) -> tuple[list[str], list[str]]:
        """WGSL lines: binding declarations, then access functions."""
        declared: list[str] = []
        functions: list[str] = []
        slot = 0
        for use in self._uses.values():
            element = _element_type(use)
            access = "read_write" if use.writes else "read"
            count = self.windows(use.buffer)
            for window in range(count):
                name = use.alias if count == 1 else f"{use.alias}_w{window}"
                sizes = "×".join(map(repr, use.buffer.sizes)) or "scalar"
                declared.append(
                    f"@group(0) @binding({slot}) var<storage, {access}> {name}: "
                    f"array<{element}>;  // {use.buffer.dtype} {sizes}"
                )
                slot += 1
            for verb in sorted(use.functions):
                functions += _access_function(use, verb, element, count, self.window_nbytes)
        if self.checks:
            declared.append(
                f"@group(0) @binding({slot}) var<storage, read_write> device_status: "
                f"array<atomic<u32>, {STATUS_NBYTES // 4}>;"
            )
            functions += _report_function(self._reported)
        return declared, functions

    @property
    def count(self) -> int:
        """Storage bindings used."""
        return sum(self.windows(use.buffer) for use in self._uses.values()) + bool(self.checks)

    def plan_bindings(self) -> tuple[tuple[Binding, ...], tuple[KernelBinding, ...]]:
        """The same bindings for the plan."""
        bindings: list[Binding] = []
        kernel: list[KernelBinding] = []
        for name, use in self._uses.items():
            count = self.windows(use.buffer)
            for window in range(count):
                offset = window * self.window_nbytes
                nbytes: Expr | None = None
                if count > 1:
                    total = int(use.buffer.nbytes)
                    nbytes = as_expr(min(self.window_nbytes, (total - offset + 15) // 16 * 16))
                bindings.append(Binding(name, offset, nbytes))
                kernel.append(KernelBinding(use.writes))
        if self.checks:
            bindings.append(Binding(STATUS))
            kernel.append(KernelBinding(writable=True))
        return tuple(bindings), tuple(kernel)

    def traffic(self) -> tuple[Expr, Expr]:
        """(bytes read, bytes written) when every bound element that is touched moves once."""
        read = written = as_expr(0)
        for use in self._uses.values():
            numel = use.buffer.numel if use.touched is None else use.touched
            nbytes = numel * use.buffer.dtype.itemsize
            if use.writes:
                written = written + nbytes
            if use.reads or not use.writes:
                read = read + nbytes
        return read, written


def _report_function(type: str) -> list[str]:
    """Sets the device's status (`plan.model.Kernel`) unless it is set."""
    high = "u32(bitcast<u64>(index) >> 32u)" if type == "i64" else "u32(index >> 31u)"
    low = "u32(bitcast<u64>(index) & 0xfffffffflu)" if type == "i64" else "u32(index)"
    values = ("u32(check)", low, high, "u32(size)")
    return [
        f"fn tw_report(check: i32, index: {type}, size: i32) {{",
        # The load spares the others an atomic each where many are wrong.
        "  if (atomicLoad(&device_status[0]) != 0u) { return; }",
        "  if (atomicAdd(&device_status[0], 1u) != 0u) { return; }",
        *(f"  atomicStore(&device_status[{k}], {v});" for k, v in enumerate(values, 1)),
        "}",
    ]


def _storage_lanes(use: _Use) -> int:
    """Elements that one element of the binding's array holds, of a dtype that is not packed."""
    verbs, dtype = use.functions, use.buffer.dtype
    if "store" in verbs or dtype.packing > 1 or dtype.itemsize > 4:
        return 1  # WGSL may write a whole vector where one component is stored (a race)
    pairs = {"load2", "store2"} & verbs
    if {"load4", "store4"} & verbs and "store2" not in verbs:
        return VECTOR
    return PAIR if pairs and not {"load4", "store4"} & verbs else 1


def _element_type(use: _Use) -> str:
    dtype = use.buffer.dtype
    if "add" in use.functions or (dtype.packing > 1 and "store" in use.functions):
        return "atomic<u32>"
    lanes = _storage_lanes(use)
    return f"vec{lanes}<{dtype.storage}>" if lanes > 1 else dtype.storage


def _access_function(
    use: _Use, verb: str, element: str, windows: int, window_nbytes: int
) -> list[str]:
    """One access function; ``i`` counts elements for scalar verbs and groups of four for vector
    verbs.
    """
    lines = _BODIES[verb](use, element)
    if windows == 1:
        return [_signature(use, verb, use.alias) + " {", *lines, "}"]
    per_window = window_nbytes // use.buffer.dtype.itemsize
    per_window //= _verb_lanes(verb)
    text: list[str] = []
    for w in range(windows):
        name = f"{use.alias}_w{w}"
        own = [line.replace(f"{use.alias}[", f"{name}[") for line in lines]
        text += [_signature(use, verb, name) + " {", *own, "}"]
    value = ", v" if verb.startswith(("store", "add")) else ""
    back = "" if value else "return "
    text.append(_signature(use, verb, use.alias) + " {")
    for w in range(windows - 1):
        end = (w + 1) * per_window
        call = f"{verb}_{use.alias}_w{w}(i - {w * per_window}{value});"
        text.append(f"  if (i < {end}) {{ {back}{call}{' return;' if value else ''} }}")
    last = windows - 1
    text.append(f"  {back}{verb}_{use.alias}_w{last}(i - {last * per_window}{value});")
    return [*text, "}"]


def _verb_lanes(verb: str) -> int:
    return int(verb[-1]) if verb[-1].isdigit() else 1


def _signature(use: _Use, verb: str, name: str) -> str:
    compute = use.buffer.dtype.compute
    lanes = _verb_lanes(verb)
    value = f"vec{lanes}<{compute}>" if lanes > 1 else compute
    if verb.startswith("load"):
        return f"fn {verb}_{name}(i: i32) -> {value}"
    return f"fn {verb}_{name}(i: i32, v: {value})"


def _load(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if dtype.packing == 1:
        at = f"{x}[i]"
        if element.startswith("vec"):
            at = f"{x}[i >> 2u][i & 3]" if element.startswith("vec4") else f"{x}[i >> 1u][i & 1]"
        return [f"  return {_widen(dtype, at, '')};"]
    shift = {2: 1, 4: 2}[dtype.packing]
    word = f"{x}[i >> {shift}u]"
    if element.startswith("atomic"):
        word = f"atomicLoad(&{word})"
    bit = f"u32(i & {dtype.packing - 1}) * {dtype.bits}u"
    return [f"  return {_unpack(dtype, f'({word} >> ({bit}))')};"]


def _load2(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if element.startswith("vec2"):
        return [f"  return {_widen(dtype, f'{x}[i]', 'vec2')};"]
    if element.startswith("vec4"):
        half = f"select({x}[i >> 1u].xy, {x}[i >> 1u].zw, (i & 1) == 1)"
        return [f"  return {_widen(dtype, half, 'vec2')};"]
    lanes = [_widen(dtype, f"{x}[2 * i + {k}]", "") for k in range(PAIR)]
    return [f"  return vec2<{dtype.compute}>({', '.join(lanes)});"]


def _store2(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if element.startswith("vec2"):
        return [f"  {x}[i] = {_narrow(dtype, 'v', 'vec2')};"]
    return [f"  {x}[2 * i + {k}] = {_narrow(dtype, f'v.{c}', '')};" for k, c in enumerate("xy")]


def _load4(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if dtype.packing == 1 and element.startswith("vec4"):
        return [f"  return {_widen(dtype, f'{x}[i]', 'vec4')};"]
    if dtype.packing == 1:
        lanes = [_widen(dtype, f"{x}[4 * i + {k}]", "") for k in range(VECTOR)]
        return [f"  return vec4<{dtype.compute}>({', '.join(lanes)});"]

    def word(at: str) -> str:
        return f"atomicLoad(&{x}[{at}])" if element.startswith("atomic") else f"{x}[{at}]"

    if dtype.packing == 4:
        lanes = [_unpack(dtype, f"(w >> {8 * k}u)") for k in range(4)]
        head = f"  let w = {word('i')};"
    else:
        halves = ("w0", "(w0 >> 16u)", "w1", "(w1 >> 16u)")
        lanes = [_unpack(dtype, half) for half in halves]
        head = f"  let w0 = {word('2 * i')};\n  let w1 = {word('2 * i + 1')};"
    return [head, f"  return vec4<{dtype.compute}>({', '.join(lanes)});"]


def _store(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if dtype.packing == 1:
        return [f"  {x}[i] = {_narrow(dtype, 'v', '')};"]
    # Neighbours in the word belong to other invocations: clear own bits, then set them.
    shift = {2: 1, 4: 2}[dtype.packing]
    mask = (1 << dtype.bits) - 1
    return [
        f"  let bit = u32(i & {dtype.packing - 1}) * {dtype.bits}u;",
        f"  atomicAnd(&{x}[i >> {shift}u], ~({mask}u << bit));",
        f"  atomicOr(&{x}[i >> {shift}u], {_pack(dtype, 'v')} << bit);",
    ]


def _store4(use: _Use, element: str) -> list[str]:
    dtype, x = use.buffer.dtype, use.alias
    if dtype.packing == 1 and element.startswith("vec4"):
        return [f"  {x}[i] = {_narrow(dtype, 'v', 'vec4')};"]
    if dtype.packing == 1:
        return [
            f"  {x}[4 * i + {k}] = {_narrow(dtype, f'v.{c}', '')};" for k, c in enumerate("xyzw")
        ]
    lane = [_pack(dtype, f"v.{c}") for c in "xyzw"]

    def put(at: str, word: str) -> str:
        return (
            f"  atomicStore(&{at}, {word});"
            if element.startswith("atomic")
            else f"  {at} = {word};"
        )

    if dtype.packing == 4:
        word = f"{lane[0]} | ({lane[1]} << 8u) | ({lane[2]} << 16u) | ({lane[3]} << 24u)"
        return [put(f"{x}[i]", word)]
    return [
        put(f"{x}[2 * i]", f"{lane[0]} | ({lane[1]} << 16u)"),
        put(f"{x}[2 * i + 1]", f"{lane[2]} | ({lane[3]} << 16u)"),
    ]


def _add(use: _Use, element: str) -> list[str]:
    """Atomic accumulation: integers natively, f32 by compare-exchange (in any order).

    An i64 is two words: the sum of the low ones wraps exactly as often as an addition sees it wrap.
    """
    dtype, x = use.buffer.dtype, use.alias
    if dtype.compute == "i64":
        return [
            "  let bits = bitcast<u64>(v);",
            "  let low = u32(bits & 0xfffffffflu);",
            f"  let carry = select(0u, 1u, atomicAdd(&{x}[2 * i], low) > 0xffffffffu - low);",
            f"  atomicAdd(&{x}[2 * i + 1], u32(bits >> 32u) + carry);",
        ]
    if dtype.kind is not Kind.FLOAT:
        return [f"  atomicAdd(&{x}[i], bitcast<u32>(v));"]
    return [
        f"  var old = atomicLoad(&{x}[i]);",
        "  loop {",
        "    let sum = bitcast<u32>(bitcast<f32>(old) + v);",
        f"    let result = atomicCompareExchangeWeak(&{x}[i], old, sum);",
        "    if (result.exchanged) { break; }",
        "    old = result.old_value;",
        "  }",
    ]


_BODIES = {
    "load": _load,
    "load2": _load2,
    "load4": _load4,
    "store": _store,
    "store2": _store2,
    "store4": _store4,
    "add": _add,
}


def _widen(dtype: DType, text: str, vector: str) -> str:
    if dtype.storage == dtype.compute:
        return text
    return f"{f'{vector}<{dtype.compute}>' if vector else dtype.compute}({text})"


def _narrow(dtype: DType, text: str, vector: str) -> str:
    if dtype.storage == dtype.compute:
        return text
    return f"{f'{vector}<{dtype.storage}>' if vector else dtype.storage}({text})"


def _unpack(dtype: DType, word: str) -> str:
    """The lowest ``dtype.bits`` of a u32 expression as the compute type."""
    match dtype.short:
        case "bool":
            return f"(({word} & 0xffu) != 0u)"
        case "u8":
            return f"({word} & 0xffu)"
        case "bf16":
            return f"bitcast<f32>({word} << 16u)"
        case _:
            return f"extractBits(bitcast<i32>({word}), 0u, {dtype.bits}u)"


def _pack(dtype: DType, value: str) -> str:
    """A value of the compute type as its bits, in the low end of a u32."""
    match dtype.short:
        case "bool":
            return f"select(0u, 1u, {value})"
        case "u8":
            return f"({value} & 0xffu)"
        case "bf16":
            return f"bf16_bits({value})"
        case _:
            return f"(bitcast<u32>({value}) & {(1 << dtype.bits) - 1}u)"


def check_index_range(buffer: Buffer) -> None:
    """Raises AdapterError when a buffer has more elements than 32-bit index arithmetic reaches."""
    high = upper_bound(buffer.span)
    if high is not None and high >= 1 << 31:
        raise AdapterError(
            f"buffer {buffer.name} spans {high} elements; kernels address less than 2**31: split it"
        )
