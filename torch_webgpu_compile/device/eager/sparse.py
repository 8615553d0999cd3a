"""Operators on sparse tensors: on the host, with one warning for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...options import resolve
from ...tensors import sparse
from ...tensors.copying import is_here
from ...torch_ops.names import overload_of
from ...torch_private import (
    DispatchKey,
    OpOverload,
    _dispatch_get_registrations_for_dispatch_key,
)
from ..registration import new_library, untraced
from .host import report, run_on_host

aten = torch.ops.aten

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
# What makes a tensor sparse.
_CONVERSIONS = (
    *("_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc"),
    *("_to_sparse_bsr", "_to_sparse_bsc"),
)
# What looks into the dense tensors that one is made of, with kernels for the CPU and CUDA alone.
_CHECKS = ("_validate_compressed_sparse_indices",)
# Copies and checks, which are no reason for a warning.
_QUIET = frozenset(
    f"aten::{name}"
    for name in ("copy_", "clone", "empty", "empty_like", "zero_", "_to_copy", *_CHECKS)
)


def run(op: OpOverload, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on sparse tensors, or one that makes them; its results are on the device.

    Raises:
        UnsupportedOp: under ``TORCH_WEBGPU_FALLBACK=error``.
    """
    if op._schema.name not in _QUIET:
        name = str(op) if resolve().fallback == "error" else "aten.* of sparse tensors"
        report(name, f"{op} has sparse tensors", (arguments, keywords))
    return run_on_host(op, arguments, keywords)


def make_coo(
    indices: Tensor, values: Tensor, size: Sequence[int], *, is_coalesced: Any = None, **kind: Any
) -> Tensor:
    """``aten::sparse_coo_tensor.indices_size``; the host sees whether indices are coalesced."""
    make = partial(aten.sparse_coo_tensor.indices_size._op_dk, _COMPOSITE, indices, values, size)
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    made: Tensor
    if is_coalesced and checks.is_enabled():
        check = aten._validate_sparse_coo_tensor_args.default
        run_on_host(check, (indices, values.detach(), size, is_coalesced), {})
        with checks(enable=False):
            made = make(is_coalesced=is_coalesced, **kind)
    else:
        made = make(is_coalesced=is_coalesced, **kind)
    return made


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::_copy_from`` between tensors of which one is sparse and on the device."""
    value = sparse.to_host(source) if is_here(source) else source
    if is_here(target):
        sparse.write(target, value.to(target.dtype))
    else:
        target.copy_(value)
    return target


def register(library: Any) -> None:
    """Registers all kernels of sparse tensors.

    Those of operators that PyTorch has for sparse tensors of the CPU come before compositions that
    are for dense ones.
    """
    for name in (*_CONVERSIONS, *_CHECKS):
        library.impl(name, partial(untraced(run), overload_of(name)), "PrivateUse1")
    for key in ("PrivateUse1", "SparsePrivateUse1"):
        library.impl("sparse_coo_tensor.indices_size", untraced(make_coo), key)
    through = torch.library.fallthrough_kernel
    library.impl("sparse_coo_tensor.indices_size", through, "AutogradPrivateUse1")
    structure = sparse.structure_kernels()
    registrations = _dispatch_get_registrations_for_dispatch_key
    for key, of_cpu in _KEYS.items():
        kernels = {name: kernel for (name, where), kernel in structure.items() if where == key}
        for name in registrations(of_cpu):
            namespace, _, short = name.partition("::")
            if namespace == "aten" and short not in kernels:
                kernels[short] = partial(untraced(run), overload_of(short))
        kernels["_copy_from"] = untraced(copy_from)
        for short, kernel in kernels.items():
            library.impl(short, kernel, key)
        new_library("_").fallback(untraced(run), key)
