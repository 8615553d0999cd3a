"""``out=`` operators and PyTorch's checks of the tensors that they write into."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...capture.decompositions.table import OWN
from ...capture.eager.arguments import with_tensors
from ...tensors import aliasing
from ...tensors.factories import contiguous_strides
from ...torch_private import OpOverload, tree_leaves, tree_map

_RESIZED = (
    "An output with one or more elements was resized since it had shape {}, which does not match "
    "the required output shape {}. This behavior is deprecated, and in a future PyTorch release "
    "outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
    "tensor t by resizing it, inplace, to zero elements with t.resize_(0)."
)


def cause_for_host(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """Why a call cannot write its results where it should, or "".

    PyTorch's own kernels refuse it, or know how to convert. The functional overload says what the
    results are.

    Raises:
        Exception: what PyTorch raises about the arguments.
    """
    functional = functional_of(op)
    if functional is None:
        return ""
    try:
        results = _results(op, functional, arguments, keywords)
    except NotImplementedError:
        return ""
    written = aliasing.written_by(op, arguments, keywords)
    for tensor, result in zip(written, results, strict=False):
        if not torch.can_cast(result.dtype, tensor.dtype):
            return f"its result, {result.dtype}, cannot be cast to {tensor.dtype}"
        if result.dtype != tensor.dtype:
            _check_dtypes(op, arguments, keywords)
        if not _has_outs(op) and result.shape != tensor.shape:
            return f"its result has other sizes than its argument: {list(result.shape)}"
    return ""


def check_sizes(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises RuntimeError where an ``out=`` of other sizes than the result is also an argument.

    PyTorch's kernels are not asked: of some the process ends.
    """
    functional = functional_of(op)
    if functional is None or not _has_outs(op):
        return
    values = aliasing.by_schema(op, arguments, keywords)
    read = tree_leaves([value for value, is_written in values if not is_written])
    written = aliasing.written_by(op, arguments, keywords)
    if not any(aliasing.meet(tensor, other) for tensor in written for other in read):
        return
    try:
        results = _results(op, functional, arguments, keywords)
    except Exception:
        return  # whoever compiles the call raises it
    pointwise = torch.Tag.pointwise in op.tags
    for tensor, result in zip(written, results, strict=False):
        if result.shape != tensor.shape:
            aliasing.check_resized(tensor, result.shape, read, pointwise=pointwise)


def resize(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> None:
    """Gives an ``out=`` argument the layout of the result, with a warning unless it is empty."""
    if tensor.numel():
        warnings.warn(_RESIZED.format(list(tensor.shape), list(sizes)), stacklevel=2)
    tensor.resize_(sizes).as_strided_(sizes, strides)


def from_result(
    function: Callable[..., Tensor], keep_strides: bool = False, apart: bool = False
) -> Callable[..., Tensor]:
    """The kernel of an ``.out`` overload that copies the result of the functional one.

    For those that do not know the sizes of their result before they have it, or that PyTorch
    traces as writing into what ``out=`` was. With ``keep_strides`` a resized ``out=`` gets those of
    the result, otherwise it becomes contiguous. If ``apart``, it may not be an argument.
    """

    def kernel(*arguments: Any, out: Tensor, **keywords: Any) -> Tensor:
        check = aliasing.check_apart if apart else aliasing.check_overlap
        for argument in _tensors(arguments):
            check(out, argument)
        result = function(*arguments, **keywords)
        if out.device != result.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{result.device} and {out.device}!"
            )
        if out.dtype is not result.dtype:
            wanted, given = _scalar_type(result), _scalar_type(out)
            raise RuntimeError(
                f"Expected out tensor to have scalar type {wanted} but got scalar type {given}"
            )
        if out.shape != result.shape:
            strides = result.stride() if keep_strides else contiguous_strides(result.shape)
            resize(out, result.shape, strides)
        return out.copy_(result)

    return kernel


def _scalar_type(tensor: Tensor) -> str:
    """A dtype's name in PyTorch's messages: ``Long``."""
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


def _check_dtypes(op: OpOverload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Has PyTorch check the dtypes of ``out=``: some operators cast their results, some do not."""
    described, named = tree_map(to_meta, (with_tensors(op, arguments), keywords))
    with warnings.catch_warnings(), suppress(NotImplementedError):
        warnings.simplefilter("ignore")  # about sizes, which are another matter
        op(*described, **named)


@cache
def _has_outs(op: OpOverload) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


@cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """The overload that returns what ``op`` writes; None if there is none, or for random ones."""
    schema = op._schema
    if op.namespace != "aten" or not schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None
    name = schema.name.split("::")[1]
    if not _has_outs(op):
        infos = [argument.alias_info for argument in schema.arguments]
        changed = [k for k, info in enumerate(infos) if info is not None and info.is_write]
        is_in_place = name.endswith("_") and not name.endswith("__") and changed == [0]
        if not is_in_place or str(schema.arguments[0].type) != "Tensor":
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


def _results(
    op: OpOverload,
    functional: OpOverload,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> list[Tensor]:
    outs = {argument.name for argument in op._schema.arguments if argument.is_out}
    rest = {name: value for name, value in keywords.items() if name not in outs}
    described, named = tree_map(to_meta, (with_tensors(op, arguments), rest))
    try:
        found = functional(*described, **named)
    except NotImplementedError:  # PyTorch does not know the results; our decomposition may
        rule = OWN.get(functional)
        found = NotImplemented if rule is None else rule(*described, **named)
        if found is NotImplemented:
            raise
    return _tensors(found)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def to_meta(value: Any) -> Any:
    """A tensor or a device of a call without its contents; whatever else as it is."""
    if isinstance(value, Tensor):
        sizes, strides = value.shape, value.stride()
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
