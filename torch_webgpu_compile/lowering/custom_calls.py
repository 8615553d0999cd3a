"""Operators that others define (``torch.library``): steps of the host, also where they change
their arguments.

AOTAutograd writes an operator that changes arguments as ``auto_functionalized_v2`` of it, which
gives the new values of all tensors of which it changes a part (``auto_functionalized``, for export,
those of the arguments themselves). Source: ``torch/_higher_order_ops/auto_functionalize.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from ..errors import UnsupportedOp
from ..node_text import user_source
from ..symbolic.nested import HostBuffer, HostView
from ..symbolic.sizes import Expr, as_expr
from ..torch_ops.dtypes import dtype_of
from ..torch_ops.foreign import is_foreign
from ..torch_ops.names import dispatch_name
from ..torch_private import (
    AsStridedViewInfo,
    OpOverload,
    SliceViewInfo,
    _dispatch_has_kernel_for_dispatch_key,
    get_mutable_args,
    read_view_information_from_args,
    tree_leaves,
    tree_map,
)
from .builder import Builder, ResultType
from .fallback import check_sizes, encode
from .outputs import is_dense_layout
from .registry import LOWERINGS
from .value import Value, zeros

_V1 = torch.ops.higher_order.auto_functionalized
_V2 = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True, slots=True)
class CustomCall:
    """A call of an operator that others define.

    Attributes:
        arguments, keywords: nodes, what nodes hold of other arguments, and `HostView`s.
        changed: the tensors that it changes: a node, or fake memory whose contents it does not see.
    """

    overload: OpOverload
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    changed: tuple[FxNode | ResultType, ...] = ()


def is_custom(target: Any) -> bool:
    """Whether a node's target is an operator that others define, or one that changes arguments."""
    return target in (_V1, _V2) or (is_foreign(target) and target not in LOWERINGS)


def custom_call(node: FxNode, read: Callable[[Any], Any], builder: Builder) -> CustomCall:
    """The call of a node of which `is_custom` is true.

    Args:
        read: gives sizes and other numbers for a node's arguments.

    Raises:
        UnsupportedOp: it is a higher-order operator that changes its arguments.
    """
    if isinstance(node.target, OpOverload):
        return CustomCall(node.target, tuple(node.args), dict(node.kwargs))
    (overload,) = node.args
    if not isinstance(overload, OpOverload):
        raise UnsupportedOp(
            str(overload),
            "a higher-order operator that changes its arguments cannot be lowered",
            "leave it out of the graph",
            user_source(node),
        )
    keywords = dict(node.kwargs)
    names, types = get_mutable_args(overload)
    if node.target is _V1:
        return _of_arguments(overload, keywords, names, builder)
    bases: Any = keywords.pop("_all_bases", [])
    if any(f"_{name}_dtype" in keywords for name in names):
        return _of_written(overload, keywords, names, read)
    # The fields of views are popped, the other arguments stay.
    views = read_view_information_from_args(names, types, keywords, bases)

    def host_view(info: Any) -> HostView | None:
        return None if info is None else _view(info, bases[info.base_index], read, builder)

    keywords |= tree_map(host_view, views)
    return CustomCall(overload, (), keywords, tuple(bases))


def _of_arguments(
    overload: OpOverload, keywords: dict[str, Any], names: Sequence[str], builder: Builder
) -> CustomCall:
    """``auto_functionalized``: what is changed are the arguments themselves."""
    changed: list[FxNode] = []

    def whole(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [whole(item) for item in argument]
        if not isinstance(argument, FxNode):
            return argument
        changed.append(argument)
        fake = argument.meta["val"]
        sizes, strides = builder.reader.sizes(fake.shape), builder.reader.strides(fake.stride())
        return HostView(len(changed) - 1, sizes, strides, as_expr(0))

    keywords |= {name: whole(keywords[name]) for name in names}
    return CustomCall(overload, (), keywords, tuple(changed))


def _of_written(
    overload: OpOverload,
    keywords: dict[str, Any],
    names: Sequence[str],
    read: Callable[[Any], Any],
) -> CustomCall:
    """An operator of ``torch.Tag.out``: it writes all of what it changes, and reads nothing."""
    changed: list[ResultType] = []
    for number, name in enumerate(names):
        sizes, strides, dtype, _ = (
            keywords.pop(f"_{name}_{part}") for part in ("size", "stride", "dtype", "device")
        )
        found = dtype_of(dtype)
        assert found is not None, dtype
        shape = tuple(as_expr(read(size)) for size in sizes)
        layout = tuple(as_expr(read(stride)) for stride in strides)
        changed.append(ResultType(found, shape))
        keywords[name] = HostView(number, shape, layout, as_expr(0))
    return CustomCall(overload, (), keywords, tuple(changed))


def _view(info: Any, base: FxNode, read: Callable[[Any], Any], builder: Builder) -> HostView:
    """A part of a tensor, of which PyTorch knows it as a view's sizes, strides and offset."""
    fake, number = base.meta["val"], info.base_index
    sizes, strides = builder.reader.sizes(fake.shape), builder.reader.strides(fake.stride())
    if isinstance(info, AsStridedViewInfo):
        sizes = tuple(as_expr(read(size)) for size in info.size)
        strides = tuple(as_expr(read(stride)) for stride in info.stride)
        # PyTorch counts from the start of the memory that the tensor is in.
        offset = as_expr(read(info.storage_offset)) - builder.reader.size(fake.storage_offset())
        return HostView(number, sizes, strides, offset)
    if isinstance(info, SliceViewInfo):
        dim, start, end = int(info.dim), as_expr(read(info.start)), as_expr(read(info.end))
        inside = (*sizes[:dim], end - start, *sizes[dim + 1 :])
        return HostView(number, inside, strides, start * strides[dim])
    return HostView(number, sizes, strides, as_expr(0))


def runs_on_device(overload: OpOverload, node: FxNode) -> bool:
    """Whether an operator has an implementation for tensors on the device.

    One for every device (``CompositeExplicitAutograd``: what ``custom_op`` makes without device
    types) is given what the graph is given: it may look at the memory of CPU tensors.
    """
    has_kernel = _dispatch_has_kernel_for_dispatch_key
    name = dispatch_name(overload)
    if has_kernel(name, "PrivateUse1"):
        return True
    found = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    is_there = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
    return is_there and has_kernel(name, "CompositeExplicitAutograd")


def lower_custom(
    builder: Builder,
    call: CustomCall,
    results: Sequence[Any],
    values: Callable[[FxNode], Any],
    *,
    on_device: bool,
) -> tuple[Value | None, ...]:
    """The call as a `HostCall`; its results that are tensors.

    ``results``: fake tensors, and others. Raises UnsupportedOp for arguments that cannot be passed.
    """
    overload = call.overload
    check_sizes(builder, str(overload))

    def given(argument: Any) -> Any:
        if isinstance(argument, FxNode):
            value = values(argument)
            if isinstance(value, Value) and not value.number:
                return _host_buffer(builder, value, argument)
            return encode(builder, value)
        if isinstance(argument, (tuple, list)):
            return tuple(given(item) for item in argument)
        if isinstance(argument, torch.device) and on_device:
            return argument.type
        return encode(builder, values(argument))

    def changed(tensor: FxNode | ResultType) -> HostBuffer:
        if isinstance(tensor, ResultType):
            return HostBuffer(builder.materialize(zeros(tensor.sizes, tensor.dtype)).name)
        return _host_buffer(builder, values(tensor), tensor)

    arguments = tuple(given(argument) for argument in call.arguments)
    keywords = tuple((name, given(argument)) for name, argument in call.keywords.items())
    copies = tuple(changed(tensor) for tensor in call.changed)
    layouts = [
        _dense_strides(builder, result) if isinstance(result, Tensor) else None
        for result in results
    ]
    target = str(overload)
    return builder.host(target, arguments, keywords, layouts, copies, on_device=on_device)


def _host_buffer(builder: Builder, value: Value, node: FxNode) -> HostBuffer:
    """A tensor argument, in the layout that it has in PyTorch: the operator may depend on it."""
    strides = builder.reader.strides(node.meta["val"].stride())
    return HostBuffer(builder.materialize(value).name, strides)


def _dense_strides(builder: Builder, fake: Tensor) -> tuple[Expr, ...] | None:
    sizes, strides = builder.reader.sizes(fake.shape), builder.reader.strides(fake.stride())
    return strides if is_dense_layout(sizes, strides) else None
