"""Gives PyTorch the kernels of the device, once, at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ... import patches
from ...capture.decompositions import distributions, factorizations, products
from ...capture.decompositions.table import OWN
from ...compiler import native_operators
from ...tensors import factories
from ...tensors.deferred import settle
from ...torch_ops.names import overload_of
from ...torch_private import (
    OpOverload,
    _dispatch_get_all_op_names,
    _dispatch_has_kernel_for_dispatch_key,
)
from ..registration import new_library, untraced
from . import (
    composed,
    copies,
    data_dependent,
    lists,
    outputs,
    random_checks,
    ranges,
    sparse,
    steps,
    transformer_encoder,
)
from .dispatch import run

_lock = threading.Lock()
_registered = False

# Their composite kernels are made of views, factories and copies, which is all there is to do.
_COMPOSITE = frozenset(
    {
        "lift",
        "lift_fresh",
        "_lazy_clone",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "resize_as_",
        "as_strided_copy",
        "as_strided_scatter",
        "_unsafe_view",
    }
)
# `autoload` has registered theirs.
_REGISTERED = frozenset({"_to_copy"})
# Their composite kernels refuse devices that they do not know.
_REFUSING = (
    "conj_physical_",
    "mode.values",
    "kaiser_window",
    "kaiser_window.periodic",
    "kaiser_window.beta",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": factories.empty,
    "empty_strided": factories.empty_strided,
    "set_": factories.set_,
    "as_strided_": factories.as_strided_,
    "resize_": factories.resize_,
    "copy_": copies.copy_,
    "clone": copies.clone,
    "_copy_from": copies.copy_from,
    "_local_scalar_dense": copies.local_scalar_dense,
    "equal": data_dependent.equal,
    "cat": composed.cat,
    "stack": composed.stack,
    "randperm.generator_out": composed.randperm_out,
    "_ctc_loss": composed.ctc_loss,
    "_ctc_loss_backward": composed.ctc_loss_backward,
    "_scaled_dot_product_fused_attention_overrideable": composed.fused_attention,
    "record_stream": composed.record_stream,
    "quantize_per_tensor": composed.no_quantized_tensors,
    "quantize_per_tensor.tensor_qparams": composed.no_quantized_tensors,
    "quantize_per_tensor.tensors": composed.no_quantized_tensors,
    "quantize_per_tensor_dynamic": composed.no_quantized_tensors,
    "quantize_per_channel": composed.no_quantized_tensors,
    "nonzero": data_dependent.nonzero,
    "nonzero.out": outputs.from_result(data_dependent.nonzero, keep_strides=True, apart=True),
    "_fft_c2c.out": outputs.from_result(torch.ops.aten._fft_c2c.default),
    "_fft_c2r.out": outputs.from_result(torch.ops.aten._fft_c2r.default),
    "_fft_r2c.out": outputs.from_result(torch.ops.aten._fft_r2c.default),
    "_logcumsumexp.out": outputs.from_result(torch.ops.aten.logcumsumexp.default),
    "masked_select": data_dependent.masked_select,
    "masked_select.out": outputs.from_result(data_dependent.masked_select, apart=True),
    "cholesky": factorizations.cholesky,
    "cholesky.out": outputs.from_result(factorizations.cholesky),
    "bincount": data_dependent.bincount,
    "repeat_interleave.Tensor": data_dependent.repeat_interleave,
    "_unique": lambda *arguments: data_dependent.unique(*arguments)[:2],
    "_unique2": data_dependent.unique,
    "unique_consecutive": data_dependent.unique_consecutive,
    "unique_dim": data_dependent.unique_dim,
    "unique_dim_consecutive": lambda x, dim, *_: data_dependent.unique_consecutive(x, dim=dim),
    "index.Tensor": data_dependent.index,
    "_index_put_impl_": data_dependent.index_put_impl_,
    "_amp_foreach_non_finite_check_and_unscale_": composed.non_finite_check_and_unscale_,
    **ranges.kernels(),
    **random_checks.KERNELS,
    **transformer_encoder.KERNELS,
}

# Composite operators that have a derivative of their own, for devices with a kernel. Their parts
# would be several calls, views among them, each of which costs more than on other devices.
_WHOLE = ("_fused_rms_norm", "_fused_rms_norm_backward")
_FOR_ALL_KEYS = (
    "scaled_dot_product_attention",
    "layer_norm",
    "linear_backward",
    "batch_norm_gather_stats_with_counts",
)

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")

# Composite operators that read a tensor on the host, where a decomposition of ours does not.
_READING = ("_grouped_mm",)
# Composite operators that read their `out=`, or copy to it wherever it is.
_WRITING = ("mv.out", "addr.out")


def register() -> Callable[..., Any]:
    """Registers every kernel; does nothing the second time.

    Returns:
        What runs the other operators.
    """
    global _registered
    with _lock:
        if _registered:
            return run
        library = new_library("aten")
        kernels = {**_KERNELS, **factories.view_kernels(), **composed.foreach_kernels()}
        if torch.__version__ >= "2.12":  # before, not of complex numbers
            kernels["linear"] = composed.linear
        for name, kernel in kernels.items():
            library.impl(name, untraced(kernel), "PrivateUse1")
        whole = (*_REFUSING, *_READING, *_WRITING, *_WHOLE, *_FUSED)
        for name in (*_taken_from_composites(kernels), *whole):
            on_lists = name.startswith("_foreach_") or name in _FUSED
            kernel = partial(lists.run if on_lists else run, overload_of(name))
            library.impl(name, untraced(kernel), "PrivateUse1")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            for name in _FOR_ALL_KEYS:
                library.impl(name, untraced(getattr(composed, name)), key)
        for op, rule in {**OWN, **distributions.META}.items():
            name = op.name()
            # Nothing else tells what the results are like, when Dynamo traces a module.
            if not any(_has_kernel(name, key) for key in ("Meta", *_COMPOSITES)):
                library.impl(name, untraced(rule), "Meta")
        # For who takes operators apart, such as tensor subclasses.
        rule = untraced(products.linear_backward)
        library.impl("linear_backward", rule, "CompositeImplicitAutograd")
        for key in ("Conjugate", "Negative"):
            library.impl("_copy_from", torch.library.fallthrough_kernel, key)
        steps.watch(settle)
        transformer_encoder.register_nested(library)
        sparse.register(library)
        refusing = untraced(composed.no_quantized_tensors)
        new_library("_").fallback(refusing, "QuantizedPrivateUse1")
        patches.install(patches.When.KERNELS)
        _registered = True
        return untraced(run)


_COMPOSITES = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
_has_kernel: Callable[[str, str], bool] = _dispatch_has_kernel_for_dispatch_key


def _taken_from_composites(kernels: Iterable[str]) -> list[str]:
    """Operators that PyTorch would break up into several, and that one kernel can run whole."""
    native = {
        str(overload).removeprefix("aten.").removesuffix(".default")
        for overload in native_operators()
    }
    found = []
    known = _REGISTERED.union(kernels)
    for name in _dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if namespace != "aten" or short in known or short.split(".")[0] in _COMPOSITE:
            continue
        structured = _has_kernel(name, "CompositeExplicitAutogradNonFunctional")
        composite = _has_kernel(name, "CompositeExplicitAutograd")
        wanted = structured or (composite and (short in native or short.startswith("_foreach_")))
        schema = str(overload_of(short)._schema) if wanted else ""
        # What takes numbers in a CPU tensor reads them, and does one tensor after the other.
        if wanted and "Tensor scalars" not in schema and not _returns_view(overload_of(short)):
            found.append(short)
    return found


def _returns_view(op: OpOverload) -> bool:
    """Whether results share memory with arguments that the operator does not change."""
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
