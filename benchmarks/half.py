"""Half precision in matrix units, and f32 on both providers: seconds of a call or training step.

``python -m benchmarks.half [--small] [--output FILE] [case …]``. Each system has a process of its
own: ``webgpu`` is this package on Dawn, ``wgpu`` on wgpu-native, ``f32`` on Dawn in f32; with CUDA,
its eager mode and Inductor run the same in the same dtype. Results of forwards are compared with
PyTorch's in f32: what they differ by, relative to the largest, next to what eager CUDA's do. Goals
are those of an H200.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_webgpu_compile.device.autoload import register

from . import cases, training
from .generate import argument_parser, report
from .goals import OURS, AtMost, FlopRate, Goal, Verdict, Work, judge_all, systems_of
from .training import Built, Case, as_fast

_PROVIDERS = {OURS: "wgpudawn", "f32": "wgpudawn", "wgpu": "wgpu"}


class _Calls(nn.Module):
    """A function as a module, without weights."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Tensor:
        result: Tensor = self.function(*arguments)
        return result


class _Autocast(nn.Module):
    """A loss that is computed under autocast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.float16):
            loss: Tensor = self.module(tokens)
        return loss


def product(small: bool, rows: int, inner: int, columns: int) -> Built:
    """A matrix product."""
    scale = 32 if small else 1
    sizes = (rows // scale, inner // scale), (inner // scale, columns // scale)
    return _Calls(torch.mm), tuple(map(torch.randn, sizes))


def attention(small: bool) -> Built:
    """Causal attention."""
    shape = (1, 2, 64, 32) if small else (8, 16, 1024, 64)
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    return _Calls(causal), (torch.randn(shape), torch.randn(shape), torch.randn(shape))


def model(small: bool, name: str) -> Built:
    """Of `cases`."""
    return cases.CASES[name].build(small)


def resnet50(small: bool) -> Built:
    """ResNet-50's logits for 32 images."""
    loss, (images, _) = training.resnet50(small, 32)
    return cases.Classifier(loss.model), (images,)


@dataclass(frozen=True)
class Half:
    """A case, and what it must reach.

    Attributes:
        case: of `training`, as it is in f32.
        dtype: of weights and inputs; None: as they are.
        is_autocast: instead, whether the module runs under autocast.
        flops: of a call.
    """

    case: Case
    dtype: torch.dtype | None = None
    is_autocast: bool = False
    flops: int = 0

    def of(self, system: str) -> Case:
        """What one system runs."""
        if system == "f32":
            return self.case
        return replace(self.case, build=self._build)

    def _build(self, small: bool) -> Built:
        module, inputs = self.case.build(small)
        if self.is_autocast:
            return _Autocast(module), inputs
        if self.dtype is None:
            return module, inputs
        moved = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in inputs)
        return module.to(self.dtype), moved


_ACCURACY = AtMost("difference_share", 2, what="of the rounding of eager CUDA")


def _product(rows: int, inner: int, columns: int, tflops: float) -> Half:
    goals: tuple[Goal, ...] = (FlopRate(tflops * 1e12), _ACCURACY)
    case = Case(partial(product, rows=rows, inner=inner, columns=columns), "forward", goals)
    return Half(case, torch.float16, flops=2 * rows * inner * columns)


def _forward(build: Any, dtype: torch.dtype | None, *goals: Goal) -> Half:
    return Half(Case(build, "forward", goals), dtype)


_EAGER = as_fast("eager", "eager CUDA")

CASES: dict[str, Half] = {
    "matmul_4096": _product(4096, 4096, 4096, 160),
    "matmul_512x2048x8192": _product(512, 2048, 8192, 100),
    "matmul_512x8192x2048": _product(512, 8192, 2048, 100),
    "llama_512_f16": _forward(training.llama, torch.float16, _EAGER, _ACCURACY),
    "llama_512_bf16": _forward(training.llama, torch.bfloat16, _EAGER, _ACCURACY),
    "resnet50_32_f16": _forward(
        resnet50, torch.float16, as_fast("eager", "eager CUDA", 1 / 1.2), _ACCURACY
    ),
    "attention_f16": _forward(
        attention, torch.float16, as_fast("f32", "the same in f32", 3.0), _ACCURACY
    ),
    "gpt2_step_f16": Half(
        Case(training.gpt2, "step", (as_fast("f32", "the same in f32", 1.6),)), is_autocast=True
    ),
    **{
        f"{name}_f32": _forward(partial(model, name=name), None, as_fast("wgpu", "wgpu-native"))
        for name in ("gpt2", "bert", "vit", "resnet50")
    },
}


def systems_for(half: Half) -> list[str]:
    """What is measured of a case here: what its goals name, and Inductor beside eager CUDA."""
    wanted = set[str]().union(*map(systems_of, half.case.goals))
    if half.dtype is not None or half.is_autocast:
        wanted |= {"eager", "inductor"}
    if not torch.cuda.is_available():
        wanted -= {"eager", "inductor"}
    return sorted(wanted, key=[OURS, "f32", "wgpu", "eager", "inductor"].index)


def measure(name: str, system: str, small: bool, wanted: Tensor | None) -> dict[str, Any]:
    """One system, in a process that has used none before: see `training.measure`.

    Args:
        wanted: what a forward gives in f32; the result's ``difference`` is relative to its largest.
    """

    def difference(result: Tensor) -> dict[str, Any]:
        if wanted is None:
            return {}
        error = (result.float().cpu() - wanted).abs().max() / wanted.abs().max()
        return {"difference": error.item()}

    case = CASES[name].of(system)
    if system not in _PROVIDERS:
        backend = None if system == "eager" else system
        return training.measure(case, "cuda", backend, small, difference)
    os.environ["TORCH_WEBGPU_PROVIDER"] = _PROVIDERS[system]
    register()
    return training.measure(case, "webgpu", "webgpu", small, difference)


def in_f32(half: Half, small: bool) -> Tensor | None:
    """A forward's result by PyTorch on the CPU, from the same weights, which were rounded."""
    if half.case.kind != "forward":
        return None
    torch.manual_seed(0)
    module, inputs = half.of(OURS).build(small)
    with torch.no_grad():
        result: Tensor = module.float().eval()(
            *(x.float() if x.is_floating_point() else x for x in inputs)
        )
    return result


def verdicts(half: Half, systems: dict[str, dict[str, Any]], is_real: bool) -> list[Verdict]:
    """The case's goals next to what was measured.

    Args:
        is_real: whether sizes and GPU are those that goals mean: else nothing is reached or missed.
    """
    ours, theirs = systems[OURS], systems.get("eager", {})
    if "difference" in ours and theirs.get("difference"):
        ours["difference_share"] = ours["difference"] / theirs["difference"]
    work = Work(flops=half.flops if is_real else 0)
    return judge_all(half.case.goals, systems, {}, work, "eager" in systems, is_real)


def line(name: str, systems: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for a person."""
    parts = []
    for system, found in systems.items():
        text = f"{system} {1e3 * found['seconds']:.3f} ms"
        if "difference" in found:
            text += f" ({found['difference']:.1e})"
        parts.append(text)
    return f"{name:22} {'; '.join(parts)}"


def main() -> None:
    """Prints every case."""
    arguments = argument_parser(__doc__, CASES).parse_args()
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    results: dict[str, Any] = {}
    for name in arguments.cases or CASES:
        systems: dict[str, dict[str, Any]] = {}
        wanted = in_f32(CASES[name], arguments.small)
        for system in systems_for(CASES[name]):
            with ProcessPoolExecutor(1, get_context("spawn")) as new_process:
                systems[system] = new_process.submit(
                    measure, name, system, arguments.small, wanted
                ).result()
        judged = verdicts(CASES[name], systems, not arguments.small)
        report(results, name, systems, judged, line(name, systems), arguments.output)


if __name__ == "__main__":
    main()
