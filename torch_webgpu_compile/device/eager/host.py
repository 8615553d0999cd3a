"""Operators that run on the host: they have no kernel, or cannot be compiled ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import fallbacks
from ...capture.eager.arguments import with_tensors
from ...capture.eager.capture import rule_for_host
from ...counters import counters
from ...errors import too_large
from ...node_text import line_of_user
from ...options import resolve
from ...tensors import devices, sparse
from ...tensors.aliasing import by_schema, may_overlap_itself
from ...tensors.copying import from_host, is_here, to_host, write_on_host
from ...tensors.generators import on_host
from ...tensors.storages import data_ptr, is_dense, new_tensor, storage_address
from ...torch_private import (
    Generator,
    OpOverload,
    _current_autograd_node,
    _DisableAutocast,
    _neg_view,
    tree_leaves,
    tree_map,
)
from .outputs import to_meta

_CPU = torch.device("cpu")


def report(name: str, cause: str, arguments: Sequence[Any]) -> None:
    """Warns of an operator, or raises UnsupportedOp, as ``TORCH_WEBGPU_FALLBACK`` says."""
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "this dtype"
    fallbacks.on_fallback(resolve().fallback)(name, dtype, _line_of_forward(), cause)


def _line_of_forward() -> str:
    """The user's line in the forward pass, in a backward pass under anomaly detection; else ""."""
    node: Any = _current_autograd_node() if torch.is_anomaly_enabled() else None
    return line_of_user("".join(node.metadata.get("traceback_", ()))) if node is not None else ""


def run_on_host(op: OpOverload, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Runs an operator on CPU copies of its arguments, and brings the results to the device."""
    _refuse_large_results(op, arguments, keywords)
    moved = _Moved()
    if op._schema.is_mutable:
        moved.find_shared((arguments, keywords))
    # PyTorch hands numbers in tensors' places to Python, but does not take them from there.
    given = with_tensors(op, arguments), keywords
    host_arguments, host_keywords = tree_map(moved.to_host, given)
    if moved.index is None and "device" in keywords:
        moved.index = devices.index_of(keywords["device"])
    compute = rule_for_host(op) or op
    with _DisableAutocast():  # of the CPU
        results = compute(*host_arguments, **host_keywords)
    counters.add_fallback(str(op))
    moved.write_back(op, arguments, keywords)
    return tree_map(moved.to_device, results)


def _refuse_large_results(op: OpOverload, arguments: Any, keywords: dict[str, Any]) -> None:
    """Raises OutOfMemoryError where no buffer of the GPU can hold a result of the host."""
    leaves = tree_leaves((arguments, keywords))
    places = [x.device for x in leaves if isinstance(x, Tensor)]
    places += [x for x in leaves if isinstance(x, torch.device)]
    index = next((devices.index_of(place) for place in places if place.type == devices.NAME), None)
    if index is None:
        return
    limit = devices.get_device(index).target.max_buffer_nbytes
    if _most_elements(leaves) <= limit / _MOST_ITEMSIZE:
        return
    try:
        given, named = tree_map(to_meta, (arguments, keywords))
        results = op(*given, **named)
    except Exception:
        return  # it depends on contents, or the host says what is wrong
    for result in tree_leaves(results):
        if isinstance(result, Tensor) and result.is_meta:
            nbytes = result.numel() * result.element_size()
            if nbytes > limit:
                raise too_large(str(op), nbytes, limit)


_MOST_ITEMSIZE = 16  # complex128


def _most_elements(leaves: Sequence[Any]) -> float:
    """More than most results of a call have, which are products of its sizes and numbers."""
    most = 1.0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            most *= max(1, leaf.numel())
        elif isinstance(leaf, (int, float)) and leaf != 0:
            most *= max(abs(float(leaf)), 1 / abs(float(leaf)))
    return most


class _Moved:
    """The CPU copies of a call's device tensors.

    Arguments that share memory with one that is changed do so on the host, too.
    """

    def __init__(self) -> None:
        self.index: int | None = None
        self._copies: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}
        self._shared: dict[int, Tensor | None] = {}

    def find_shared(self, values: Any) -> None:
        """Notes the storages that several tensors are in, or one that overlaps itself."""
        seen: dict[int, Tensor] = {}
        for value in tree_leaves(values):
            if not isinstance(value, Tensor) or sparse.is_sparse(value):
                continue
            if is_here(value) and value.numel():
                storage = storage_address(data_ptr(value))
                if seen.setdefault(storage, value) is not value or may_overlap_itself(value):
                    self._shared[storage] = None

    def _copy(self, tensor: Tensor) -> Tensor:
        if sparse.is_sparse(tensor):
            return sparse.to_host(tensor)
        storage = storage_address(data_ptr(tensor))
        if storage not in self._shared or tensor.layout is not torch.strided:
            return to_host(tensor, through_kernels=False)
        memory = self._shared[storage]
        if memory is None:
            memory = self._shared[storage] = to_host(_bytes_of(tensor), through_kernels=False)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        made = made.conj() if tensor.is_conj() else made
        return _neg_view(made) if tensor.is_neg() else made

    def to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor) and is_here(value):
            self.index = value.get_device()
            copy = self._copies.get(id(value))
            if copy is None:
                copy = self._copies[id(value)] = self._copy(value)
                self._originals[id(copy)] = value
            return copy
        if isinstance(value, torch.device) and value.type == devices.NAME:
            return _CPU
        if isinstance(value, Generator):
            return on_host(value)
        if isinstance(value, Tensor):
            self._originals[id(value)] = value
        return value

    def write_back(self, op: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        """Copies every CPU argument that the operator has changed to its tensor on the device."""
        for given, is_written in by_schema(op, arguments, keywords):
            for tensor in tree_leaves(given) if is_written else ():
                copy = self._copies.get(id(tensor)) if isinstance(tensor, Tensor) else None
                if copy is not None:
                    self._write(copy, tensor)

    def _write(self, copy: Tensor, tensor: Tensor) -> None:
        if sparse.is_sparse(tensor):
            sparse.write(tensor, copy)
            return
        memory = self._shared.get(storage_address(data_ptr(tensor)))
        if memory is not None and copy.untyped_storage()._cdata == memory.untyped_storage()._cdata:
            from_host(memory, _bytes_of(tensor))
            return
        copy = copy.resolve_conj().resolve_neg()  # an operator may leave an output conjugated
        if copy.shape != tensor.shape or copy.stride() != tensor.stride():
            # The operator gave an output another layout, perhaps in more memory than it shows.
            whole = torch.empty(0, dtype=copy.dtype).set_(copy.untyped_storage())
            tensor.resize_(whole.shape)
            from_host(whole, tensor)
            offset = int(tensor.storage_offset()) + copy.storage_offset()
            tensor.as_strided_(copy.shape, copy.stride(), offset)
            return
        _write(copy, tensor)

    def to_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self.index is None:
            return value
        original = self._originals.get(id(value))
        if original is not None:
            return original
        if sparse.is_sparse(value):
            return sparse.to_device(value, self.index)
        device = devices.torch_device(self.index)
        value = value.resolve_conj().resolve_neg()
        if not is_dense(value):
            value = value.contiguous()
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        from_host(value, made)
        return made


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    storage = tensor.untyped_storage()
    return new_tensor(storage, torch.uint8, [storage.nbytes()], [1], 0, tensor.get_device())


def _write(value: Tensor, target: Tensor) -> None:
    if is_dense(target) and not target.is_conj() and not target.is_neg():
        from_host(value, target)
    elif target.numel():
        write_on_host(target, value)
