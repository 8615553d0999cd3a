"""What the tensors that a function reaches are called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bundle.manifest import Kind
from ..torch_private import is_traceable_wrapper_subclass

Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def key_of(tensor: Tensor) -> Key:
    """Equal for tensors that are the same elements of the same memory."""
    return (
        tensor.untyped_storage()._cdata,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


@dataclass(frozen=True)
class Named:
    """A tensor that was found, and how."""

    name: str
    kind: Kind
    tensor: Tensor


class Names:
    """The modules, optimizers and tensors around functions, by the variables that hold them.

    A module that is exported itself, or the only one around, gives its tensors the names of its
    ``state_dict``; others have the variable's name before them.

    Attributes:
        modules, optimizers: what was found, by variable.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for function in functions.values():
            for name, value in _reached(function):
                if isinstance(value, torch.nn.Module):
                    value = getattr(value, "_orig_mod", value)  # inside of a compiled one
                found.setdefault(id(value), (name, value))
        roots = [
            (n, v) for n, v in found.values() if isinstance(v, (torch.nn.Module, Optimizer, Tensor))
        ]
        inner = {
            id(child)
            for _, root in roots
            if isinstance(root, torch.nn.Module)
            for child in root.modules()
            if child is not root
        }
        self.modules = {
            n: v for n, v in roots if isinstance(v, torch.nn.Module) and id(v) not in inner
        }
        self.optimizers = {n: v for n, v in roots if isinstance(v, Optimizer)}
        self._tensors = {n: v for n, v in roots if isinstance(v, Tensor)}

    def known(self) -> dict[Key, Named]:
        """Every tensor that has a name now; optimizers may make theirs while they are traced."""
        found: dict[Key, Named] = {}
        for named in self._all():
            for part in _parts(named):
                found.setdefault(key_of(part.tensor), part)
        return found

    def _all(self) -> Iterator[Named]:
        parameters: dict[int, str] = {}
        for prefix, module in self._with_prefixes():
            kept = set(module.state_dict(keep_vars=True))
            for name, parameter in module.named_parameters():
                parameters.setdefault(id(parameter), prefix + name)
                yield Named(prefix + name, "parameter", parameter)
            for name, buffer in module.named_buffers():
                yield Named(prefix + name, "buffer" if name in kept else "tensor", buffer)
        for variable, optimizer in self.optimizers.items():
            for number, (weight, state) in enumerate(optimizer.state.items()):
                owner = parameters.get(id(weight), str(number))
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        yield Named(f"{variable}.{owner}.{name}", "optimizer", value)
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, Tensor):
                        yield Named(f"{variable}.{number}.{name}", "optimizer", value)
        for owner, weight in self.parameters():
            if isinstance(weight.grad, Tensor):
                yield Named(f"{owner}.grad", "tensor", weight.grad)
        for variable, tensor in self._tensors.items():
            yield Named(variable, "tensor", tensor)

    def parameters(self) -> Collection[tuple[str, torch.nn.Parameter]]:
        """Those of all modules and optimizers, with names, once each."""
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for prefix, module in self._with_prefixes():
            for name, parameter in module.named_parameters():
                found.setdefault(id(parameter), (prefix + name, parameter))
        for variable, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    found.setdefault(id(parameter), (f"{variable}.{number}.{k}", parameter))
        return found.values()

    def _with_prefixes(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules, with what the names of their tensors begin with."""
        single = len(self.modules) == 1
        for variable, module in self.modules.items():
            yield "" if single or not variable else f"{variable}.", module

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Gives parameters back the gradients that they had: captures may leave some as state."""
        gradients = [(parameter, parameter.grad) for _, parameter in self.parameters()]
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _parts(named: Named) -> Iterator[Named]:
    """The plain tensors that a tensor consists of, as a quantized weight does; or itself."""
    if not is_traceable_wrapper_subclass(named.tensor):
        yield named
        return
    for name in named.tensor.__tensor_flatten__()[0]:
        inner = getattr(named.tensor, name)
        yield from _parts(Named(f"{named.name}.{name}", named.kind, inner))


def _reached(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(variable, value) of what a function holds: its module, closure, defaults and globals."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, torch.nn.Module):
        yield "", function
        return
    if isinstance(function, functools.partial):
        yield from _reached(function.func, seen)
        yield from ((f"argument{k}", value) for k, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        owner = function.__self__
        yield from [("", owner)] if isinstance(owner, torch.nn.Module) else _attributes(owner)
        function = function.__func__
    if not inspect.isfunction(function):
        yield from _attributes(function)
        function = type(function).__call__
        if not inspect.isfunction(function):
            return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield name, value
        if inspect.isfunction(value):
            yield from _reached(value, seen)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if value is not None:
            yield name, value
            if inspect.isfunction(value) and value.__module__ == function.__module__:
                yield from _reached(value, seen)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
