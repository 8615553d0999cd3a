"""Tokens per second of a language model, as a user of `torch.compile` generates them.

``python -m benchmarks.generate [--small] [--output FILE] [case …]`` decodes greedily, each token
from the one before it, in a static cache that is filled up to a position; ``prefill`` is a prompt
at once; ``generate`` is transformers' (`benchmarks.generate_calls`), and ``sampling`` what choosing
a token by chance adds to it on the GPU. With CUDA, Inductor with CUDA graphs does the same beside
it where a goal compares with it. Bytes are those of the weights that a step reads and of the
cache's filled positions: what they allow at the rate of a copy is the limit. Goals are those of an
H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.runtime import limits
from torch_webgpu_compile.tensors import devices

from .cases import static_cache
from .generate_calls import SAMPLED, STATIC, Call, measure_call
from .goals import AtLeast, AtMost, CopyShare, Faster, Goal, Verdict, Work, judge_all
from .language_models import LLAMA_1B, QWEN_HALF_B, Geometry, language_model
from .limits import copy_bytes_per_second, use_full_f32, wait_of
from .timing import host_seconds_per_call, seconds_per_call

_BATCHES = 5


_DRAFT = replace(LLAMA_1B, hidden=512, layers=2, heads=8, kv_heads=2, intermediate=1024)
_FEW_LAYERS = replace(LLAMA_1B, hidden=64, layers=1, heads=1, kv_heads=1, intermediate=64)


@dataclass(frozen=True)
class Case:
    """What is measured, and what it must reach.

    Attributes:
        positions, filled: of the cache, and how many of them hold something before the first token.
        prompt: tokens at once, in an empty cache; None: one token after another.
        weights: see `language_model`.
        steps: timed together, one after another.
        goals: compared with ``cuda``, or read from the figures of this package (`figures`).
    """

    dtype: torch.dtype
    batch: int = 1
    goals: tuple[Goal, ...] = ()
    geometry: Geometry = LLAMA_1B
    positions: int = 1024
    filled: int = 500
    prompt: int | None = None
    weights: str | None = None
    steps: int = 60

    @property
    def tokens(self) -> int:
        """That a call makes, or takes."""
        return self.batch * (self.prompt or 1)

    def small(self) -> Case:
        """The same for software adapters: it shows that it runs."""
        heads = {"heads": self.geometry.heads // 2, "kv_heads": self.geometry.kv_heads // 2}
        few = {"hidden": 16 * heads["heads"], "intermediate": 512, "layers": 2, "vocabulary": 1000}
        geometry = replace(self.geometry, **heads, **few)
        fewer = {"positions": self.positions // 8, "filled": self.filled // 8}
        prompt = self.prompt and self.prompt // 8
        return replace(self, geometry=geometry, **fewer, prompt=prompt, steps=4)


def _tokens_per_second(least: float) -> AtLeast:
    return AtLeast("tokens_per_second", least, "tokens/s")


def _times_bf16(least: float) -> AtLeast:
    return AtLeast("times_plain", least, "× bf16")


_BATCH_1 = "decode_bf16"
_GENERATE = "generate_bf16"
_GRAPHS, _INDUCTOR = (
    Faster("cuda", r, n, "stream") for r, n in ((1.5, "CUDA graphs"), (1, "Inductor"))
)
_HOST = AtMost("host_share", 1, what="of a step's time on the host")

_AS_PLAIN = AtLeast("times_plain", 1, "× plain")
_SAMPLING = AtMost("sampling_s", 1e-4, "s", what="of the GPU for a token's choice")

CASES: dict[str, Case | Call] = {
    "decode_f32": Case(torch.float32, goals=(_tokens_per_second(900), _HOST)),
    _BATCH_1: Case(torch.bfloat16, goals=(_tokens_per_second(1100), _GRAPHS, _HOST)),
    "decode_f16": Case(torch.float16, goals=(_HOST,)),
    "decode_bf16_batch8": Case(
        torch.bfloat16, batch=8, goals=(AtLeast("times_batch_1", 6, "× batch 1"), _HOST)
    ),
    "decode_int8": Case(torch.bfloat16, weights="int8", goals=(_tokens_per_second(1500), _HOST)),
    "decode_int4": Case(torch.bfloat16, weights="int4", goals=(_tokens_per_second(1900), _HOST)),
    "decode_q4_k": Case(torch.bfloat16, weights="Q4_K", goals=(_tokens_per_second(1300), _HOST)),
    "decode_q8_0": Case(torch.bfloat16, weights="Q8_0", goals=(_tokens_per_second(1000), _HOST)),
    "decode_bf16_32k": Case(
        torch.bfloat16, positions=32_768, filled=32_000, goals=(CopyShare(0.6), _HOST)
    ),
    "qwen_f32": Case(torch.float32, geometry=QWEN_HALF_B, goals=(CopyShare(0.6), _HOST)),
    "prefill_f32": Case(torch.float32, prompt=512, goals=(_INDUCTOR,)),
    _GENERATE: Call(LLAMA_1B, goals=(_tokens_per_second(900), _GRAPHS)),
    "generate_int8": Call(LLAMA_1B, weights="int8", goals=(_times_bf16(1.25),)),
    "generate_int4": Call(
        LLAMA_1B,
        weights="int4",
        goals=(_tokens_per_second(1300), _times_bf16(1.6)),
    ),
    "generate_q4_k": Call(LLAMA_1B, weights="Q4_K", goals=(_tokens_per_second(1300),)),
    "generate_sampled": Call(LLAMA_1B, keywords=STATIC | SAMPLED),
    "prompt_lookup": Call(
        LLAMA_1B, keywords=STATIC | {"prompt_lookup_num_tokens": 10}, goals=(_AS_PLAIN,)
    ),
    "small_draft": Call(LLAMA_1B, draft=_DRAFT),
    **{
        f"sampling_{words // 1000}k": Call(
            replace(_FEW_LAYERS, vocabulary=words),
            keywords=STATIC | SAMPLED,
            goals=(_SAMPLING,),
            samples_alone=True,
        )
        for words in (128_256, 256_000)
    },
}


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; of a quantized one, those of the tensors that it consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(nbytes_of(getattr(tensor, name)) for name in flatten()[0])


class Step(nn.Module):
    """(token, position), batch × 1 each → the next ones; writes the cache in place."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        self.model = language_model(case.geometry, case.dtype, case.weights, device)
        self.cache = static_cache(self.model.config, case.positions, case.batch, case.dtype, device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    def rewind(self, position: int) -> None:
        """The next token is at this position."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)

    def cache_nbytes(self) -> int:
        """Of all positions."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def weights_nbytes(self) -> int:
        """What a step reads: of an embedding that is not also the last product, one row."""
        embedding, last = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        unread = 0 if last.weight is embedding.weight else embedding.weight.nbytes
        return sum(map(nbytes_of, self.model.parameters())) - unread

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(token, past_key_values=self.cache, position_ids=position)
        return output.logits[:, -1].argmax(-1, keepdim=True), position[:, -1:] + 1


def decode(
    step: Step, call: Callable[..., Any], case: Case, device: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Seconds per token, and those that the host spends in a call.

    ``unguarded_s`` are seconds per token without most of Dynamo's guards, as a program may ask for
    that changes nothing of its model.
    """
    token = torch.full((case.batch, 1), 7).to(device)
    position = torch.full((case.batch, 1), case.filled).to(device)

    def run(count: int) -> float:
        nonlocal token, position
        step.rewind(case.filled)
        position = torch.full_like(position, case.filled)
        start = time.perf_counter()
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            token, position = (x.clone() if device == "cuda" else x for x in call(token, position))
        wait()
        return (time.perf_counter() - start) / count

    run(3)
    found = {"seconds": statistics.median(run(case.steps) for _ in range(_BATCHES))}
    torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    found["unguarded_s"] = statistics.median(run(case.steps) for _ in range(_BATCHES))
    torch.compiler.set_stance("default")
    step.rewind(case.filled)
    found["host_s"] = host_seconds_per_call(lambda: call(token, position), wait, 10)
    return found


def prefill(
    step: Step, call: Callable[..., Any], case: Case, device: str, wait: Callable[[], None]
) -> dict[str, float]:
    """Seconds of a prompt."""
    assert case.prompt is not None
    tokens = (torch.arange(case.prompt) % 900).expand(case.batch, -1).contiguous().to(device)
    positions = torch.arange(case.prompt).expand(case.batch, -1).contiguous().to(device)

    def run() -> None:
        step.rewind(0)
        call(tokens, positions)

    return {"seconds": seconds_per_call(run, wait)}


def measure(case: Case, device: str, **compile_options: Any) -> dict[str, float]:
    """One system.

    ``seconds`` of a step, perhaps ``host_s``; ``nbytes`` that a step reads at least;
    ``extra_nbytes`` allocated at most beside the model and its cache; ``total_s`` of it all.
    """
    use_full_f32()
    torch._dynamo.reset()
    gc.collect()
    memory: Any = torch.cuda if device == "cuda" else torch.webgpu  # type: ignore[attr-defined]
    wait = wait_of(device)
    with torch.no_grad():
        step = Step(case, device)
        call = torch.compile(step, dynamic=False, **compile_options)
        wait()
        memory.reset_peak_memory_stats()
        held, start = memory.memory_allocated(), time.perf_counter()
        found = (decode if case.prompt is None else prefill)(step, call, case, device, wait)
        filled = step.cache_nbytes() * case.filled // case.positions
        return found | {
            "nbytes": step.weights_nbytes() + (0 if case.prompt else filled),
            "extra_nbytes": memory.max_memory_allocated() - held,
            "total_s": time.perf_counter() - start,
        }


def figures(
    case: Case | Call, found: dict[str, float], rates: Mapping[str, float]
) -> dict[str, float]:
    """What a system was measured to do, with what goals ask for besides.

    Args:
        rates: tokens per second of the cases that were measured before.
    """
    is_call = isinstance(case, Call)
    rate = (1 if is_call else case.tokens) / found["seconds"]
    more = {"tokens_per_second": rate}
    if "host_s" in found:
        more["host_share"] = found["host_s"] / found["seconds"]
    base, times = (_GENERATE, "times_plain") if is_call else (_BATCH_1, "times_batch_1")
    if base in rates:
        more[times] = rate / rates[base]
    return found | more


def verdicts(
    case: Case | Call,
    systems: Mapping[str, Mapping[str, Any]],
    copy: float,
    *,
    by_cuda: bool,
    is_real: bool,
) -> list[Verdict]:
    """The case's goals next to what was measured: ``webgpu`` as `figures` gives it, and ``cuda``.

    Args:
        copy: bytes per second, read and written, of a copy.
        by_cuda: whether CUDA made that copy, and what there is of ``cuda``.
        is_real: whether sizes and GPU are those that goals mean: else nothing is reached or missed.
    """
    work = Work(nbytes=round(systems["webgpu"].get("nbytes", 0)))
    rates = {"copy_bytes_per_second": copy}
    return judge_all(case.goals, systems, rates, work, by_cuda, is_real)


_MARKS = {True: "reached", False: "missed", None: "not judged"}


def print_verdicts(judged: Sequence[Verdict]) -> None:
    """A line for each."""
    for verdict in judged:
        notes = f" ({verdict.note})" if verdict.note else ""
        print(f"  {verdict.goal}: {verdict.measured}, {_MARKS[verdict.reached]}{notes}")


def report(
    results: dict[str, Any],
    name: str,
    systems: Mapping[str, Any],
    judged: Sequence[Verdict],
    text: str,
    output: Path | None,
    **besides: Any,
) -> None:
    """Adds a case to the results, prints it, and writes all of them, with figures ``besides``.

    Args:
        text: its row for a person.
        output: the file, if one is wanted.
    """
    results[name] = {**systems, "goals": [asdict(verdict) for verdict in judged]}
    print(text, flush=True)
    print_verdicts(judged)
    if output is not None:
        write_figures(output, {**besides, "cases": results})


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes them as JSON, with what they were measured on.

    To be called after each case: the rest takes minutes, and may fail.
    """
    gpu = {"gpu": devices.get_device(0).info.name, "pytorch": torch.__version__}
    path.write_text(json.dumps({**gpu, **figures}, indent=1, ensure_ascii=False) + "\n")


def argument_parser(description: str | None, cases: Iterable[str]) -> argparse.ArgumentParser:
    """A command line with ``cases``, ``small`` and ``output``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(cases)}")
    parser.add_argument("--small", action="store_true", help="sizes for software adapters")
    parser.add_argument("--output", type=Path, help="a JSON file with all figures")
    return parser


def line(name: str, systems: Mapping[str, Mapping[str, Any]], copy: float) -> str:
    """A row for a person."""
    ours, theirs = systems["webgpu"], systems.get("cuda")
    rate, seconds = ours["tokens_per_second"], ours["seconds"]
    parts = [f"{name:20} {rate:9.0f} tokens/s", f"{1e3 * seconds:8.3f} ms"]
    if "host_s" in ours:
        parts.append(f"host {1e3 * ours['host_s']:.3f} ms")
        parts.append(f"{1e3 * ours['unguarded_s']:.3f} ms without guards")
        parts.append(f"{ours['nbytes'] / seconds / copy:.0%} of a copy's rate")
    if "first_s" in ours:
        parts.append(f"first call {ours['first_s']:.1f} s")
    if "sampling_s" in ours:
        parts.append(f"sampling {1e3 * ours['sampling_s']:.3f} ms of the GPU")
    parts.append(f"{ours['extra_nbytes'] / 2**20:.1f} MiB beside model and cache")
    if theirs is not None:
        parts.append(f"{theirs['seconds'] / seconds:.2f} × CUDA")
    return ", ".join(parts)


def main() -> None:
    """Prints every case."""
    arguments = argument_parser(__doc__, CASES).parse_args()
    chosen = {name: CASES[name] for name in arguments.cases or CASES}
    if arguments.small:
        chosen = {name: case.small() for name, case in chosen.items()}
    theirs: dict[str, Any] = {}
    copy = None
    if torch.cuda.is_available():  # first: see `device.autoload.load`
        copy = copy_bytes_per_second((4 if arguments.small else 1024) << 20)
        for name, case in chosen.items():
            if not any(isinstance(goal, Faster) for goal in case.goals):
                continue
            if isinstance(case, Call):
                theirs[name] = measure_call(case, "cuda")
            else:
                mode = "reduce-overhead" if case.prompt is None else None
                theirs[name] = measure(case, "cuda", mode=mode)
            torch.cuda.empty_cache()
    register()
    copied_by = "webgpu" if copy is None else "cuda"
    copy = copy or limits.copy_bytes_per_second(devices.get_device(0))
    results: dict[str, Any] = {}
    rates: dict[str, float] = {}
    for name, case in chosen.items():
        if isinstance(case, Call):
            found = measure_call(case, "webgpu")
        else:
            found = measure(case, "webgpu", backend="webgpu")
        systems = {"webgpu": figures(case, found, rates)}
        rates[name] = systems["webgpu"]["tokens_per_second"]
        if name in theirs:
            systems["cuda"] = theirs[name]
        judged = verdicts(
            case, systems, copy, by_cuda=copied_by == "cuda", is_real=not arguments.small
        )
        text = line(name, systems, copy)
        copied = {"copy_bytes_per_second": copy, "copied_by": copied_by}
        report(results, name, systems, judged, text, arguments.output, **copied)


if __name__ == "__main__":
    main()
