"""Products with the weights of GGUF files: ``webgpu::gguf_…`` (`torch_ops.gguf`).

They become operations on single elements of the words and one product, which a kernel does where it
reads them. Imported where the operators are known: registering them takes 13 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import gguf
from ...torch_private import OpOverload
from .grouped import grouped_mm


def experts(input: Tensor, weight: Tensor, ggml_type: int, ids: Tensor) -> Tensor:
    """``webgpu::gguf_experts``: see `gguf.experts_of_parts`.

    More rows than experts are put in the order of these, so that a weight is read once for several.
    """
    count, each = ids.shape
    if isinstance(count, int) and count * each <= 2 * weight.shape[0]:
        return gguf.experts_of_parts(input, weight, ggml_type, ids)
    chosen = ids.flatten()
    order = chosen.argsort()
    whole = gguf.dequantized(weight, ggml_type, input.shape[1])
    matrices = gguf.multiplied(whole, chosen.shape[0], input.dtype)
    numbers = torch.arange(weight.shape[0], device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(chosen[order], numbers, right=True)
    products = grouped_mm(input.to(matrices.dtype)[order // each], matrices.mT, ends)
    results = torch.zeros_like(products).index_put((order,), products)
    return results.to(input.dtype).view(count, each, -1)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    gguf.fields: gguf.fields_of_parts,
    gguf.linear: gguf.linear_of_parts,
    gguf.embedding: gguf.embedding_of_parts,
    gguf.experts: experts,
}
