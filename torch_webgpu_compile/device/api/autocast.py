"""``torch.autocast("webgpu")``: kernels that cast the arguments of operators by `autocast_rules`.

PyTorch's own autocast kernels can only be had for a device by compiling C++. These are registered
for the same dispatch key, above autograd: casts are differentiated like any other operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import patches
from ...tensors import devices
from ...torch_private import DispatchKey, DispatchKeySet, OpOverload, _ExcludeDispatchKeyGuard
from ..registration import new_library, untraced
from . import autocast_rules as rules

_KEY = "AutocastPrivateUse1"
_KEYS = DispatchKeySet(getattr(DispatchKey, _KEY))

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_without_autocast = _ExcludeDispatchKeyGuard
_lock = threading.Lock()
_registered = False

# Casts of weights by the weights' addresses, dtypes and whether autograd recorded them; each with
# its weight, which keeps the address from being taken over, and the weight's version.
casts: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}


def register() -> None:
    """Registers the kernels; does nothing the second time."""
    global _registered
    with _lock:
        if _registered:
            return
        library = new_library("aten")
        for name, kernel in _kernels().items():
            library.impl(name, untraced(kernel), _KEY)
        # The other operators are not autocast's concern. It takes milliseconds, too many for
        # ``import torch``.
        new_library("_").fallback(torch.library.fallthrough_kernel, _KEY)
        patches.install(patches.When.AUTOCAST)
        _registered = True


def _kernels() -> dict[str, Callable[..., Any]]:
    """A kernel for each operator of the rules that this version of PyTorch has."""
    kernels: dict[str, Callable[..., Any]] = {}
    for names, choose in (
        (rules.LOWER_PRECISION, lambda *_: torch.get_autocast_dtype(devices.NAME)),
        (rules.float32(), lambda *_: torch.float32),
        (rules.WIDEST, _widest_of),
    ):
        kernels |= {name: partial(_in, choose, op) for name in names if (op := _find(name))}
    for name in rules.FLOAT32_BY_ARGUMENT:
        if op := _find(name):
            position = [argument.name for argument in op._schema.arguments].index("dtype")
            kernels[name] = partial(_to_float32, op, position)
    for name, other in rules.FLOAT32_BY_OVERLOAD.items():
        if (op := _find(name)) and (typed := _find(other)):
            kernels[name] = partial(_to_float32_by, op, typed)
    for name, message in rules.REFUSED.items():
        if _find(name):
            kernels[name] = partial(_refuse, message)
    return kernels


def _find(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def _in(choose: Callable[..., Any], op: OpOverload, /, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on arguments of a dtype, which ``choose`` gives."""
    with _without_autocast(_KEYS):
        dtype = choose(arguments, keywords)
        cast = [_cast(value, dtype) for value in arguments]
        if keywords:
            keywords = {name: _cast(value, dtype) for name, value in keywords.items()}
        return op(*cast, **keywords)


def _widest_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.dtype:
    return _widest(torch.get_autocast_dtype(devices.NAME), (*arguments, *keywords.values()))


def _to_float32(op: OpOverload, position: int, /, *arguments: Any, **keywords: Any) -> Any:
    with _without_autocast(_KEYS):
        if _is_eligible(arguments[0]) and keywords.get("dtype") is None:
            if len(arguments) <= position:
                keywords["dtype"] = torch.float32
            elif arguments[position] is None:
                arguments = (*arguments[:position], torch.float32, *arguments[position + 1 :])
        return op(*arguments, **keywords)


def _to_float32_by(op: OpOverload, typed: OpOverload, /, *arguments: Any, **keywords: Any) -> Any:
    with _without_autocast(_KEYS):
        if not _is_eligible(arguments[0]):
            return op(*arguments, **keywords)
        defaults = [argument.default_value for argument in op._schema.arguments]
        given = (*arguments, *defaults[len(arguments) :])
        return typed(*given, **keywords, dtype=torch.float32)


def _refuse(message: str, /, *arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError(message)


def _is_eligible(value: Any) -> bool:
    """Whether autocast changes a tensor's dtype; not of float64, which a user has to choose."""
    return (
        isinstance(value, Tensor) and value.dtype in _FLOATS and value.device.type == devices.NAME
    )


def _widest(dtype: torch.dtype, values: tuple[Any, ...] | list[Any]) -> torch.dtype:
    """The widest dtype of tensors and ``dtype``; of bfloat16 and float16, float32."""
    for value in values:
        if isinstance(value, (list, tuple)):
            dtype = _widest(dtype, value)
        elif _is_eligible(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor or a list of them in a dtype; whatever else as it is."""
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not isinstance(value, Tensor) or value.dtype is dtype or not _is_eligible(value):
        return value
    if _is_weight(value) and dtype is not torch.float32 and torch.is_autocast_cache_enabled():
        return _cached_cast(value, dtype)
    return value.to(dtype)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is cast once per context: a float32 leaf, no stand-in of a tracer."""
    return (
        tensor.requires_grad
        and tensor.is_leaf
        and tensor.dtype is torch.float32
        and type(tensor) in (torch.nn.Parameter, Tensor)
        and not tensor._is_view()
        and not tensor.is_inference()
    )


def _cached_cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    # Without a graph, what ``no_grad`` leaves would cut the weight off from its gradient.
    key = (id(weight), dtype, torch.is_grad_enabled())
    version = weight._version
    known = casts.get(key)
    if known is not None and known[1] == version:
        return known[2]
    cast = weight.to(dtype)
    casts[key] = (weight, version, cast)
    return cast
