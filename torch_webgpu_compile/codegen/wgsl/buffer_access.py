"""The WGSL functions through which kernels read and write one buffer.

Elements narrower than 32 bits are packed in words; vectors are one access where a binding allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...dtypes import DType, Kind, int64_in_words
from ...ir.access import ACCESS_NBYTES, VECTOR
from ...ir.buffers import Buffer
from ...ir.scalar import Load
from ...symbolic.sizes import Expr, as_expr
from ...target import Window

PAIR = 2
WORD_NBYTES = 4
COMBINING = ("add", "raise")
"""Verbs of atomics that combine a value with an element."""


@dataclass
class Use:
    """How a kernel uses one buffer: its accesses, lanes and elements.

    Attributes:
        touched: how many elements move, where not all do.
        gathered: the most elements that each of its loads at places from data reads.
        walked: whether it is also read at places that no data decides.
    """

    buffer: Buffer
    alias: str
    functions: set[str] = field(default_factory=set)
    touched: Expr | None = None
    gathered: dict[Load, Expr] = field(default_factory=dict)
    walked: bool = False

    @property
    def numel(self) -> Expr:
        """Elements that move, each once."""
        if self.touched is not None:
            return self.touched
        numel, found = self.buffer.numel, list(self.gathered.values())
        if self.walked or not found or not all(e.is_constant for e in (numel, *found)):
            return numel
        return min(numel, as_expr(sum(map(int, found))), key=int)

    @property
    def reads(self) -> bool:
        """Whether the kernel loads from the buffer; atomics that combine load too."""
        return any(f.startswith(("load", "word", "pairs", *COMBINING)) for f in self.functions)

    @property
    def writes(self) -> bool:
        """Whether the kernel stores to the buffer; atomics that combine store too."""
        return any(f.startswith(("store", *COMBINING)) for f in self.functions)


def _storage_lanes(use: Use) -> int:
    """How many elements the array element of a binding holds, of a dtype that is not packed."""
    verbs, dtype = use.functions, use.buffer.dtype
    if "store" in verbs or dtype.packing > 1 or dtype.itemsize > 4:
        return 1  # WGSL may write a whole vector where one component is stored (a race)
    pairs = {"load2", "store2"} & verbs
    if {"load4", "store4"} & verbs and "store2" not in verbs:
        return VECTOR
    return PAIR if pairs and not {"load4", "store4"} & verbs else 1


def element_type(use: Use) -> str:
    """The WGSL type of an element of the binding's array.

    Atomic words for what combines and for stores into packed words; a vector where all accesses are
    by vectors.
    """
    dtype = use.buffer.dtype
    if use.functions & set(COMBINING) or (dtype.packing > 1 and "store" in use.functions):
        return "atomic<u32>"
    if "words" in use.functions and not use.writes:
        return "vec4<u32>"
    if use.functions == {"pairs"}:
        return "vec2<u32>"
    lanes = _storage_lanes(use)
    return f"vec{lanes}<{dtype.storage}>" if lanes > 1 else dtype.storage


def access_function(use: Use, verb: str, element: str, windows: Sequence[Window]) -> list[str]:
    """One access function; ``i`` counts elements for scalar verbs and groups of four for vector
    verbs.
    """
    single = len(windows) == 1
    text: list[str] = []
    for name in [use.alias] if single else [f"{use.alias}_w{w}" for w in range(len(windows))]:
        body = _BODIES[verb](use.buffer.dtype, name, element)
        text += [_signature(use, verb, name) + " {", *body, "}"]
    if single:
        return text
    value = ", v" if verb.startswith(("store", *COMBINING)) else ""
    back = "" if value else "return "
    text.append(_signature(use, verb, use.alias) + " {")
    itemsize = use.buffer.dtype.itemsize
    step = _STEPS.get(verb, itemsize * _verb_lanes(verb))
    starts = [window.offset_nbytes // step for window in windows]
    calls = [f"{verb}_{use.alias}_w{w}(i - {start}{value});" for w, start in enumerate(starts)]
    for call, end in zip(calls, starts[1:], strict=False):
        text.append(f"  if (i < {end}) {{ {back}{call}{' return;' if value else ''} }}")
    text.append(f"  {back}{calls[-1]}")
    return [*text, "}"]


def function_by_part(uses: Sequence[Use], verb: str) -> list[str]:
    """The access to the buffer of a part, by the part's number; all are of one dtype."""
    value = ", v" if verb.startswith(("store", *COMBINING)) else ""
    lines = [_signature(uses[0], verb, f"any_{uses[0].alias}") + " {", "  switch (tw_part) {"]
    for k, use in enumerate(uses):
        label = f"case {k}:" if k + 1 < len(uses) else "default"
        call = f"{verb}_{use.alias}(i{value});"
        lines.append(f"    {label} {{ {call if value else f'return {call}'} }}")
    return [*lines, "  }", "}"]


_WORDS = {"word": "u32", "pairs": "vec2<u32>", "words": "vec4<u32>"}
_STEPS = {"word": WORD_NBYTES, "pairs": 2 * WORD_NBYTES, "words": ACCESS_NBYTES}


def _verb_lanes(verb: str) -> int:
    return int(verb[-1]) if verb[-1].isdigit() else 1


def _signature(use: Use, verb: str, name: str) -> str:
    if verb in _WORDS:
        return f"fn {verb}_{name}(i: i32) -> {_WORDS[verb]}"
    compute = use.buffer.dtype.compute
    lanes = _verb_lanes(verb)
    value = f"vec{lanes}<{compute}>" if lanes > 1 else compute
    if verb.startswith("load"):
        return f"fn {verb}_{name}(i: i32) -> {value}"
    return f"fn {verb}_{name}(i: i32, v: {value})"


def _load(dtype: DType, x: str, element: str) -> list[str]:
    if dtype.packing == 1:
        at = f"{x}[i]"
        if element != dtype.storage:
            at = f"{x}[i >> 2u][i & 3]" if element.startswith("vec4") else f"{x}[i >> 1u][i & 1]"
        return [f"  return {_widen(dtype, at, '')};"]
    shift = {2: 1, 4: 2}[dtype.packing]
    word = _word(x, element, f"i >> {shift}u")
    bit = f"u32(i & {dtype.packing - 1}) * {dtype.bits}u"
    return [f"  return {value_of(dtype, f'({word} >> ({bit}))')};"]


def _load_vector(count: int, dtype: DType, x: str, element: str) -> list[str]:
    """So many elements of a dtype that is not packed."""
    if element.startswith(f"vec{count}"):
        return [f"  return {_widen(dtype, f'{x}[i]', f'vec{count}')};"]
    lanes = [_widen(dtype, f"{x}[{count} * i + {k}]", "") for k in range(count)]
    return [f"  return vec{count}<{dtype.compute}>({', '.join(lanes)});"]


def _load2(dtype: DType, x: str, element: str) -> list[str]:
    if element.startswith("vec4"):
        half = f"select({x}[i >> 1u].xy, {x}[i >> 1u].zw, (i & 1) == 1)"
        return [f"  return {_widen(dtype, half, 'vec2')};"]
    return _load_vector(PAIR, dtype, x, element)


def _store_vector(count: int, dtype: DType, x: str, element: str) -> list[str]:
    """So many elements of a dtype that is not packed."""
    if element.startswith(f"vec{count}"):
        return [f"  {x}[i] = {_narrow(dtype, 'v', f'vec{count}')};"]
    values = [_narrow(dtype, f"v.{c}", "") for c in "xyzw"[:count]]
    return [f"  {x}[{count} * i + {k}] = {value};" for k, value in enumerate(values)]


def _load4(dtype: DType, x: str, element: str) -> list[str]:
    if dtype.packing == 1:
        return _load_vector(VECTOR, dtype, x, element)
    if dtype.packing == 4:
        lanes = [value_of(dtype, f"(w >> {8 * k}u)") for k in range(4)]
        head = f"  let w = {_word(x, element, 'i')};"
    else:
        halves = ("w0", "(w0 >> 16u)", "w1", "(w1 >> 16u)")
        lanes = [value_of(dtype, half) for half in halves]
        words = [_word(x, element, at) for at in ("2 * i", "2 * i + 1")]
        head = f"  let w0 = {words[0]};\n  let w1 = {words[1]};"
    return [head, f"  return vec4<{dtype.compute}>({', '.join(lanes)});"]


def _words(count: int, dtype: DType, x: str, element: str) -> list[str]:
    """So many words as they are, of a dtype that is packed in words."""
    if element.startswith(f"vec{count}"):
        return [f"  return {x}[i];"]
    words = [_word(x, element, f"{count} * i + {k}") for k in range(count)]
    return [f"  return vec{count}<u32>({', '.join(words)});"]


def _whole_word(dtype: DType, x: str, element: str) -> list[str]:
    """A word as it is, of a dtype that is packed in words."""
    return [f"  return {_word(x, element, 'i')};"]


def _word(x: str, element: str, at: str) -> str:
    """A word of a binding whose array has elements of this type."""
    if element.startswith("vec4"):
        return f"{x}[({at}) >> 2u][({at}) & 3]"
    return f"atomicLoad(&{x}[{at}])" if element.startswith("atomic") else f"{x}[{at}]"


def element_of(dtype: DType, words: str, number: int) -> str:
    """An element, by its number from the first, of the words that ``words_…`` gave."""
    bit = number % dtype.packing * dtype.bits
    word = f"{words}.{'xyzw'[number // dtype.packing]}"
    return value_of(dtype, f"({word} >> {bit}u)" if bit else word)


def _store(dtype: DType, x: str, element: str) -> list[str]:
    if dtype.packing == 1:
        return [f"  {x}[i] = {_narrow(dtype, 'v', '')};"]
    # Neighbours in the word belong to other invocations: clear own bits, then set them.
    shift = {2: 1, 4: 2}[dtype.packing]
    mask = (1 << dtype.bits) - 1
    return [
        f"  let bit = u32(i & {dtype.packing - 1}) * {dtype.bits}u;",
        f"  atomicAnd(&{x}[i >> {shift}u], ~({mask}u << bit));",
        f"  atomicOr(&{x}[i >> {shift}u], {bits_of(dtype, 'v')} << bit);",
    ]


def _store4(dtype: DType, x: str, element: str) -> list[str]:
    if dtype.packing == 1:
        return _store_vector(VECTOR, dtype, x, element)
    lane = [bits_of(dtype, f"v.{c}") for c in "xyzw"]

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


def _add(dtype: DType, x: str, element: str) -> list[str]:
    """Atomic accumulation: integers natively, f32 by compare-exchange (in any order).

    An i64 is two words: the sum of the low ones wraps exactly as often as an addition sees it wrap.
    """
    if dtype.is_integer and dtype.bits == 64:
        low, high = words_of(dtype, "v", "bits")
        return [
            *(() if dtype is int64_in_words else ("  let bits = bitcast<u64>(v);",)),
            f"  let low = {low};",
            f"  let carry = select(0u, 1u, atomicAdd(&{x}[2 * i], low) > 0xffffffffu - low);",
            f"  atomicAdd(&{x}[2 * i + 1], {high} + carry);",
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


def _raise(dtype: DType, x: str, element: str) -> list[str]:
    """The larger of a u32 and what is there; seldom it is the new one, and a load costs less."""
    return [f"  if (atomicLoad(&{x}[i]) < v) {{ atomicMax(&{x}[i], v); }}"]


_BODIES: dict[str, Callable[[DType, str, str], list[str]]] = {
    "load": _load,
    "load2": _load2,
    "load4": _load4,
    "words": partial(_words, VECTOR),
    "word": _whole_word,
    "pairs": partial(_words, PAIR),
    "store": _store,
    "store2": partial(_store_vector, PAIR),
    "store4": _store4,
    "add": _add,
    "raise": _raise,
}


def words_of(dtype: DType, value: str, bits: str) -> tuple[str, str]:
    """The low and the high word of an int64; ``bits``: as a u64, where WGSL has that."""
    if dtype is int64_in_words:
        return f"{value}.x", f"{value}.y"
    return f"u32({bits} & 0xfffffffflu)", f"u32({bits} >> 32u)"


def _widen(dtype: DType, text: str, vector: str) -> str:
    if dtype.storage == dtype.compute:
        return text
    return f"{f'{vector}<{dtype.compute}>' if vector else dtype.compute}({text})"


def _narrow(dtype: DType, text: str, vector: str) -> str:
    if dtype.storage == dtype.compute:
        return text
    return f"{f'{vector}<{dtype.storage}>' if vector else dtype.storage}({text})"


def value_of(dtype: DType, word: str) -> str:
    """The lowest ``dtype.bits`` (less than 32) of a u32 expression as the compute type."""
    match dtype.short:
        case "bool":
            return f"(({word} & 0xffu) != 0u)"
        case "u8":
            return f"({word} & 0xffu)"
        case "bf16":
            return f"bitcast<f32>({word} << 16u)"
        case "f16":
            return f"unpack2x16float({word}).x"
        case _ if dtype.is_float8:
            return f"tw_{dtype.name.removeprefix('float8_')}_value({word})"
        case _:
            return f"extractBits(bitcast<i32>({word}), 0u, {dtype.bits}u)"


def bits_of(dtype: DType, value: str) -> str:
    """A value of the compute type as its bits, in the low end of a u32."""
    match dtype.short:
        case "bool":
            return f"select(0u, 1u, {value})"
        case "u8":
            return f"({value} & 0xffu)"
        case "bf16":
            return f"bf16_bits({value})"
        case "f16":
            return f"tw_f16_bits(tw_f16_rounded({value}))"
        case _ if dtype.is_float8:
            return f"tw_{dtype.name.removeprefix('float8_')}_bits({value})"
        case _:
            return f"(bitcast<u32>({value}) & {(1 << dtype.bits) - 1}u)"
