"""Which ATen operators are decomposed while a graph is traced.

An operator that lowering knows (``native``) is kept. Every other one is replaced by PyTorch's own
decomposition if there is a good one, so lowering an operator is enough to stop its decomposition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload

from . import antialiasing, counting, distances, grid_sampling, losses, random

aten = torch.ops.aten

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
FAMILIES = (antialiasing, counting, distances, grid_sampling, losses)
# Of all families.
OWN: dict[OpOverload, Decomposition] = {
    op: rule for family in FAMILIES for op, rule in family.DECOMPOSITIONS.items()
}


@cache
def _candidates() -> dict[OpOverload, Decomposition]:
    chosen: dict[OpOverload, Decomposition] = {}
    for op, decomposition in decomposition_table.items():
        if not isinstance(op, OpOverload) or op.namespace != "aten" or _is_inplace(op):
            continue
        written = inspect.unwrap(decomposition).__module__ == "torch._decomp.decompositions"
        if op in REFERENCES or (written and not op.is_view):
            chosen[op] = decomposition
    chosen.update(core_aten_decompositions())
    return chosen | OWN


def _is_inplace(op: OpOverload) -> bool:
    # AOTAutograd replaces these by their functional forms; a decomposition would bring copies back.
    return op._schema.name.endswith("_")


def table(native: Collection[OpOverload]) -> dict[OpOverload, Decomposition]:
    """The decompositions to trace with, when lowering knows the ``native`` operators."""
    kept = frozenset(native)
    chosen = {op: rule for op, rule in _candidates().items() if op not in kept}
    return chosen | random.DECOMPOSITIONS
