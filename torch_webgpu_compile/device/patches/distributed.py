"""``torch.distributed``: collectives of device tensors, by way of the host.

Patched: PyTorch's kernels of the operators of the namespace ``c10d`` for the device. Every
collective of a process group is one, also those of ``DistributedDataParallel``'s C++ code. The
kernels here run it on copies in host memory, and bring what it wrote to the device.

Why: the backends of PyTorch, such as gloo, know CPU tensors and CUDA's; PyTorch's kernels ask for a
backend that knows this device. So ``init_process_group("gloo")`` serves the device without more.

Until: a backend of PyTorch takes tensors of PrivateUse1 devices.

Several asynchronous collectives may be on their way: the copy to the device is made when one ends,
by the thread of the backend that ends it. (What gloo has no thread for, a message that is received
and a scattered reduction, is copied by ``wait()``.)
"""

from __future__ import annotations

import atexit
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...tensors.copying import from_host, is_here
from ..registration import new_library, untraced

_Copies = list[tuple[Tensor, Tensor]]

# What operators do with arguments, which their schemas do not tell: those that they write,
# and whether they read them before.
_WRITTEN: dict[str, tuple[str, bool]] = {
    "allgather_": ("output_tensors", False),
    "_allgather_base_": ("output_tensor", False),
    "allgather_coalesced_": ("output_lists", False),
    "allgather_into_tensor_coalesced_": ("outputs", False),
    "allreduce_": ("tensors", True),
    "allreduce_coalesced_": ("tensors", True),
    "alltoall_": ("output_tensors", False),
    "alltoall_base_": ("output", False),
    "barrier": ("", False),
    "broadcast_": ("tensors", True),
    "gather_": ("output_tensors", False),
    "monitored_barrier_": ("", False),
    "recv_": ("tensors", False),
    "recv_any_source_": ("tensors", False),
    "reduce_": ("tensors", True),
    "reduce_scatter_": ("output_tensors", False),
    "_reduce_scatter_base_": ("output_tensor", False),
    "reduce_scatter_tensor_coalesced_": ("outputs", False),
    "scatter_": ("output_tensors", False),
    "send": ("", False),
}

# gloo wants whole tensors joined along the first dimension, NCCL and PyTorch's own code take any
# shape of that many elements: as one dimension both are the same.
_FLAT = frozenset({"_allgather_base_", "allgather_into_tensor_coalesced_"})


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels, by the names of operators; none where PyTorch is built without ``c10d``."""
    if not torch.distributed.is_available():
        return {}
    return {name: partial(_run, name) for name in _WRITTEN if _exists(name)}


def install() -> None:
    """Gives PyTorch the kernels."""
    library: Any = new_library("c10d")
    with warnings.catch_warnings():
        # PyTorch has kernels for all devices, which ask for a backend that knows this one.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels().items():
            library.impl(name, untraced(kernel), "PrivateUse1")


def _exists(name: str) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "CPU")
    return found


@cache
def _overload(name: str) -> Any:
    return getattr(torch.ops.c10d, name).default


def _run(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on the host.

    Returns:
        What the operator returns: the tensors that it writes and a ``Work``, or one of the two.
    """
    op = _overload(name)
    given = dict(zip((each.name for each in op._schema.arguments), arguments, strict=False))
    given |= keywords
    written, is_read = _WRITTEN[name]
    copies: _Copies = []
    on_host = {
        key: pytree.tree_map(_to_host, value)
        if key != written
        else _buffers(value, is_read, copies)
        for key, value in given.items()
    }
    if name in _FLAT:
        on_host = pytree.tree_map(_flat, on_host)
    results = op(**on_host)
    if not isinstance(results, torch.ScriptObject):
        if results is None:
            return None
        results = results[-1]
    work = _finish(name, results, copies, given.get("async_op", True))
    return (given[written], work) if len(op._schema.returns) > 1 else work


def _flat(value: Any) -> Any:
    return value.view(-1) if isinstance(value, Tensor) and value.is_contiguous() else value


def _to_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or not is_here(value):
        return value
    return value.detach().cpu().resolve_conj().resolve_neg()


def _buffers(value: Any, is_read: bool, copies: _Copies) -> Any:
    """Host tensors for the operator to write, noted in ``copies`` with those on the device."""

    def buffer(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not is_here(tensor):
            return tensor
        made = _to_host(tensor) if is_read else torch.empty_like(tensor, device="cpu")
        copies.append((made, tensor.detach()))
        return made

    return pytree.tree_map(buffer, value)


def _write(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for source, target in copies:
            from_host(source, target)


def _finish(name: str, boxed: Any, copies: _Copies, is_async: bool) -> Any:
    """A ``Work`` that ends when the device has what the operator wrote."""
    if not copies:
        return boxed
    c10d: Any = torch._C._distributed_c10d
    work = c10d.Work.unbox(boxed)
    if name in ("recv_", "recv_any_source_"):
        return _waiting()(work, copies).boxed()
    targets = [target for _, target in copies]
    if is_async:
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has none for scattered reductions
            return _waiting()(work, copies).boxed()
        future = future.then(partial(_when_done, name, copies, targets))
        _wait_for_at_exit(future)
    else:
        work.wait()
        _write(copies)
        future = torch.futures.Future()
        future.set_result(targets)
    return c10d._create_work_from_future(future).boxed()


def _when_done(name: str, copies: _Copies, targets: Sequence[Tensor], future: Any) -> Any:
    try:
        future.value()
    except RuntimeError as error:
        raise RuntimeError(f"c10d::{name} of webgpu tensors failed: {error}") from error
    _write(copies)
    return targets


_numbers = itertools.count()
_pending: dict[int, Any] = {}


def _wait_for_at_exit(future: Any) -> None:
    """Lets the interpreter end only after the copies: their threads would abort it."""
    _register_exit()
    number = next(_numbers)
    _pending[number] = future
    future.add_done_callback(lambda _: _pending.pop(number, None))


@cache
def _register_exit() -> None:
    """Called when a device is in use: what is registered last runs first, before it closes."""
    atexit.register(_wait_for_all)


def _wait_for_all() -> None:
    for future in list(_pending.values()):
        with suppress(Exception):  # nobody has asked for it
            future.wait()


@cache
def _waiting() -> Any:
    """The class of a ``Work`` that copies when it is waited for; its base may not be there."""
    unfinished: set[Any] = set()
    work: Any = torch._C._distributed_c10d.Work

    class Waiting(work):  # type: ignore[misc]
        """Waits for the backend, and then copies to the device.

        C++ code holds no reference to this Python object, so that it is kept until then.
        """

        def __init__(self, inner: Any, copies: _Copies) -> None:
            super().__init__()
            self._inner = inner
            self._copies = copies
            unfinished.add(self)

        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            try:
                done: bool = self._inner.wait(timeout)
            finally:
                unfinished.discard(self)
            copies, self._copies = self._copies, []
            _write(copies)
            return done

        def is_completed(self) -> bool:
            found: bool = self._inner.is_completed()
            return found

        def _source_rank(self) -> int:
            found: int = self._inner._source_rank()
            return found

        source_rank = _source_rank

    return Waiting
