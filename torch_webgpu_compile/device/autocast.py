"""``torch.autocast("webgpu")``: kernels that cast the inputs of operators and call them again.

They stand between autograd and the dispatch key of autocast, as PyTorch's own C++ ones do for other
devices. `register` is called when autocast is first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload

from .. import devices
from .autocast_rules import (
    FLOAT32,
    FLOAT32_OVERLOAD,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    REFUSED,
    WIDEST,
)

_KEY = "AutocastPrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_KEY))
_without_autocast = partial(torch._C._ExcludeDispatchKeyGuard, _KEYS)

_Kernel = Callable[..., Any]

_lock = threading.Lock()
_libraries: list[Any] = []
# Casts of weights, which every use within one autocast context shares. The weights are kept so that
# their identities stay theirs; PyTorch clears all casts at the end of the outermost context.
_casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}


def register() -> None:
    """Gives PyTorch the kernels; does nothing the second time."""
    with _lock:
        if _libraries:
            return
        rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        rest.fallback(torch.library.fallthrough_kernel, _KEY)
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for rule, names in _RULES.items():
            for name in names:
                op = _overload(name)
                if op is not None:
                    library.impl(name, rule(op), _KEY)
        _libraries.extend((rest, library))
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            _casts.clear()
            clear()

        torch.clear_autocast_cache = clear_autocast_cache


def _overload(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, OpOverload) else None


# ---- casts


def _is_eligible(value: Any) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.device.type == devices.NAME
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor, or lists of them, in ``dtype``; everything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and value.dtype is torch.float32 and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    key = id(value), dtype
    known = _casts.get(key)
    if known is None or known[1] != value._version:
        known = _casts[key] = value, value._version, value.to(dtype)
    return known[2]


def _widest(values: Sequence[Any], lower: torch.dtype) -> torch.dtype:
    """float32 if a tensor has it, else ``lower``.

    Raises:
        RuntimeError: a tensor has the other 16-bit dtype.
    """
    for value in values:
        if isinstance(value, (list, tuple)):
            if _widest(value, lower) is torch.float32:
                return torch.float32
        elif _is_eligible(value):
            if value.dtype is torch.float32:
                return torch.float32
            if value.dtype != lower:
                raise RuntimeError(
                    f"Unexpected floating ScalarType in autocast: {value.dtype}, while the dtype "
                    f"of autocast is {lower}"
                )
    return lower


def _call_in(
    dtype: torch.dtype, op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    return op(
        *[_cast(value, dtype) for value in arguments],
        **{name: _cast(value, dtype) for name, value in keywords.items()},
    )


# ---- rules: from an operator to its kernel


def _lower_precision(op: OpOverload) -> _Kernel:
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with _without_autocast():
            dtype = torch.get_autocast_dtype(devices.NAME)
            return _call_in(dtype, op, arguments, keywords)

    return kernel


def _float32(op: OpOverload) -> _Kernel:
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with _without_autocast():
            return _call_in(torch.float32, op, arguments, keywords)

    return kernel


def _float32_result(op: OpOverload) -> _Kernel:
    schema = op._schema.arguments
    position = next(i for i, argument in enumerate(schema) if argument.name == "dtype")

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with _without_autocast():
            is_set = keywords.get("dtype") is not None or (
                len(arguments) > position and arguments[position] is not None
            )
            if not is_set and _is_eligible(arguments[0]):
                arguments = arguments[:position]
                keywords["dtype"] = torch.float32
            return op(*arguments, **keywords)

    return kernel


def _float32_overload(op: OpOverload) -> _Kernel:
    name = op._schema.name.removeprefix("aten::")
    other = _overload(FLOAT32_OVERLOAD[f"{name}.{op._schema.overload_name}"])
    assert other is not None
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with _without_autocast():
            first = arguments[0]
            dtype = torch.float32 if _is_eligible(first) else first.dtype
            given = (*arguments, *defaults[len(arguments) :])
            return other(*given, **keywords, dtype=dtype)

    return kernel


def _widest_input(op: OpOverload) -> _Kernel:
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with _without_autocast():
            lower = torch.get_autocast_dtype(devices.NAME)
            dtype = _widest((*arguments, *keywords.values()), lower)
            return _call_in(dtype, op, arguments, keywords)

    return kernel


def _refused(op: OpOverload) -> _Kernel:
    message = REFUSED[op._schema.name.removeprefix("aten::")]

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError(message)

    return kernel


_RULES: dict[Callable[[OpOverload], _Kernel], Sequence[str]] = {
    _lower_precision: LOWER_PRECISION,
    _float32: FLOAT32,
    _float32_result: FLOAT32_RESULT,
    _float32_overload: tuple(FLOAT32_OVERLOAD),
    _widest_input: WIDEST,
    _refused: tuple(REFUSED),
}
