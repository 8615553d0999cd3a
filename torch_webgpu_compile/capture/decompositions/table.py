"""Which ATen operators are decomposed while a graph is traced.

An operator that lowering knows (``native``) is kept. Every other one is replaced by PyTorch's own
decomposition if there is a good one, so lowering an operator is enough to stop its decomposition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import torch

from ...torch_ops.names import dispatch_name
from ...torch_private import (
    DispatchKey,
    OpOverload,
    _dispatch_get_all_op_names,
    _dispatch_has_kernel_for_dispatch_key,
    core_aten_decompositions,
    decomposition_table,
)
from . import (
    counting,
    ctc,
    distributions,
    factorizations,
    fused_optimizers,
    grouped,
    jagged,
    losses,
    packed_weights,
    products,
    quantization,
    random,
    recurrent,
    sampling,
    segments,
    synchronized_norm,
    weight_norm,
    windows,
)

aten = torch.ops.aten

_COMPOSITE = DispatchKey.CompositeExplicitAutograd

Decomposition = Callable[..., Any]

# PyTorch's table has two kinds of rows outside of the core set. Those written as decompositions are
# all used. Reference implementations (``torch._refs``) mostly end in primitive operators
# (``prims``), which nothing lowers; these end in ATen operators.
REFERENCES: frozenset[OpOverload] = frozenset(
    {
        aten.alpha_dropout.default,
        aten.as_strided_scatter.default,
        aten.diagonal_scatter.default,
        aten.elu.default,
        aten.gelu.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.linalg_vector_norm.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
        aten.var_mean.correction,
    }
)


# Rules for operators that PyTorch has none for, or one with other results than its kernels.
FAMILIES = (
    *(counting, ctc, distributions, factorizations, fused_optimizers, grouped, jagged, losses),
    *(packed_weights, products, quantization, recurrent, sampling, segments),
    *(synchronized_norm, weight_norm, windows),
)
# Of all families.
OWN: dict[OpOverload, Decomposition] = {
    op: rule for family in FAMILIES for op, rule in family.DECOMPOSITIONS.items()
}


@cache
def _candidates() -> dict[OpOverload, Decomposition]:
    chosen: dict[OpOverload, Decomposition] = {}
    for op, decomposition in decomposition_table.items():
        if not isinstance(op, OpOverload) or op.namespace != "aten":
            continue
        if op._schema.name.endswith("_"):
            continue  # AOTAutograd has functional forms; decompositions would bring copies back
        written = inspect.unwrap(decomposition).__module__ == "torch._decomp.decompositions"
        if op in REFERENCES or (written and not op.is_view):
            chosen[op] = decomposition
    chosen.update(core_aten_decompositions())
    return chosen | _of_lists() | OWN


def _of_lists() -> dict[OpOverload, Decomposition]:
    """``_foreach`` operators, tensor by tensor: their composite kernels call other operators."""
    found: dict[OpOverload, Decomposition] = {}
    for name in _dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        packet, _, overload = short.partition(".")
        if not short.startswith("_foreach_") or overload.endswith("out"):
            continue
        op: OpOverload = getattr(getattr(aten, packet), overload or "default")
        if not op._schema.is_mutable and is_composite(op):
            found[op] = partial(op._op_dk, _COMPOSITE)
    return found | _LISTS_FROM_IN_PLACE


# PyTorch made the functional forms of these from the in-place ones, which they call.
_LISTS_FROM_IN_PLACE: dict[OpOverload, Decomposition] = {
    aten._foreach_zero.default: lambda tensors: [aten.zeros_like.default(x) for x in tensors],
    aten._foreach_copy.default: lambda tensors, sources, non_blocking=False: [
        aten.copy.default(x, source) for x, source in zip(tensors, sources, strict=True)
    ],
}


def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch implements an operator, on any device, by calls of other operators."""
    return _dispatch_has_kernel_for_dispatch_key(dispatch_name(op), _COMPOSITE)


def decompositions(native: Collection[OpOverload]) -> dict[Any, Decomposition]:
    """The decompositions to trace with, when lowering knows the ``native`` operators.

    Keys are overloads and higher-order operators.
    """
    kept = frozenset(native)
    # A rule of this package returns NotImplemented where it leaves a call to lowering.
    chosen: dict[Any, Decomposition] = {
        op: rule for op, rule in _candidates().items() if op not in kept or op in OWN
    }
    # Registered when Dynamo first writes it, for ``addcmul_`` and ``addcdiv_`` with a number.
    fma = getattr(torch.ops.prims, "fma", None)
    if fma is not None:
        chosen[fma.default] = _fma
    # The gradient of what a score_mod captures; registered with `flex_attention`.
    scatter = getattr(torch.ops.flex_lib, "zeros_and_scatter", None)
    if scatter is not None:
        chosen[scatter.default] = _zeros_and_scatter
    chosen.update(quantization.of_integers())
    chosen.update(grouped.of_transformers())
    if hasattr(torch.ops.webgpu, "gguf_linear"):
        from . import gguf_weights

        chosen.update(gguf_weights.DECOMPOSITIONS)
    chosen[torch.ops.higher_order.out_dtype] = quantization.with_out_dtype
    return chosen | random.DECOMPOSITIONS


def _zeros_and_scatter(
    shape: list[int], indices: list[torch.Tensor | None], vals: torch.Tensor
) -> torch.Tensor:
    return torch.index_put(vals.new_zeros(shape), indices, vals, accumulate=True)


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a·b + c, with one rounding to 16 bits."""
    return torch.addcmul(c, a, b) if isinstance(b, torch.Tensor) else torch.add(c, a, alpha=b)
