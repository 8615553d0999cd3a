"""Jinja templates to whole WGSL modules."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...plan.entry_point import entry_point, parameters_declaration
from ...plan.model import Parameter
from ..hardening.spelling import ENTRY, exponentials, hide_bits
from .storage import Bindings
from .words import without_int64

_LIBRARIES = (
    "math",
    "math_bytes",
    "math_float8",
    "math_f32",
    "math_f32_angle",
    "math_f64",
    "math_f64_exponential",
    "math_f64_angle",
    "math_polynomials",
    "math_series",
    "math_words",
)
_WORD = re.compile(r"\b(?:tw_\w+|bf16_bits|floor_(?:div|mod)_index)\b")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("torch_webgpu_compile", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.globals["entry_point"] = lambda local: entry_point(local) + ENTRY
    return environment


def parameter_names(sizes: Sequence[Parameter]) -> dict[Parameter, str]:
    """The WGSL expression of each size that reaches a kernel as a parameter."""
    return {s: f"parameters[{k // 4}].{'xyzw'[k % 4]}" for k, s in enumerate(sizes)}


def render_template(template: str, inputs: dict[str, Any]) -> str:
    """The text of a template alone; ``inputs``: exactly what it names at its top."""
    return _environment().get_template(template).render(inputs)


def render_module(
    template: str, bindings: Bindings, parameters: Sequence[Parameter], inputs: dict[str, Any]
) -> str:
    """A WGSL module: bindings, the helpers that are used, and the template's text.

    Args:
        template: file name in ``templates/``.
        bindings: after all code that uses buffers has been rendered into ``inputs``.
        parameters: the sizes in the uniform buffer, in order.
        inputs: exactly what the template names at its top.
    """
    body = render_template(template, inputs)
    declared, functions = bindings.declarations()
    if parameters:
        rows = (len(parameters) + 3) // 4
        names = ", ".join(map(str, parameters))
        declared.append(f"{parameters_declaration(bindings.count, rows)}  // {names}")
    text = "\n".join([*functions, body])
    helpers = _helpers(text)
    module = "\n".join([*declared, *helpers.values(), hide_bits(text, helpers)])
    module = exponentials(module, bindings.target)
    if not bindings.target.has_int64:
        module = without_int64(module)
    module = "\n".join([*_helpers(module, helpers).values(), module])
    module = "\n".join(line for line in module.splitlines() if line.strip())
    # As they are: positions in them are told to who wrote them.
    written = (function.definition for function in bindings.functions.values())
    module = "\n".join([module, *written])
    enables = "enable f16;\n" if re.search(r"\bf16\b", _without_comments(module)) else ""
    return enables + module + "\n"


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


@lru_cache(maxsize=1)
def _library() -> dict[str, str]:
    """Every definition of the math templates by name."""
    found: dict[str, str] = {}
    for library in _LIBRARIES:
        text = _environment().get_template(f"{library}.wgsl.jinja").render()
        for part in re.split(r"(?m)^(?=fn |var<private>|const )", text):
            match = re.match(r"(?:fn|var<private>|const) (\w+)", part)
            if match:
                found[match.group(1)] = part.rstrip()
    return found


def _helpers(text: str, defined: Container[str] = ()) -> dict[str, str]:
    """The library definitions that ``text`` needs by name, in the library's order.

    ``defined``: those that it has.
    """
    library = _library()
    needed: set[str] = set()
    pending = set(_WORD.findall(text))
    while pending:
        name = pending.pop()
        if name in library and name not in needed:
            needed.add(name)
            pending |= set(_WORD.findall(library[name])) - needed
    return {
        name: definition
        for name, definition in library.items()
        if name in needed and name not in defined
    }
