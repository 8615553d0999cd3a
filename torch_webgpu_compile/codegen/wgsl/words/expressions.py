"""Expressions: a parser that gives each one's type, and its text without 64-bit integers.

An expression that has none keeps its text. A helper ``tw_words_…`` is one of
``templates/math_words.wgsl.jinja``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .tokens import Token, tokens_of
from .types import (
    WIDE,
    WORDS,
    element,
    in_words,
    indexed,
    is_wide,
    lanes,
    of_builtin,
    vector,
)

_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_LEVEL_OF = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs}
_COMPARISONS = ("==", "!=", "<", ">", "<=", ">=")
_NAMES = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "%": "rem",
    "&": "and",
    "|": "or",
    "^": "xor",
    "<<": "shl",
    ">>": "shr",
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
}
_SIGNED = frozenset({"div", "rem", "shr", "lt", "le", "gt", "ge", "min", "max", "clamp"})
_MATRIX_CALLS = frozenset({"subgroupMatrixLoad", "subgroupMatrixStore"})
_TEMPLATED = _MATRIX_CALLS | {"vec2", "vec3", "vec4", "array", "bitcast", "ptr", "atomic"}
_BUILTINS = frozenset({"min", "max", "abs", "sign", "clamp", "select"})
_SCALARS = frozenset({"i32", "u32", "f32", "f16", "bool", "i64", "u64"})
_COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}


@dataclass(frozen=True, slots=True)
class Code:
    """An expression: its text, its type before the translation ("number" where it is abstract)."""

    text: str
    type: str

    @property
    def is_wide(self) -> bool:
        """Whether it is a 64-bit integer, or a vector of them."""
        return is_wide(self.type)


@dataclass
class Parser:
    """Reads tokens of ``text``; ``types`` are those of the names in scope."""

    text: str
    types: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    place: int = 0
    tokens: list[Token] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.text)

    # -- tokens --------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.place]

    def accept(self, *texts: str) -> str:
        """The next token's text if it is one of these, which is then read; else ""."""
        if self.token.kind != "number" and self.token.text in texts:
            self.place += 1
            return self.tokens[self.place - 1].text
        return ""

    def expect(self, text: str) -> None:
        """Reads a sign or word. Raises ValueError."""
        if not self.accept(text):
            near = self.text[self.token.start : self.token.start + 40]
            raise ValueError(f"{text!r} expected in WGSL at {near!r}")

    def name(self) -> str:
        """Reads a name. Raises ValueError."""
        if self.token.kind != "name":
            raise ValueError(f"a name expected in WGSL at {self.text[self.token.start :][:40]!r}")
        self.place += 1
        return self.tokens[self.place - 1].text

    def type(self) -> str:
        """Reads a type: its text without space."""
        found = self.name()
        if self.accept("<"):
            found += "<"
            depth = 1
            while depth:
                text = self.token.text
                self.place += 1
                depth += {"<": 1, ">": -1, ">>": -2}.get(text, 0)
                found += text
        return found

    def _is_template(self) -> bool:
        following = self.tokens[self.place + 1]
        return self.token.text in _TEMPLATED and following.text == "<"

    # -- expressions ---------------------------------------------------------------------------

    def expression(self, level: int = 0) -> Code:
        """Reads an expression."""
        left = self._unary()
        while (found := _LEVEL_OF.get(self.token.text, -1)) >= level:
            self.place += 1
            left = binary(self.tokens[self.place - 1].text, left, self.expression(found + 1))
        return left

    def _unary(self) -> Code:
        sign = self.accept("-", "!", "~", "&", "*")
        if not sign:
            return self._postfix(self._primary())
        if sign == "-" and self.token.text.endswith("li"):
            value = int(self.token.text[:-2], 0)
            self.place += 1
            return Code(_constant(-value), "i64")
        operand = self._unary()
        if not operand.is_wide:
            return Code(f"{sign}{operand.text}", operand.type)
        return call({"-": "neg", "~": "not"}[sign], operand)

    def _postfix(self, code: Code) -> Code:
        while True:
            if self.accept("."):
                member = self.name()
                code = _component(code, member)
            elif self.accept("["):
                index = self.expression()
                self.expect("]")
                code = Code(f"{code.text}[{index.text}]", indexed(code.type))
            else:
                return code

    def _primary(self) -> Code:
        token = self.token
        if token.kind == "number":
            self.place += 1
            return _number(token.text)
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return Code(f"({inner.text})", inner.type)
        if self._is_template() or token.text in _SCALARS:
            type = self.type()
            return self._constructed(type)
        name = self.name()
        if self.token.text != "(":
            type = "bool" if name in ("true", "false") else self.types.get(name, "")
            return Code(name, type)
        return self._called(name, self._arguments())

    def _arguments(self) -> list[Code]:
        self.expect("(")
        found: list[Code] = []
        while not self.accept(")"):
            found.append(self.expression())
            self.accept(",")
        return found

    def _constructed(self, type: str) -> Code:
        arguments = self._arguments()
        if type.split("<")[0] in _MATRIX_CALLS:  # of no integers
            return Code(f"{type}({_list(arguments)})", "")
        if type.startswith("bitcast<"):
            return _bitcast(type[len("bitcast<") : -1], arguments[0])
        if is_wide(type) or any(a.is_wide for a in arguments):
            return constructed(type, arguments)
        return Code(f"{in_words(type)}({_list(arguments)})", type)

    def _called(self, name: str, arguments: list[Code]) -> Code:
        if name in self.results:
            return Code(f"{name}({_list(arguments)})", self.results[name])
        if any(a.is_wide for a in arguments):
            if name not in _BUILTINS:
                raise ValueError(f"{name} of 64-bit integers has no translation")
            return _builtin(name, arguments)
        return Code(f"{name}({_list(arguments)})", of_builtin(name, [a.type for a in arguments]))


def _list(arguments: list[Code]) -> str:
    return ", ".join(a.text for a in arguments)


def _number(text: str) -> Code:
    if text[-2:] in ("li", "lu"):
        value = int(text[:-2], 0)
        return Code(_constant(value), "i64" if text.endswith("li") else "u64")
    if text[-1] in "iu":
        return Code(text, "i32" if text[-1] == "i" else "u32")
    is_hexadecimal = text[:2].lower() == "0x"
    if not is_hexadecimal and ("." in text or "e" in text.lower()) and text[-1] not in "fh":
        return Code(text, "f32")
    if text[-1] in "fh" and not is_hexadecimal:
        return Code(text, "f32" if text[-1] == "f" else "f16")
    return Code(text, "number")


def _constant(value: int) -> str:
    return f"{WORDS}({value & 0xFFFFFFFF}u, {value >> 32 & 0xFFFFFFFF}u)"


def _component(code: Code, member: str) -> Code:
    if code.is_wide and lanes(code.type) > 1:
        return Code(f"{code.text}[{_COMPONENTS[member]}]", element(code.type))
    swizzled = vector(element(code.type), len(member)) if lanes(code.type) > 1 else ""
    return Code(f"{code.text}.{member}", swizzled)


def call(name: str, *arguments: Code, type: str = "") -> Code:
    """A call of a helper on 64-bit integers; single ones are repeated where others are vectors.

    ``type``: the result's, if it is not that of the first argument.
    """
    count = max(lanes(a.type) for a in arguments)
    suffix = f"_x{count}" if count > 1 else ""
    texts = [a.text if lanes(a.type) == count else _repeated(a, count) for a in arguments]
    result = vector(type or element(arguments[0].type), count)
    return Code(f"tw_words_{name}{suffix}({', '.join(texts)})", result)


def _repeated(code: Code, count: int) -> str:
    if code.is_wide:
        return f"tw_words_repeat_x{count}({code.text})"
    return f"vec{count}({code.text})"


def _as_wide(code: Code, type: str) -> Code:
    """An operand beside one of a wide type: an abstract number becomes one too."""
    if code.is_wide:
        return code
    return constructed(type, [code])


def binary(sign: str, left: Code, right: Code) -> Code:
    """An operation on two operands."""
    if not (left.is_wide or right.is_wide):
        return Code(f"{left.text} {sign} {right.text}", _result(sign, left, right))
    name = _NAMES[sign]
    wide = element(left.type if left.is_wide else right.type)
    if name in ("shl", "shr"):
        return call(_signed(name, wide), left, right)
    left, right = _as_wide(left, wide), _as_wide(right, wide)
    is_bitwise = name in ("and", "or", "xor")
    if is_bitwise and lanes(left.type) == lanes(right.type) == 1:
        return Code(f"({left.text} {sign} {right.text})", wide)
    if sign in _COMPARISONS:
        return call(_signed(name, wide), left, right, type="bool")
    return call(_signed(name, wide), left, right)


def _signed(name: str, wide: str) -> str:
    return f"{name}_{wide}" if name in _SIGNED else name


def _result(sign: str, left: Code, right: Code) -> str:
    count = max(lanes(left.type), lanes(right.type))
    if sign in _COMPARISONS:
        return vector("bool", count)
    if sign in ("&&", "||"):
        return "bool"
    if sign in ("<<", ">>"):
        return left.type
    known = right if left.type in ("", "number") else left
    if not known.type:
        return ""
    return known.type if lanes(known.type) == count else vector(element(known.type), count)


def _builtin(name: str, arguments: list[Code]) -> Code:
    wide = next(element(a.type) for a in arguments if a.is_wide)
    if name == "select":
        no, yes, condition = arguments
        no, yes = _as_wide(no, wide), _as_wide(yes, wide)
        if max(lanes(a.type) for a in arguments) == 1:
            return Code(f"select({no.text}, {yes.text}, {condition.text})", wide)
        return call("select", no, yes, condition)
    if wide == "u64" and name in ("abs", "sign"):
        raise ValueError(f"{name} of u64 has no translation")
    return call(_signed(name, wide), *(_as_wide(a, wide) for a in arguments))


def constructed(type: str, arguments: list[Code]) -> Code:
    """``type(arguments)`` where one or the other has 64-bit integers."""
    count, of = lanes(type), element(type)
    if type.startswith("array<"):
        of = indexed(type)
        texts = [(constructed(of, [a]) if not a.is_wide else a).text for a in arguments]
        return Code(f"{in_words(type)}({', '.join(texts)})", type)
    if count > 1 and len(arguments) == count:
        parts = [_converted(a, of) for a in arguments]
        made = in_words(type)
        return Code(f"{made}({', '.join(parts)})", type)
    (argument,) = arguments or [Code("0", "number")]
    if count == 1:
        return Code(_converted(argument, of), type)
    if lanes(argument.type) == 1:
        single = Code(_converted(argument, of), of)
        return Code(_repeated(single, count), type)
    if argument.is_wide and of in WIDE:
        return Code(argument.text, type)
    source = element(argument.type)
    name = f"to_{of}_of_{source}" if argument.is_wide else f"of_{source}"
    return Code(f"tw_words_{name}_x{count}({argument.text})", type)


def _converted(argument: Code, of: str) -> str:
    """One value as another scalar type."""
    source = argument.type
    if source in WIDE:
        if of in WIDE:
            return argument.text
        if of == "u32":
            return f"{argument.text}.x"
        if of == "i32":
            return f"bitcast<i32>({argument.text}.x)"
        if of == "bool":
            return f"any({argument.text} != {WORDS}(0u))"
        return f"tw_words_to_{of}_of_{source}({argument.text})"
    if of not in WIDE:
        return f"{of}({argument.text})"
    if source == "number":
        try:
            return _constant(int(argument.text.replace("(", "").replace(")", "").strip(), 0))
        except ValueError:
            source = "i32"
    if source == "u32":
        return f"{WORDS}({argument.text}, 0u)"
    if source == "bool":
        return f"{WORDS}(select(0u, 1u, {argument.text}), 0u)"
    if source not in ("i32", "f32", "f16"):
        raise ValueError(f"a 64-bit integer of {argument.text!r}, whose type is {source!r}")
    return f"tw_words_of_{source}({argument.text})"


def _bitcast(type: str, argument: Code) -> Code:
    if argument.type.replace(" ", "") in (*WIDE, WORDS) and type.replace(" ", "") in (*WIDE, WORDS):
        return Code(argument.text, type)
    if argument.is_wide and is_wide(type):
        return Code(argument.text, type)
    if argument.is_wide or is_wide(type):
        raise ValueError(f"bitcast of {argument.type} to {type} has no translation")
    return Code(f"bitcast<{type}>({argument.text})", type)
