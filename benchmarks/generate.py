"""Tokens per second of a language model, as a user of `torch.compile` generates them.

``python -m benchmarks.generate [--small] [--output FILE] [case …]`` decodes greedily, each token
from the one before it, in the middle of a static cache of 1024 positions, with the geometry of
Llama 3.2 1B and a vocabulary of 32,000; ``prefill`` is 512 tokens at once. With CUDA, Inductor with
CUDA graphs does the same beside it. Bytes are those of the weights that a step reads and of the
cache: what they allow at the rate of a copy is the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_webgpu_compile.device.autoload import register

from .cases import static_cache
from .limits import copy_bytes_per_second, synchronize, use_full_f32
from .timing import host_seconds_per_call, seconds_per_call

POSITIONS, FILLED, PROMPT = 1024, 500, 512
_BATCHES, _STEPS = 5, 60


@dataclass(frozen=True)
class Case:
    """``goal``: tokens per second; ``ratio``: to CUDA graphs, or Inductor for the prefill."""

    dtype: torch.dtype
    batch: int = 1
    is_prefill: bool = False
    goal: float | None = None
    ratio: float | None = None


CASES = {
    "decode_f32": Case(torch.float32, goal=900),
    "decode_bf16": Case(torch.bfloat16, goal=1100, ratio=1.5),
    "decode_f16": Case(torch.float16),
    "decode_bf16_batch8": Case(torch.bfloat16, batch=8),
    "prefill_f32": Case(torch.float32, is_prefill=True, ratio=1.0),
}


def _config(small: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256 if small else 2048,
        intermediate_size=512 if small else 8192,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1000 if small else 32000,
        max_position_embeddings=4096,
    )


class Step(nn.Module):
    """(token, position), batch × 1 each → the next ones; writes the cache in place."""

    def __init__(self, config: Any, case: Case, device: str) -> None:
        from transformers import LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).eval().to(case.dtype).to(device)
        self.cache = static_cache(config, POSITIONS, case.batch, case.dtype, device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    def rewind(self, position: int) -> None:
        """The next token is at this position."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)

    def nbytes(self) -> int:
        """What a step reads at least: weights, but one row of the embedding, and the cache."""
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        embedding = self.model.get_input_embeddings().weight.nbytes
        return cache - embedding + sum(p.nbytes for p in self.model.parameters())

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(token, past_key_values=self.cache, position_ids=position)
        return output.logits[:, -1].argmax(-1, keepdim=True), position[:, -1:] + 1


def decode(
    step: Step, call: Callable[..., Any], case: Case, device: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Seconds per token, and those that the host spends in a call."""
    token = torch.full((case.batch, 1), 7).to(device)
    position = torch.full((case.batch, 1), FILLED).to(device)

    def run(count: int) -> float:
        nonlocal token, position
        step.rewind(FILLED)
        position = torch.full_like(position, FILLED)
        start = time.perf_counter()
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            token, position = (x.clone() if device == "cuda" else x for x in call(token, position))
        wait()
        return (time.perf_counter() - start) / count

    run(3)
    found = {"seconds": statistics.median(run(_STEPS) for _ in range(_BATCHES))}
    step.rewind(FILLED)
    found["host_s"] = host_seconds_per_call(lambda: call(token, position), wait, 10)
    return found


def prefill(
    step: Step, call: Callable[..., Any], case: Case, device: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Seconds of a prompt."""
    tokens = (torch.arange(PROMPT) % 900).expand(case.batch, -1).contiguous().to(device)
    positions = torch.arange(PROMPT).expand(case.batch, -1).contiguous().to(device)

    def run() -> None:
        step.rewind(0)
        call(tokens, positions)

    return {"seconds": seconds_per_call(run, wait)}


def measure(case: Case, small: bool, device: str, **compile_options: Any) -> dict[str, float]:
    """One system: ``seconds`` of a step, ``nbytes``, perhaps ``host_s``; ``total_s`` of it all."""
    use_full_f32()
    torch._dynamo.reset()
    gc.collect()
    wait = synchronize if device == "cuda" else torch.webgpu.synchronize  # type: ignore[attr-defined]
    with torch.no_grad():
        step = Step(_config(small), case, device)
        call = torch.compile(step, dynamic=False, **compile_options)
        start = time.perf_counter()
        found = (prefill if case.is_prefill else decode)(step, call, case, device, wait)
        return found | {"nbytes": step.nbytes(), "total_s": time.perf_counter() - start}


def line(name: str, case: Case, ours: dict[str, float], theirs: Any, copy: float | None) -> str:
    """A row for a person."""
    tokens = case.batch * (PROMPT if case.is_prefill else 1)
    rate = tokens / ours["seconds"]
    parts = [f"{name:20} {rate:9.0f} tokens/s", f"{1e3 * ours['seconds']:8.3f} ms"]
    if "host_s" in ours:
        parts.append(f"host {1e3 * ours['host_s']:.3f} ms")
    if copy is not None and not case.is_prefill:
        parts.append(f"{ours['nbytes'] / ours['seconds'] / copy:.0%} of a copy's rate")
    if case.goal is not None:
        parts.append(f"goal {case.goal:.0f}")
    if theirs is not None:
        goal = "" if case.ratio is None else f" (goal {case.ratio})"
        parts.append(f"{theirs['seconds'] / ours['seconds']:.2f} × CUDA{goal}")
    return ", ".join(parts)


def main() -> None:
    """Prints every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--small", action="store_true", help="sizes for software adapters")
    parser.add_argument("--output", type=Path, help="a JSON file with all figures")
    arguments = parser.parse_args()
    chosen = {name: CASES[name] for name in arguments.cases or CASES}
    theirs: dict[str, Any] = {}
    copy = None
    if torch.cuda.is_available():  # first: see `device.autoload.load`
        copy = copy_bytes_per_second((4 if arguments.small else 1024) << 20)
        for name, case in chosen.items():
            mode = None if case.is_prefill else "reduce-overhead"
            theirs[name] = measure(case, arguments.small, "cuda", mode=mode)
            torch.cuda.empty_cache()
    register()
    results = {}
    for name, case in chosen.items():
        ours = measure(case, arguments.small, "webgpu", backend="webgpu")
        results[name] = {"webgpu": ours, "cuda": theirs.get(name)}
        print(line(name, case, ours, theirs.get(name), copy), flush=True)
    if arguments.output is not None:
        found = {"copy_bytes_per_second": copy, "cases": results}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
