"""Every kernel and plan of a zoo of models, as text: whether a change changes what is generated.

    python -m tests.zoo before              writes a file per model and adapter into ``before/``
    python -m tests.zoo after --only gpt2   those whose names contain this
    diff -r before after

The models have their real sizes, with fewer layers where all are alike; they are traced on fake
tensors, and compiled for adapters that are not there.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.cases import CASES
from benchmarks.targets import H200, NATIVE_FEATURES
from tests.unit.test_models_lowered import MODELS
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import CapturedGraph, Phase
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.errors import WebGPUCompileError
from torch_webgpu_compile.inspection import debug
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.target import Target

Case = tuple[Callable[..., Any], tuple[Any, ...]]

TARGETS = {
    "browser": Target(features=frozenset(), max_storage_buffers=10, max_buffer_nbytes=2 << 30),
    "software": Target(
        name="llvmpipe (LLVM 15.0.6, 256 bits)",
        vendor="mesa",
        software=True,
        features=NATIVE_FEATURES,
        max_buffer_nbytes=2147483632,
        max_storage_buffers=32,
        max_workgroup_invocations=1024,
        max_workgroup_nbytes=32 << 10,
        subgroup_sizes=(4, 128),
        max_loop_iterations=65535,
    ),
    "h200": H200,
}


def _encoder(name: str, **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, **settings)
        return getattr(transformers, f"{name}Model")(config), (torch.randint(0, 99, (8, 128)),)

    return build


def _language_model(name: str, rows: int, columns: int, **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model(config)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.model(tokens, use_cache=False).logits

        return Logits(), (torch.randint(0, 99, (rows, columns)),)

    return build


def _mixed() -> Case:
    """Operators of every family besides those of models."""

    def function(x: Tensor, y: Tensor, i: Tensor) -> Any:
        scores = torch.softmax(x @ y.mT, -1).cumsum(-1)
        rows = torch.zeros_like(x).index_add(0, i, y[i]).sort(-1).values
        windows = torch.nn.functional.unfold(x[None, None], 3).std(1)
        wave = torch.fft.rfft(x).abs() + torch.special.erfinv(y[:, :33] / 9)
        whole = (i * (1 << 33)) // 7 + i.cumsum(0)
        return scores, rows, windows, wave, whole, x.half() + y.half(), (x > y).any(0), x.argmax(1)

    return function, (torch.ones(48, 64), torch.ones(48, 64), torch.arange(48))


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}
_GPT2 = {"n_layer": 2, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0}
_SMALL = ("vit", "whisper", "unet", "lstm", "convnet")

INFERENCE: dict[str, Callable[[], Case]] = {
    **{name: lambda case=case: case.build(False) for name, case in CASES.items()},
    **{f"small_{name}": MODELS[name] for name in _SMALL},
    "gpt2": _language_model("GPT2", 1, 512, **_GPT2),
    "llama": _language_model("Llama", 1, 512, **_LLAMA),
    "qwen2": _language_model("Qwen2", 4, 128, **_LLAMA),
    "bert": _encoder("Bert"),
    "mixed": _mixed,
}
for _name in ("dispatch_chain",):
    INFERENCE.pop(_name)
TRAINING: dict[str, Callable[[], Case]] = {
    **{f"small_{name}": MODELS[name] for name in _SMALL},
    "gpt2": _language_model("GPT2", 4, 256, **_GPT2, attn_pdrop=0),
    "llama": _language_model("Llama", 1, 512, **_LLAMA),
    "bert": _encoder("Bert"),
    "resnet50": INFERENCE["resnet50"],
    "mlp": INFERENCE["mlp"],
}
HALF = {name: INFERENCE[name] for name in ("gpt2", "llama", "resnet50")}
DYNAMIC = {name: INFERENCE[name] for name in ("gpt2", "llama", "mixed", "mlp", "small_convnet")}


def _leaves(output: Any) -> list[Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


def _results(captured: CapturedGraph, phase: Phase, arguments: list[Any]) -> list[Any]:
    """Tensors like the graph's results, of any values."""
    given = dict(phase.forwarded)
    (output,) = captured.module.graph.find_nodes(op="output")
    results: list[Any] = []
    for position, node in enumerate(output.args[0]):
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if position in given:
            value = arguments[given[position]]
        elif isinstance(value, Tensor):
            value = torch.zeros([int(size) for size in value.shape], dtype=value.dtype)
        elif isinstance(value, torch.SymInt):
            value = int(value)
        results.append(value)
    return results


def _compiled(captured: CapturedGraph, phase: Phase, target: Target) -> list[str]:
    try:
        state = compile_graph(captured, phase, target, CompileOptions(), use_cache=False)
    except WebGPUCompileError as error:
        return [str(error)]
    plans = [plan for plan in (state.plan.preparation, state.plan) if plan is not None]
    kernels = [debug.kernel_text(kernel) for plan in plans for kernel in plan.kernels]
    parts = [debug.plan_text(state.plan), *kernels]
    return [re.sub(r"graph\d+_", "graph_", text) for text in parts]


def texts(build: Callable[[], Case], kind: str, mode: Any) -> dict[str, list[str]]:
    """By the adapter's name: the text of each graph's kernels and plan.

    Args:
        kind: ``inference``, ``training``, ``half`` or ``dynamic``.
        mode: a context to build and trace in.
    """
    found: dict[str, list[str]] = {name: [] for name in TARGETS}

    def compile_captured(captured: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        for name, target in TARGETS.items():
            found[name] += _compiled(captured, phase, target)
        return lambda arguments: _results(captured, phase, arguments)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return aot.capture(module, inputs, compile_captured, native_operators())

    torch._dynamo.reset()
    torch.manual_seed(0)
    training = kind == "training"
    torch.set_default_dtype(torch.bfloat16 if kind == "half" else torch.float32)
    with mode, torch.set_grad_enabled(training):
        function, inputs = build()
        if isinstance(function, nn.Module):
            function.train(training)
        compiled = torch.compile(function, backend=backend, dynamic=kind == "dynamic" or None)
        results = _leaves(compiled(*inputs))
        if training:
            sum(t.sum() for t in results if t.requires_grad).backward()
    return found


def _texts(build: Callable[[], Case], kind: str) -> dict[str, list[str]]:
    """`texts` on fake tensors, or on real ones where the model's own code reads values."""
    try:
        return texts(build, kind, FakeTensorMode(allow_non_fake_inputs=True))
    except DataDependentOutputException:
        return texts(build, kind, nullcontext())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    torch._dynamo.config.allow_rnn = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    kinds = {"inference": INFERENCE, "training": TRAINING, "half": HALF, "dynamic": DYNAMIC}
    torch._logging.set_logs(all=logging.ERROR)
    for kind, cases in kinds.items():
        for name, build in cases.items():
            full = f"{kind}_{name}"
            if arguments.only not in full:
                continue
            try:
                with torch.backends.mkldnn.flags(enabled=False):
                    found = _texts(build, kind)
            except Exception as error:
                print(f"{full}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                continue
            for target, parts in found.items():
                text = "\n\n".join(parts) + "\n"
                (arguments.folder / f"{full}_{target}.txt").write_text(text, encoding="utf-8")
            print(full, *(len(parts) for parts in found.values()), flush=True)


if __name__ == "__main__":
    main()
