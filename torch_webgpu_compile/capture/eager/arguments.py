"""The arguments of a captured call: as the trace sees them, and when two calls are the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch

from ...errors import UnsupportedOp
from ...torch_private import OpOverload, _should_allow_numbers_as_tensors, tree_leaves
from .calls import TensorSpec

_CPU = torch.device("cpu")

# Which ``SymInt`` arguments are sizes. Others, such as strides and paddings, choose the code.
_SIZES = frozenset(
    {"size", "sizes", "self_sizes", "input_size", "input_sizes", "output_size", "bias_sizes"}
    | {"normalized_shape", "shape", "n", "m", "N", "C", "HxW", "start", "end", "length"}
    | {"num_weights", "repeats", "split_size", "split_sizes", "index", "max_q", "max_k"}
    | {"num_samples", "last_dim_size", "k"}
)
# Integers of any sign that only move, count, select or bound elements.
_SIGNED = frozenset(
    {"shifts", "pad", "diagonal", "ignore_index", "bins", "steps", "low", "high", "from", "to"}
)
# Operators whose numbers choose the code or the sizes of the result.
_STATIC_NUMBERS = frozenset({"special_polygamma", "range"})
# Numbers that have code of their own, by the argument's name: products, roots, comparisons with 0.
_SPECIAL: dict[str, frozenset[float]] = {
    "exponent": frozenset({-2, -1, -0.5, 0, 0.5, 1, 2, 3}),
    **dict.fromkeys(("ord", "p", "norm_type"), frozenset({0, 1, 2})),
    "beta": frozenset({0}),
    "dropout_p": frozenset({0, 1}),
}
_NONE: frozenset[float] = frozenset()
# Operators whose integers may be symbols, but not their floats.
_STATIC_FLOATS = frozenset({"arange"})
# Numbers that seldom change, whose float32 value would cost accuracy: beta2 ** step.
_STATIC_NAMES = frozenset({"beta2"})
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
_WIDE = (torch.float64, torch.complex128)
# Numbers that are promoted with tensors: beside integers only, they make the result a float.
_OPERANDS = frozenset({"self", "other", "exponent", "min", "max"})
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat)
MAX_INT = (1 << 31) - 1  # what a kernel's parameter holds


def as_traced(leaf: Any) -> Any:
    """An argument as the trace sees it: on the CPU, with the default generator."""
    if isinstance(leaf, torch.device):
        return _CPU
    return None if isinstance(leaf, torch.Generator) else leaf


def without_placement(named: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an operator without what only places its result (``pin_memory``).

    Raises UnsupportedOp: for a ``layout`` other than strided.
    """
    if named.get("layout") not in (None, torch.strided):
        raise UnsupportedOp(
            "layout=", f"{named['layout']} tensors cannot be stored", "run it on the host"
        )
    if named.get("pin_memory"):
        return {**named, "pin_memory": False}
    return named


def with_tensors(op: OpOverload, positional: Sequence[Any]) -> list[Any]:
    """Arguments with a tensor in place of a number where the operator takes no numbers."""
    arguments = op._schema.arguments[: len(positional)]
    wrapped = [
        k
        for k, argument in enumerate(arguments)
        if isinstance(positional[k], _NUMBERS) and _is_tensor(argument.type)
    ]
    name = op._schema.name.split("::")[1]
    if not wrapped or _should_allow_numbers_as_tensors(name):
        return list(positional)
    tensors = [value for value in positional if isinstance(value, torch.Tensor)]
    return [
        _wrapped(value, tensors) if k in wrapped else value for k, value in enumerate(positional)
    ]


def _is_tensor(kind: Any) -> bool:
    return str(kind) in ("Tensor", "Optional[Tensor]")


def _wrapped(value: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number as a tensor that leaves the dtype of the result to ``tensors``, as a number does."""
    kind: Any = float if isinstance(value, (float, torch.SymFloat)) else int
    kind = bool if isinstance(value, bool) else kind
    kind = complex if isinstance(value, complex) else kind
    real = torch.get_default_dtype()
    dtypes = {complex: real.to_complex(), float: real, int: torch.int64, bool: torch.bool}
    dtype = dtypes[kind]
    if tensors and not any(tensor.dim() for tensor in tensors):
        found = [torch.result_type(tensor, kind(1)) for tensor in tensors]
        dtype = reduce(torch.promote_types, found)
    return torch.scalar_tensor(value, dtype=dtype)


def as_written(value: Any, spec: TensorSpec) -> Any:
    """A tensor's values, made of its memory.

    The memory of a lazily conjugated or negated tensor holds the conjugates or negatives.
    """
    if spec.conj:
        value = torch.ops.aten._conj_physical.default(value)
    return torch.ops.aten.neg.default(value) if spec.neg else value


def overlap(specs: Sequence[TensorSpec]) -> bool:
    """Whether any two of the tensors lie in the same memory."""
    return len({spec.memory for spec in specs}) < len(specs)


def key_of(leaf: Any) -> Any:
    """What has to be equal for two arguments to be served by the same compiled call.

    Of a tensor: dtype, sizes, strides, offset and lazy conjugation or negation. Of anything else:
    its type and value, where 0.0 and -0.0 differ.
    """
    if isinstance(leaf, TensorSpec):
        return leaf.dtype, leaf.sizes, leaf.strides, leaf.offset, leaf.conj, leaf.neg
    leaf = as_traced(leaf)
    # 1, 1.0 and True are equal in Python but not to an operator, and -0.0 is not 0.0.
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def symbolic_leaves(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Sequence[Any],
) -> dict[int, frozenset[float]]:
    """The leaves with numbers that can be symbols: where other values give the same code.

    A function of the call alone. Where a decomposition asks for a value, its answer is a guard of
    what was traced. What lowering asks for is known here: the values that each leaf may not have.
    """
    if _base_name(op) in _STATIC_NUMBERS:
        return {}
    floats = _floats_allowed(op, leaves, kwargs.get("dtype"))
    dtypes = {x.dtype for x in leaves if isinstance(x, TensorSpec)}
    are_integers = bool(dtypes) and dtypes.issubset(_INTEGERS)
    sizes = _size_names(op)
    signed = _SIGNED | {"padding"} if "_pad" in _base_name(op) else _SIGNED
    found: dict[int, frozenset[float]] = {}
    leaf = 0
    for name, kind, value in _bound(op, args, kwargs):
        for item in tree_leaves(value):
            is_number = "number" in kind or (kind.startswith(("Tensor", "Optional[Tensor")))
            special = _SPECIAL.get(name, _NONE)
            if type(item) is int and -MAX_INT <= item <= MAX_INT:
                is_size = item >= 2 and name in sizes
                chosen = is_size or (item not in (0, 1) and (is_number or name in signed))
            elif type(item) is float and math.isfinite(item):
                is_float = "float" in kind and name not in _STATIC_NAMES
                is_data = name in _OPERANDS if are_integers else is_number or is_float
                chosen = floats and is_data
            else:
                chosen = False
            if chosen and item not in special:
                found[leaf] = special
            leaf += 1
    return found


# Dimensions of tensors, by their names, whose sizes choose the code: windows are unrolled, a head's
# elements are in registers, and the channels of groups tell how groups are computed.
_FIXED_SIZES: Mapping[str, Mapping[str, slice]] = {
    "convolution": {"weight": slice(2, None)},
    "attention": dict.fromkeys(("query", "key", "value"), slice(-1, None)),
}
_FIXED_OF_GROUPS = {"weight": slice(None), **dict.fromkeys(("input", "grad_output"), slice(1, 2))}


# Arguments whose sizes have to agree. Where their layouts do, too, as most have it, they share
# symbols: a result with the sizes of one and the layout of the other is no copy then.
_ALIKE: Mapping[str, frozenset[str]] = {"fused_attention": frozenset({"key", "value"})}


def groups_of_equals(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Sequence[int]]:
    """The leaves that are tensors of one shape and one layout: each such list, and see `_ALIKE`.

    Args:
        args, kwargs: with a `TensorSpec` for each tensor.
    """
    alike = next((names for part, names in _ALIKE.items() if part in op._schema.name), ())
    named: dict[int, TensorSpec] = {}
    leaf = 0
    for name, _, value in _bound(op, args, kwargs):
        count = len(tree_leaves(value))
        entries = value if isinstance(value, (list, tuple)) else ()
        specs = [entry for entry in entries if isinstance(entry, TensorSpec)]
        if 1 < len(specs) == len(entries) and _are_equal(specs):
            yield range(leaf, leaf + count)
        if name in alike and isinstance(value, TensorSpec):
            named[leaf] = value
        leaf += count
    if len(named) > 1 and _are_equal(named.values()):
        yield tuple(named)


def _are_equal(specs: Iterable[TensorSpec]) -> bool:
    return len({(spec.sizes, spec.strides) for spec in specs}) == 1


def size_leaves(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """The leaves that are sizes, and (leaf, dimension) of the sizes that choose the code."""
    names, name = _size_names(op), op._schema.name
    dims = next((named for part, named in _FIXED_SIZES.items() if part in name), {})
    bound = list(_bound(op, args, kwargs))
    if "convolution" in name and any(n == "groups" and value != 1 for n, _, value in bound):
        dims = _FIXED_OF_GROUPS
    integers: list[int] = []
    fixed: list[tuple[int, int]] = []
    leaf = 0
    for argument, _, value in bound:
        for item in tree_leaves(value):
            if type(item) is int and argument in names:
                integers.append(leaf)
            elif isinstance(item, TensorSpec) and argument in dims:
                fixed += [(leaf, dim) for dim in range(len(item.sizes))[dims[argument]]]
            leaf += 1
    return frozenset(integers), frozenset(fixed)


def _base_name(op: OpOverload) -> str:
    """The operator's name, the same in place."""
    return op._schema.name.split("::")[1].rstrip("_")


def _bound(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """(name, type, value) of each argument, in the order of the leaves."""
    by_name = {argument.name: str(argument.type) for argument in op._schema.arguments}
    for argument, value in zip(op._schema.arguments, args, strict=False):
        yield argument.name, str(argument.type), value
    for name, value in kwargs.items():
        yield name, by_name.get(name, ""), value


@lru_cache(maxsize=4096)
def _size_names(op: OpOverload) -> frozenset[str]:
    # The type of a SymInt argument is "int" everywhere but in the text of the schema.
    return frozenset(re.findall(r"SymInt\S* (\w+)", str(op._schema).split("->")[0])) & _SIZES


def number_dtype(leaves: Sequence[Any]) -> torch.dtype:
    """What holds the numbers of calls with these leaves: float64 where one of them is as wide."""
    found = {x.dtype for x in leaves if isinstance(x, TensorSpec)}
    found |= {x for x in leaves if isinstance(x, torch.dtype)}
    found = found.difference(_INTEGERS) or {torch.get_default_dtype()}
    return torch.float32 if found.isdisjoint(_WIDE) else torch.float64


def _floats_allowed(op: OpOverload, leaves: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Whether PyTorch computes with the operator's numbers in their `number_dtype` at most."""
    found = [leaf.dtype for leaf in leaves if isinstance(leaf, TensorSpec)]
    name = _base_name(op)
    if name in _STATIC_FLOATS:
        return False
    floats = _FLOATS + (_WIDE if number_dtype(leaves) is torch.float64 else ())
    if not found:
        return (dtype or torch.get_default_dtype()) in floats
    return dtype in (None, *floats) and all(d in floats or d in _INTEGERS for d in found)
