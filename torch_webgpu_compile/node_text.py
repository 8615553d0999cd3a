"""Text of nodes of FX graphs: for a person, the user's line; for keys, what they hold.

Text for keys is equal only where the values are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node as FxNode

# Between an operator and a user's line there may be those of this package, and of PyTorch, which
# Dynamo leaves out but for some, as under ``torch.set_default_device``.
LIBRARIES = (os.path.join(os.path.dirname(__file__), ""), os.path.join(torch.__path__[0], ""))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s*(?!File )([^\n]*))?')
_PLAIN = (type(None), bool, int, float, complex, str, type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OWN: Mapping[str, str] = MappingProxyType({})


class Unreadable(Exception):
    """Something that has no text, or of which more may be read than its text says."""


def storage_of(fake: torch.Tensor) -> int:
    """A key of a fake tensor's storage: equal for tensors that share memory."""
    return int(fake.untyped_storage()._cdata)


def argument_text(value: Any, names: Mapping[str, str] = _OWN) -> str:
    """An argument of a node; ``names`` has those of nodes that are not called by their own."""
    if isinstance(value, FxNode):
        return f"%{names.get(value.name, value.name)}"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, (tuple, list)):
        entries = ", ".join(argument_text(entry, names) for entry in value)
        return f"{'(' if isinstance(value, tuple) else '['}{entries})"
    if isinstance(value, dict):
        pairs = (f"{name}={argument_text(entry, names)}" for name, entry in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, slice):
        return f"slice{argument_text((value.start, value.stop, value.step), names)}"
    raise Unreadable


def value_text(value: Any, storages: dict[int, int]) -> str:
    """What is known of a node's value; ``storages`` are numbered in the order of the graph."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(entry, storages) for entry in value)})"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise Unreadable
    layout: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in layout):
        raise Unreadable
    storage = storages.setdefault(storage_of(value), len(storages))
    return f"{value.dtype}{layout} {value.dim()} {value.device} {storage}"


def source_text(node: FxNode, sources: dict[str, str]) -> str:
    """The user's line, found once for all nodes of one trace."""
    trace = node.meta.get("stack_trace") or ""
    if trace not in sources:
        sources[trace] = line_of_user(trace)
    return sources[trace] or user_source(node)


def line_of_user(trace: str, not_in: tuple[str, ...] = LIBRARIES) -> str:
    """``file:line: code`` of the innermost line of user code in a traceback; "" without one.

    Args:
        not_in: what the files of other code start with.
    """
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(not_in)]
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{file}:{line}: {code.strip()}" if code else f"{file}:{line}"


def user_source(node: FxNode) -> str:
    """The user's line of code that a node of an FX graph comes from, for a person.

    ``file:line: code`` of the innermost line of user code that led to it; where all of the code is
    PyTorch's own, as in an ``nn.Sequential`` that is compiled as it is, the module: ``0 (Linear)``,
    or, without one, as in an optimizer's step, PyTorch's line; "" where nothing is known.
    """
    trace = node.meta.get("stack_trace") or ""
    source = line_of_user(trace)
    if source:
        return source
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not modules:
        return line_of_user(trace, ())
    path, kind = list(modules.values())[-1]
    # Dynamo's name starts with the variable: L['self'].layers.0; a module may be a class's name.
    name = path.partition("]")[2].strip(".") if path.startswith("L[") else path
    kind = getattr(kind, "__name__", None) or str(kind).rpartition(".")[2]
    return f"{name} ({kind})" if name else kind
