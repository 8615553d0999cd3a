"""PyTorch's precompile cache keeps decorated functions and functions that return dictionaries.

Patched: when they are imported, ``GuardsStatePickler.reducer_override`` in ``torch._dynamo.guards``
and ``PyCodegen.create_load_python_module`` in ``torch._dynamo.codegen``. Where a version of PyTorch
has no such method, nothing is changed.

Why: with ``TORCH_CACHING_PRECOMPILE=1`` each loses something that the next process needs, and is
missed there by an exception. A function that is found under its name only inside of a decorated one
is stored as nothing, also where a guard asks for its name; a module that the code of a graph needs,
as ``collections`` for an ``OrderedDict``, is not among those that are imported for it. The models
of `transformers` have both, so that their ``generate`` could not be precompiled.

Until: they are stored.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from ..import_hooks import after_import


def install() -> None:
    """Wraps both methods, now or when their modules are imported."""
    after_import("torch._dynamo.guards", _store_decorated)
    after_import("torch._dynamo.codegen", _import_modules)


def _store_decorated(module: Any) -> None:
    pickler = getattr(module, "GuardsStatePickler", None)
    if pickler is None or not hasattr(pickler, "_unpickle_nested_function"):
        return
    reduce = pickler.reducer_override

    @functools.wraps(reduce)
    def reducer_override(self: Any, obj: Any) -> Any:
        made = reduce(self, obj)
        if isinstance(made, tuple) and made[0] is module._Missing and inspect.isfunction(obj):
            depth = _depth(obj)
            if depth:
                return decorated, (obj.__module__, obj.__qualname__, depth)
        return made

    pickler.reducer_override = reducer_override


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


def _import_modules(module: Any) -> None:
    codegen: Any = getattr(module, "PyCodegen", None)
    load = getattr(codegen, "create_load_python_module", None)
    if load is None:
        return

    @functools.wraps(load)
    def create_load_python_module(self: Any, mod: Any) -> Any:
        instruction = load(self, mod)
        package = getattr(self.tx.output, "package", None)
        if package is not None:
            package.add_import_source(instruction.argval, mod.__name__)
        return instruction

    codegen.create_load_python_module = create_load_python_module
