"""Modules whose weights are those of a GGUF file, packed (`torch_ops.gguf`).

Each takes the place of the module of a model before its weights are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..torch_ops import gguf


def _empty(ggml_type: int, *sizes: int) -> nn.Parameter:
    """A weight of so many elements that is to be loaded."""
    *outer, columns = sizes
    words = gguf.row_words(ggml_type, columns)
    return nn.Parameter(torch.empty(*outer, words, dtype=torch.int32), requires_grad=False)


class PackedLinear(nn.Module):
    """A linear layer with a weight (out_features, words of a row)."""

    def __init__(self, in_features: int, out_features: int, ggml_type: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.ggml_type = ggml_type
        self.weight = _empty(ggml_type, out_features, in_features)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.input_permutation: Tensor | None
        self.register_buffer("input_permutation", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features) in the dtype of ``x``."""
        if self.input_permutation is not None:
            x = x.index_select(-1, self.input_permutation)
        result: Tensor = gguf.linear(x, self.weight, self.ggml_type, self.bias)
        return result

    def extra_repr(self) -> str:
        """Sizes and format."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {gguf.name_of(self.ggml_type)}"


class PackedEmbedding(nn.Module):
    """An embedding with a weight (num_embeddings, words of a row).

    Args:
        dtype: of the rows.
        scale: what rows are multiplied with.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ggml_type: int,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.ggml_type, self.dtype = ggml_type, dtype
        self.weight = _empty(ggml_type, num_embeddings, embedding_dim)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()  # rounded

    def forward(self, input_ids: Tensor) -> Tensor:
        """Integers (…) to (…, embedding_dim)."""
        given = input_ids, self.weight, self.ggml_type, self.embedding_dim, self.dtype
        result: Tensor = gguf.embedding(*given)
        return result if self.scale == 1 else result * self.scale

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {gguf.name_of(self.ggml_type)}"


class PackedExperts(nn.Module):
    """The experts of a layer: gated feed-forward networks, of which each token has some.

    Their weights are (experts, 2 · intermediate, words of a row), the gate's rows first, and
    (experts, hidden, words of a row).

    Args:
        like: the model's experts.
    """

    def __init__(self, like: Any, gate_up_type: int, down_type: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = like.num_experts, like.act_fn
        self.hidden_dim, self.intermediate_dim = like.hidden_dim, like.intermediate_dim
        self.gate_up_type, self.down_type = gate_up_type, down_type
        sizes = self.num_experts, 2 * self.intermediate_dim, self.hidden_dim
        self.gate_up_proj = _empty(gate_up_type, *sizes)
        sizes = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.down_proj = _empty(down_type, *sizes)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sums of what a token's experts give, by their weights.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index, top_k_weights: (tokens, experts of a token).

        Returns:
            (tokens, hidden)
        """
        both = gguf.experts(hidden_states, self.gate_up_proj, self.gate_up_type, top_k_index)
        gate, up = both.chunk(2, -1)
        inner = (self.act_fn(gate) * up).flatten(0, 1)
        ids = top_k_index.reshape(-1, 1)
        found = gguf.experts(inner, self.down_proj, self.down_type, ids).view(*both.shape[:2], -1)
        result: Tensor = (found * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)
        return result

    def extra_repr(self) -> str:
        """Sizes and formats."""
        kinds = {gguf.name_of(kind): None for kind in (self.gate_up_type, self.down_type)}
        return f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}, {', '.join(kinds)}"
