"""Memory that the arguments of one call share.

Compiled operators read their arguments as they were before the call. Where an operator changes one
of them, shared memory can give it another meaning: PyTorch refuses most such calls, and defines the
rest by the order in which it works. Here the former are refused alike, and the latter run on the
host, on arguments that share memory there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..symbolic.sizes import may_overlap, storage_span
from ..torch_private import OpOverload, tree_leaves
from .storages import data_ptr, is_dense, starts_of, storage_address

# Writing the same value twice, or a warning only (ATen: TensorIterator's check is off).
_MAY_REPEAT = frozenset({"aten::fill_", "aten::zero_"})
_REPEATS_WITH_WARNING = frozenset(
    {"aten::masked_fill_", "aten::index_put_", "aten::_index_put_impl_"}
)

_NO_TENSORS = {int, float, bool, type(None)}

_INTERNAL = (
    "unsupported operation: more than one element of the written-to tensor refers to a single "
    "memory location. Please clone() the tensor before performing the operation."
)
_PARTIAL = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to "
    "a single memory location. Please clone() the tensor before performing the operation."
)


def sharing(leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Which tensors are in one storage, and where; () if none share any.

    Equal for calls with equal signatures only if their tensors overlap alike.
    """
    addresses = [
        data_ptr(leaf)
        for leaf in leaves
        if type(leaf) not in _NO_TENSORS
        and isinstance(leaf, Tensor)
        and leaf.get_device() >= 0  # a CPU tensor's is real
    ]
    if len(addresses) < 2:
        return ()
    starts = starts_of(addresses)
    if len({*starts}) == len(starts):
        return ()
    first: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int]] = []
    for address in addresses:
        known = first.setdefault(storage_address(address), (len(found), address))
        found.append((known[0], address - known[1]))
    return tuple(found)


def cause_for_host(op: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]) -> str:
    """Why a call that changes its arguments is not compiled; "" if it can be.

    Raises:
        RuntimeError: PyTorch does not define the call.
    """
    written, pairs = _split(op, arguments, keywords)
    repeats = overlaps_itself(op, written)
    for tensor in written:
        if tensor.is_conj() or tensor.is_neg():
            return "a changed argument is lazily conjugated or negated"
    for tensor, other in pairs:
        check_overlap(tensor, other)
    if repeats:
        return "a changed argument overlaps itself"
    for position, tensor in enumerate(written):
        if any(_ranges_meet(tensor, other) for other in written[:position]):
            return "it changes two arguments that share memory"
    return ""


def overlaps_itself(op: OpOverload, written: Iterable[Tensor]) -> bool:
    """Whether a tensor that an operator changes has two elements in one place, and may not.

    Raises:
        RuntimeError: PyTorch does not define the call.
    """
    name = op._schema.name
    found = False
    for tensor in written:
        if _repeats(tensor):
            if name not in _MAY_REPEAT and name not in _REPEATS_WITH_WARNING:
                raise RuntimeError(_INTERNAL)
            found |= name not in _MAY_REPEAT
        else:
            found |= may_overlap_itself(tensor)
    return found


def check_copy(source: Tensor, target: Tensor) -> None:
    """Raises RuntimeError where ``copy_`` does: an expanded target, or a shifted part of it."""
    if _repeats(target):
        raise RuntimeError(_INTERNAL)
    check_overlap(target, source)


def check_apart(written: Tensor, read: Tensor) -> None:
    """Raises RuntimeError if two tensors share memory, as ATen's ``assert_no_overlap`` does.

    It does not look into tensors with gaps.
    """
    if meet(written, read) and is_dense(written) and is_dense(read):
        raise RuntimeError(_PARTIAL)


def check_resized(
    written: Tensor, sizes: Sequence[int], others: Iterable[Any], *, pointwise: bool = False
) -> None:
    """Raises RuntimeError if an ``out=`` that is to get other sizes is also an argument.

    What is read would change with it. PyTorch refuses that where it looks; what its other
    operators compute is not defined.

    Args:
        others: the other arguments, among which may be other things than tensors.
        pointwise: the operator is one of single elements.
    """
    for other in others:
        if other is written and pointwise:
            raise RuntimeError(
                f"output with shape {list(written.shape)} doesn't match the broadcast shape "
                f"{list(sizes)}"
            )
        if meet(written, other):
            raise RuntimeError(_PARTIAL)


def meet(tensor: Tensor, other: Any) -> bool:
    """Whether something else is a tensor of the device in the same memory."""
    return isinstance(other, Tensor) and other.get_device() >= 0 and _ranges_meet(tensor, other)


def check_overlap(written: Tensor, read: Tensor) -> None:
    """Raises RuntimeError if two tensors share some elements but are not the same ones.

    As ATen's ``get_overlap_status``, it does not look into tensors with gaps.
    """
    if written is read or read.get_device() < 0:
        return
    if storage_address(data_ptr(written)) != storage_address(data_ptr(read)):
        return
    if not is_dense(written) or not is_dense(read) or not _ranges_meet(written, read):
        return
    same = data_ptr(written) == data_ptr(read) and _nbytes(written) == _nbytes(read)
    if not same or written.stride() != read.stride():
        raise RuntimeError(_PARTIAL)


def _split(
    op: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The tensors that change, and the pairs of one with another that must not overlap in part."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    lists = False
    for value, is_written in by_schema(op, arguments, keywords):
        lists |= is_written and isinstance(value, (list, tuple))
        if is_written:
            written += _on_device(value)
        else:
            read += _on_device(value)
    # Operators on lists work on one entry after the other.
    return written, [] if lists else [(a, b) for a in written for b in read]


def by_schema(
    op: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """The value of each argument, None where none is given, and whether the operator writes it."""
    for position, schema in enumerate(op._schema.arguments):
        given = position < len(arguments) and not schema.kwarg_only
        value = arguments[position] if given else keywords.get(schema.name)
        yield value, schema.alias_info is not None and schema.alias_info.is_write


def written_by(op: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call changes."""
    values = [value for value, written in by_schema(op, arguments, keywords) if written]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_device(value: Any) -> Iterable[Tensor]:
    tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return [x for x in tensors if x.numel() and x.get_device() >= 0]


def _repeats(tensor: Tensor) -> bool:
    """Whether a dimension repeats its elements: ATen's ``has_internal_overlap``."""
    if not tensor.numel():
        return False
    return any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements may be in one place: not for slices of anything that has none."""
    return not tensor.is_contiguous() and may_overlap(tensor.shape, tensor.stride())


def _nbytes(tensor: Tensor) -> int:
    return storage_span(tensor.shape, tensor.stride()) * tensor.element_size()


def _ranges_meet(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of two tensors from their first to their last byte have one in common."""
    start, other = data_ptr(a), data_ptr(b)
    return start < other + _nbytes(b) and other < start + _nbytes(a)
