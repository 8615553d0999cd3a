"""Jinja templates to whole WGSL modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...ir.access import VECTOR
from ...plan.entry_point import entry_point, parameters_declaration
from ...plan.model import Parameter
from ...target import Target
from ..hardening.spelling import changed_bits, fast_exp
from .storage import Bindings
from .template_code import TemplateCode

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
# Without \b before it, which makes the search five times as long: no other name has these in it.
_WORD = re.compile(r"(?:tw_\w+|bf16_bits|floor_(?:div|mod)_index)\b")

# What templates print behind `entry_point`: a text is assembled of what is before it and after it.
_ENTRY = "\0"


def _entry_point(local: str, workgroup_size: int, total: str = "") -> str:
    """`entry_point`, and the number ``id`` of a workgroup that is one of ``total``, where given."""
    text = f"@compute @workgroup_size({workgroup_size})\n{entry_point(local)}{_ENTRY}"
    if total:
        text += "\n  let id = i32(group.y * groups.x + group.x);\n"
        text += f"  if (id >= {total}) {{ return; }}"
    return text


@cache
def _environment(exp: str, exp4: str) -> Environment:
    """Templates by the names of the functions that are `fast_exp` of one and of four numbers.

    The filter ``statements`` prints one below the other, with so many spaces before each.
    """
    environment = Environment(
        loader=PackageLoader("torch_webgpu_compile", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        optimized=False,  # a quarter of the time that it takes to load templates, for nothing
        bytecode_cache=TemplateCode(),
    )
    environment.globals["entry_point"] = _entry_point
    environment.globals["fast_exp"], environment.globals["fast_exp4"] = exp, exp4
    environment.filters["statements"] = lambda lines, indent=0: f"\n{' ' * indent}".join(lines)
    return environment


def environment_of(target: Target) -> Environment:
    """What renders templates for a target."""
    return _environment(fast_exp(target), fast_exp(target, VECTOR))


def parameter_names(sizes: Sequence[Parameter]) -> dict[Parameter, str]:
    """The WGSL expression of each size that reaches a kernel as a parameter."""
    return {s: f"parameters[{k // 4}].{'xyzw'[k % 4]}" for k, s in enumerate(sizes)}


def render_template(template: str, inputs: dict[str, Any], target: Target) -> str:
    """The text of a template alone; ``inputs``: exactly what it names at its top."""
    return environment_of(target).get_template(f"{template}.wgsl.jinja").render(inputs)


def render_module(
    template: str, bindings: Bindings, parameters: Sequence[Parameter], inputs: dict[str, Any]
) -> str:
    """A WGSL module: bindings, the helpers that are used, and the template's text.

    Args:
        template: its name in ``templates/``.
        bindings: after all code that uses buffers has been rendered into ``inputs``.
        parameters: the sizes in the uniform buffer, in order.
        inputs: exactly what the template names at its top.
    """
    body = render_template(template, inputs, bindings.target)
    start, end = body.split(f"{_ENTRY}\n")  # a template begins its main with entry_point
    declared, functions = bindings.declarations()
    if parameters:
        rows = (len(parameters) + 3) // 4
        names = ", ".join(map(str, parameters))
        declared.append(f"{parameters_declaration(bindings.count, rows)}  // {names}")
    helpers = helpers_of("\n".join([*functions, body]), bindings.target)
    hidden = [f"{line}\n" for line in changed_bits(helpers)]
    module = "\n".join([*declared, *helpers.values(), *functions, "".join([start, *hidden, end])])
    module = "\n".join(line for line in module.splitlines() if line.strip())
    # As they are: positions in them are told to who wrote them.
    written = (function.definition for function in bindings.functions.values())
    module = "\n".join([module, *written])
    return ("enable f16;\n" if _has_float16(module) else "") + module + "\n"


def _has_float16(module: str) -> bool:
    without_comments = re.sub(r"//[^\n]*", "", module)
    return "f16" in without_comments and bool(re.search(r"\bf16\b", without_comments))


@cache
def library_of(environment: Environment) -> dict[str, str]:
    """Every definition of the math templates by name."""
    found: dict[str, str] = {}
    for library in _LIBRARIES:
        text = environment.get_template(f"{library}.wgsl.jinja").render()
        for part in re.split(r"(?m)^(?=fn |var<private>|const )", text):
            match = re.match(r"(?:fn|var<private>|const) (\w+)", part)
            if match:
                found[match.group(1)] = part.rstrip()
    return found


def helpers_of(text: str, target: Target) -> dict[str, str]:
    """The library definitions that ``text`` needs by name, in the library's order."""
    library = library_of(environment_of(target))
    needed: set[str] = set()
    pending = set(_WORD.findall(text))
    while pending:
        name = pending.pop()
        if name in library and name not in needed:
            needed.add(name)
            pending |= set(_WORD.findall(library[name])) - needed
    return {name: definition for name, definition in library.items() if name in needed}
