"""Gives PyTorch the kernels of the device, once, at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from . import (
    attention,
    autoload,
    checks,
    copies,
    counting,
    distributed,
    factories,
    foreach,
    masks,
    outputs,
    printing,
    sparse,
    transformers,
    views,
)
from .dispatch import run
from .libraries import new_library
from .untraced import untraced

_lock = threading.Lock()
_library: Any = None
_others: list[Any] = []

# Their composite kernels are made of views, factories and copies, which is all there is to do.
_COMPOSITE = frozenset(
    {
        "clone",
        "lift",
        "lift_fresh",
        "_lazy_clone",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "resize_as_",
        "as_strided_copy",
        "as_strided_scatter",
        "as_strided_",
        "_unsafe_view",
    }
)
# Their composite kernels refuse devices that they do not know.
_REFUSING = (
    "conj_physical_",
    "mode.values",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": factories.empty,
    "empty_strided": factories.empty_strided,
    "set_": factories.set_,
    "resize_": factories.resize_,
    "copy_": copies.copy_,
    "_copy_from": copies.copy_from,
    "_to_copy": copies.to_copy,
    "_local_scalar_dense": copies.local_scalar_dense,
    "equal": masks.equal,
    "uniform_": checks.uniform_,
    "quantize_per_tensor": checks.no_quantized_tensors,
    "quantize_per_tensor.tensor_qparams": checks.no_quantized_tensors,
    "quantize_per_tensor.tensors": checks.no_quantized_tensors,
    "quantize_per_tensor_dynamic": checks.no_quantized_tensors,
    "quantize_per_channel": checks.no_quantized_tensors,
    "nonzero": masks.nonzero,
    "nonzero.out": outputs.from_result(masks.nonzero, keep_strides=True, apart=True),
    "_fft_c2c.out": outputs.from_result(torch.ops.aten._fft_c2c.default),
    "_fft_c2r.out": outputs.from_result(torch.ops.aten._fft_c2r.default),
    "_fft_r2c.out": outputs.from_result(torch.ops.aten._fft_r2c.default),
    "_logcumsumexp.out": outputs.from_result(torch.ops.aten.logcumsumexp.default),
    "masked_select": masks.masked_select,
    "masked_select.out": outputs.from_result(masks.masked_select, apart=True),
    "bincount": counting.bincount,
    "repeat_interleave.Tensor": counting.repeat_interleave,
    "_unique": counting.unique_without_counts,
    "_unique2": counting.unique,
    "unique_consecutive": counting.unique_consecutive,
    "unique_dim": counting.unique_dim,
    "unique_dim_consecutive": counting.unique_dim_consecutive,
    "index.Tensor": masks.index,
    "_index_put_impl_": masks.index_put_impl_,
    **transformers.KERNELS,
}


def register() -> None:
    """Registers every kernel; does nothing the second time."""
    global _library
    with _lock:
        if _library is not None:
            return
        library: Any = new_library("aten")
        kernels = {**_KERNELS, **views.kernels(), **foreach.kernels()}
        for name, kernel in kernels.items():
            library.impl(name, untraced(kernel), "PrivateUse1")
        for name in (*_taken_from_composites(kernels), *_REFUSING):
            library.impl(name, partial(run, _overload(name)), "PrivateUse1")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            function = attention.scaled_dot_product_attention
            library.impl("scaled_dot_product_attention", untraced(function), key)
        for key in ("Conjugate", "Negative"):
            library.impl("_copy_from", torch.library.fallthrough_kernel, key)
        printing.install()
        _others.extend((distributed.register(), transformers.register_nested(library)))
        _others.extend(sparse.register())
        _library = library
        autoload.run = untraced(run)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert isinstance(found, torch._ops.OpOverload)
    return found


def _taken_from_composites(kernels: Iterable[str]) -> list[str]:
    """Operators that PyTorch would break up into several, and that one kernel can run whole."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    from ..compiler import native_operators

    native = {
        str(overload).removeprefix("aten.").removesuffix(".default")
        for overload in native_operators()
    }
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if namespace != "aten" or short in kernels or short.split(".")[0] in _COMPOSITE:
            continue
        structured = has_kernel(name, "CompositeExplicitAutogradNonFunctional")
        composite = has_kernel(name, "CompositeExplicitAutograd")
        wanted = structured or (composite and (short in native or short.startswith("_foreach_")))
        if wanted and not _returns_view(_overload(short)):
            found.append(short)
    return found


def _returns_view(op: torch._ops.OpOverload) -> bool:
    """Whether results share memory with arguments that the operator does not change."""
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
