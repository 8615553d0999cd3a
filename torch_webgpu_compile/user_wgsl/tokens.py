"""The tokens of WGSL, and the declarations of a module: no more of the language than is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*)|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>0[xX][\da-fA-F.]+(?:[pP][+-]?\d+)?(?:l[iuf]|[iufh])?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
    r"(?:l[iuf]|[iufh])?)"
    r"|(?P<sign>->|[^\s\w])"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class SourceToken:
    """A word, number or sign; ``start`` and ``end`` are positions in the text."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Behind its last character."""
        return self.start + len(self.text)


class WgslSyntaxError(Exception):
    """The text at a position is not of the expected syntax."""

    def __init__(self, cause: str, position: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.position = position


def tokens_of(text: str) -> list[SourceToken]:
    """Every token but comments.

    Raises:
        WgslSyntaxError: a comment does not end.
    """
    found: list[SourceToken] = []
    place = 0
    while (match := _TOKEN.search(text, place)) is not None:
        place = match.end()
        kind = match.lastgroup or "sign"
        if kind != "comment":
            found.append(SourceToken(kind, match.group(), match.start()))
        elif match.group() == "/*":
            place = _comment_end(text, match.start())
    return found


def _comment_end(text: str, start: int) -> int:
    """Behind a comment of ``/* … */``, which may have others inside."""
    depth = 0
    for mark in re.compile(r"/\*|\*/").finditer(text, start):
        depth += 1 if mark.group() == "/*" else -1
        if not depth:
            return mark.end()
    raise WgslSyntaxError("this comment does not end", start)


@dataclass(frozen=True, slots=True)
class Attribute:
    """``@name(arguments)``: the arguments as text, and the position behind all of it."""

    name: str
    arguments: str
    end: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter, a member of a structure or a variable: its type without spaces."""

    name: str
    type: str
    token: SourceToken
    attributes: tuple[Attribute, ...] = ()


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declaration of a module.

    Attributes:
        kind: the keyword: ``fn``, ``struct``, ``var``, ``const``, ``alias``, ``enable``, …
        name: what it declares, "" of a directive.
        token: the name, or the keyword of a directive.
        variables: a function's parameters, a structure's members.
        type: what a function returns, the type of a variable, what an alias stands for; or "".
        space: of a ``var<…>``, what is between the brackets.
        value: of a constant, its text.
        end: the position behind it.
    """

    kind: str
    name: str
    token: SourceToken
    attributes: tuple[Attribute, ...] = ()
    variables: tuple[Variable, ...] = ()
    type: str = ""
    space: tuple[str, ...] = ()
    value: str = ""
    start: int = 0
    end: int = 0

    def attribute(self, name: str) -> Attribute | None:
        """The attribute of that name, if it has one."""
        return next((found for found in self.attributes if found.name == name), None)


DIRECTIVES = ("enable", "requires", "diagnostic")
_KINDS = ("fn", "struct", "var", "const", "override", "alias", "const_assert", *DIRECTIVES)


def declarations_of(text: str) -> list[Declaration]:
    """The declarations and directives of a module, in order.

    Raises:
        WgslSyntaxError: something else is in between, or one of them does not end.
    """
    return _Parser(text).declarations()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*tokens_of(text), SourceToken("end", "", len(text.rstrip()))]
        self._place = 0

    @property
    def _token(self) -> SourceToken:
        return self._tokens[self._place]

    @property
    def _end(self) -> int:
        return self._tokens[self._place - 1].end

    def _next(self) -> SourceToken:
        token = self._token
        if token.kind == "end":
            raise WgslSyntaxError("the text ends within a declaration", token.start)
        self._place += 1
        return token

    def _accept(self, *texts: str) -> bool:
        if self._token.kind != "end" and self._token.text in texts:
            self._place += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._unexpected(repr(text))

    def _name(self) -> SourceToken:
        if self._token.kind != "name":
            raise self._unexpected("a name")
        return self._next()

    def _unexpected(self, wanted: str) -> WgslSyntaxError:
        found = repr(self._token.text) if self._token.text else "the end of the text"
        return WgslSyntaxError(f"expected {wanted}, found {found}", self._token.start)

    def declarations(self) -> list[Declaration]:
        found = []
        while self._token.kind != "end":
            if not self._accept(";"):
                found.append(self._declaration())
        return found

    def _declaration(self) -> Declaration:
        start = self._token.start
        attributes = self._attributes()
        keyword = self._token
        if keyword.text not in _KINDS:
            raise self._unexpected("a declaration")
        self._place += 1
        match keyword.text:
            case "fn":
                name = self._name()
                self._expect("(")
                variables = self._variables(")")
                type = ""
                if self._accept("->"):
                    self._attributes()
                    type = self._joined("{")
                self._skip_brackets("{")
                made = Declaration("fn", name.text, name, attributes, variables, type)
            case "struct":
                name = self._name()
                self._expect("{")
                made = Declaration("struct", name.text, name, (), self._variables("}"))
            case "var" | "const" | "override":
                made = self._value(keyword.text, attributes)
            case "alias":
                name = self._name()
                self._expect("=")
                made = Declaration("alias", name.text, name, type=self._joined(";"))
                self._expect(";")
            case _:
                value = self._joined(";")
                self._expect(";")
                made = Declaration(keyword.text, "", keyword, value=value)
        return replace(made, start=start, end=self._end)

    def _value(self, kind: str, attributes: tuple[Attribute, ...]) -> Declaration:
        space: list[str] = []
        if self._accept("<"):
            while not self._accept(">"):
                if not self._accept(","):
                    space.append(self._next().text)
        name = self._name()
        type = self._joined("=", ";") if self._accept(":") else ""
        value = self._joined(";") if self._accept("=") else ""
        self._expect(";")
        return Declaration(kind, name.text, name, attributes, (), type, tuple(space), value)

    def _attributes(self) -> tuple[Attribute, ...]:
        found = []
        while self._token.text == "@":
            self._place += 1
            name = self._name().text
            arguments = ""
            if self._token.text == "(":
                start = self._token.end
                self._skip_brackets("(")
                arguments = self._text[start : self._tokens[self._place - 1].start].strip()
            found.append(Attribute(name, arguments, self._end))
        return tuple(found)

    def _variables(self, end: str) -> tuple[Variable, ...]:
        found = []
        while not self._accept(end):
            attributes = self._attributes()
            name = self._name()
            self._expect(":")
            found.append(Variable(name.text, self._joined(",", end), name, attributes))
            self._accept(",")
        return tuple(found)

    def _joined(self, *ends: str) -> str:
        """The tokens up to one of ``ends`` outside of brackets, without spaces."""
        parts: list[str] = []
        depth = 0
        while depth or self._token.text not in ends:
            text = self._next().text
            depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(text, 0)
            depth = max(depth, 0)
            parts.append(text)
            if text == ";":
                raise WgslSyntaxError(
                    f"expected {' or '.join(map(repr, ends))} before this",
                    self._tokens[self._place - 1].start,
                )
        return "".join(parts)

    def _skip_brackets(self, first: str) -> None:
        opened = self._token
        self._expect(first)
        wanted = [_BRACKETS[first]]
        while wanted:
            if self._token.kind == "end":
                raise WgslSyntaxError(f"this {opened.text!r} is not closed", opened.start)
            text = self._next().text
            if text in _BRACKETS:
                wanted.append(_BRACKETS[text])
            elif text in _BRACKETS.values() and text != wanted.pop():
                raise WgslSyntaxError(
                    f"this {text!r} closes nothing", self._tokens[self._place - 1].start
                )


def renamed(text: str, names: dict[str, str]) -> str:
    """``text`` with module-scope names replaced, but for members and attributes of such a name."""
    found = tokens_of(text)
    members = {
        variable.token.start
        for declaration in declarations_of(text)
        if declaration.kind == "struct"
        for variable in declaration.variables
    }
    changes = [
        (token.start, token.end, names[token.text])
        for before, token in zip([None, *found], found, strict=False)
        if token.kind == "name" and token.text in names and token.start not in members
        if before is None or before.text not in (".", "@")
    ]
    return replaced(text, changes)


def replaced(text: str, changes: Sequence[tuple[int, int, str]]) -> str:
    """``text`` with other text at (start, end), which do not overlap."""
    parts: list[str] = []
    copied = 0
    for start, end, new in sorted(changes):
        parts += [text[copied:start], new]
        copied = end
    return "".join([*parts, text[copied:]])
