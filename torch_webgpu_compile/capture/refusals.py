"""Whether PyTorch refuses a call: its own CPU kernels are asked, on stand-ins.

Tracing tells what a call computes, but on tensors without contents, and through decompositions,
PyTorch checks less than its kernels do: dtypes that differ, dimensions that do not exist, sizes
that do not fit. So a call that is new is made once on the CPU, where it costs less than a
thousandth of what compiling does, and the types and messages of errors are PyTorch's.

The stand-ins have the arguments' dtypes and ranks. Where the arguments are large, so are sizes that
a smaller number stands for: equal ones for equal sizes, in the same order. What such a call is
refused for says nothing if its sizes alone do not fit any more, which tensors without contents
tell, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..symbolic.sizes import storage_span
from ..torch_ops.names import dispatch_name
from ..torch_private import (
    Generator,
    OpOverload,
    _dispatch_has_kernel_for_dispatch_key,
    _get_privateuse1_backend_name,
    _LinAlgError,
    is_functorch_wrapped_tensor,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from .tracing import clean_dispatch


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = query.shape[-3] != key.shape[-3]
    return attend(query, key, value, bias, dropout, is_causal, scale=scale, enable_gqa=grouped)


_SMALL = 4  # sizes up to this one stand for themselves
_MOST_ELEMENTS = 1 << 10  # of calls whose sizes stand for themselves, of all arguments
_MOST_WORK = 1 << 18  # the same times all numbers: what a kernel may do with so many
_MARGIN = _MOST_ELEMENTS  # elements beside a stand-in that are its own, where kernels look too far
_MOST_LARGE_WORK = 1 << 22  # of other calls, after sizes were made smaller
_LARGE_NUMBER = 64  # whose square or cube may be the size of a result
# Floats are 1, a probability. Whole numbers are 0, an index, which kernels may rely on, but no
# divisor, pivot or count: where it is one, 1 decides.
_NOT_ZERO = (
    *("ZeroDivisionError", "ivots given to", "ivots passed to", "sum to zero", "got 0"),
    "without overflow",
)
_OF_MASK = "shape mismatch: value tensor of shape"  # what a mask chooses may have it
# Operators that compare sizes with what tensors contain, or even rely on it; that read what is
# beside them in memory, or a file.
_NOT_ASKED = frozenset(
    {"segment_reduce", "repeat_interleave", "ctc_loss", "linalg_lu_factor", "linalg_ldl_factor"}
    | {"lu_solve", "linalg_lu_solve", "linalg_ldl_solve"}  # whose pivots are indices of rows
    | {"embedding_bag", "as_strided", "as_strided_", "from_file"}
)
# Parts of the names of kernels that end the process where sizes, or contents, are not what they
# expect.
_UNCHECKED = ("backward", "pack", "quant", "fbgemm", "nested", "mkldnn", "2d_aa")
_INTERNAL = ("_", "native_")
_PUBLIC = ("__", "_foreach_")
# These check what nothing does before.
_CHECKED = frozenset(
    {"native_dropout", "native_layer_norm", "native_group_norm", "_cdist_forward"}
    | {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)
_STRUCTURED = "CompositeExplicitAutogradNonFunctional"  # which PyTorch gives these alone
# Kernels that take whole numbers on other devices.
_TAKE_INTEGERS = ('"abs', '"histogram', '"trace')
# What the CPU has in the place of an operator for other devices.
INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
}
# What is said of a number in a tensor's place, of which Python's bindings make a tensor; of dtypes
# that other devices mix; of the host's memory.
_OF_CPU_ALONE = ("Expected a value of type 'Tensor'", "mixed dtype (CPU)", "can't allocate memory")
# What the CPU alone has no kernel for: a type of floats. Others have no meaning there.
_NO_KERNEL = "not implemented for '"
_INTEGERS = frozenset({"Bool", "Byte", "Char", "Short", "Int", "Long"})


@dataclass(frozen=True, slots=True)
class _Like:
    """What stands for a tensor: its dtype, sizes and strides, and where it is in which storage."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int

    @property
    def span(self) -> int:
        return storage_span(self.sizes, self.strides)

    def content(self, whole: int, truth: bool) -> int:
        if self.dtype is torch.bool:
            return truth
        return 1 if self.dtype.is_floating_point or self.dtype.is_complex else whole


class _UnknownError(Exception):
    """Nothing can stand for an argument."""


def refusal(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    sizes_fit: bool = False,
) -> Exception | None:
    """What PyTorch raises about a call on the CPU, whatever its tensors contain; None if nothing.

    Args:
        function: of torch, or an operator of ATen.
        args, kwargs: nested; tensors may be fake, on any device, and sizes symbols. They are not
            changed.
        sizes_fit: the call has been made on tensors without contents, or one of other sizes has,
            of which all holds that this found of its sizes.
    """
    if not _is_asked(function):
        return None
    try:
        call = _Call.of(INSTEAD.get(function, function), args, kwargs)
    except _UnknownError:
        return None
    is_small = call.is_small
    smaller = call if is_small else call.shrunk()
    if call in _accepted or (sizes_fit and smaller in _accepted):
        return None
    with clean_dispatch(symbolic=False), warnings.catch_warnings(), _same_numbers():
        warnings.simplefilter("ignore")
        error = call.refused() if is_small else _refused_by_size(call, smaller, sizes_fit)
    if error is None:
        _accept(call)
    return error


@cache
def _is_asked(function: Callable[..., Any]) -> bool:
    """Whether the CPU's kernels check what they are given, whatever that is.

    Those of operators that only PyTorch itself calls rely on who called them, unless a structured
    kernel checks the same for all devices.
    """
    if function in INSTEAD:
        return True
    if isinstance(function, OpOverload) and function.namespace != "aten":
        return False
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in _NOT_ASKED or any(part in name for part in _UNCHECKED):
        return False
    is_internal = name.startswith(_INTERNAL) and not name.startswith(_PUBLIC)
    if not is_internal or name in _CHECKED:
        return True
    return isinstance(function, OpOverload) and _is_structured(function)


def _is_structured(op: OpOverload) -> bool:
    packet = op.overloadpacket
    return any(_has_structured_kernel(getattr(packet, name)) for name in packet.overloads())


def _has_structured_kernel(op: OpOverload) -> bool:
    try:
        return _dispatch_has_kernel_for_dispatch_key(dispatch_name(op), _STRUCTURED)
    except RuntimeError:  # an overload of TorchScript's alone
        return False


def _refused_by_size(call: _Call, smaller: _Call, sizes_fit: bool) -> Exception | None:
    if smaller.work > _MOST_LARGE_WORK:
        return None
    if sizes_fit or call.refused_without_contents() is None:
        if smaller in _accepted:
            return None
        if smaller.refused() is None:
            _accept(smaller)
            return None
        # A trace through decompositions of ours may have checked less.
        fits = not sizes_fit or call.refused_without_contents() is None
        if fits and smaller.refused_without_contents() is not None:
            return None  # other calls that this smaller one stands for may not fit
    # Sizes may fit where smaller ones do not, and kernels may take what others do not.
    return call.refused(lazily=True)


_accepted: set[_Call] = set()
_MOST_ACCEPTED = 1 << 14


def _accept(call: _Call) -> None:
    if len(_accepted) >= _MOST_ACCEPTED:
        _accepted.clear()
    _accepted.add(call)


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Leaves PyTorch's random numbers as they are."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        if not torch.equal(torch.get_rng_state(), before):
            torch.set_rng_state(before)


@dataclass(frozen=True)
class _Call:
    """A call with a `_Like` in the place of each tensor.

    Equal calls are refused alike: ``kinds`` are the types of numbers and the default dtype.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any
    kinds: tuple[Any, ...]

    @staticmethod
    def of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        """Raises _UnknownError: nothing can stand for an argument."""
        leaves, spec = tree_flatten((tuple(args), _with_empty_outs(function, args, kwargs)))
        storages: dict[int, int] = {}
        found = tuple(_stand_in(leaf, storages) for leaf in leaves)
        return _Call(function, found, spec, (torch.get_default_dtype(), *map(type, found)))

    @property
    def likes(self) -> list[_Like]:
        return [leaf for leaf in self.leaves if type(leaf) is _Like]

    @property
    def is_small(self) -> bool:
        """Whether the call may be made as it is."""
        return self.elements <= _MOST_ELEMENTS and self.work <= _MOST_WORK

    @property
    def elements(self) -> int:
        return sum(max(math.prod(like.sizes), like.span) for like in self.likes)

    @property
    def work(self) -> int:
        """At most: numbers may be sizes of results."""
        numbers = math.prod(abs(k) or 1 for k in self.leaves if type(k) is int)
        return max(1, self.elements) * numbers

    def shrunk(self) -> _Call:
        """The call with small sizes, and small numbers where they are sizes."""
        large = {n for like in self.likes for n in like.sizes if n > _SMALL}
        smaller = {n: _SMALL + 1 + k for k, n in enumerate(sorted(large))}
        storages = {like: k for k, like in enumerate(dict.fromkeys(self.likes))}
        leaves = tuple(_shrunk(leaf, smaller, storages) for leaf in self.leaves)
        return replace(self, leaves=leaves)

    @property
    def is_affordable(self) -> bool:
        """Whether the results are not much larger than the arguments; True if nothing tells.

        ``work`` bounds results that grow with a number, not with its square.
        """
        if all(abs(k) <= _LARGE_NUMBER for k in self.leaves if type(k) is int):
            return True
        try:
            results = self._without_contents()
        except Exception:
            return True
        found = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        return sum(result.numel() for result in found) <= _MOST_LARGE_WORK + self.elements

    def refused_without_contents(self) -> Exception | None:
        """What PyTorch raises about tensors on "meta"; not that it cannot make the call there."""
        try:
            self._without_contents()
        except NotImplementedError:
            return None
        except Exception as error:
            return None if "meta tensor" in str(error) else error
        return None

    def _without_contents(self) -> Any:
        made = {
            like: torch.empty_strided(like.sizes, like.strides, dtype=like.dtype, device="meta")
            for like in self.likes
        }
        return self._run(made, "meta")

    def refused(self, *, lazily: bool = False) -> Exception | None:
        """What the CPU raises.

        Args:
            lazily: tensors are large, and have no memory as long as nothing reads them.
        """
        if not self.is_affordable:
            return None
        error = self._error(0, False, lazily)
        if error is not None and any(text in str(error) for text in _NOT_ZERO):
            error = self._error(1, False, lazily)
        if error is not None and any(like.dtype is torch.bool for like in self.likes):
            error = self._error(0, True, lazily)  # masks that choose nothing, and assertions
            if _OF_MASK in str(error):
                return None
        return error

    def _error(self, whole: int, truth: bool, lazily: bool) -> Exception | None:
        """What the CPU raises about tensors of such numbers (zeros, ``lazily``) and bools."""
        try:
            made = _filled(self.likes, whole, truth, lazily)
        except Exception:  # a dtype that holds no numbers, or too much memory
            return None
        try:
            self._run(made, "cpu")
        except _LinAlgError:
            return None
        except Exception as error:
            return error if _counts(error) else None
        return None

    def _run(self, made: Mapping[_Like, Tensor], place: str) -> Any:
        values = []
        for leaf in self.leaves:
            if type(leaf) is _Like:
                leaf = made[leaf]
            elif isinstance(leaf, torch.device) or (type(leaf) is str and _is_place(leaf)):
                leaf = torch.device(place)
            elif type(leaf) is _Slice:
                leaf = slice(*leaf)
            elif leaf is _GENERATOR:
                leaf = Generator()
            values.append(leaf)
        args, kwargs = tree_unflatten(values, self.spec)
        return _quietly(lambda: self.function(*args, **kwargs))


def _quietly(function: Callable[[], Any]) -> Any:
    """Calls a function whose warnings from C++ are given, and so ignored, before this returns.

    PyTorch keeps them until the outermost of its functions that Python has called ends: an
    operator on device tensors, as a rule, which is no longer within `warnings.catch_warnings`. But
    ``apply_`` is also one of these functions.
    """

    results = []

    def call(value: float) -> float:
        results.append(function())
        return value

    torch.zeros(1).apply_(call)
    return results[0]


def _filled(likes: Sequence[_Like], whole: int, truth: bool, lazily: bool) -> dict[_Like, Tensor]:
    """Tensors with the same contents everywhere, which share memory as the arguments do.

    Those that are made ``lazily`` share none: they are zeros that have no memory before they are
    read, on most systems; bools are ``truth``.
    """
    made: dict[_Like, Tensor] = {}
    for like in dict.fromkeys(likes):
        near = [k for k in likes if (k.storage, k.dtype) == (like.storage, like.dtype)]
        near = [like] if lazily else near
        first = min(k.offset for k in near)
        last = max(k.offset + k.span for k in near)
        length = last - first + 2 * _MARGIN
        if lazily:
            fill = np.ones if truth and like.dtype is torch.bool else np.zeros
            memory = torch.from_numpy(fill(length * like.dtype.itemsize, np.uint8)).view(like.dtype)
        elif like is near[0] or last - first > _MOST_ELEMENTS:
            memory = torch.full((length,), like.content(whole, truth), dtype=like.dtype)
        else:
            memory = made[near[0]]
        start = _MARGIN + like.offset - first
        made[like] = torch.as_strided(memory, like.sizes, like.strides, start)
    return made


def _counts(error: Exception) -> bool:
    """Whether an error is about the call, rather than about what the CPU has kernels for."""
    text = str(error)
    kernel, found, rest = text.partition(_NO_KERNEL)
    if found:
        return not kernel.startswith(_TAKE_INTEGERS) and rest.partition("'")[0] in _INTEGERS
    of_cpu_alone = any(part in text for part in _OF_CPU_ALONE)
    return not (of_cpu_alone or isinstance(error, NotImplementedError))


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
_GENERATOR = object()


class _Slice(NamedTuple):
    """A slice, which has no hash before Python 3.12."""

    start: int | None
    stop: int | None
    step: int | None


def _with_empty_outs(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords with ``out=`` tensors that are resized without a warning, if they share nothing."""
    found = dict(kwargs)
    if not isinstance(function, OpOverload):
        return found
    outs = {argument.name for argument in function._schema.arguments if argument.is_out}
    given = tree_leaves([args, [kwargs[name] for name in kwargs.keys() - outs]])
    read = {x.untyped_storage()._cdata for x in given if _is_strided(x)}

    def empty(out: Tensor) -> Tensor:
        if not _is_strided(out) or out.untyped_storage()._cdata in read:
            return out
        return torch.empty(0, dtype=out.dtype, device="meta")

    for name in outs & kwargs.keys():
        found[name] = tree_map_only(Tensor, empty, kwargs[name])
    return found


def _is_strided(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not is_functorch_wrapped_tensor(value)
    )


def _stand_in(leaf: Any, storages: dict[int, int]) -> Any:
    if isinstance(leaf, Tensor):
        return _like(leaf, storages)
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(leaf)
    if isinstance(leaf, Generator):
        return _GENERATOR
    if isinstance(leaf, slice):
        return _Slice(*map(_number, (leaf.start, leaf.stop, leaf.step)))
    if leaf is None or leaf is Ellipsis or isinstance(leaf, (torch.device, *_PLAIN)):
        return leaf
    raise _UnknownError


def _like(tensor: Tensor, storages: dict[int, int]) -> _Like:
    if not _is_strided(tensor):
        raise _UnknownError
    storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
    offset = _number(tensor.storage_offset())
    sizes, strides = (tuple(map(_number, x)) for x in (tensor.shape, tensor.stride()))
    return _Like(tensor.dtype, sizes, strides, storage, offset)


def _number(value: Any) -> Any:
    """A number, or what a symbol is in this call."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = getattr(value.node, "hint", None)
        if not isinstance(value, (bool, int, float)):
            raise _UnknownError
    return value


def _shrunk(leaf: Any, smaller: Mapping[int, int], storages: Mapping[_Like, int]) -> Any:
    """A leaf with smaller sizes; one tensor shares memory with another only if it is the same."""
    if type(leaf) is int:
        return smaller.get(leaf, leaf)
    if type(leaf) is not _Like:
        return leaf
    sizes = tuple(smaller.get(n, n) for n in leaf.sizes)
    strides = [0] * len(sizes)
    stride = 1
    for dim in sorted(range(len(sizes)), key=lambda k: (leaf.strides[k], -k)):
        if leaf.strides[dim] or sizes[dim] == 1:
            strides[dim] = stride
            stride *= max(sizes[dim], 1)
    return _Like(leaf.dtype, sizes, tuple(strides), storages[leaf], 0)


@cache
def _is_place(text: str) -> bool:
    """Whether a string names the device."""
    return text.partition(":")[0] == _get_privateuse1_backend_name()
