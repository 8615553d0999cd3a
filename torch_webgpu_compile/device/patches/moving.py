"""Modules that move to or from the device keep their parameters.

Patched: ``torch.nn.Module._apply``, by which modules move to a device.

Why: ``module.to("cuda")`` gives each ``Parameter`` other data, so that it stays the same object:
tied weights stay tied, and optimizers made before keep what they update. PyTorch does that for its
own devices only; for others it makes new parameters.

Until: ``torch._has_compatible_shallow_copy_type`` is true between the CPU and PrivateUse1 devices,
or ``torch.__future__.set_swap_module_params_on_conversion(True)`` is PyTorch's default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .. import devices

# What users register on a parameter belongs to its C++ tensor.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_Function = Callable[[Tensor], Tensor]


def install() -> None:
    """Wraps ``torch.nn.Module._apply``, by which modules move to a device.

    Parameters that are tied, by being the same tensor, stay so.
    """
    original: Any = Module._apply

    def _apply(self: Module, fn: _Function, recurse: bool = True) -> Module:
        if isinstance(fn, _Moving):  # a child of a module that moves
            child: Module = original(self, fn, recurse)
            return child
        moving = _Moving(fn)
        places = _places_of_tied(self) if recurse else {}
        moved: Module = original(self, moving, recurse)
        if moving.replaced:
            _tie(places)
        return moved

    Module._apply = _apply  # type: ignore[method-assign]


class _Moving:
    """A conversion of tensors that keeps the parameters that it moves to or from the device.

    Attributes:
        replaced: parameters that could not be kept, with their conversions, by identity.
    """

    def __init__(self, function: _Function) -> None:
        self._function = function
        self.replaced: dict[int, tuple[Parameter, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self.replaced.get(id(tensor))
        if known is not None:
            return known[1]
        applied = self._function(tensor)
        if not isinstance(tensor, Parameter) or not _must_be_kept(tensor, applied):
            return applied
        if self._keep(tensor, applied):
            return tensor if torch.nn.parameter.is_lazy(tensor) else tensor.detach()
        self.replaced[id(tensor)] = tensor, applied
        return applied

    def _keep(self, parameter: Parameter, applied: Tensor) -> bool:
        """Gives the parameter the converted data and gradient; False where PyTorch forbids it."""
        gradient = parameter.grad
        parameter.grad = None
        moved = applied.detach().requires_grad_(parameter.requires_grad)
        hooks = {name: getattr(parameter, name) for name in _HOOKS}
        if not _swap(parameter, moved):
            parameter.grad = gradient
            return False
        for name, functions in hooks.items():
            if functions is not None:
                setattr(parameter, name, functions)
        if gradient is not None:
            needs_grad = gradient.requires_grad
            parameter.grad = self._function(gradient).requires_grad_(needs_grad)
        return True


def _must_be_kept(tensor: Tensor, applied: Any) -> bool:
    """Whether PyTorch would put a new parameter in the place of ``tensor``, unlike for CUDA."""
    if type(applied) not in (Tensor, Parameter) or applied is tensor:
        return False
    kinds = {tensor.device.type, applied.device.type}
    if len(kinds) == 1 or devices.NAME not in kinds:
        return False
    future = torch.__future__
    return not (
        future.get_overwrite_module_params_on_conversion()
        or future.get_swap_module_params_on_conversion()
    )


def _swap(parameter: Parameter, moved: Tensor) -> bool:
    """Exchanges the C++ tensors of two Python objects; False where PyTorch forbids it.

    A graph recorded before keeps the first: its gradients would be lost, so it is made to raise.
    """
    if parameter.requires_grad and parameter._use_count() > 1:  # type: ignore[attr-defined]
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_prehook(_refuse_backward)
    try:
        torch._C._swap_tensor_impl(parameter, moved)
    except RuntimeError:
        return False
    return True


def _refuse_backward(*_: Any) -> None:
    raise RuntimeError(
        "backward of a graph whose parameter was moved to or from a webgpu device after the "
        "forward pass: move modules before the forward pass, or after the backward pass"
    )


_Places = dict[int, list[tuple[Module, str]]]


def _places_of_tied(module: Module) -> _Places:
    """Where parameters stand that stand in several places, by the parameters' identities."""
    places: _Places = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return {key: owners for key, owners in places.items() if len(owners) > 1}


def _tie(places: _Places) -> None:
    """Puts one parameter in all places where one was before."""
    for (owner, name), *others in places.values():
        for other, other_name in others:
            other._parameters[other_name] = owner._parameters[name]
