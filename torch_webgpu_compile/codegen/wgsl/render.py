"""Jinja templates to whole WGSL modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...plan.model import Parameter
from .storage import Bindings

_LIBRARIES = (
    "math",
    "math_float8",
    "math_f32",
    "math_f32_angle",
    "math_f64",
    "math_f64_exponential",
    "math_f64_angle",
    "math_polynomials",
    "math_series",
)
_WORD = re.compile(r"\b(?:tw_\w+|bf16_bits|floor_(?:div|mod)_index)\b")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("torch_webgpu_compile", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


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
        declared.append(
            f"@group(0) @binding({bindings.count}) var<uniform> parameters: "
            f"array<vec4<i32>, {rows}>;  // {', '.join(map(str, parameters))}"
        )
    text = "\n".join([*functions, body])
    helpers = list(_helpers(text))
    parts = [*declared, *helpers, _with_unknown("\n".join(helpers), text)]
    module = "\n".join(line for line in "\n".join(parts).splitlines() if line.strip())
    enables = "enable f16;\n" if re.search(r"\bf16\b", _without_comments(module)) else ""
    return enables + module + "\n"


def _with_unknown(helpers: str, text: str) -> str:
    """``text``, whose entry point may change the variables that hold infinities, NaN and 0.

    NVIDIA's driver knows what a variable holds that is never written: it makes 0 of a choice
    between 0 and NaN that is multiplied by a number and, beside 64-bit integers, x of
    x > 1 ? -∞ : x, as if no float was infinite. No driver knows that a workgroup's index is less
    than how many there are (their greatest number, Mesa's knows). A float's bits and a 0 that may
    be another number make one of which it knows nothing (`tw_opaque`).
    """
    names = re.findall(r"var<private> (tw_\w+_bits)", helpers)
    lines = [f"  if (group.x == groups.x) {{ {name} ^= 1u; }}\n" for name in names]
    return re.sub(r"(?m)^(fn main\([^{]*\{\n)", lambda head: head[0] + "".join(lines), text)


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


def _helpers(text: str) -> Iterable[str]:
    """The library definitions that ``text`` needs, in the library's order."""
    library = _library()
    needed: set[str] = set()
    pending = set(_WORD.findall(text))
    while pending:
        name = pending.pop()
        if name in library and name not in needed:
            needed.add(name)
            pending |= set(_WORD.findall(library[name])) - needed
    return [definition for name, definition in library.items() if name in needed]
