"""Runs any ATen operator on the device: compiled once per signature, then replayed.

`run` finds what it has compiled by the operator and by all that a kernel depends on: dtypes, sizes,
strides and alignment of tensors, and the values of everything else. Only a call with a new
signature goes further: to a graph compiled for symbolic sizes and numbers that accepts it, to the
compiler, or, where there is no kernel, to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten

from ...capture.decompositions.table import is_composite
from ...capture.eager.capture import rule_for_host
from ...capture.refusals import INSTEAD, refusal
from ...errors import AdapterError, DeviceError, OutOfMemoryError, ShaderError, UnsupportedOp
from ...target import BINDING_ALIGNMENT
from ...torch_ops.foreign import NO_IMPLEMENTATION, is_foreign
from ...torch_ops.names import dispatch_name
from ...torch_ops.written import WITHOUT_HOST
from ..tensors import aliasing
from ..tensors.storages import FEWEST_OF_MANY, data_ptr
from . import outputs
from .compiled_op import CompiledOp, Placement, compile_op
from .host import report, run_on_host

_MAX_SIGNATURES = 1 << 14  # one or two kilobytes each
_MAX_OPS = 1 << 11  # some hundred kilobytes each, a software adapter's machine code included
_MAX_NUMBERS = 256
_INF = float("inf")
_UNKNOWN = object()

PLAIN_TENSORS = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_PROPERTIES = (
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    Tensor.get_device,
)

_GENERATOR: Any = torch._C.Generator  # any will do: numbers are drawn of it at each call

_lock = threading.RLock()
# None: on the host. A dictionary: by the values of the floats, which matter to what was compiled.
_by_signature: dict[tuple[Any, ...], Any] = {}
_remembered = 0  # what there is of both kinds
_by_kind: dict[tuple[Any, ...], list[CompiledOp]] = {}
_mutable: dict[OpOverload, bool] = {}
_numbers_checked: dict[OpOverload, bool] = {}


def run(op: OpOverload, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on device tensors; its results are there too.

    Raises:
        Exception: what PyTorch raises about the arguments.
        UnsupportedOp: there is no kernel, under ``TORCH_WEBGPU_FALLBACK=error``.
        DeviceError: the GPU refused.
    """
    leaves: list[Any] = []
    key: list[Any] = [op, torch.get_default_dtype()]
    try:
        _describe(arguments, leaves, key)
    except RuntimeError:
        if not is_composite(op):
            raise
        # Tensors without memory: zeros_like, where a tracer makes arguments to run a real operator
        # whose results nothing else describes. PyTorch's composite kernel reads sizes only, and
        # comes back here with the tensor that it made.
        composite = torch._C.DispatchKey.CompositeExplicitAutograd
        return op._op_dk(composite, *arguments, **keywords)
    if keywords:
        key.extend(keywords)
        _describe(tuple(keywords.values()), leaves, key)
    if len(leaves) > 1 and _is_mutable(op):
        key += aliasing.sharing(leaves)
    signature = tuple(key)
    compiled = _by_signature.get(signature, _UNKNOWN)
    if type(compiled) is dict:
        compiled = compiled.get(_numbers(leaves), _UNKNOWN)
    if compiled is _UNKNOWN:
        with torch._C._DisableAutocast():  # tracing calls operators: they are this one's parts
            return _first_time(_Call(op, arguments, keywords, leaves, signature))
    if compiled is None:
        return run_on_host(op, arguments, keywords)
    try:
        return compiled.run(leaves)
    except (UnsupportedOp, AdapterError) as error:
        return _not_at_these_sizes(_Call(op, arguments, keywords, leaves, signature), error)
    except OutOfMemoryError as error:
        error.add_op(str(op))
        raise


def _numbers(leaves: Sequence[Any]) -> tuple[str, ...]:
    """The floats of a call. As text: -0.0 and 0.0 are equal, but not to an operator."""
    return tuple([leaf.hex() for leaf in leaves if type(leaf) is float])


def _is_mutable(op: OpOverload) -> bool:
    found = _mutable.get(op)
    if found is None:
        found = _mutable[op] = op._schema.is_mutable
    return found


def _describe(values: Sequence[Any], leaves: list[Any], key: list[Any]) -> None:
    """Appends the leaves of nested arguments, and what kernels depend on of each."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            leaves.append(value)
            key += (
                value.dtype,
                value.shape,
                value.stride(),
                value.get_device(),
                data_ptr(value) % BINDING_ALIGNMENT,
            )
            if value.is_conj() or value.is_neg():
                key += (value.is_conj(), value.is_neg())
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if len(value) < FEWEST_OF_MANY or not PLAIN_TENSORS.issuperset(map(type, value)):
                _describe(value, leaves, key)
            else:
                leaves += value
                key += _described(value)
        elif kind is float:
            leaves.append(value)
            key.append(kind if -_INF < value < _INF else value.hex())
        else:
            leaves.append(value)
            key += (kind, None if isinstance(value, _GENERATOR) else value)


def _described(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """What `_describe` says of each, one property after another: the calls stay in C code."""
    yield from (tuple(map(get, tensors)) for get in _PROPERTIES)
    yield tuple([address % BINDING_ALIGNMENT for address in map(data_ptr, tensors)])
    for is_lazy in (Tensor.is_conj, Tensor.is_neg):
        yield any(map(is_lazy, tensors)) and tuple(map(is_lazy, tensors))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is not compiled yet: an operator, its arguments, and what `_describe` made."""

    op: OpOverload
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    leaves: list[Any]
    signature: tuple[Any, ...]

    def on_host(self) -> Any:
        """Its results, computed on the host."""
        return run_on_host(self.op, self.arguments, self.keywords)


def _first_time(call: _Call) -> Any:
    op, arguments, keywords, leaves = call.op, call.arguments, call.keywords, call.leaves
    cause = ""
    if _is_mutable(op):
        cause = aliasing.cause_for_host(op, arguments, keywords)
        if is_foreign(op):
            cause = NO_IMPLEMENTATION  # only its kernels know what it does to its arguments
        outputs.check_sizes(op, arguments, keywords)
    written = aliasing.written_by(op, arguments, keywords)
    placement = Placement.of(op, leaves, tree_structure((arguments, keywords)), written)
    try:
        refused = outputs.cause_for_host(op, arguments, keywords) if _is_mutable(op) else ""
        if refused:
            return _refused(call, refused)
        if not cause:
            _check(call)
        compiled, cause = _compiled(op, placement, cause or placement.cause_for_host)
    except Exception as error:
        if isinstance(error, OutOfMemoryError):
            error.add_op(str(op))
        if isinstance(error, DeviceError) and not isinstance(error, ShaderError):
            raise
        if not _runs_on_cpu(op):  # nothing there says what is wrong
            raise
        return _refused(call, f"{type(error).__name__}: {error}; please report this")
    if compiled is not None and compiled.resize(leaves):
        return run(op, *arguments, **keywords)
    _remember(call, compiled)
    if compiled is None:
        report(op, cause, leaves)
        return call.on_host()
    try:
        return compiled.run(leaves)
    except (UnsupportedOp, AdapterError) as error:
        return _not_at_these_sizes(call, error)
    except OutOfMemoryError as error:
        error.add_op(str(op))
        raise


def _check(call: _Call) -> None:
    """Raises what PyTorch's kernels raise about a call: tracing alone finds less."""
    if call.op in INSTEAD or (call.op.namespace == "aten" and _runs_on_cpu(call.op)):
        error = refusal(call.op, call.arguments, call.keywords)
        if error is not None:
            raise error


def _checks_numbers(call: _Call) -> bool:
    """Whether PyTorch refuses some numbers: standard deviations and probabilities, for instance."""
    known = _numbers_checked.get(call.op)
    if known is None:
        known = _numbers_checked[call.op] = any(
            refusal(call.op, *changed) is not None for changed in _with_unlikely_numbers(call)
        )
    return known


def _with_unlikely_numbers(call: _Call) -> Iterator[Any]:
    """The arguments and keywords of a call with another number in the place of one."""
    leaves, spec = tree_flatten((call.arguments, call.keywords))
    for k, leaf in enumerate(leaves):
        for number in (-1.0, 2.0) if type(leaf) is float else ():
            yield tree_unflatten([*leaves[:k], number, *leaves[k + 1 :]], spec)


def _not_at_these_sizes(call: _Call, error: UnsupportedOp | AdapterError) -> Any:
    """A call that has kernels, but none for tensors as large as these."""
    if not _runs_on_host(call.op):
        raise error
    _remember(call, None)
    cause = error.cause if isinstance(error, UnsupportedOp) else str(error)
    report(call.op, cause, call.leaves)
    return call.on_host()


def _runs_on_cpu(op: OpOverload) -> bool:
    """Whether there is a kernel for the CPU; some operators are for other devices."""
    if op in WITHOUT_HOST or op in INSTEAD:
        return False
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(dispatch_name(op), "CPU")


def _runs_on_host(op: OpOverload) -> bool:
    """Whether `run_on_host` can compute it, by a kernel or by a decomposition."""
    return _runs_on_cpu(op) or rule_for_host(op) is not None


def _refused(call: _Call, cause: str) -> Any:
    """A call that cannot be compiled: PyTorch's CPU kernels say what is wrong with it, if it is."""
    results = call.on_host()
    report(call.op, cause, call.leaves)
    return results


def _compiled(op: OpOverload, placement: Placement, cause: str) -> tuple[CompiledOp | None, str]:
    """What computes a call, or why it is for the host: ``cause``, or what the compiler says."""
    if cause and not _runs_on_host(op):
        raise UnsupportedOp(str(op), cause, "convert the tensor")
    if cause:
        return None, cause
    with _lock:
        known = _by_kind.setdefault(placement.kind, [])
        compiled = next((found for found in known if found.accepts(placement.specs)), None)
        if compiled is None:
            if sum(max(1, len(found)) for found in _by_kind.values()) > _MAX_OPS:
                forget()
                known = _by_kind.setdefault(placement.kind, [])
            try:
                compiled = compile_op(op, placement)
            except UnsupportedOp as error:
                if not _runs_on_host(op):
                    raise
                return None, error.cause
            known.append(compiled)
    return compiled, ""


def _remember(call: _Call, compiled: CompiledOp | None) -> None:
    global _remembered
    if _remembered >= _MAX_SIGNATURES:
        # All of them: to know which were used last would slow down every call.
        _by_signature.clear()
        for known in list(_by_kind.values()):
            for found in list(known):
                found.forget_sizes()
        _remembered = 0
    _remembered += 1
    numbers = _numbers(call.leaves)
    takes_any = compiled is not None and compiled.takes_any_number(call.leaves)
    if not numbers or (takes_any and not _checks_numbers(call)):
        _by_signature[call.signature] = compiled
        return
    by_number = _by_signature.get(call.signature)
    if type(by_number) is not dict or len(by_number) >= _MAX_NUMBERS:
        by_number = _by_signature[call.signature] = {}
    by_number[numbers] = compiled


def forget() -> None:
    """Drops all compiled eager operators, which are compiled again when they are called."""
    global _remembered
    with _lock:
        _remembered = 0
        _by_signature.clear()
        _by_kind.clear()
