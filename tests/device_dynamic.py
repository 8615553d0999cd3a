"""A sample at three sizes: the graph that is compiled for the second serves the third."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_webgpu_compile import counters


class Recompiled(Exception):
    """Sizes of a kind that had been seen twice were compiled for once more."""


FACTORS = (1, 2, 3)

_SINGULAR = "a matrix of repeated rows is singular"
NOT_REPEATED = {
    "bucketize": "boundaries have to be in order",
    "histogram": "edges have to be in order",
    "histogramdd": "edges have to be in order",
    "linalg.cholesky_ex": _SINGULAR,
    "linalg.inv_ex": _SINGULAR,
    "logdet": _SINGULAR,
    "lu": _SINGULAR,
    "nn.functional.embedding_bag": "offsets have to be in order",
    "searchsorted": "the sequence has to be in order",
}
"""By operator name, with the reason."""


def grown(values: Any, factor: int, few: bool) -> Any:
    """Every dimension of more than one element, of every tensor, repeated; all contiguous.

    Args:
        factor: how often a dimension is repeated.
        few: repeat as many elements only, of each dimension, as there are factors above 1.
    """

    def grow(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            return tensor
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                wanted = size + factor - 1 if few else size * factor
                tensor = tensor.index_select(dim, torch.arange(wanted) % size)
        return tensor.contiguous()

    return tree_map_only(Tensor, grow, values)


def is_large(values: Any) -> bool:
    """Whether a tensor would have very many elements with each dimension repeated."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return any(tensor.numel() * FACTORS[-1] ** tensor.dim() > 1 << 15 for tensor in leaves)


def can_grow(values: Any) -> bool:
    """Whether some tensor has a dimension to repeat, and none is empty: 0 is a size of its own."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    sizes = [size for tensor in leaves for size in tensor.shape]
    return any(size > 1 for size in sizes) and 0 not in sizes


class Compilations:
    """Counts the plans that are compiled while it is entered."""

    def __enter__(self) -> Compilations:
        self._before = counters.plans_compiled
        self.count = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.count = counters.plans_compiled - self._before
