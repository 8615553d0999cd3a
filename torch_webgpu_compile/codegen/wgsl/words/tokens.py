"""WGSL text as tokens, each with its place in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|//[^\n]*|/\*.*?\*/)+)
    | (?P<number>0[xX][0-9a-fA-F]+(?:li|lu|[iu])?
        | (?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?:li|lu|lf|[iufh])?)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<sign><<=|>>=|->|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=
        | [-+*/%&|^!~<>=()\[\]{},;:.@])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A word, number or sign; ``start`` and ``end`` are its place in the text."""

    kind: str
    text: str
    start: int
    end: int


def tokens_of(text: str) -> list[Token]:
    """The tokens of WGSL text without its space and comments, and one of kind ``end``.

    Raises:
        ValueError: a character that starts no token.
    """
    found: list[Token] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"no WGSL token at {text[place : place + 20]!r}")
        if match.lastgroup != "space":
            found.append(Token(match.lastgroup or "", match.group(), place, match.end()))
        place = match.end()
    return [*found, Token("end", "", len(text), len(text))]
