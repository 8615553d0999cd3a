"""Weak hash-consing: equal objects are one object, for as long as somebody refers to it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

Key = tuple[Any, ...]


def reduced(made: Any) -> tuple[type, tuple[Any, ...]]:
    """``__reduce__`` of an interned object whose attributes have the names of its arguments.

    Its class is called again, which finds the object that is there.
    """
    code = type(made).__init__.__code__
    names = code.co_varnames[1 : code.co_argcount]
    return type(made), tuple(getattr(made, name) for name in names)


class _Reference(weakref.ref[Any]):
    __slots__ = ("key",)
    key: Key


class InternTable:
    """A table for weak hash-consing: weak references to objects, by their constructors' arguments.

    Look an object up with ``references.get(key)``, a weak reference; `add` it if it is not there.
    (`weakref.WeakValueDictionary` is half as fast, and two threads may both add.)
    """

    def __init__(self) -> None:
        self.references: dict[Key, _Reference] = {}
        self._dead: deque[_Reference] = deque()
        self._lock = threading.RLock()

    def add(self, key: Key, made: Any) -> Any:
        """Adds ``made`` under ``key``; returns it, or the object that is there already."""
        references, dead = self.references, self._dead
        with self._lock:  # nobody else changes the table
            while dead:
                reference = dead.popleft()
                if references.get(reference.key) is reference:
                    del references[reference.key]
            present = references.get(key)
            found = None if present is None else present()
            if found is not None:
                return found
            # An object dies in the middle of anything: it is only put on a list then.
            reference = _Reference(made, dead.append)
            reference.key = key
            references[key] = reference
            return made
