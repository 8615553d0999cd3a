"""Sparse tensors: their indices and values are device tensors, which PyTorch's C++ code puts
together as it does those of the CPU.

COO and the compressed layouts (CSR, CSC, BSR, BSC). Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..torch_private import DispatchKey, DispatchKeySet
from . import devices
from .copying import from_host
from .copying import to_host as dense_to_host

aten = torch.ops.aten

_COO = DispatchKeySet(DispatchKey.SparseCPU)
_COMPRESSED = DispatchKeySet(DispatchKey.SparseCsrCPU)
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)

_OF_COO = (
    *("_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"),
    *("_indices", "_values", "indices", "values", "_nnz", "sparse_dim", "dense_dim"),
    *("is_coalesced", "_coalesced_", "sparse_resize_", "sparse_resize_and_clear_"),
    "copy_sparse_to_sparse_",
)
_OF_COMPRESSED = (
    *("crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "_nnz"),
    *("sparse_dim", "dense_dim", "_sparse_compressed_tensor_with_dims"),
)


def structure_kernels() -> dict[tuple[str, str], Callable[..., Any]]:
    """Kernels that only take sparse tensors apart or build them, by operator and dispatch key."""
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    for key, keys, names in (
        ("SparsePrivateUse1", _COO, _OF_COO),
        ("SparseCsrPrivateUse1", _COMPRESSED, _OF_COMPRESSED),
    ):
        for name in names:
            op = getattr(aten, name).default
            kernel = op._schema.name.removeprefix("aten::")
            found[kernel, key] = partial(op.redispatch, keys)
    return found


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor has indices."""
    return tensor.layout in (torch.sparse_coo, torch.sparse_csc, torch.sparse_bsc, *_BY_ROWS)


def to_host(tensor: Tensor) -> Tensor:
    """The sparse CPU tensor with the elements of a device tensor."""
    return _moved(tensor, dense_to_host, torch.device("cpu"))


def to_device(tensor: Tensor, index: int) -> Tensor:
    """The sparse tensor on ``webgpu:index`` with the elements of a CPU tensor."""
    device = devices.torch_device(index)

    def move(part: Tensor) -> Tensor:
        part = part.contiguous()
        made = torch.empty(part.shape, dtype=part.dtype, device=device)
        from_host(part, made)
        return made

    return _moved(tensor, move, device)


def write(target: Tensor, value: Tensor) -> None:
    """Gives a sparse device tensor the elements of a sparse CPU tensor of its layout."""
    made = to_device(value, target.get_device())
    if target.layout is torch.sparse_coo:
        aten.copy_sparse_to_sparse_.default.redispatch(_COO, target, made)
    else:
        aten.copy_.default.redispatch(_COMPRESSED, target, made)


def _moved(tensor: Tensor, move: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    kind: dict[str, Any] = {
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "device": device,
        "pin_memory": False,
    }
    made: Tensor
    if tensor.layout is torch.sparse_coo:
        get = partial(_part, _COO, tensor)
        made = aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
            *(_COO, get("sparse_dim"), get("dense_dim"), tensor.shape),
            *(move(get("_indices")), move(get("_values"))),
            **kind,
        )
        aten._coalesced_.default.redispatch(_COO, made, get("is_coalesced"))
        return made
    get = partial(_part, _COMPRESSED, tensor)
    names = ("crow", "col") if tensor.layout in _BY_ROWS else ("ccol", "row")
    indices = [move(get(f"{name}_indices")) for name in names]
    made = aten._sparse_compressed_tensor_unsafe.default.redispatch(
        _COMPRESSED, *indices, move(get("values")), tensor.shape, **kind
    )
    return made


def _part(keys: Any, tensor: Tensor, name: str) -> Any:
    return getattr(aten, name).default.redispatch(keys, tensor)
