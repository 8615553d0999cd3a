"""A causal language model as two entries that share a cache, with the choice of a token in them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from ..exports.export import EntryPoint

MOST_WORDS = 64
"""Of which a token is drawn at most: `chosen` orders so many."""


def lengths(config: Any, most: int) -> dict[str, int]:
    """The most tokens of a prompt and of a whole text: no more than a model has positions.

    Nor more than its window sees: a cache that forgets is not exported.
    """
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window")]
    length = min([most, *(limit for limit in limits if limit)])
    return {"prompt": length // 2, "length": length}


def chosen(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """A token for each row of logits (rows, words), int64 (rows, 1).

    Drawn from the softmax of logits / temperature over the best ``top_k`` words, at most
    `MOST_WORDS`, of which those count that come before a sum of ``top_p``. Without temperature it
    is the best.
    """
    best = logits.topk(min(MOST_WORDS, logits.shape[-1]), dim=-1)
    scaled = best.values / temperature.clamp(min=1e-6)
    number = torch.arange(best.values.shape[-1], device=logits.device)
    scaled = scaled.masked_fill(number >= top_k.clamp(min=1), float("-inf"))
    shares = scaled.softmax(-1)
    is_beyond = (shares.cumsum(-1) - shares >= top_p) & (number > 0)
    # The highest after Gumbel noise is a draw from the softmax.
    noise = -torch.empty_like(scaled).exponential_().log()
    noisy = scaled.masked_fill(is_beyond, float("-inf")) + noise * (temperature > 0)
    return best.indices.gather(-1, noisy.argmax(-1, keepdim=True))


def text_entries(model: Any, prompt: int, length: int) -> dict[str, EntryPoint]:
    """``prefill`` of at most ``prompt`` tokens, ``decode`` of one, and a cache of ``length``."""
    from transformers import StaticCache

    # Within its window a layer sees all, and a cache that forgets counts its tokens in Python.
    whole = copy.deepcopy(model.config.get_text_config(decoder=True))
    whole.sliding_window = None
    if getattr(whole, "layer_types", None):
        seen = {"sliding_attention": "full_attention"}
        whole.layer_types = [seen.get(kind, kind) for kind in whole.layer_types]
    cache: Any = StaticCache(whole, max_cache_len=length)

    # transformers 5.24 has another name for it, and warns of the one before.
    is_renamed = "cache" in inspect.signature(model.forward).parameters
    kept = {"cache" if is_renamed else "past_key_values": cache, "use_cache": True}

    def step(
        ids: Tensor, position: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            found = model(ids, position_ids=position[None], logits_to_keep=1, **kept)
        token = chosen(found.logits[:, -1].float(), temperature, top_k, top_p)
        return {"token": token, "position": position[-1:] + 1}

    here: Any = {"device": model.device}
    how = (
        torch.tensor(0.7, **here),
        torch.tensor(20, **here),
        torch.tensor(1.0, **here),
    )
    ids = torch.zeros((1, 5), dtype=torch.int64, **here)
    positions = torch.arange(5, **here)
    step(ids, positions, *how)  # makes the cache's tensors
    cache.reset()
    tokens = Dim("tokens", min=2, max=prompt)  # of one, `decode` is the prefill
    shapes = ({1: tokens}, {0: tokens}, None, None, None)
    return {
        "prefill": EntryPoint(step, (ids, positions, *how), None, shapes),
        "decode": EntryPoint(step, (ids[:, :1], positions[-1:] + 1, *how)),
    }
