"""Modules whose weights are those of a GGUF file, packed on the device (`torch_ops.gguf`).

Each takes the place of transformers' module of the same kind, which has the blocks as they are in
the file, and leaves it with nothing but the planes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_ops import gguf


class PackedLinear(nn.Module):
    """A linear layer.

    Args:
        source: transformers' ``GgufLinear``, with a weight (out_features, words of a row).
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.ggml_type = source.ggml_type
        self.weight, self.bias = source.weight, source.bias
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
        source: transformers' ``GgufEmbedding``, with a weight (num_embeddings, words of a row) and
            with the ``scale`` that rows are multiplied with.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.ggml_type, self.dtype = source.ggml_type, source.compute_dtype
        self.weight = source.weight
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
        source: transformers' ``GgufExperts``, with weights (experts, 2 · intermediate, words of a
            row), the gate's rows first, and (experts, hidden, words of a row).
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = source.num_experts, source.act_fn
        self.hidden_dim, self.intermediate_dim = source.hidden_dim, source.intermediate_dim
        self.gate_up_type, self.down_type = source.gate_up_type, source.down_type
        self.gate_up_proj, self.down_proj = source.gate_up_proj, source.down_proj

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


_WEIGHTS: dict[str, tuple[Callable[[Any], nn.Module], dict[str, str]]] = {
    "GgufLinear": (PackedLinear, {"weight": "ggml_type"}),
    "GgufEmbedding": (PackedEmbedding, {"weight": "ggml_type"}),
    "GgufExperts": (PackedExperts, {"gate_up_proj": "gate_up_type", "down_proj": "down_type"}),
}
"""For each of transformers' modules ours, and the names of its weights and of their formats."""


def pack(model: nn.Module) -> None:
    """Packs all weights that transformers has loaded as blocks, each in place, and their modules.

    Parameters stay what they are, so that those that modules share are shared.
    """
    packed: set[nn.Parameter] = set()
    for name, source in [*model.named_modules(remove_duplicate=False)]:
        ours, weights = _WEIGHTS.get(type(source).__name__, (None, {}))
        for weight, kind in weights.items():
            parameter = getattr(source, weight)
            if parameter not in packed:
                parameter.data = gguf.pack(parameter.data, getattr(source, kind))
                packed.add(parameter)
        if ours is not None:
            model.set_submodule(name, ours(source))
