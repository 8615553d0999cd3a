"""Operators that write into tensors they are given: what PyTorch checks, and resizes, before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

_RESIZED = (
    "An output with one or more elements was resized since it had shape {}, which does not match "
    "the required output shape {}. This behavior is deprecated, and in a future PyTorch release "
    "outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
    "tensor t by resizing it, inplace, to zero elements with t.resize_(0)."
)


def fit(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[bool, str]:
    """Gives ``out=`` arguments the sizes and strides of the results.

    PyTorch's meta kernels decide, those of the functional overload if there is one.

    Returns:
        Whether any size was changed, and why the call is for the host, or "". There PyTorch's own
        kernels refuse it, or convert the results.

    Raises:
        Exception: what PyTorch raises about the arguments.
    """
    if op.namespace != "aten":
        return False, ""
    written = _written(op, arguments, keywords)
    if not written:
        return False, ""
    functional = functional_of(op)
    try:
        if functional is not None:
            wanted = _results(op, functional, arguments, keywords)
        else:
            wanted = _outs(op, arguments, keywords)
    except NotImplementedError:
        return False, ""
    if len(wanted) != len(written):
        return False, ""
    for tensor, result in zip(written, wanted, strict=True):
        if not torch.can_cast(result.dtype, tensor.dtype):
            return False, f"its result, {result.dtype}, cannot be cast to {tensor.dtype}"
        if not _has_outs(op) and result.shape != tensor.shape:
            return False, f"its result has other sizes than its argument, {list(result.shape)}"
    if not _has_outs(op):
        return False, ""
    resized = [_resize(t, w) for t, w in zip(written, wanted, strict=True)]
    return any(resized), ""


def _resize(tensor: Tensor, wanted: Tensor) -> bool:
    if tensor.shape == wanted.shape:
        return False
    if tensor.numel():
        warnings.warn(_RESIZED.format(list(tensor.shape), list(wanted.shape)), stacklevel=2)
    tensor.resize_(wanted.shape)
    if wanted.stride() != tensor.stride():
        tensor.as_strided_(wanted.shape, wanted.stride())
    return True


@cache
def _has_outs(op: OpOverload) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


def _written(op: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Tensor]:
    """The ``out=`` tensors, or the first argument of an in-place operator."""
    if _has_outs(op):
        names = [argument.name for argument in op._schema.arguments if argument.is_out]
        leaves = tree_leaves([keywords.get(name) for name in names])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if functional_of(op) is None or not arguments or not isinstance(arguments[0], Tensor):
        return []
    return [arguments[0]]


@cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """The overload that returns what ``op`` writes; None if there is none, or for random ones."""
    schema = op._schema
    if not schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    name = schema.name.split("::")[1]
    if not _has_outs(op):
        if not name.endswith("_") or name.endswith("__") or len(_mutated(op)) != 1:
            return None
        name = name[:-1]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for overload in packet.overloads():
        found: OpOverload = getattr(packet, overload)
        given = [(a.name, str(a.type)) for a in found._schema.arguments]
        if given == wanted and not found._schema.is_mutable:
            return found
    return None


def _mutated(op: OpOverload) -> list[str]:
    found = []
    for argument in op._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name)
    return found


def _results(
    op: OpOverload,
    functional: OpOverload,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> list[Tensor]:
    outs = {argument.name for argument in op._schema.arguments if argument.is_out}
    rest = {name: value for name, value in keywords.items() if name not in outs}
    described, named = tree_map(_to_meta({}), (arguments, rest))
    return _tensors(functional(*described, **named))


def _outs(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
    """The ``out=`` arguments after a call on the meta device."""
    made: dict[int, Tensor] = {}
    described, named = tree_map(_to_meta(made), (arguments, keywords))
    op(*described, **named)
    return [made[id(tensor)] for tensor in _written(op, arguments, keywords)]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _to_meta(made: dict[int, Tensor]) -> Callable[[Any], Any]:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            found = made.get(id(value))
            if found is None:
                sizes, strides = value.shape, value.stride()
                found = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
                made[id(value)] = found
            return found
        return torch.device("meta") if isinstance(value, torch.device) else value

    return move
