"""Operators that are checked or chosen here and then computed by other operators of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...capture.attention import operators
from ...capture.decompositions import products
from ...capture.decompositions.ctc import of_lists
from ...capture.refusals import refusal
from ...tensors.storages import FEWEST_OF_MANY, data_ptr, new_tensor, storage_address
from ...torch_private import (
    OpOverload,
    _dispatch_get_all_op_names,
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _get_overrideable_sdp_enabled,
    _get_sdp_priority_order,
    _len_torch_dispatch_stack,
    _SDPBackend,
    forward_ad,
)
from . import lists
from .dispatch import PLAIN_TENSORS, PROPERTIES, run

aten = torch.ops.aten

_attention = aten.scaled_dot_product_attention.default
_fused = aten._scaled_dot_product_fused_attention_overrideable
_is_grad_enabled = torch.is_grad_enabled
_modes: Callable[[], int] = _len_torch_dispatch_stack
_PLAIN_OR_NONE = PLAIN_TENSORS | {type(None)}
_UNUSED = torch.empty((), dtype=torch.int64, device="cpu")
_MATH = _SDPBackend.MATH.value
_AT_ONCE = 16  # tensors that are joined by one kernel


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, for all keys of the device.

    PyTorch takes the fused operator of a device only where C++ tells it to, and else breaks
    attention up into products and a softmax of all scores. So the choice is made here.

    The fused operator has no second derivative. Who needs one asks for PyTorch's plain attention,
    as with every fused attention: ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. Any of the
    fused backends is the device's one.

    Raises:
        RuntimeError: only fused backends are allowed, and there is no kernel for these tensors.
    """
    supported = query.dim() == 4 and operators.is_supported(query, key, value, enable_gqa)
    is_fused = supported and _is_fused_wanted() and not (is_causal and attn_mask is not None)
    if is_fused and not _are_watched(query, key, value, attn_mask):
        rest = attn_mask, dropout_p, is_causal
        alone: Tensor = run(
            _attention, query, key, value, *rest, scale=scale, enable_gqa=enable_gqa
        )
        return alone
    # PyTorch's plain attention would add True as 1.
    bias = None if attn_mask is None else _additive(attn_mask, query.dtype)
    if not is_fused:
        if not _get_math_sdp_enabled():
            raise RuntimeError(
                "No available kernel. Aborting execution. The fused attention of webgpu tensors "
                "takes query, key and value of four dimensions and one dtype of at most 32 bits, "
                f"with heads of at most {operators.MAX_HEAD_SIZE}, and not is_causal with "
                "attn_mask: allow PyTorch's own by adding SDPBackend.MATH to sdpa_kernel's list"
            )
        if not query.dtype is key.dtype is value.dtype:  # the operators below would convert them
            attend = torch.nn.functional.scaled_dot_product_attention
            error = refusal(attend, (query, key, value, attn_mask, dropout_p, is_causal), {})
            if error is not None:
                raise error
        plain: Tensor = aten._scaled_dot_product_attention_math.default(
            *(query, key, value, bias, dropout_p, is_causal, None),
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
        return plain
    fused: Tensor = _fused.default(
        query, key, value, bias, dropout_p, is_causal, False, scale=scale
    )[0]
    return fused


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`torch.nn.functional.layer_norm`, for all keys of the device: without the statistics, which
    only a backward pass reads."""
    if _are_watched(input, weight, bias):
        with_statistics = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
        normed: Tensor = with_statistics[0]
        return normed
    result: Tensor = run(aten.layer_norm.default, input, normalized_shape, weight, bias, eps)
    return result


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``aten::linear``, whole: its parts would be views of its argument and of its result, too.

    Raises:
        NotImplementedError: gradients are wanted of a bias that is more than a vector. PyTorch has
            ``linear_backward`` compute them, which knows neither the bias nor its shape.
    """
    if bias is not None and bias.dim() > 1 and bias.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"linear has no gradient here for a bias of shape {tuple(bias.shape)}, only for one of "
            "shape (out_features,) or (): add it to the result"
        )
    result: Tensor = run(aten.linear.default, input, weight, bias)
    return result


def linear_backward(
    self: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> Any:
    """``aten::linear_backward``, for all keys of the device: whole, unless its parts are wanted.

    Its own derivative in PyTorch is not for complex numbers, nor for a weight that is a vector.
    """
    if _are_watched(self, grad_output, weight):
        return products.linear_backward(self, grad_output, weight, output_mask)
    return run(aten.linear_backward.default, self, grad_output, weight, output_mask)


def _are_watched(*tensors: Tensor | None) -> bool:
    """Whether autograd or a dispatch mode has to see the operators on tensors one by one."""
    if _is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return (
        _modes() > 0
        or forward_ad._current_level >= 0
        or not _PLAIN_OR_NONE.issuperset(map(type, tensors))
    )


def fused_attention(*arguments: Any, **keywords: Any) -> Any:
    """``_scaled_dot_product_fused_attention_overrideable``, which gives a seed and an offset.

    Without dropout nobody reads them. They are tensors even so: AOTAutograd, which was told that
    they are, keeps them for the backward pass.
    """
    *results, seed, offset, mask = run(_fused.default, *arguments, **keywords)
    return *results, _UNUSED if seed is None else seed, _UNUSED if offset is None else offset, mask


def _is_fused_wanted() -> bool:
    """Whether one of the fused backends is allowed, and PyTorch's plain attention not put first."""
    allowed = (
        _get_overrideable_sdp_enabled()
        or _get_flash_sdp_enabled()
        or _get_mem_efficient_sdp_enabled()
        or _get_cudnn_sdp_enabled()
    )
    if not allowed:
        return False
    is_first = _get_sdp_priority_order()[0] == _MATH and _get_math_sdp_enabled()
    return not is_first


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`operators.additive` in one kernel, without the float32 between: masks may be large."""
    if mask.dtype != torch.bool:
        return mask
    kept, left_out = torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)
    return torch.where(mask, kept, left_out)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The statistics of all processes from those of each, for ``torch.nn.SyncBatchNorm``.

    It updates the running statistics, of which its schema says nothing: so graphs are to see what
    it consists of, and it is registered for all keys of the device. Source: ATen
    ``native/cuda/Normalization.cuh``.

    Args:
        mean, invstd: (processes, C).
        counts: (processes,), values of a channel.
    """
    share = counts.to(mean.dtype).view(-1, 1)
    total = share.sum()
    share = share / total
    overall = (mean * share).sum(0)
    variances = invstd.pow(-2) - eps
    variance = ((variances + (mean - overall).square()) * share).sum(0)
    if running_mean is not None:
        running_mean.lerp_(overall.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (total / (total - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return overall, torch.rsqrt(variance + eps)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, of many tensors by groups.

    A kernel is for a number of tensors, so that a list that grows would compile one at each length.
    """
    return _joined(aten.cat.default, tensors, dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.stack``, as `cat`; of views that follow each other in memory one copy.

    Norms of many tensors are such views, which `lists` gives.
    """
    if len(tensors) >= FEWEST_OF_MANY and (whole := _as_one_view(tensors, dim)) is not None:
        copy: Tensor = run(aten.clone.default, whole, memory_format=torch.contiguous_format)
        return copy
    return _joined(aten.stack.default, tensors, dim)


def _as_one_view(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The stack as a view of memory in which equal tensors follow each other; None of others."""
    first, count = tensors[0], len(tensors)
    rank = first.dim()
    # Of more dimensions than here, PyTorch chooses the order of the result's.
    if rank > 1 or not -rank - 1 <= dim <= rank:
        return None
    addresses = list(map(data_ptr, tensors))
    start, step = addresses[0], addresses[1] - addresses[0]
    if step <= 0 or addresses != list(range(start, start + count * step, step)):
        return None
    distance, rest = divmod(step, first.element_size())
    if rest or storage_address(start) != storage_address(addresses[-1]):
        return None
    of_each = (map(get, tensors) for get in PROPERTIES)
    if len({*zip(*of_each, strict=True)}) > 1 or any(map(Tensor.is_neg, tensors)):
        return None
    if any(map(Tensor.is_conj, tensors)):
        return None
    sizes, strides = list(first.shape), list(first.stride())
    sizes.insert(dim % (rank + 1), count)
    strides.insert(dim % (rank + 1), distance)
    storage, offset = first.untyped_storage(), int(first.storage_offset())
    return new_tensor(storage, first.dtype, sizes, strides, offset, first.get_device())


def _joined(op: OpOverload, tensors: Sequence[Tensor], dim: int) -> Tensor:
    if len(tensors) > _AT_ONCE and len({tensor.dtype for tensor in tensors}) == 1:
        groups = [tensors[k : k + _AT_ONCE] for k in range(0, len(tensors), _AT_ONCE)]
        # What PyTorch says of tensors that do not fit is said of all of them, below.
        with suppress(RuntimeError, IndexError):
            return cat([run(op, group, dim) for group in groups], dim)
    joined: Tensor = run(op, tensors, dim)
    return joined


def randperm_out(n: int, *, generator: torch.Generator | None, out: Tensor) -> Any:
    """``aten::randperm.generator_out``, which resizes its result without a word."""
    if n >= 0 and out.shape != (n,):
        out.resize_(n)
    return run(aten.randperm.generator_out, n, generator=generator, out=out)


def _ctc(name: str, first: int) -> Callable[..., Any]:
    """CTC with lengths in lists, as the operator with tensors: kernels do not depend on them."""
    packet = getattr(aten, name)
    with_tensors = of_lists(partial(run, packet.Tensor), first)

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        found = with_tensors(*arguments, **keywords)
        return run(packet.default, *arguments, **keywords) if found is NotImplemented else found

    return kernel


ctc_loss, ctc_loss_backward = _ctc("_ctc_loss", 0), _ctc("_ctc_loss_backward", 1)


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """``Tensor.record_stream``: nothing, as memory is used again in the order of the one queue."""


def no_quantized_tensors(*_: Any, **__: Any) -> NoReturn:
    """``aten::quantize_per_tensor`` and its kin: their tensors need an allocator in C++."""
    raise NotImplementedError(
        "webgpu tensors cannot have quantized dtypes, which PyTorch is about to remove: import "
        "torch.ao.quantization.fx._decomposed and use torch.ops.quantized_decomposed, which "
        "quantizes to integers"
    )


def non_finite_check_and_unscale_(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_``, of operators that run by lists.

    A tensor has an infinity or NaN exactly where its largest magnitude is one. Numbers of 16 bits
    are multiplied in 32, as ``_foreach_mul_`` does not: they take the operator's own way.
    """
    full = [grad for grad in grads if grad.numel()]
    if any(grad.dtype not in (torch.float32, torch.float64) for grad in full):
        run(aten._amp_foreach_non_finite_check_and_unscale_.default, grads, found_inf, inv_scale)
    elif full:
        largest = torch.stack(lists.run(aten._foreach_norm.Scalar, full, float("inf")))
        found_inf.copy_(found_inf.maximum(~largest.isfinite().all()))
        lists.run(aten._foreach_mul_.Tensor, full, inv_scale.reshape(()))


def foreach_kernels() -> dict[str, Callable[..., Any]]:
    """``_foreach`` operators with a number per tensor, by name.

    Optimizers give such lists although all numbers are equal, as long as all parameters have made
    the same steps. The overload with one number then does the same with one kernel per shape of a
    tensor, where the list would be as many kernels as tensors.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in _dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        if not short.startswith("_foreach_") or not short.endswith(".ScalarList"):
            continue
        packet = getattr(torch.ops.aten, short.split(".")[0])
        if "Scalar" in packet.overloads():
            found[short] = partial(_number_per_tensor, packet.ScalarList, packet.Scalar)
    return found


def _number_per_tensor(op: OpOverload, with_one: OpOverload, *arguments: Any) -> Any:
    *tensors, numbers = arguments
    if not numbers or len(numbers) != len(tensors[0]):
        return lists.run(op, *arguments)
    first = numbers[0]
    # 0.0 and -0.0 are equal.
    same = first != 0 and numbers.count(first) == len(numbers) and len({*map(type, numbers)}) == 1
    return lists.run(with_one, *tensors, first) if same else lists.run(op, *arguments)
