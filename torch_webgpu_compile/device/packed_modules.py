"""Modules whose weights are those of a GGUF file, packed on the device (`torch_ops.gguf`).

Each takes the place of transformers' module of the same kind, which has the blocks as they are in
the file, and leaves it with nothing but the planes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..torch_ops import gguf


class PackedLinear(nn.Module):
    """A linear layer.

    Args:
        source: transformers' ``GgufLinear``.
        weight: int32 (out_features, words of a row).
    """

    def __init__(self, source: Any, weight: nn.Parameter) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.ggml_type = source.ggml_type
        self.weight, self.bias = weight, source.bias
        self.input_permutation: Tensor | None
        self.register_buffer("input_permutation", source.input_permutation, persistent=False)

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
    """An embedding.

    Args:
        source: transformers' ``GgufEmbedding``, with the ``scale`` that rows are multiplied with.
        weight: int32 (num_embeddings, words of a row).
    """

    def __init__(self, source: Any, weight: nn.Parameter) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.ggml_type, self.dtype = source.ggml_type, source.compute_dtype
        self.weight = weight
        self.scale = torch.tensor(source.scale, dtype=self.dtype, device="cpu").item()  # rounded

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

    Args:
        source: transformers' ``GgufExperts``.
        gate_up: int32 (experts, 2 · intermediate, words of a row), the gate's rows first.
        down: int32 (experts, hidden, words of a row).
    """

    def __init__(self, source: Any, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.num_experts, self.act_fn = source.num_experts, source.act_fn
        self.hidden_dim, self.intermediate_dim = source.hidden_dim, source.intermediate_dim
        self.gate_up_type, self.down_type = source.gate_up_type, source.down_type
        self.gate_up_proj, self.down_proj = gate_up, down

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


class Packing:
    """Makes packed modules of transformers', a weight that several share once."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """The packed module for one of transformers', or the module itself."""
        source: Any = module
        match type(module).__name__:
            case "GgufLinear":
                return PackedLinear(source, self._weight(source.weight, source.ggml_type))
            case "GgufEmbedding":
                return PackedEmbedding(source, self._weight(source.weight, source.ggml_type))
            case "GgufExperts":
                gate_up = self._weight(source.gate_up_proj, source.gate_up_type)
                down = self._weight(source.down_proj, source.down_type)
                return PackedExperts(source, gate_up, down)
        return module

    def _weight(self, blocks: Any, ggml_type: int) -> nn.Parameter:
        found = self._packed.get(id(blocks))
        if found is None:
            with torch.no_grad():
                packed = nn.Parameter(gguf.pack(blocks.data, ggml_type), requires_grad=False)
            found = self._packed[id(blocks)] = (blocks, packed)
        return found[1]
