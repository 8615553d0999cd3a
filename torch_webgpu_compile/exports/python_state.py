"""`PythonState`: what a function reaches in Python, and how a call has changed it.

Python itself is not exported. A number that each call changes (a schedule, a count of steps) would
be the one of the first call for ever: such changes are found by comparing what a function reaches
before a call of it and after.

Not seen: attributes in ``__slots__``, and of classes; iterators; arrays of numpy that are changed
in place; the clock, files, and whatever else is not reached from the function's variables.
"""

from __future__ import annotations

import enum
import functools
import inspect
import random
import re
import reprlib
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..torch_private import FakeTensor

_PLAIN = (int, float, complex, str, bytes, types.NoneType, np.generic, enum.Enum)
_LEAVES = (*_PLAIN, Tensor, type, types.ModuleType)
_MOST = 100_000
"""Containers that are looked at; models of a thousand modules have a tenth."""

_OTHERS = (
    *("asyncio", "concurrent", "logging", "multiprocessing", "numpy", "queue", "sympy"),
    *("threading", "torch_webgpu_compile", "weakref"),
)
"""Packages whose objects are left alone, as other threads may use them."""

_LENGTH = object()
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """A value that a call has changed.

    Attributes:
        name: how Python reaches it: ``trainer.step``.
        owner: the object of which it is an attribute, if it is one.
        key: of the value in its container; the attribute's name.
        old, new: the values.
    """

    name: str
    owner: Any
    container: Any
    key: Any
    old: Any
    new: Any

    @property
    def text(self) -> str:
        """E.g. ``trainer.step: 0, then 1``."""
        if self.container is None:
            return self.name
        return f"{self.name}: {reprlib.repr(self.old)}, then {reprlib.repr(self.new)}"

    def repeat(self) -> None:
        """Makes the change once more, where it was taken back."""
        if self.key is not _LENGTH and self.container is not None:
            _set(self.container, self.key, self.new)

    def is_count(self, more: Sequence[Change]) -> bool:
        """Whether it is an integer that the next call, too, has changed by as much."""
        if type(self.old) is not int or type(self.new) is not int or self.key is _LENGTH:
            return False
        then = self.new + (self.new - self.old)
        return any(
            c.container is self.container
            and c.key == self.key
            and (c.old, c.new) == (self.new, then)
            for c in more
        )

    def count_to(self, number: int) -> None:
        """Makes it so that the next call counts to a number."""
        _set(self.container, self.key, number - (self.new - self.old))


@dataclass(frozen=True)
class _Place:
    """A container, and what it held."""

    name: str
    owner: Any
    container: Any
    held: Any
    names: frozenset[str] | None = None  # of the module's variables that count

    def key_name(self, key: Any) -> str:
        if self.owner is not None:
            return f"{self.name}.{key}"
        if isinstance(self.container, types.CellType) or self.names is not None:
            return self.name if self.names is None else str(key)
        return f"{self.name}[{key!r}]" if isinstance(key, _PLAIN) else f"{self.name}[…]"


class PythonState:
    """What a function reaches now: its variables, objects, and containers.

    Args:
        function: which will be called.
        arguments: of the call, with the names of its parameters.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._places: list[_Place] = []
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[str, Any]] = deque()
        self._random = _random_state()
        # Wrapped ones are those of torch.no_grad() and torch.compile.
        self._module = _module_of(inspect.unwrap(function))
        self._queue += [("", function), *arguments.items()]
        while self._queue and len(self._places) < _MOST:
            self._visit(*self._queue.popleft())

    # ---- what has changed

    def changes(self) -> list[Change]:
        """The numbers, strings and the like that are others now, and lengths of lists."""
        return [
            *(change for place in self._places for change in _changes(place)),
            *self._random_changes(),
        ]

    def replaced_tensors(self) -> Iterator[tuple[Tensor, FakeTensor]]:
        """(old, new): real tensors for which a call on fake tensors has put others.

        Not those that something else holds as well.
        """
        found: list[tuple[Tensor, FakeTensor]] = []
        staying: set[int] = set()
        for place in self._places:
            now = _content(place.container, place.names)
            for key, old in _pairs(place.held):
                if not isinstance(old, Tensor) or isinstance(old, FakeTensor):
                    continue
                new = _get(now, key)
                if isinstance(new, FakeTensor):
                    found.append((old, new))
                else:
                    staying.add(id(old))
        yield from ((old, new) for old, new in found if id(old) not in staying)

    def _random_changes(self) -> Iterator[Change]:
        python, numpy = _random_state()
        if python != self._random[0]:
            yield Change("Python's random numbers", None, None, None, None, None)
        if numpy[2] != self._random[1][2] or not np.array_equal(numpy[1], self._random[1][1]):
            yield Change("numpy's random numbers", None, None, None, None, None)

    # ---- putting it back

    def restore(self) -> None:
        """Gives all containers what they held."""
        for place in self._places:
            _restore(place)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    def restore_tensors(self) -> None:
        """Puts real tensors where fake ones are instead."""
        for place in self._places:
            now = _content(place.container, place.names)
            for key, old in _pairs(place.held):
                is_real = isinstance(old, Tensor) and not isinstance(old, FakeTensor)
                if is_real and isinstance(_get(now, key), FakeTensor):
                    _set(place.container, key, old)

    # ---- finding it

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            value = value._modules.get("_orig_mod", value)  # inside of a compiled one
        if isinstance(value, (list, deque)):
            self._hold(name, value)
        elif isinstance(value, dict):
            self._hold(name, value)
            if type(value) not in (dict, OrderedDict, defaultdict):
                self._attributes(name, value)
        elif isinstance(value, tuple):
            self._queue.extend((f"{name}[{k}]", item) for k, item in enumerate(value))
        elif isinstance(value, functools.partial):
            self._queue += [(name, value.func), (name, value.args), (name, value.keywords)]
        elif isinstance(value, types.MethodType):
            self._queue += [(name or "self", value.__self__), (name, value.__func__)]
        elif inspect.isfunction(value):
            self._function(name, value)
        else:
            self._attributes(name or "self", value)
            if not name:
                is_module = isinstance(value, torch.nn.Module)
                call = getattr(type(value), "forward" if is_module else "__call__", None)
                if inspect.isfunction(call):
                    self._function("", call)

    def _function(self, name: str, function: Any) -> None:
        module = _module_of(function)
        is_other = name and module != self._module
        if is_other or module.startswith(("torch.", "torch_webgpu_compile")):
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is not None:
                self._queue.append((name, wrapped))
            return
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._hold(variable, cell)
        names = frozenset(_names(code)) & function.__globals__.keys()
        self._hold("", function.__globals__, names=names)
        self._queue += [(name or "defaults", value) for value in function.__defaults__ or ()]
        self._queue += list((function.__kwdefaults__ or {}).items())

    def _attributes(self, name: str, value: Any) -> None:
        module = type(value).__module__ or ""
        if module.startswith("torch._") or module.split(".")[0] in _OTHERS:
            return
        try:
            attributes = object.__getattribute__(value, "__dict__")  # without a class's own rules
        except AttributeError:
            return
        if type(attributes) is dict:
            self._hold(name, attributes, owner=value)

    def _hold(
        self, name: str, container: Any, owner: Any = None, names: frozenset[str] | None = None
    ) -> None:
        place = _Place(name, owner, container, _content(container, names), names)
        self._places.append(place)
        for key, value in _pairs(place.held):
            if not isinstance(value, _LEAVES):
                self._queue.append((place.key_name(key), value))


def _module_of(function: Any) -> str:
    """Where a function is written: wrappers have the ``__module__`` of what they wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        return str(function.__globals__.get("__name__", ""))
    return type(function).__module__ or ""


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names in a function, and in those that are written in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _short(name: str) -> str:
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", name)


def _content(container: Any, names: frozenset[str] | None = None) -> Any:
    """A copy of what a container has, as a dictionary or a list."""
    if isinstance(container, types.CellType):
        try:
            return [container.cell_contents]
        except ValueError:  # not assigned
            return []
    if names is not None:
        return {name: container[name] for name in names if name in container}
    return dict(container) if isinstance(container, dict) else list(container)


def _pairs(content: Any) -> Iterator[tuple[Any, Any]]:
    yield from content.items() if isinstance(content, dict) else enumerate(content)


def _get(content: Any, key: Any) -> Any:
    if isinstance(content, dict):
        return content.get(key, _MISSING)
    return content[key] if key < len(content) else _MISSING


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, types.CellType):
        container.cell_contents = value
    elif isinstance(container, OrderedDict):
        OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)  # subclasses may do more
    elif key < len(container):
        container[key] = value


def _restore(place: _Place) -> None:
    now = _content(place.container, place.names)
    same = len(now) == len(place.held)
    if same and all(_get(now, key) is value for key, value in _pairs(place.held)):
        return
    if isinstance(place.container, (list, deque)):
        place.container.clear()
        place.container.extend(place.held)
        return
    for key, value in _pairs(place.held):
        _set(place.container, key, value)
    if isinstance(place.container, dict) and place.names is None:
        for key in [key for key in place.container if key not in place.held]:
            del place.container[key]


def _changes(place: _Place) -> Iterator[Change]:
    now = _content(place.container, place.names)

    def change(name: str, key: Any, old: Any, new: Any) -> Change:
        return Change(_short(name), place.owner, place.container, key, old, new)

    if isinstance(place.container, (list, deque)) and len(now) != len(place.held):
        yield change(f"len({place.name})", _LENGTH, len(place.held), len(now))
    for key, new in _pairs(now):
        old = _get(place.held, key)
        if old is new or not _is_plain(new):
            continue
        if old is _MISSING:
            if isinstance(place.container, dict):
                yield change(place.key_name(key), key, None, new)
        elif _is_plain(old) and not _equal(old, new):
            yield change(place.key_name(key), key, old, new)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _equal(old: Any, new: Any) -> bool:
    return bool(old == new) or (old != old and new != new)
