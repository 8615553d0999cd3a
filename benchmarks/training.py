"""Seconds and memory of a training step, as a user of `torch.compile` trains; and of some forwards.

``python -m benchmarks.training [--small] [--output FILE] [case …]``. A step is forward, backward,
AdamW and `zero_grad`, in f32 without TF32. With CUDA, its eager mode and Inductor do the same.
Each case has a process of its own, in which nothing is left of another one. Losses of the first
steps are compared with eager CUDA's (without CUDA: the CPU's). The first step finds nothing in any
cache. Goals are those of an H200.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_webgpu_compile.device.autoload import register

from .cases import Classifier, Logits, mlp
from .generate import argument_parser, report
from .goals import OURS, AtMost, Faster, Goal, Leaner, Verdict, Work, judge_all
from .language_models import LLAMA_1B, Geometry
from .limits import use_full_f32, wait_of
from .timing import host_seconds_per_call, seconds_per_call

Built = tuple[Any, tuple[Tensor, ...]]
"""A module, and its inputs on the CPU; where it is trained, it gives the loss."""

Kind = Literal["step", "compiled optimizer", "forward", "waited call"]

_LOSSES = 5


class LanguageModelLoss(nn.Module):
    """Tokens → the loss of predicting each from those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens, use_cache=False).loss
        return loss


class ImageLoss(nn.Module):
    """(images, labels) → the loss of classifying them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(images).logits, labels)


def gpt2(small: bool) -> Built:
    """The 124M model on 4 × 256 tokens, without dropout: its losses are compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 2, "vocab_size": 1001} if small else {}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(config.vocab_size, (2, 16) if small else (4, 256))
    return LanguageModelLoss(GPT2LMHeadModel(config)), (tokens,)


def _images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))


def resnet50(small: bool, batch: int) -> Built:
    """ResNet-50, with batch statistics."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"depths": [1, 1, 1, 1]} if small else {}
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))
    return ImageLoss(model), _images(2 if small else batch, 32 if small else 224)


def vit(small: bool, batch: int) -> Built:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    layers = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3}
    sizes = {**layers, "intermediate_size": 96, "image_size": 32} if small else {}
    model = ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))
    return ImageLoss(model), _images(2 if small else batch, 32 if small else 224)


def convnext(small: bool, batch: int, *, trained: bool = True) -> Built:
    """ConvNeXt-T."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    few = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
    sizes: dict[str, Any] = few if small else {}
    model = ConvNextForImageClassification(ConvNextConfig(num_labels=1000, **sizes))
    images, labels = _images(2 if small else batch, 32 if small else 224)
    return (ImageLoss(model), (images, labels)) if trained else (Classifier(model), (images,))


def llama(
    small: bool,
    geometry: Geometry = LLAMA_1B,
    dtype: torch.dtype = torch.float32,
    prompts: tuple[int, int] = (1, 512),
) -> Built:
    """Prompts of 512 tokens, one of them by default."""
    from transformers import AutoModelForCausalLM

    if small:
        geometry = replace(geometry, hidden=64, layers=2, heads=4, kv_heads=1, intermediate=128)
        geometry = replace(geometry, vocabulary=1000)
    config: Any = geometry.config()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rows, tokens = prompts
    return Logits(model), (torch.randint(geometry.vocabulary, (rows, 32 if small else tokens)),)


@dataclass(frozen=True)
class Case:
    """What is measured, and what it must reach.

    Attributes:
        build: makes the module and its inputs; of small sizes where that is asked for.
        kind: "step"; a step whose optimizer is compiled, too; a forward without gradients; or such
            a one, of which each call is waited for.
    """

    build: Callable[[bool], Built]
    kind: Kind = "step"
    goals: tuple[Goal, ...] = ()


def as_fast(system: str, label: str, factor: float = 1.0) -> Faster:
    """The goal to be so many times as fast as a system, in a stream of calls."""
    by_cuda = system in ("eager", "inductor")
    return Faster(system, factor, label, "stream", needs_cuda=by_cuda)


_INDUCTOR, _EAGER = as_fast("inductor", "Inductor"), as_fast("eager", "eager CUDA")
_MEMORY = Leaner("inductor", 1.1, "Inductor")
_FIRST = AtMost("first_share", 0.7, what="of Inductor's first step")
_HOST = AtMost("host_share", 1, what="of a step's time on the host")
_STEP = (_INDUCTOR, _MEMORY, _FIRST, _HOST)

CASES = {
    "gpt2": Case(gpt2, goals=_STEP),
    "gpt2_compiled_optimizer": Case(
        gpt2, "compiled optimizer", (as_fast("inductor", "Inductor", 1.1), _MEMORY, _FIRST, _HOST)
    ),
    "resnet50_16": Case(partial(resnet50, batch=16), goals=(_EAGER, *_STEP)),
    "resnet50_64": Case(partial(resnet50, batch=64), goals=(_EAGER, *_STEP)),
    "vit_8": Case(partial(vit, batch=8), goals=_STEP),
    "convnext_8": Case(partial(convnext, batch=8), goals=_STEP),
    "convnext_8_forward": Case(
        partial(convnext, batch=8, trained=False), "forward", (_INDUCTOR, _MEMORY, _FIRST)
    ),
    "llama_512_forward": Case(llama, "forward", (_INDUCTOR, _MEMORY, _FIRST)),
    "mlp_waited": Case(mlp, "waited call", (as_fast("eager", "eager CUDA", 1 / 1.1),)),
}


def step_of(case: Case, module: nn.Module, inputs: tuple[Tensor, ...], backend: str | None) -> Any:
    """A call of what is measured; it gives the loss, or the result."""
    call: Any = module if backend is None else torch.compile(module, backend=backend)
    if case.kind in ("forward", "waited call"):
        module.eval()

        def forward() -> Any:
            with torch.no_grad():
                return call(*inputs)

        return forward
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    update: Any = optimizer.step
    if case.kind == "compiled optimizer" and backend is not None:
        update = torch.compile(optimizer.step, backend=backend)

    def step() -> Tensor:
        loss: Tensor = call(*inputs)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(
    case: Case,
    device: str,
    backend: str | None,
    small: bool,
    inspect: Callable[[Any], dict[str, Any]] = lambda result: {},
) -> dict[str, Any]:
    """One system.

    ``first_s``: of the first step; ``seconds`` of a later one, in a stream of them (or waited for);
    ``host_s`` that the host spends in it; ``gpu_nbytes`` allocated at most; ``losses`` of the
    first steps; and what ``inspect`` says of the first result.
    """
    use_full_f32()
    torch._dynamo.reset()
    gc.collect()
    memory: Any = None if device == "cpu" else getattr(torch, device)
    wait = wait_of(device)
    torch.manual_seed(0)
    module, inputs = case.build(small)
    module, inputs = module.to(device), tuple(x.to(device) for x in inputs)
    if memory is not None:
        memory.empty_cache()
        wait()
        memory.reset_peak_memory_stats()
    call = step_of(case, module, inputs, backend)
    start = time.perf_counter()
    results = [call()]
    wait()
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    results += [call() for _ in range(_LOSSES - 1)]
    if case.kind in ("step", "compiled optimizer"):
        found["losses"] = [result.item() for result in results]
    if memory is not None:
        found["gpu_nbytes"] = memory.max_memory_allocated()
    found |= inspect(results[0])
    del results
    if case.kind == "waited call":
        found["seconds"] = _waited_seconds(call, wait)
    else:
        found["seconds"] = seconds_per_call(call, wait)
        found["host_s"] = host_seconds_per_call(call, wait, 4)
    return found


def _waited_seconds(call: Callable[[], object], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def figures(systems: Mapping[str, dict[str, Any]], wanted: list[float] | None) -> dict[str, Any]:
    """Ours, with what goals ask for besides.

    Args:
        wanted: losses that the first steps should have.
    """
    found = dict(systems[OURS])
    if "host_s" in found:
        found["host_share"] = found["host_s"] / found["seconds"]
    if "inductor" in systems:
        found["first_share"] = found["first_s"] / systems["inductor"]["first_s"]
    if wanted is not None:
        pairs = zip(found["losses"], wanted, strict=True)
        found["relative_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return found


def verdicts(case: Case, systems: Mapping[str, Mapping[str, Any]], is_real: bool) -> list[Verdict]:
    """The case's goals next to what was measured: "webgpu", and perhaps "eager" and "inductor".

    Args:
        is_real: whether sizes and GPU are those that goals mean: else nothing is reached or missed.
    """
    return judge_all(case.goals, systems, {}, Work(), "eager" in systems, is_real)


def line(name: str, systems: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for a person."""
    parts = []
    for system, found in systems.items():
        text = f"{system} {1e3 * found['seconds']:.2f} ms"
        if "gpu_nbytes" in found:
            text += f", {found['gpu_nbytes'] / 2**30:.2f} GiB"
        if "host_s" in found:
            text += f", host {1e3 * found['host_s']:.2f} ms"
        parts.append(f"{text}, first {found['first_s']:.1f} s")
    difference = systems[OURS].get("relative_difference")
    losses = "" if difference is None else f"; losses differ by {difference:.1e}"
    return f"{name:24} {'; '.join(parts)}{losses}"


def main() -> None:
    """Prints every case."""
    arguments = argument_parser(__doc__, CASES).parse_args()
    os.environ |= {
        "TORCH_WEBGPU_CACHE": "0",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "__GL_SHADER_DISK_CACHE": "0",
    }
    results: dict[str, Any] = {}
    for name in arguments.cases or CASES:
        with ProcessPoolExecutor(1, get_context("spawn")) as new_process:
            systems = new_process.submit(compare, name, arguments.small).result()
        judged = verdicts(CASES[name], systems, not arguments.small)
        report(results, name, systems, judged, line(name, systems), arguments.output)


def compare(name: str, small: bool) -> dict[str, dict[str, Any]]:
    """What was measured of a case by system, in a process that has used none of them before."""
    case = CASES[name]
    theirs: dict[str, dict[str, Any]] = {}
    if torch.cuda.is_available():  # first: see `device.autoload.load`
        for system, backend in (("eager", None), ("inductor", "inductor")):
            theirs[system] = measure(case, "cuda", backend, small)
            torch.cuda.empty_cache()
    register()
    systems = {OURS: measure(case, "webgpu", "webgpu", small), **theirs}
    reference = systems.get("eager") or _on_cpu(case, small)
    systems[OURS] = figures(systems, reference.get("losses"))
    return systems


def _on_cpu(case: Case, small: bool) -> dict[str, Any]:
    """Losses of the first steps."""
    if case.kind in ("forward", "waited call"):
        return {}
    torch.manual_seed(0)
    module, inputs = case.build(small)
    call = step_of(case, module, inputs, None)
    return {"losses": [call().item() for _ in range(_LOSSES)]}


if __name__ == "__main__":
    main()
