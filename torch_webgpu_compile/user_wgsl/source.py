"""Positions in users' WGSL as lines and columns of their own files.

Kernels have the text of a user's module between marks, line by line, with other names. So a
position that a compiler of WGSL reports is one in the user's file again, in every process that has
run the file: `located`.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import WgslError
from .tokens import WgslSyntaxError, tokens_of


@dataclass(frozen=True, slots=True)
class Source:
    """A user's WGSL.

    Attributes:
        title: whose it is, e.g. ``mylib::swish``.
        text: the WGSL.
        file: the file that has it, or in which it is made.
        line: where its first line is in that file, from 1; or where it is used.
        column: where its first line starts, from 1.
        indentation: columns that the file has before every line but the first one.
        exact: whether its lines are lines of the file.
    """

    title: str
    text: str
    file: str
    line: int
    column: int = 1
    indentation: int = 0
    exact: bool = True

    def place(self, line: int, column: int) -> str:
        """A position in the text (from 1) for a person: ``file:line:column`` where that is known"""
        if not self.exact:
            return f"{self.file}:{self.line} (line {line}, column {column} of the WGSL)"
        shift = self.column - 1 if line == 1 else self.indentation
        return f"{self.file}:{self.line + line - 1}:{column + shift}"

    def place_of(self, position: int) -> str:
        """`place` of an offset in the text."""
        before = self.text[:position]
        return self.place(before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)

    def error(self, cause: str, position: int, next_step: str = "") -> WgslError:
        """The error at an offset in the text."""
        return WgslError(self.title, cause, self.place_of(position), next_step)

    def syntax_error(self, error: WgslSyntaxError) -> WgslError:
        """The error for text that could not be parsed."""
        return self.error(error.cause, error.position)


def find_source(title: str, given: str | os.PathLike[str], depth: int = 1) -> Source:
    """The source of WGSL that is given as a string, or as the path of a file.

    Args:
        title: see `Source`.
        given: a `Path` is read.
        depth: the frame that the string is from, counted from the caller of this function.
    """
    if isinstance(given, os.PathLike):
        path = Path(given)
        return Source(title, path.read_text(encoding="utf-8"), str(path), 1)
    frame = sys._getframe(depth + 1)
    file, line = frame.f_code.co_filename, frame.f_lineno
    found = _find_literal(given, file, line)
    if found is None:
        return Source(title, given, file, line, exact=False)
    return Source(title, given, file, found.line, found.column, found.indentation)


@dataclass(frozen=True, slots=True, order=True)
class _Literal:
    """The place of a text in a file, and the indentation there of all lines but its first."""

    distance: int
    line: int
    column: int
    indentation: int


def _find_literal(text: str, file: str, line: int) -> _Literal | None:
    """The string in a Python file that is ``text``, the nearest to ``line``.

    Its lines may have been stripped and dedented. None where no string has it line by line: it may
    be made of pieces.
    """
    lines = linecache.getlines(file)
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
    except (SyntaxError, ValueError):
        return None
    found = (
        _literal(text, node, node.value, lines, line)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return min((literal for literal in found if literal is not None), default=None)


def _literal(
    text: str, node: ast.Constant, value: str, lines: list[str], near: int
) -> _Literal | None:
    end = node.end_lineno or node.lineno
    if value.split() != text.split() or end - node.lineno != value.count("\n"):
        return None
    code = lines[node.lineno - 1]
    start = len(code.encode()[: node.col_offset].decode())
    quotes = re.match(r"[a-zA-Z]*(?:\"\"\"|\'\'\'|\"|\')", code[start:])
    assert quotes is not None, code
    there, here = value.splitlines(), text.splitlines()
    skipped = 0
    while here[0].strip() and not there[skipped].strip():
        skipped += 1
    margins = [
        len(old.rstrip()) - len(own.rstrip())
        for old, own in zip(there[skipped:], here, strict=False)
        if own.strip()
    ]
    first = len(there[skipped].rstrip()) - len(here[0].rstrip())
    column = first + 1 + (start + quotes.end() if skipped == 0 else 0)
    distance = min(abs(node.lineno - near), abs(end - near))
    return _Literal(distance, node.lineno + skipped, column, margins[-1] if margins else 0)


_sources: dict[str, Source] = {}


def remember(source: Source) -> None:
    """Makes positions in a source known to `located`, under its title."""
    _sources[source.title] = source


_BEGIN, _END = "// WGSL of ", "// end of the WGSL of "


def marked(title: str, text: str) -> str:
    """A user's text in a kernel, between marks that say whose it is."""
    return f"{_BEGIN}{title}\n{text}\n{_END}{title}"


def name_suffix(text: str) -> str:
    """The suffix of a module's names in kernels: 8 hex digits of the SHA-256 of its text."""
    return f"_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def original_names(text: str) -> str:
    """``text`` about a kernel with names as their user has written them."""
    return re.sub(r"\b([A-Za-z]\w*)_[0-9a-f]{8}\b", r"\1", text)


def located(module: str, line: int, column: int) -> tuple[str, str] | None:
    """The operator whose WGSL is at a position of a kernel, and its place in the user's file.

    None of what this package has written. The second is "" where the file was not run by this
    process, as with a plan from a cache.
    """
    lines = module.splitlines()
    first = min(line, len(lines)) - 1
    while first >= 0 and not lines[first].startswith(_BEGIN):
        if lines[first].startswith(_END) and first != line - 1:
            return None
        first -= 1
    if first < 0 or first == line - 1:
        return None
    title = lines[first].removeprefix(_BEGIN)
    source = _sources.get(title)
    if source is None:
        return title, ""
    number = line - first - 1  # from 1
    own = source.text.splitlines()
    if number > len(own):
        return title, source.place(max(len(own), 1), 1)
    return title, source.place(number, _original_column(lines[line - 1], own[number - 1], column))


def _original_column(written: str, original: str, column: int) -> int:
    """The column of a token in a line that has other names: the token of the same number."""
    try:
        here, there = tokens_of(written), tokens_of(original)
    except WgslSyntaxError:
        return column
    if len(here) != len(there):
        return column
    for own, old in zip(here, there, strict=True):
        if own.start <= column - 1 < own.end:
            return old.start + min(column - 1 - own.start, len(old.text) - 1) + 1
    return column
