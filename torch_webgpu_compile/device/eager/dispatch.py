"""Runs any ATen operator on the device: compiled once per signature, then replayed.

`run` finds what it has compiled by the operator and by all that a kernel depends on: dtypes, sizes,
strides and alignment of tensors, and the values of everything else. That one look-up leads to all
that a call does (`KnownCall`). Only a call with a new signature goes further: to a graph compiled
for symbolic sizes and numbers that accepts it, to the compiler, or, where there is no kernel, to
the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ...capture.decompositions.table import is_composite
from ...capture.eager.capture import rule_for_host
from ...capture.refusals import INSTEAD, refusal
from ...errors import AdapterError, DeviceError, OutOfMemoryError, ShaderError, UnsupportedOp
from ...target import BINDING_ALIGNMENT
from ...tensors import aliasing, determinism
from ...tensors.storages import FEWEST_OF_MANY, data_ptr
from ...torch_ops.foreign import NO_IMPLEMENTATION, is_foreign
from ...torch_ops.names import dispatch_name
from ...torch_ops.written import WITHOUT_HOST
from ...torch_private import (
    DispatchKey,
    Generator,
    OpOverload,
    _DisableAutocast,
    _dispatch_has_computed_kernel_for_dispatch_key,
    tree_flatten,
    tree_structure,
    tree_unflatten,
)
from . import outputs
from .compiled_op import CompiledOp, KnownCall, Placement, compile_op
from .host import report, run_on_host

_MAX_SIGNATURES = 1 << 14  # one or two kilobytes each
_MAX_OPS = 1 << 11  # some hundred kilobytes each, a software adapter's machine code included
_MAX_DETAILS = 256
_INF = float("inf")

PLAIN_TENSORS = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
PROPERTIES = (
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    Tensor.get_device,
)
_is_conj, _is_neg = Tensor.is_conj, Tensor.is_neg

_GENERATOR: Any = Generator  # any will do: numbers are drawn of it at each call
_VALUES = {int, bool, type(None), torch.dtype}  # `isinstance` of a generator is Python code

_default_dtype = torch.get_default_dtype

_lock = threading.RLock()
# By the operator's identity, which what is found keeps, as its hash is a function in Python. A
# dictionary: by what else mattered to what was compiled, see `_details`.
_by_signature: dict[tuple[Any, ...], Any] = {}
_remembered = 0  # what there is of both kinds
_by_kind: dict[tuple[Any, ...], list[CompiledOp]] = {}
_mutable: dict[int, tuple[OpOverload, bool]] = {}
_numbers_checked: dict[OpOverload, bool] = {}


def run(op: OpOverload, *arguments: Any, **keywords: Any) -> Any:
    """Runs an operator on device tensors; its results are there too.

    Raises:
        Exception: what PyTorch raises about the arguments.
        UnsupportedOp: there is no kernel, under ``TORCH_WEBGPU_FALLBACK=error``.
        DeviceError: the GPU refused.
    """
    leaves: list[Any] = []
    key: list[Any] = [id(op), _default_dtype()]
    try:
        _describe(arguments, leaves, key)
    except RuntimeError:
        if not is_composite(op):
            raise
        # Tensors without memory: zeros_like, where a tracer makes arguments to run a real operator
        # whose results nothing else describes. PyTorch's composite kernel reads sizes only, and
        # comes back here with the tensor that it made.
        composite = DispatchKey.CompositeExplicitAutograd
        return op._op_dk(composite, *arguments, **keywords)
    if keywords:
        key += keywords
        _describe(keywords.values(), leaves, key)
    if len(leaves) > 1 and (_mutable.get(id(op)) or _mutability(op))[1]:
        key += aliasing.sharing(leaves)
    signature = tuple(key)
    found = _by_signature.get(signature)
    known = found.get(_details(leaves)) if type(found) is dict else found
    try:
        if known is None:
            with _DisableAutocast():  # tracing calls operators: they are this one's parts
                return _first_time(_Call(op, arguments, keywords, leaves, signature))
        compiled: CompiledOp | None = known.compiled
        if compiled is None:
            return run_on_host(op, arguments, keywords)
        try:
            return compiled.run(leaves, known)
        except (UnsupportedOp, AdapterError) as error:
            return _not_at_these_sizes(_Call(op, arguments, keywords, leaves, signature), error)
    except OutOfMemoryError as error:
        error.add_op(str(op))
        raise


def _details(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs of compiled code that no signature has: a switch of PyTorch, and the floats.

    As text: -0.0 and 0.0 are equal, but not to an operator.
    """
    return determinism.is_on(), *[leaf.hex() for leaf in leaves if type(leaf) is float]


def _mutability(op: OpOverload) -> tuple[OpOverload, bool]:
    """The operator, and whether it changes arguments."""
    found = _mutable[id(op)] = op, op._schema.is_mutable
    return found


def _describe(values: Iterable[Any], leaves: list[Any], key: list[Any]) -> None:
    """Appends the leaves of nested arguments, and the properties of each that kernels depend on."""
    for value in values:
        kind = type(value)
        if kind in PLAIN_TENSORS or isinstance(value, Tensor):
            leaves.append(value)
            key += (
                value.dtype,
                value.shape,
                value.stride(),
                value.get_device(),
                data_ptr(value) % BINDING_ALIGNMENT,
            )
            if _is_neg(value) or _is_conj(value):
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
            if kind not in _VALUES and isinstance(value, _GENERATOR):
                value = None
            key += (kind, value)


def _described(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The properties for `_describe`, one after another: the calls stay in C code."""
    yield from (tuple(map(get, tensors)) for get in PROPERTIES)
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
    is_mutable = _mutability(op)[1]
    if is_mutable:
        cause = aliasing.cause_for_host(op, arguments, keywords)
        if is_foreign(op):
            cause = NO_IMPLEMENTATION  # only its kernels know what it does to its arguments
        outputs.check_sizes(op, arguments, keywords)
    written = aliasing.written_by(op, arguments, keywords)
    placement = Placement.of(op, leaves, tree_structure((arguments, keywords)), written)
    try:
        refused = outputs.cause_for_host(op, arguments, keywords) if is_mutable else ""
        if refused:
            return _refused(call, refused)
        with _lock:  # what one thread compiles serves those that wait for it
            compiled = None if cause else _accepting(placement)
            if not cause:
                _check(call, sizes_fit=compiled is not None)
            if compiled is None:
                compiled, cause = _compiled(op, placement, cause)
    except Exception as error:
        if isinstance(error, DeviceError) and not isinstance(error, ShaderError):
            raise
        if not _runs_on_cpu(op):  # nothing there says what is wrong
            raise
        return _refused(call, f"{type(error).__name__}: {error}; please report this")
    if compiled is not None and compiled.resize(leaves):
        return run(op, *arguments, **keywords)
    try:
        known = _remember(call, compiled)
        if compiled is None:
            report(str(op), cause, leaves)
            return call.on_host()
        return compiled.run(leaves, known)
    except (UnsupportedOp, AdapterError) as error:
        return _not_at_these_sizes(call, error)


def _check(call: _Call, *, sizes_fit: bool) -> None:
    """Raises the errors of PyTorch's kernels about a call: tracing alone finds fewer.

    Args:
        sizes_fit: all that a trace of another call assumed of its sizes is true of these.
    """
    if call.op in INSTEAD or (call.op.namespace == "aten" and _runs_on_cpu(call.op)):
        error = refusal(call.op, call.arguments, call.keywords, sizes_fit=sizes_fit)
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
    """The arguments and keywords of a call with one number changed, or two exchanged."""
    leaves, spec = tree_flatten((call.arguments, call.keywords))
    floats = [k for k, leaf in enumerate(leaves) if type(leaf) is float]
    changes = [{k: number} for k in floats for number in (-1.0, 2.0)]
    changes += [{a: leaves[b], b: leaves[a]} for a, b in combinations(floats, 2)]
    for changed in changes:
        yield tree_unflatten([changed.get(k, leaf) for k, leaf in enumerate(leaves)], spec)


def _not_at_these_sizes(call: _Call, error: UnsupportedOp | AdapterError) -> Any:
    """A call that has kernels, but none for tensors as large as these."""
    if not _runs_on_host(call.op):
        raise error
    _remember(call, None)
    cause = error.cause if isinstance(error, UnsupportedOp) else str(error)
    report(str(call.op), cause, call.leaves)
    return call.on_host()


def _runs_on_cpu(op: OpOverload) -> bool:
    """Whether there is a kernel for the CPU; some operators are for other devices."""
    if op in WITHOUT_HOST or op in INSTEAD:
        return False
    return _dispatch_has_computed_kernel_for_dispatch_key(dispatch_name(op), "CPU")


def _runs_on_host(op: OpOverload) -> bool:
    """Whether `run_on_host` can compute it, by a kernel or by a decomposition."""
    return _runs_on_cpu(op) or rule_for_host(op) is not None


def _refused(call: _Call, cause: str) -> Any:
    """Runs a call that cannot be compiled on the CPU, whose kernels say if it is wrong."""
    results = call.on_host()
    report(str(call.op), cause, call.leaves)
    return results


def _accepting(placement: Placement) -> CompiledOp | None:
    """The compiled operator of another call that serves this one, too, if there is one."""
    known = _by_kind.get(placement.kind, ())
    return next((found for found in known if found.accepts(placement.specs)), None)


def _compiled(op: OpOverload, placement: Placement, cause: str) -> tuple[CompiledOp | None, str]:
    """A compiled call, or None and why it is for the host: ``cause``, or the compiler's reason."""
    if cause and not _runs_on_host(op):
        raise UnsupportedOp(str(op), cause, "convert the tensor")
    if cause:
        return None, cause
    if sum(map(len, _by_kind.values())) >= _MAX_OPS:
        forget()
    try:
        compiled = compile_op(op, placement)
    except UnsupportedOp as error:
        if not _runs_on_host(op):
            raise
        return None, error.cause
    _by_kind.setdefault(placement.kind, []).append(compiled)
    return compiled, ""


def _remember(call: _Call, compiled: CompiledOp | None) -> KnownCall:
    global _remembered
    if _remembered >= _MAX_SIGNATURES:
        # All of them: to know which were used last would slow down every call.
        _by_signature.clear()
        for known in list(_by_kind.values()):
            for found in list(known):
                found.forget_sizes()
        _remembered = 0
    _remembered += 1
    made = KnownCall(call.op) if compiled is None else compiled.known_call(call.op, call.leaves)
    details = _details(call.leaves)
    takes_any = compiled is not None and compiled.takes_any_number(call.leaves)
    is_switched = compiled is not None and compiled.deterministic is not None
    if not is_switched and (len(details) == 1 or (takes_any and not _checks_numbers(call))):
        _by_signature[call.signature] = made
        return made
    by_details = _by_signature.get(call.signature)
    if type(by_details) is not dict or len(by_details) >= _MAX_DETAILS:
        by_details = _by_signature[call.signature] = {}
    by_details[details] = made
    return made


def forget() -> None:
    """Drops all compiled eager operators, which are compiled again when they are called."""
    global _remembered
    with _lock:
        _remembered = 0
        _by_signature.clear()
        _by_kind.clear()
