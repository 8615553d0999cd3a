"""Functions of a joint kernel that differ in the buffers they use, as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..wgsl.storage import Bindings

_ACCESS = re.compile(r"\b((?:load|store|add|words?|pairs)[24]?)_(x\d+)\(")
# Drivers unroll loops of known length, with a branch for each part in each access.
_LOOP = re.compile(r"(for \(var \w+ = 0; \w+ < \d+)(;)")
_HEAD = re.compile(r"fn part\d+\(id: i32, local: i32\) \{")


@dataclass(frozen=True)
class JointFunction:
    """A kernel of several, as the template prints it.

    Attributes:
        text: the function.
        first: its first workgroup.
        workgroups: how many it has.
    """

    text: str
    first: int
    workgroups: int


def merged(parts: Sequence[JointFunction], bindings: Bindings) -> list[JointFunction]:
    """The parts of a kernel, with one in place of all that are alike and follow each other.

    Args:
        bindings: the kernel's, which get functions that access the buffers of a part by its number.
    """
    runs: list[list[JointFunction]] = []
    for part in parts:
        if runs and _skeleton(runs[-1][0], bindings) == _skeleton(part, bindings):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_merged(number, run, bindings) for number, run in enumerate(runs)]


def _aliases(part: JointFunction) -> list[str]:
    """The buffers of a part by their names in the kernel, in the order in which it uses them."""
    return list(dict.fromkeys(alias for _, alias in _ACCESS.findall(part.text)))


def _skeleton(part: JointFunction, bindings: Bindings) -> tuple[object, ...]:
    """Equal for parts that differ in their buffers only."""
    aliases = _aliases(part)
    text = _ACCESS.sub(lambda found: f"{found[1]}_{aliases.index(found[2])}(", part.text)
    types = [bindings.dtype_of(alias) for alias in aliases]
    return part.workgroups, _HEAD.sub("", text), types


def _merged(number: int, run: Sequence[JointFunction], bindings: Bindings) -> JointFunction:
    first, head = run[0], f"fn part{number}("
    workgroups = first.workgroups * len(run)
    if len(run) == 1:
        text = _HEAD.sub(head + "id: i32, local: i32) {", first.text)
        return JointFunction(text, first.first, workgroups)
    chosen = dict(zip(_aliases(first), zip(*map(_aliases, run), strict=True), strict=True))

    def access(found: re.Match[str]) -> str:
        verb, aliases = found[1], chosen[found[2]]
        if len(set(aliases)) == 1:
            return found[0]
        return f"{bindings.function_by_number(verb, aliases)}(which, "

    lines = [f"{head}all: i32, local: i32) {{", "  let which = all;", "  let id = 0;"]
    if first.workgroups > 1:
        lines[1:] = [f"  let which = all / {first.workgroups};"]
        lines.append(f"  let id = all % {first.workgroups};")
    text = _LOOP.sub(r"\1 + i32(tw_zero_bits)\2", _ACCESS.sub(access, first.text))
    text = _HEAD.sub("\n".join(lines), text)
    return JointFunction(text, first.first, workgroups)
