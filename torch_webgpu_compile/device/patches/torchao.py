"""``torchao``: ``quantize_`` with int4 on the device, and products of int8 that stay there.

Patched: when their modules are imported, ``Int4Tensor``, ``Int4PlainInt32Tensor`` and
``Int4TilePackedTo4dTensor`` of ``torchao.quantization`` (``from_hp``, and what they do for
``linear`` and ``bmm``), for tensors on the device, and on the CPU where nothing else does it;
``safe_int_mm`` in ``torchao.kernel.intmm``; and ``__torch_function__`` of the kinds of tensors that
Dynamo's ``VariableBuilder.wrap_tensor`` then takes for objects. Tried with torchao 0.18; where a
version has no such thing, nothing is changed.

Why: ``Int4Tensor``, the default of ``Int4WeightOnlyConfig``, takes all from the package `mslk`,
which has kernels for CUDA alone, and ``Int4PlainInt32Tensor`` has a list of device types. The
layouts are plain, so what is packed here is what is packed there. ``safe_int_mm`` looks for a fake
tensor in the text of its argument, which reads all of it, and multiplies on the host where a size
is not a multiple of 8. Dynamo's guards of tensor subclasses take more of a decoding step than its
kernels do.

Until: torchao asks the device for kernels that it does not have itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...tensors import devices
from ..import_hooks import after_import, around

aten = torch.ops.aten

_WORKFLOWS = "torchao.quantization.quantize_.workflows"
_INT4 = f"{_WORKFLOWS}.int4"


def install() -> None:
    """Has ``torchao`` know the device, once it is imported."""
    after_import(f"{_INT4}.int4_tensor", _take_plain)
    after_import(f"{_INT4}.int4_plain_int32_tensor", _take_words)
    after_import(f"{_INT4}.int4_tile_packed_to_4d_tensor", _refuse_tiles)
    for module in _TRACED_BY_PARTS:
        after_import(module, _trace_by_parts)


def _replace(
    kind: Any,
    function: Any,
    ours: Callable[..., Any],
    op: Any = None,
    places: Sequence[str] = (devices.NAME, "cpu"),
) -> None:
    """What a kind of tensor does for a function of torch, and for an operator, where it is ours.

    The first argument says where.
    """
    theirs = kind._TORCH_FN_TABLE.get(kind, {}).get(function)
    if theirs is None:
        return

    def chosen(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if args[0].device.type in places:
            return ours(*args, **kwargs)
        return theirs(func, types, args, kwargs)

    kind.implements_torch_function(function)(chosen)
    if op is not None:
        kind.implements(op)(chosen)


def _known_kind(module: Any, name: str) -> Any:
    """A kind of tensor in a module; None where a version has none of which functions are known."""
    kind = getattr(module, name, None)
    return kind if hasattr(kind, "_TORCH_FN_TABLE") else None


def _scaled(x: Tensor, weight: Any) -> Tensor:
    return x if weight.act_pre_scale is None else x * weight.act_pre_scale


# -- Dynamo ----------------------------------------------------------------------------------------

_TRACED_BY_PARTS = {
    f"{_INT4}.int4_tensor": "Int4Tensor",
    f"{_INT4}.int4_plain_int32_tensor": "Int4PlainInt32Tensor",
    f"{_WORKFLOWS}.int8.int8_tensor": "Int8Tensor",
    f"{_WORKFLOWS}.intx.intx_unpacked_to_int8_tensor": "IntxUnpackedToInt8Tensor",
}
_kinds_traced_by_parts = set[type]()


def _trace_by_parts(module: Any) -> None:
    """Has Dynamo take a weight of a module's kind on the device for an object with attributes.

    A graph then takes the parts, as it takes any tensors, and guards are of C++. Of a tensor
    subclass one is of Python, which asks it for its parts and compares what it says of itself: that
    was 8 µs of each weight at each call (3 now), and AOTAutograd asked once more.
    """
    kind = _known_kind(module, _TRACED_BY_PARTS[module.__name__])
    if kind is None:
        return
    original = kind.__torch_function__
    functions = tuple(kind._TORCH_FN_TABLE[kind].items())

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for known, function in functions:  # Dynamo looks no function up in a dict
            if func is known:
                return function(func, types, args, kwargs or {})
        return original(func, types, args, kwargs)

    kind.__torch_function__ = classmethod(dispatch)
    for method in (_dim, _is_floating_point, _numel, _size):
        setattr(kind, method.__name__.removeprefix("_"), method)
    _kinds_traced_by_parts.add(kind)


def _dim(weight: Any) -> int:
    return len(weight.shape)


def _is_floating_point(weight: Any) -> bool:
    return bool(weight.dtype.is_floating_point)


def _numel(weight: Any) -> int:
    return math.prod(weight.shape)


def _size(weight: Any, dim: int | None = None) -> Any:
    return weight.shape if dim is None else weight.shape[dim]


@around("torch._dynamo.variables.builder:VariableBuilder.wrap_tensor")
def wrap_tensor(original: Any, self: Any, value: Tensor) -> Any:
    if type(value) in _kinds_traced_by_parts and value.device.type == devices.NAME:
        return self.wrap_user_defined(value)
    return original(self, value)


# -- Int4Tensor ("plain") --------------------------------------------------------------------------


def _take_plain(module: Any) -> None:
    kind = _known_kind(module, "Int4Tensor")
    if kind is None:
        return
    from ...torch_ops import int4

    def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
        _check_activations(weight.activation_dtype)
        parts = weight.qdata, weight.scale, weight.zero_point
        return int4.linear(_scaled(input, weight), *parts, bias)

    def bmm(input: Tensor, weight: Any) -> Tensor:
        """With a weight (B, N, K), which a batch of linear layers has."""
        whole = int4.dequantized(weight.qdata, weight.scale, weight.zero_point)
        return torch.bmm(_scaled(input, weight).float(), whole.mT).to(input.dtype)

    _replace(kind, torch.nn.functional.linear, linear, aten.linear.default)
    _replace(kind, torch.bmm, bmm)


@around(f"{_INT4}.int4_tensor:Int4Tensor.from_hp")
def make_plain(
    make: Any,
    cls: Any,
    w: Tensor,
    block_size: Sequence[int],
    activation_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    quantize = getattr(sys.modules[f"{_INT4}.int4_tensor"], "int4_row_quantize_zp", None)
    on_cpu = w.device.type == "cpu" and quantize is None
    if not (w.device.type == devices.NAME or on_cpu):
        return make(cls, w, block_size, activation_dtype)
    _check_activations(activation_dtype)
    return cls(*_quantized(w, block_size[-1]), list(block_size), w.shape)


def _check_activations(dtype: torch.dtype) -> None:
    if dtype is torch.float8_e4m3fn:
        raise NotImplementedError(
            "webgpu has no products of int4 with activations in float8: use Int4WeightOnlyConfig"
        )


def _quantized(w: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`mslk.quantize.shuffle.int4_row_quantize_zp` and ``pack_int4``.

    Args:
        w: (…, N, K), K a multiple of ``group_size``.

    Returns:
        int8 (…, N, K / 2), scale and zero point (…, K / group_size, N) in the dtype of ``w``:
        16 levels from the lowest to the highest element of a group, the zero point is level 8.
    """
    groups = w.detach().float().reshape(*w.shape[:-1], -1, group_size)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (highest - lowest).clamp(min=1e-6) / 15
    levels = ((groups - lowest) / scale).round().clamp(0, 15).to(torch.int8) - 8
    even, odd = levels.reshape(*w.shape[:-1], -1, 2).unbind(-1)
    packed = (even & 15) | (odd << 4)
    zero_point = lowest + scale * 8
    scale, zero_point = (t.squeeze(-1).mT.contiguous().to(w.dtype) for t in (scale, zero_point))
    return packed.contiguous(), scale, zero_point


# -- Int4PlainInt32Tensor --------------------------------------------------------------------------


def _take_words(module: Any) -> None:
    kind = _known_kind(module, "Int4PlainInt32Tensor")
    if kind is None:
        return

    def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
        rows = _scaled(input, weight).reshape(-1, input.shape[-1])
        result = aten._weight_int4pack_mm_with_scales_and_zeros.default(
            rows, weight.qdata, weight.block_size[1], weight.scale, weight.zero_point
        )
        result = result.reshape(*input.shape[:-1], -1)
        return result if bias is None else result + bias

    _replace(kind, torch.nn.functional.linear, linear, aten.linear.default, (devices.NAME,))


@around(f"{_INT4}.int4_plain_int32_tensor:Int4PlainInt32Tensor.from_hp")
def make_words(make: Any, cls: Any, w: Tensor, block_size: Sequence[int]) -> Any:
    if w.device.type != devices.NAME:
        return make(cls, w, block_size)
    module: Any = sys.modules[f"{_INT4}.int4_plain_int32_tensor"]
    bounds = torch.int32, 0, 15
    scale, zero_point = module.choose_qparams_affine(
        w, module.MappingType.ASYMMETRIC, block_size, *bounds, 1e-6, None, torch.int32
    )
    levels = module.quantize_affine(w, block_size, scale, zero_point, *bounds)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=w.device)
    # Sums of what has no bit in common.
    words = (levels.reshape(len(w), -1, 8) << shifts).sum(2, dtype=torch.int32)
    scale, zero_point = (t.reshape(len(w), -1).t().contiguous() for t in (scale, zero_point))
    return cls(words, scale, zero_point.to(torch.int8), list(block_size), w.shape)


# -- Int4TilePackedTo4dTensor ----------------------------------------------------------------------


def _refuse_tiles(module: Any) -> None:
    kind = _known_kind(module, "Int4TilePackedTo4dTensor")
    if kind is not None:
        function = torch.nn.functional.linear
        _replace(kind, function, _refuse, aten.linear.default, (devices.NAME,))


@around(f"{_INT4}.int4_tile_packed_to_4d_tensor:Int4TilePackedTo4dTensor.from_hp")
def make_tiles(make: Any, cls: Any, hp_tensor: Tensor, *rest: Any, **keywords: Any) -> Any:
    """What CUDA has packed would give wrong numbers: the operator's layout is the device's."""
    if hp_tensor.device.type == devices.NAME:
        _refuse()
    return make(cls, hp_tensor, *rest, **keywords)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        'tile_packed_to_4d has tiles for CUDA: quantize with int4_packing_format="plain", '
        "which is the same on webgpu and CUDA"
    )


# -- products of int8 ------------------------------------------------------------------------------


@around("torchao.kernel.intmm:safe_int_mm")
def safe_int_mm(original: Any, input: Tensor, mat2: Tensor) -> Any:
    if input.device.type == devices.NAME and input.dtype is mat2.dtype is torch.int8:
        return torch._int_mm(input, mat2)
    return original(input, mat2)
