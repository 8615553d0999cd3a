"""What is to be done to another package when that package is imported.

`around` has calls of one of its functions go through one of this package, `after_import` does
anything to it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any, TypeVar

from ..patches import attempt

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Finder(MetaPathFinder):
    """Finds nothing but the modules that somebody waits for, until they are imported.

    Who only asks whether there is such a module has not imported it.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[Any], None]]] = {}
        self._finding: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked = get_ident(), name
        if name not in self.waiting or asked in self._finding:
            return None
        self._finding.add(asked)
        try:
            spec = find_spec(name)
        finally:
            self._finding.discard(asked)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                for function in self.waiting.pop(name, ()):
                    _change(function, module)

            loader.exec_module = exec_module
            _run_changed(loader)
        return spec


def _run_changed(loader: Any) -> None:
    """Has ``python -m``, which asks a loader for code to run as ``__main__``, run what was changed.

    So that code imports the module.
    """

    original = getattr(loader, "get_code", None)
    if original is None or not hasattr(loader, "get_source"):
        return

    def get_code(module: str) -> Any:
        is_run = sys._getframe(1).f_globals.get("__name__") == "runpy"
        if not is_run or "\ndef main(" not in (loader.get_source(module) or ""):
            return original(module)
        return compile(f"from {module} import main\nraise SystemExit(main())", module, "exec")

    loader.get_code = get_code


class _Ending(ModuleSpec):
    """The spec of a module whose import is under way: what Python sets at its end is noticed."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            module = sys.modules.get(self.name)
            for function in vars(self).pop("_functions"):
                if module is not None:  # else the import failed
                    _change(function, module)


_finder = _Finder()


def _change(function: Callable[[Any], None], module: Any) -> None:
    """Calls the function. If it fails, whoever imports the module gets a warning, and no error."""
    attempt(function.__module__, lambda: function(module))


def after_import(name: str, function: Callable[[Any], None]) -> None:
    """Calls ``function(module)`` when the import of a module ends; at once where it has.

    Several functions for one module are called in the order in which they were given.
    """
    module = sys.modules.get(name)
    if module is not None:
        spec: Any = module.__spec__
        if getattr(spec, "_initializing", False):  # it is what imports PyTorch
            spec.__class__ = _Ending
            vars(spec).setdefault("_functions", []).append(function)
        else:
            _change(function, module)
            _run_changed(getattr(spec, "loader", None))
        return
    _finder.waiting.setdefault(name, []).append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def around(*places: str) -> Callable[[_Function], _Function]:
    """Has calls of a function of another library go through the decorated one, a patch's.

    It gets the original before the arguments: of a method before ``self``, of a property or a class
    method alike. What is replaced is so from the end of its module's import on. A place that
    PyTorch does not have fails as patches do; other libraries' versions may lack it.

    Args:
        places: ``module:name`` or ``module:Class.name``, of a function that stands in each.
    """

    def declare(function: _Function) -> _Function:
        for place in places:
            name, _, path = place.partition(":")
            *owners, attribute = path.split(".")

            def change(module: Any, owners: Any = owners, attribute: str = attribute) -> None:
                try:
                    owner = functools.reduce(getattr, owners, module)
                    original = inspect.getattr_static(owner, attribute)
                except AttributeError:
                    if module.__name__.partition(".")[0] == "torch":
                        raise
                    return
                _set(owner, attribute, _through(original, function))

            change.__module__ = function.__module__  # the patch, for a warning
            after_import(name, change)
        return function

    return declare


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
    if isinstance(value, functools.cached_property):
        value.__set_name__(owner, name)


def _through(original: Any, function: Callable[..., Any]) -> Any:
    """``function`` in the place of a function, or of what a class makes of one."""
    match original:
        case staticmethod() | classmethod():
            return type(original)(_through(original.__func__, function))
        case property():
            return property(_through(original.fget, function))
        case functools.cached_property():
            return functools.cached_property(_through(original.func, function))

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(original, *arguments, **keywords)

    return call
