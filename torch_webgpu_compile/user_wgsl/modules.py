"""Users' WGSL as data of the IR: functions of scalars, and kernels.

`WgslFunction` and `WgslKernel` hold the text itself: it is a part of a graph's text, and so of the
key of its plan. Where the text is written is not, see `source`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .source import Source, marked, name_suffix
from .tokens import (
    DIRECTIVES,
    Declaration,
    Variable,
    WgslSyntaxError,
    declarations_of,
    renamed,
    replaced,
    tokens_of,
)

SCALARS = ("f32", "f16", "i32", "u32", "bool")
"""Types that arguments and results of a function may have."""

_VECTOR = re.compile(r"vec([234])(?:<(\w+)>|([fhiu]))")
_SHORT = {"f": "f32", "h": "f16", "i": "i32", "u": "u32"}
_MEMBERS = "xyzw"
_WORDS_OF_FEATURES = {
    "shader-f16": r"f16|(?:vec|mat)\w+h|[\d.]+h",
    "shader-int64": r"[iu]64|\d\w*l[iu]",
    "shader-f64": r"f64|[\d.].*lf",
}


@dataclass(frozen=True, slots=True)
class WgslFunction:
    """A function of scalars, with all that it needs.

    Attributes:
        name: the operator's, e.g. ``mylib::swish``.
        text: a WGSL module of functions, structures, constants and aliases.
        entry: the function in it.
        parameters: its parameters' names and types, of `SCALARS`.
        results: (member, type) of each result; one of member "" if it gives a scalar.
    """

    name: str
    text: str
    entry: str
    parameters: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]

    @property
    def unique(self) -> str:
        """The name that the entry has in kernels."""
        return self.entry + name_suffix(self.text)

    @property
    def definition(self) -> str:
        """The text for a kernel: no name of its module is one of another text's."""
        return marked(self.name, _own_names(self.text))

    @property
    def features(self) -> frozenset[str]:
        """The WebGPU features that its types need."""
        return features_of(self.text)

    @property
    def has_loops(self) -> bool:
        """Whether there is a loop in it."""
        return bool(re.search(r"\b(?:for|while|loop)\b", self.text))


@lru_cache(maxsize=256)
def features_of(text: str) -> frozenset[str]:
    """The WebGPU features that a module needs for types and numbers in it."""
    words = {token.text for token in tokens_of(text)}
    return frozenset(
        feature
        for feature, pattern in _WORDS_OF_FEATURES.items()
        if any(map(re.compile(pattern).fullmatch, words))
    )


@lru_cache(maxsize=256)
def _own_names(text: str) -> str:
    """A module with its names made unique, without directives; lines stay lines."""
    found = declarations_of(text)
    names = {d.name: d.name + name_suffix(text) for d in found if d.name}
    directives = [(d.start, d.end, "") for d in found if not d.name and d.kind != "const_assert"]
    return renamed(replaced(text, directives), names)


def parse_function(source: Source, name: str, wanted: str = "") -> WgslFunction:
    """The function of scalars that a module has.

    Args:
        source: the module.
        name: the operator's.
        wanted: the function's name, if there are several.

    Raises:
        WgslError: there is none, it is not one of scalars, or it is not a function of its arguments
            alone.
    """
    found = _declarations(source)
    for declaration in found:
        _check_pure(source, declaration)
    functions = [d for d in found if d.kind == "fn"]
    chosen = [d for d in functions if d.name == wanted] or functions
    if not chosen:
        raise source.error("there is no function", 0, "write fn name(x: f32) -> f32 { … }")
    if len(chosen) > 1:
        shown = ", ".join(d.name for d in chosen)
        raise source.error(
            f"it has several functions ({shown})",
            chosen[0].token.start,
            f"call the one that is the operator {wanted!r}",
        )
    (entry,) = chosen
    if not entry.variables:
        raise source.error(f"{entry.name} has no parameters", entry.token.start)
    parameters = tuple((v.name, _scalar(source, v, found)) for v in entry.variables)
    return WgslFunction(name, source.text, entry.name, parameters, _results(source, entry, found))


def _declarations(source: Source) -> list[Declaration]:
    try:
        return declarations_of(source.text)
    except WgslSyntaxError as error:
        raise source.syntax_error(error) from None


def _check_pure(source: Source, found: Declaration) -> None:
    """Raises WgslError for anything that a function of its arguments alone does not need."""
    step = "make it a function of its arguments alone"
    if found.kind in ("var", "override"):
        cause = f"the variable {found.name} is none of its arguments"
    elif found.kind in DIRECTIVES and (found.kind, found.value) != ("enable", "f16"):
        cause = f"{found.kind} {found.value} would be for all of the kernel that it is a part of"
    else:
        return
    raise source.error(cause, found.token.start, step)


def _resolved(type: str, found: Sequence[Declaration]) -> str:
    """A type behind aliases."""
    aliases = {d.name: d.type for d in found if d.kind == "alias"}
    for _ in range(len(aliases)):
        type = aliases.get(type, type)
    return type


def _structure(name: str, found: Sequence[Declaration]) -> Declaration | None:
    return next((d for d in found if d.kind == "struct" and d.name == name), None)


def _scalar(source: Source, variable: Variable, found: Sequence[Declaration]) -> str:
    type = _resolved(variable.type, found)
    if type not in SCALARS:
        raise source.error(
            f"{variable.name} is {variable.type}, no scalar",
            variable.token.start,
            f"use one of {', '.join(SCALARS)}",
        )
    return type


def _results(
    source: Source, entry: Declaration, found: Sequence[Declaration]
) -> tuple[tuple[str, str], ...]:
    type = _resolved(entry.type, found)
    if type in SCALARS:
        return (("", type),)
    vector = _VECTOR.fullmatch(type)
    if vector is not None:
        element = vector[2] or _SHORT[vector[3]]
        if element in SCALARS:
            return tuple((member, element) for member in _MEMBERS[: int(vector[1])])
    structure = _structure(type, found)
    if structure is not None and structure.variables:
        return tuple((v.name, _scalar(source, v, found)) for v in structure.variables)
    cause = f"{entry.name} returns {entry.type or 'nothing'}"
    step = f"return one of {', '.join(SCALARS)}, a vector of them, or a struct of them"
    raise source.error(cause, entry.token.start, step)


UNIFORMS = ("f32", "i32", "u32")
"""Types that numbers of a kernel may have."""

_ELEMENTS = ("f32", "f16", "i32", "u32")


@dataclass(frozen=True, slots=True)
class WgslKernel:
    """A whole compute kernel.

    Attributes:
        name: the operator's.
        text: its module.
        entry: its entry point.
        inputs, outputs: names and scalar types of its tensors: ``var<storage, read>`` in order, and
            ``var<storage, read_write>``.
        uniforms: names and types of its numbers: what its ``var<uniform>`` holds, in order.
        workgroup_size: invocations per dimension.
    """

    name: str
    text: str
    entry: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    uniforms: tuple[tuple[str, str], ...]
    workgroup_size: tuple[int, int, int]

    @property
    def wgsl(self) -> str:
        """The module as a plan has it: bound as `plan.model.Kernel` says, its entry ``main``."""
        changes: list[tuple[int, int, str]] = []
        order = [name for name, _ in (*self.inputs, *self.outputs)]
        for found in declarations_of(self.text):
            if found.kind == "var" and found.attribute("binding") is not None:
                number = order.index(found.name) if found.name in order else len(order)
                space = "uniform" if number == len(order) else "storage, read"
                space += "_write" * (found.name in order[len(self.inputs) :])
                head = f"@group(0) @binding({number}) var<{space}>"
                changes.append((found.start, found.token.start, head))
            elif found.attribute("compute"):
                x, y, z = self.workgroup_size
                head = f"@compute @workgroup_size({x}, {y}, {z})"
                changes.append((found.start, found.attributes[-1].end, head))
        kept = [(a, b, _as_long(self.text[a:b], head)) for a, b, head in changes]
        return marked(self.name, renamed(replaced(self.text, kept), {self.entry: "main"})) + "\n"

    @property
    def features(self) -> frozenset[str]:
        """The WebGPU features that its types need."""
        return features_of(self.text)


def _as_long(before: str, text: str) -> str:
    """``text`` with as many line ends, and white space at its end, as what it replaces."""
    rest = before[len(before.rstrip()) :]
    return text + "\n" * before.rstrip().count("\n") + rest


def is_kernel(source: Source) -> bool:
    """Whether a module has an entry point.

    Raises:
        WgslError: its declarations cannot be read.
    """
    return any(found.attribute("compute") for found in _declarations(source))


def parse_kernel(source: Source, name: str) -> WgslKernel:
    """The kernel that a module is.

    Raises:
        WgslError: it has not one entry point, or bindings that are no tensors or numbers.
    """
    found = _declarations(source)
    entries = [d for d in found if d.attribute("compute")]
    if len(entries) != 1:
        at = entries[1].token.start if entries else 0
        raise source.error(f"it has {len(entries)} entry points", at, "write one @compute function")
    (entry,) = entries
    inputs: list[tuple[str, str]] = []
    outputs: list[tuple[str, str]] = []
    uniforms: tuple[tuple[str, str], ...] = ()
    for variable in found:
        if variable.kind == "override":
            step = "make it a const, or a number in a var<uniform>"
            raise source.error("an override has no value here", variable.token.start, step)
        if variable.kind != "var" or variable.space[:1] not in (("storage",), ("uniform",)):
            continue
        if variable.attribute("group") is None or variable.attribute("binding") is None:
            step = "write @group(0) @binding(…) before it"
            raise source.error(f"{variable.name} has no binding", variable.token.start, step)
        if variable.space[0] == "uniform":
            if uniforms:
                step = "put all numbers into one struct"
                raise source.error("it has several uniforms", variable.token.start, step)
            uniforms = _uniforms(source, variable, found)
        elif variable.space[1:] == ("read_write",):
            outputs.append((variable.name, _element(source, variable, found)))
        else:
            inputs.append((variable.name, _element(source, variable, found)))
    if not outputs:
        step = "write its result to a var<storage, read_write>"
        raise source.error("it has no result", entry.token.start, step)
    _check_lengths(source)
    size = _workgroup_size(source, entry, found)
    taken = [k for k, _ in (*inputs, *uniforms)]
    twice = next((k for k in taken if taken.count(k) > 1), None)
    if twice is not None:
        raise source.error(f"a tensor and a number are called {twice}", entry.token.start)
    return WgslKernel(
        *(name, source.text, entry.name, tuple(inputs), tuple(outputs), uniforms, size)
    )


def _element(source: Source, variable: Declaration, found: Sequence[Declaration]) -> str:
    type = _resolved(variable.type, found)
    match = re.fullmatch(r"array<(.*)>", type)
    element = _resolved(match[1], found) if match else ""
    vector = _VECTOR.fullmatch(element)
    if vector is not None and vector[1] != "3":
        element = vector[2] or _SHORT[vector[3]]
    if element not in _ELEMENTS:
        kinds = ", ".join(_ELEMENTS)
        raise source.error(
            f"{variable.name} is {variable.type}, no tensor",
            variable.token.start,
            f"declare it as array<T> of {kinds}, or of vec2 or vec4 of them",
        )
    return element


def _uniforms(
    source: Source, variable: Declaration, found: Sequence[Declaration]
) -> tuple[tuple[str, str], ...]:
    type = _resolved(variable.type, found)
    structure = _structure(type, found)
    numbers = structure.variables if structure else (Variable(variable.name, type, variable.token),)
    made = []
    for number in numbers:
        kind = _resolved(number.type, found)
        if kind not in UNIFORMS or number.attributes:
            step = f"use members of {', '.join(UNIFORMS)} without attributes"
            raise source.error(
                f"{number.name} is {number.type}, no number", number.token.start, step
            )
        made.append((number.name, kind))
    return tuple(made)


def _check_lengths(source: Source) -> None:
    for token in tokens_of(source.text):
        if token.text == "arrayLength":
            raise source.error(
                "arrayLength counts what a buffer is padded with, too",
                token.start,
                "put the size into a var<uniform>",
            )


def _workgroup_size(
    source: Source, entry: Declaration, found: Sequence[Declaration]
) -> tuple[int, int, int]:
    attribute = entry.attribute("workgroup_size")
    constants = {d.name: d.value for d in found if d.kind == "const"}
    sizes: list[int] = []
    for text in (attribute.arguments if attribute else "").split(","):
        value = text.strip()
        if not value:
            continue
        value = constants.get(value, value).rstrip("iu")
        if not value.isdigit():
            step = "write numbers, or constants of the module"
            raise source.error(f"the workgroup size {text.strip()}", entry.token.start, step)
        sizes.append(int(value))
    if not sizes:
        raise source.error(f"{entry.name} has no @workgroup_size", entry.token.start)
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
