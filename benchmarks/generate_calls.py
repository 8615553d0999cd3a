"""Cases of `benchmarks.generate` that call transformers' ``generate``, as most programs do."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import torch_webgpu_compile

from .goals import Goal
from .language_models import Geometry, language_model
from .limits import use_full_f32, wait_of
from .timing import seconds

_BATCHES = 3
STATIC = {"cache_implementation": "static"}
"""Steps are compiled, by CUDA into graphs."""

SAMPLED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
}


@dataclass(frozen=True)
class Call:
    """A call of ``generate`` of a model with random weights.

    Attributes:
        weights: see `language_model`.
        keywords: of ``generate``.
        draft: the geometry of a model that proposes tokens, whose ``generate`` is greedy too.
        tokens: that a call makes after the prompt's.
        prompt: its tokens, of which the second half repeats the first.
        samples_alone: what is measured is what sampling adds to a greedy call, on the GPU.
    """

    geometry: Geometry
    dtype: torch.dtype = torch.bfloat16
    goals: tuple[Goal, ...] = ()
    weights: str | None = None
    keywords: Mapping[str, Any] = field(default_factory=lambda: STATIC)
    draft: Geometry | None = None
    tokens: int = 256
    prompt: int = 64
    samples_alone: bool = False

    def small(self) -> Call:
        """The same for software adapters: it shows that it runs."""
        small = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 96}
        geometry = replace(self.geometry, **small, vocabulary=1000)
        draft = self.draft and replace(geometry, layers=1)
        return replace(self, geometry=geometry, draft=draft, tokens=6, prompt=16)


class _Generating:
    """A case's model, and its calls of ``generate``."""

    def __init__(self, case: Call, device: str) -> None:
        self.case = case
        self.model = language_model(case.geometry, case.dtype, case.weights, device)
        half = torch.arange(case.prompt // 2) * 7 % case.geometry.vocabulary
        self.ids = half.repeat(2)[None].to(device)
        self.draft = case.draft and language_model(case.draft, case.dtype, None, device)

    def __call__(self, **keywords: Any) -> Tensor:
        """The tokens, on the host."""
        given = {"do_sample": False, **self.case.keywords, **keywords}
        if self.draft is not None:
            given["assistant_model"] = self.draft
        mask = torch.ones_like(self.ids)
        result: Tensor = self.model.generate(
            self.ids, attention_mask=mask, max_new_tokens=self.case.tokens, **given
        )
        return result.cpu()


def measure_call(case: Call, device: str) -> dict[str, float]:
    """One system: ``first_s`` of the first call, ``seconds`` of a token, ``total_s`` of it all.

    Where sampling alone is asked for, ``sampling_s`` are seconds of the GPU for a token.
    """
    use_full_f32()
    torch._dynamo.reset()
    gc.collect()
    memory: Any = torch.cuda if device == "cuda" else torch.webgpu  # type: ignore[attr-defined]
    wait = wait_of(device)
    start = time.perf_counter()
    with torch.no_grad():
        generate = _Generating(case, device)
        wait()
        memory.reset_peak_memory_stats()
        held = memory.memory_allocated()
        found = {"first_s": seconds(generate)}
        generate()
        if case.samples_alone:
            found["sampling_s"] = _sampling_seconds(generate)
        found["seconds"] = (
            statistics.median(seconds(generate) for _ in range(_BATCHES)) / case.tokens
        )
    return found | {
        "extra_nbytes": memory.max_memory_allocated() - held,
        "total_s": time.perf_counter() - start,
    }


def _sampling_seconds(generate: _Generating) -> float:
    """What sampling adds to a token on the GPU, by its clock."""
    spent = []
    greedy = dict.fromkeys(SAMPLED) | {"do_sample": False}
    for keywords in ({}, greedy):
        generate(**keywords)
        generate(**keywords)  # greedy calls compile their choice later than others
        with torch_webgpu_compile.profile() as profile:
            generate(**keywords)
        spent.append(profile.seconds / generate.case.tokens)
    return spent[0] - spent[1]
