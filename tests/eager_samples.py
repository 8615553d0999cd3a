"""The ATen calls that PyTorch's operator samples (OpInfo) make, with in-place and out= variants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.opinfo import op_db

# What a device does itself: views, and what only moves or asks for data.
_NOT_CAPTURED = frozenset(
    [
        "_local_scalar_dense",
        "detach",
        "alias",
        "view",
        "as_strided",
        "_reshape_alias",
        "lift_fresh",
        "lift",
        "set_",
        "resize_",
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "is_pinned",
        "_pin_memory",
        "_unsafe_view",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "as_strided_",
        "swapaxes_",
        "swapdims_",
        "resize_as_",
        "equal",
        "item",
        "detach_",
        "rename_",
        "_version",
        "is_same_size",
    ]
)


@dataclass(frozen=True)
class Call:
    """A call of an ATen operator. ``args`` and ``kwargs`` are copies: running it changes them."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for calls that capture cannot tell apart."""
        memories: dict[int, int] = {}

        def described(tensor: Tensor) -> Any:
            memory = memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
            layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            return tensor.dtype, *layout, memory, tensor.is_conj(), tensor.is_neg()

        return f"{self.op} {tree_map_only(Tensor, described, (self.args, self.kwargs))}"


class _Collector(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_captured(func):
            self.calls.append(Call(func, *copied((args, kwargs))))
        return func(*args, **kwargs)


def _is_captured(op: OpOverload) -> bool:
    returns = op._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    name = op._schema.name.split("::")[1]
    return op.namespace == "aten" and not is_view and name not in _NOT_CAPTURED


def copied(value: Any) -> Any:
    """Tensors with the layouts and the sharing of those in ``value``, on other memory."""
    storages: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = whole.clone()
        made = torch.empty(0, dtype=tensor.dtype)
        memory = storages[storage._cdata].untyped_storage()
        return made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    with torch.no_grad():
        return tree_map_only(Tensor, lambda t: copy(t.detach()), value)


def calls_of(info: Any, dtype: torch.dtype, samples: int, *, backward: bool) -> list[Call]:
    """The distinct calls of the first samples of an OpInfo, forward and perhaps backward."""
    collector = _Collector()
    backward = backward and info.supports_autograd and dtype.is_floating_point
    made = info.sample_inputs("cpu", dtype, requires_grad=backward)
    for sample in itertools.islice(made, samples):
        try:
            with torch.set_grad_enabled(backward), collector:
                _run_sample(info, sample, backward)
        except Exception:  # PyTorch cannot run this sample
            continue
    return list({call.key: call for call in collector.calls if _is_dense(call)}.values())


def _run_sample(info: Any, sample: Any, backward: bool) -> None:
    result = info.op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    if outputs and inputs:
        gradients = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def _is_dense(call: Call) -> bool:
    leaves = tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return all(t.layout is torch.strided and not t.is_quantized for t in tensors)


def variants_of(call: Call) -> Iterator[Call]:
    """The same call in place and with ``out=``, where the operator has these overloads."""
    if call.op._schema.is_mutable:
        return
    try:
        result = call.op(*copied(call.args), **call.kwargs)
    except Exception:
        return
    found = result if isinstance(result, (tuple, list)) else (result,)
    if not all(isinstance(t, Tensor) for t in found):
        return
    overload = out_overload(call.op)
    if overload is not None:
        names = [a.name for a in overload._schema.arguments if a.is_out]
        outs = {name: torch.full_like(t, 1) for name, t in zip(names, found, strict=True)}
        kept = {k: v for k, v in call.kwargs.items() if k in _argument_names(overload)}
        yield Call(overload, copied(call.args), {**copied(kept), **outs})
    overload = in_place_overload(call.op)
    if overload is not None and len(found) == 1 and isinstance(call.args[0], Tensor):
        target = call.args[0]
        writable = target.dtype == found[0].dtype and target.shape == found[0].shape
        if writable and not torch._debug_has_internal_overlap(target):
            yield Call(overload, *copied((call.args, call.kwargs)))


def _argument_names(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments]


@cache
def out_overload(op: OpOverload) -> OpOverload | None:
    """The ``out=`` overload with the same other arguments."""

    def fits(other: OpOverload) -> bool:
        outs = [a for a in other._schema.arguments if a.is_out]
        rest = [a for a in other._schema.arguments if not a.is_out]
        return (
            bool(outs)
            and len(outs) == len(op._schema.returns)
            and all("List" not in str(a.type) for a in outs)
            and _is_prefix(rest, op)
        )

    return _first(op.overloadpacket, fits)


@cache
def in_place_overload(op: OpOverload) -> OpOverload | None:
    """The in-place overload with the same arguments."""
    packet = getattr(torch.ops.aten, op._schema.name.split("::")[1] + "_", None)

    def fits(other: OpOverload) -> bool:
        return _is_prefix(other._schema.arguments, op)

    return None if packet is None else _first(packet, fits)


def _is_prefix(arguments: Any, op: OpOverload) -> bool:
    """Whether these are the arguments of ``op``, without those of factories at most."""
    placement = ("dtype", "layout", "device", "pin_memory")

    def described(found: Any) -> list[tuple[str, str, bool]]:
        return [
            (a.name, str(a.type), a.has_default_value()) for a in found if a.name not in placement
        ]

    return described(arguments) == described(op._schema.arguments)


def _first(packet: Any, fits: Callable[[OpOverload], bool]) -> OpOverload | None:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((overload for overload in overloads if fits(overload)), None)


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def is_sampled(info: Any) -> bool:
    """Whether an OpInfo is about dense tensors of real numbers, among other things."""
    sparse = name_of(info).startswith(("sparse", "to_sparse"))
    return torch.float32 in info.supported_dtypes("cpu") and not sparse


OPERATORS = {name_of(info): info for info in op_db if is_sampled(info)}
