"""Builds the pages of `web/demos` into a folder that any server of files can serve.

    python -m web.build [--checkpoint FOLDER] [--quick] [FOLDER]

The runtime is made by npm, the bundles by PyTorch and this package. What is up to date is left.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import torch_webgpu_compile
from torch_webgpu_compile import EntryPoint
from torch_webgpu_compile.plan.cache import sources_digest

WEB = Path(__file__).parent
SITE = WEB / "site"


# ---- the runtime


def npm_environment() -> dict[str, str]:
    """With node from the virtual environment where the machine has none (scripts/setup web)."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{os.environ['PATH']}{os.pathsep}{folder}"}


def has_npm() -> bool:
    """Whether the runtime can be built here."""
    return shutil.which("npm", path=npm_environment()["PATH"]) is not None


def build_runtime() -> Path:
    """`web/dist/torch-webgpu.js`, and what it fetches; several processes may ask for it at once."""
    made = WEB / "dist" / "torch-webgpu.js"
    with (WEB / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inputs = [*WEB.glob("src/*.ts"), *WEB.glob("*.mjs"), WEB / "package-lock.json"]
        newest = max(path.stat().st_mtime for path in inputs)
        if not (WEB / "node_modules" / "esbuild").exists():
            _npm("ci", "--silent", "--no-audit", "--no-fund")
        if not made.exists() or made.stat().st_mtime < newest:
            _npm("run", "--silent", "dist")
    return made


def _npm(*arguments: str) -> None:
    subprocess.run(["npm", *arguments], cwd=WEB, check=True, env=npm_environment())


def build_tokenizers(path: Path) -> None:
    """Hugging Face's tokenizers as one module."""
    command = ["npx", "esbuild", "--bundle", "--minify", "--format=esm", "--log-level=error"]
    source = 'export { Tokenizer } from "@huggingface/tokenizers";'
    arguments = [*command, f"--outfile={path.resolve()}"]
    environment = npm_environment()
    subprocess.run(arguments, cwd=WEB, input=source, text=True, check=True, env=environment)


# ---- similarity


def build_similarity(folder: Path) -> None:
    from examples.sentence_embeddings import SENTENCES, load_encoder, model_folder, tokenize

    source = model_folder()
    encoder = load_encoder(source)
    length = Dim("tokens", min=2, max=128)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    with torch.no_grad():
        example = tokenize(source, SENTENCES[:1])
        bundle = folder / "bundle"
        torch_webgpu_compile.export(encoder, example, bundle, dynamic_shapes=shapes, runtime=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "sentences.json").write_text(json.dumps(SENTENCES))
    build_tokenizers(folder / "tokenizers.js")


# ---- digits


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's pictures, f32 (1797, 1, 8, 8) of 0 to 1, and labels, int64 (1797,), shuffled.

    Its last pages are of other writers than the first ones.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


def digits_network() -> nn.Module:
    """Reads pictures (n, 1, 8, 8); gives logits (n, 10)."""
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def build_digits(folder: Path) -> None:
    torch.manual_seed(0)
    images, labels = digits()
    model = digits_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train_step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    def predict(images: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            odds = model(images).softmax(-1)
        model.train()
        return odds

    batch = images[:64], labels[:64]
    shapes = ({0: Dim("pictures", max=512)},)
    entries = {
        "train_step": EntryPoint(train_step, batch),
        "predict": EntryPoint(predict, (images[:8],), None, shapes),
    }
    torch_webgpu_compile.export(entries, folder / "bundle", runtime=False)
    pixels = (images * 16).to(torch.uint8).flatten().numpy().tobytes()
    (folder / "digits.bin").write_bytes(pixels + labels.to(torch.uint8).numpy().tobytes())


# ---- text


@dataclass
class Checkpoint:
    """A causal language model of transformers, its tokenizer, and what the page begins with."""

    model: Any
    tokenizer: Any
    begin: str


LONGEST = 384
"""Tokens of a text, with its beginning, as far as the model goes."""


def characters(quick: bool) -> Checkpoint:
    """A small Llama of characters, trained for about a minute on the manual of Python.

    Args:
        quick: it is smaller and not trained. Its weights are wide: what it writes depends on all
            that comes before.
    """
    from pydoc_data.topics import topics

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    kept = set("\n " + "".join(map(chr, range(33, 127))))
    text = "".join(letter for letter in "\n".join(topics.values()) if letter in kept)
    alphabet = "".join(sorted(kept))
    numbers = {letter: k for k, letter in enumerate(alphabet)}
    data = torch.tensor([numbers[letter] for letter in text])
    length = 192
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3 if quick else 0.02,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    steps = 0 if quick else 400
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps + 1)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length, (16,))
        ids = torch.stack([data[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Checkpoint(model.eval(), _tokenizer_of(alphabet), "The statement is executed")


def _tokenizer_of(alphabet: str) -> Any:
    """Of which each letter is a token; it leaves out others."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    rules.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=rules, clean_up_tokenization_spaces=False)


def checkpoint(folder: Path) -> Checkpoint:
    """Any causal language model in a folder that ``save_pretrained`` wrote, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder), "Once upon a time")


def build_generate(folder: Path, made: Checkpoint) -> None:
    torch_webgpu_compile.export_pipeline(
        made.model, made.tokenizer, folder / "bundle", most_tokens=LONGEST, runtime=False
    )
    (folder / "about.json").write_text(json.dumps({"begin": made.begin}))
    for part in (made.model, made.tokenizer):
        part.save_pretrained(folder / "checkpoint")


# ---- the site


def build(site: Path, *, model: Path | None = None, quick: bool = False) -> Path:
    """The pages with their bundles.

    Args:
        site: the folder.
        model: a causal language model for the page that writes; None: one that is trained here.
        quick: it is smaller, and not trained.
    """
    site.mkdir(parents=True, exist_ok=True)
    runtime = build_runtime()
    shutil.copytree(WEB / "demos", site, dirs_exist_ok=True)
    for module in (runtime, runtime.with_name("torch-webgpu-text.js")):
        shutil.copy(module, site / module.name)

    def build_text(folder: Path) -> None:
        build_generate(folder, characters(quick) if model is None else checkpoint(model))

    parts: dict[str, Callable[[Path], None]] = {
        "similarity": build_similarity,
        "digits": build_digits,
        "generate": build_text,
    }
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    changed = max((path.stat().st_mtime_ns for path in model.iterdir()), default=0) if model else 0
    for name, make in parts.items():
        stamp = site / name / ".stamp"
        wanted = f"{sources_digest()} {own}"
        if name == "generate":
            wanted += f" {model} {changed} {quick}"
        if stamp.exists() and stamp.read_text() == wanted:
            continue
        print(f"==> building {name}", file=sys.stderr, flush=True)
        stamp.unlink(missing_ok=True)
        make(site / name)
        stamp.write_text(wanted)
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").split("\n")[0])
    parser.add_argument("site", nargs="?", type=Path, default=SITE)
    parser.add_argument("--checkpoint", type=Path, help="a causal language model's folder")
    parser.add_argument("--quick", action="store_true", help="do not train the small model")
    options = parser.parse_args()
    print(build(options.site, model=options.checkpoint, quick=options.quick))


if __name__ == "__main__":
    main()
