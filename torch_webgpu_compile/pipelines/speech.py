"""A Whisper model as two entries: what is heard, with the first token of its text, and the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..exports.export import EntryPoint


class LogMel(nn.Module):
    """What a feature extractor of Whisper makes of samples: float32 (samples,) → (1, mels, frames).

    The Fourier transform of a frame, which is windowed, is a product with sines and cosines.
    """

    waves: Tensor
    filters: Tensor

    def __init__(self, extractor: Any, device: torch.device) -> None:
        super().__init__()
        size: int = extractor.n_fft
        here: Any = {"device": device, "dtype": torch.float32}
        turns = torch.outer(torch.arange(size), torch.arange(size // 2 + 1)) % size
        angles = turns.to(torch.float64) * (2 * torch.pi / size)
        window = torch.hann_window(size, dtype=torch.float64)[:, None]
        waves = torch.cat([angles.cos() * window, angles.sin() * window], dim=1)
        self.size, self.hop = size, extractor.hop_length
        self.register_buffer("waves", waves.to(**here))
        self.register_buffer("filters", torch.tensor(extractor.mel_filters).to(**here))

    def forward(self, samples: Tensor) -> Tensor:
        padded = nn.functional.pad(samples[None], (self.size // 2,) * 2, mode="reflect")[0]
        frames = padded.unfold(0, self.size, self.hop)[:-1]
        real, imaginary = (frames @ self.waves).chunk(2, dim=1)
        mels = (real.square() + imaginary.square()) @ self.filters
        levels = mels.clamp(min=1e-10).log10()
        levels = torch.maximum(levels, levels.amax() - 8)
        return ((levels + 4) / 4).T[None]


def speech_entries(
    model: Any, extractor: Any, begin: int, length: int, names: Any
) -> dict[str, EntryPoint]:
    """``listen`` and ``decode``, which share caches.

    Args:
        begin: tokens that a text begins with, before its first word.
        length: of a text, in tokens.
        names: of tokens that no text has (``suppress_tokens``), and none begins with.
    """
    from transformers import EncoderDecoderCache, StaticCache

    config = model.config
    frames = config.max_source_positions
    cache: Any = EncoderDecoderCache(
        StaticCache(config, max_cache_len=length), StaticCache(config, max_cache_len=frames)
    )
    log_mel = LogMel(extractor, model.device)
    here: Any = {"device": model.device}
    words = torch.arange(config.vocab_size)
    never = torch.isin(words, torch.tensor(names.suppress_tokens or [-1]))
    not_first = never | torch.isin(words, torch.tensor(names.begin_suppress_tokens or [-1]))
    never, not_first = never.to(**here), not_first.to(**here)

    def step(ids: Tensor, position: Tensor, heard: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        found = model.model.decoder(
            input_ids=ids,
            position_ids=position[None],
            encoder_hidden_states=heard,
            cache=cache,
            use_cache=True,
        )
        logits = model.proj_out(found.last_hidden_state[:, -1]).float()
        token = logits.masked_fill(hidden, float("-inf")).argmax(-1, keepdim=True)
        return {"token": token, "position": position[-1:] + 1}

    def listen(samples: Tensor, ids: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for part in (cache.self_attention_cache, cache.cross_attention_cache):
                for layer in part.layers:
                    layer.cumulative_length.zero_()
            cache.is_updated = dict.fromkeys(cache.is_updated, False)
            features = log_mel(samples).to(model.dtype)
            heard = model.model.encoder(features).last_hidden_state
            return step(ids, torch.arange(begin, device=ids.device), heard, not_first)

    # Keys and values of what was heard are in the cache.
    nothing = torch.zeros((1, frames, config.d_model), dtype=model.dtype, **here)

    def decode(ids: Tensor, position: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            cache.is_updated = dict.fromkeys(cache.is_updated, True)
            return step(ids, position, nothing, never)

    samples = torch.zeros(extractor.n_samples, **here)
    ids = torch.zeros((1, begin), dtype=torch.int64, **here)
    listen(samples, ids)  # makes the caches' tensors
    cache.reset()
    return {
        "listen": EntryPoint(listen, (samples, ids)),
        "decode": EntryPoint(decode, (ids[:, :1], torch.full((1,), begin, **here))),
    }
