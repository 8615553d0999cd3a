"""PyTorch's precompile cache keeps decorated functions and functions that return dictionaries.

Patched: when they are imported, ``GuardsStatePickler.reducer_override`` in ``torch._dynamo.guards``
and ``PyCodegen.create_load_python_module`` in ``torch._dynamo.codegen``.

Why: with ``TORCH_CACHING_PRECOMPILE=1`` each loses something that the next process needs, and is
missed there by an exception. A function that is found under its name only inside of a decorated one
is stored as nothing, also where a guard asks for its name; a module that the code of a graph needs,
as ``collections`` for an ``OrderedDict``, is not among those that are imported for it. The models
of `transformers` have both, so that their ``generate`` could not be precompiled.

Until: they are stored.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ..import_hooks import around


@around("torch._dynamo.guards:GuardsStatePickler.reducer_override")
def reducer_override(reduce: Any, self: Any, obj: Any) -> Any:
    from torch._dynamo.guards import _Missing

    made = reduce(self, obj)
    if isinstance(made, tuple) and made[0] is _Missing and inspect.isfunction(obj):
        depth = _depth(obj)
        if depth:
            return decorated, (obj.__module__, obj.__qualname__, depth)
    return made


def decorated(module: str, name: str, depth: int) -> Any:
    """The function inside of ``depth`` decorators of the one that has this qualified name.

    Raises:
        ImportError, AttributeError: there is none.
    """
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def _depth(function: Any) -> int:
    """Decorators around a function that `decorated` finds; 0 where it finds it without or not."""
    try:
        found = decorated(function.__module__, function.__qualname__, 0)
    except (ImportError, AttributeError):
        return 0
    depth = 0
    while found is not function:
        found = getattr(found, "__wrapped__", None)
        if found is None:
            return 0
        depth += 1
    return depth


@around("torch._dynamo.codegen:PyCodegen.create_load_python_module")
def create_load_python_module(load: Any, self: Any, mod: Any) -> Any:
    instruction = load(self, mod)
    package = getattr(self.tx.output, "package", None)
    if package is not None:
        package.add_import_source(instruction.argval, mod.__name__)
    return instruction
