"""Statements and declarations of a WGSL module, translated as they are read."""

from __future__ import annotations

import re

from .expressions import Code, Parser, binary
from .types import in_words

_WIDE = re.compile(r"\b[iu]64\b|\d+l[iu]\b")
_SIGNATURE = re.compile(r"\bfn (\w+)\s*\([^{]*?\)\s*(?:->\s*([\w<>, ]+?))?\s*\{")
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")


def without_int64(wgsl: str) -> str:
    """A module that does the same without 64-bit integers; it may need helpers ``tw_words_…``.

    Raises:
        ValueError: it has what the translation does not know.
    """
    if not _WIDE.search(wgsl):
        return wgsl
    return _Module(wgsl).translated()


class _Module:
    """Copies the text up to each thing that has to be written otherwise."""

    def __init__(self, wgsl: str) -> None:
        self.parser = Parser(wgsl)
        self.parser.results = {
            name: (result or "").replace(" ", "") for name, result in _SIGNATURE.findall(wgsl)
        }
        self._text = wgsl
        self._copied = 0
        self._parts: list[str] = []

    def translated(self) -> str:
        while self.parser.token.kind != "end":
            self._declaration()
        self._parts.append(self._text[self._copied :])
        return "".join(self._parts)

    # -- text ----------------------------------------------------------------------------------

    def _replace(self, start: int, text: str) -> None:
        """Writes ``text`` in place of what was read since the place ``start``."""
        parser = self.parser
        end = parser.tokens[parser.place - 1].end
        self._parts += [self._text[self._copied : start], text]
        self._copied = end

    def _expression(self) -> Code:
        start = self.parser.token.start
        code = self.parser.expression()
        end = self.parser.tokens[self.parser.place - 1].end
        if _is_changed(self._text[start:end], code.text):
            self._replace(start, code.text)
        return code

    def _type(self) -> str:
        start = self.parser.token.start
        found = self.parser.type()
        if in_words(found) != found:
            self._replace(start, in_words(found))
        return found

    # -- declarations --------------------------------------------------------------------------

    def _declaration(self) -> None:
        parser = self.parser
        while parser.accept("@"):
            parser.name()
            if parser.token.text == "(":
                self._skip_parentheses()
        if parser.accept("enable", "requires", "diagnostic", "alias"):  # aliases: of no i64
            while not parser.accept(";"):
                parser.place += 1
        elif parser.accept("fn"):
            self._function()
        elif parser.accept("var", "const", "let", "override"):
            self._variable()
            parser.expect(";")
        elif not parser.accept(";"):
            raise ValueError(f"no WGSL declaration: {self._text[parser.token.start :][:40]!r}")

    def _skip_parentheses(self) -> None:
        parser = self.parser
        depth = 0
        while True:
            depth += {"(": 1, ")": -1}.get(parser.token.text, 0)
            parser.place += 1
            if not depth:
                return

    def _function(self) -> None:
        parser = self.parser
        parser.name()
        outer = dict(parser.types)
        parser.expect("(")
        while not parser.accept(")"):
            while parser.accept("@"):
                parser.name()
                if parser.token.text == "(":
                    self._skip_parentheses()
            name = parser.name()
            parser.expect(":")
            parser.types[name] = self._type()
            parser.accept(",")
        if parser.accept("->"):
            self._type()
        self._block()
        parser.types = outer

    def _variable(self) -> None:
        parser = self.parser
        if parser.accept("<"):
            while not parser.accept(">"):
                parser.place += 1
        name = parser.name()
        type = self._type() if parser.accept(":") else ""
        if parser.accept("="):
            code = self._expression()
            type = type or ("i32" if code.type == "number" else code.type)
        parser.types[name] = type

    # -- statements ----------------------------------------------------------------------------

    def _block(self) -> None:
        parser = self.parser
        parser.expect("{")
        outer = dict(parser.types)
        while not parser.accept("}"):
            self._statement()
        parser.types = outer

    def _statement(self) -> None:
        parser = self.parser
        word = parser.token.text
        if word == "{":
            self._block()
        elif parser.accept("if"):
            self._if()
        elif parser.accept("for"):
            self._for()
        elif parser.accept("while"):
            self._expression()
            self._block()
        elif parser.accept("loop", "continuing"):
            self._block()
        elif parser.accept("switch"):
            self._switch()
        elif parser.accept("break", "continue", "discard"):
            if parser.accept("if"):
                self._expression()
            parser.expect(";")
        elif parser.accept("return"):
            if parser.token.text != ";":
                self._expression()
            parser.expect(";")
        elif not parser.accept(";"):
            self._simple()
            parser.expect(";")

    def _if(self) -> None:
        self._expression()
        self._block()
        if self.parser.accept("else"):
            if self.parser.accept("if"):
                self._if()
            else:
                self._block()

    def _for(self) -> None:
        parser = self.parser
        outer = dict(parser.types)
        parser.expect("(")
        for end in (";", ";", ")"):
            if parser.token.text != end:
                self._simple()
            parser.expect(end)
        self._block()
        parser.types = outer

    def _switch(self) -> None:
        parser = self.parser
        self._expression()
        parser.expect("{")
        while not parser.accept("}"):
            if not parser.accept("default"):
                parser.expect("case")
                while parser.token.text not in (":", "{"):
                    self._expression()
                    parser.accept(",")
            parser.accept(":")
            self._block()

    def _simple(self) -> None:
        """A variable, an assignment, an increment, a call or a condition, without its end."""
        parser = self.parser
        if parser.accept("var", "let", "const"):
            self._variable()
            return
        start = parser.token.start
        target = parser.expression()
        sign = parser.accept(*_ASSIGNMENTS, "++", "--")
        if sign in ("++", "--"):
            if target.is_wide:
                raise ValueError(f"{target.text}{sign} of 64-bit integers has no translation")
            return
        text = target.text
        if sign and sign != "=" and target.is_wide:
            text = f"{text} = {binary(sign[:-1], target, parser.expression()).text}"
        elif sign:
            text = f"{text} {sign} {parser.expression().text}"
        end = parser.tokens[parser.place - 1].end
        if _is_changed(self._text[start:end], text):
            self._replace(start, text)


def _is_changed(before: str, after: str) -> bool:
    """Whether a translation is more than other space."""
    return re.sub(r"\s|//[^\n]*", "", before) != re.sub(r"\s", "", after)
