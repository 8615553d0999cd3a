"""The fused operators of ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` in evaluation.

PyTorch's modules call them on a PrivateUse1 device as on CUDA, and with a padding mask the encoder
hands its layers a nested tensor. The one made here is a view of the padded tensor that knows the
rows' lengths: layers compute what is padding, too, behind a mask, and at the end it becomes 0, as
on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import custom_ops
from ...torch_private import DispatchKey, DispatchKeySet, OpOverload
from ..registration import new_library, untraced
from .dispatch import run

aten = torch.ops.aten

_ON_CPU = DispatchKeySet(DispatchKey.CPU)
_NESTED_ON_CPU = DispatchKeySet(DispatchKey.NestedTensorCPU)
_OF_PADDING = 1  # ``mask_type`` of a mask (batch, keys), True removes
_KEEPS = "_webgpu_keeps"  # an attribute of our nested tensors: their mask, True keeps


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any
) -> Any:
    """``_native_multi_head_attention``: one product makes query, key and value of one tensor."""
    if query is key and key is value:
        return run(custom_ops.self_attention, query, *rest, **keywords)
    return run(aten._native_multi_head_attention.default, query, key, value, *rest, **keywords)


def is_left_aligned(t: Tensor, mask: Tensor) -> bool:
    """``_nested_tensor_from_mask_left_aligned``: whether every row keeps only its beginning."""
    keeps = mask.cpu()
    return bool((keeps == _keeps(keeps.sum(1), keeps.shape[1])).all())


def nested_from_mask(t: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
    """``_nested_tensor_from_mask``: rows (batch, length, size) without what a mask does not keep.

    Args:
        mask: bool (batch, length); True keeps.

    Raises:
        RuntimeError: as PyTorch's kernels do, of other dtypes and sizes, and of a mask that keeps
            more than the beginning of a row if ``mask_check``.
    """
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"Expected mask to be of ScalarType Bool, but got {mask.dtype} instead")
    if mask.dim() != 2 or t.dim() != 3 or mask.shape != t.shape[:2]:
        raise RuntimeError(
            "Mask should be 2D and input 3D, of the same batch and length, but got "
            f"{list(mask.shape)} and {list(t.shape)}"
        )
    keeps = mask.cpu()
    lengths = keeps.sum(1)
    if mask_check and not torch.equal(keeps, _keeps(lengths, t.shape[1])):
        raise RuntimeError("Mask must be left-aligned without gaps")
    return _nested(t.contiguous(), lengths, mask)


def _keeps(lengths: Tensor, length: int) -> Tensor:
    return torch.arange(length) < lengths.unsqueeze(1)


def _nested(padded: Tensor, lengths: Tensor, keeps: Tensor) -> Tensor:
    """A nested tensor over the memory of a padded one, (batch, length, size)."""
    rows, length, size = padded.shape
    sizes = torch.stack([lengths, torch.full_like(lengths, size)], 1)
    strides = torch.tensor([[size, 1]] * rows)
    offsets = torch.arange(rows) * (length * size)
    made: Tensor = aten._nested_view_from_buffer.default.redispatch(
        _ON_CPU, padded.view(-1), sizes, strides, offsets
    )
    setattr(made, _KEEPS, keeps)
    return made


def _padded(nested: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The padded tensor, mask and lengths of a nested tensor that `_nested` has made.

    Raises:
        NotImplementedError: it is another nested tensor.
    """
    keeps = getattr(nested, _KEEPS, None)
    if keeps is None:
        raise NotImplementedError(_refusal("a nested tensor that TransformerEncoder did not make"))
    sizes: Tensor = aten._nested_tensor_size.default.redispatch(_NESTED_ON_CPU, nested)
    buffer: Tensor = aten.values.default.redispatch(_NESTED_ON_CPU, nested)
    return buffer.view(*keeps.shape, -1), sizes[:, 0], keeps


def encoder_layer_of_nested(src: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    """``_transformer_encoder_layer_fwd`` of a nested tensor, which has no other mask."""
    padded, lengths, keeps = _padded(src)
    masked = {"mask": keeps.logical_not(), "mask_type": _OF_PADDING}
    result = aten._transformer_encoder_layer_fwd.default(padded, *rest, **(keywords | masked))
    return _nested(result.contiguous(), lengths, keeps)


def padded_of_nested(
    nested: Tensor, padding: float, output_size: Sequence[int] | None = None
) -> Tensor:
    """``to_padded_tensor`` to ``output_size``, or to the length of the longest row."""
    padded, lengths, keeps = _padded(nested)
    length = int(lengths.max()) if output_size is None else min(output_size[1], padded.shape[1])
    if int(lengths.max()) > length:
        raise RuntimeError(f"to_padded_tensor: output_size {output_size} is shorter than a row")
    filled = padded[:, :length].masked_fill(~keeps[:, :length, None], padding)
    if output_size is None or list(output_size) == list(filled.shape):
        return filled
    whole = filled.new_full(tuple(output_size), padding)
    whole[: filled.shape[0], :length, : filled.shape[2]] = filled
    return whole


def refuse_nested(op: OpOverload, *_: Any, **__: Any) -> Any:
    """Every other operator of a nested tensor of this layout.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_refusal(str(op)))


def refuse_strided(*_: Any, **__: Any) -> Any:
    """No tensor of this layout is made whose every use would fail: what makes one of others.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(_refusal("torch.nested"))


def _refusal(what: str) -> str:
    return (
        f"{what}: nested tensors of the strided layout have no kernels on webgpu beyond those of "
        "nn.TransformerEncoder; make it with layout=torch.jagged, or give the encoder "
        "enable_nested_tensor=False"
    )


KERNELS: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": multi_head_attention,
    "_nested_tensor_from_mask": nested_from_mask,
    "_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "_nested_tensor_from_tensor_list": refuse_strided,
    "_nested_view_from_buffer": refuse_strided,
}
# PyTorch also calls these where an exception ends the process.
_METADATA = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
_NESTED_KERNELS: dict[str, Callable[..., Any]] = {
    **{name: partial(getattr(aten, name).default.redispatch, _NESTED_ON_CPU) for name in _METADATA},
    "_transformer_encoder_layer_fwd": encoder_layer_of_nested,
    "to_padded_tensor": padded_of_nested,
}


def register_nested(library: Any) -> None:
    """Registers the kernels of nested tensors."""
    for name, kernel in _NESTED_KERNELS.items():
        library.impl(name, untraced(kernel), "NestedTensorPrivateUse1")
    new_library("_").fallback(untraced(refuse_nested), "NestedTensorPrivateUse1")
