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
import re
import shutil
import subprocess
import sys
import textwrap
import time
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


# ---- progress


class Progress:
    """How far a number of steps has come, on stderr: step k of n, and the seconds that are left.

    On a terminal one line is rewritten; elsewhere there is a line every ten seconds.

    Args:
        what: is done.
        steps: that it has.
        clock: gives seconds.
    """

    def __init__(self, what: str, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._steps, self._clock = what, steps, clock
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._period = 0.2 if self._is_terminal else 10.0
        self._begun = self._said = clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print(file=sys.stderr)

    def step(self) -> None:
        """One more step is done."""
        self._done += 1
        now = self._clock()
        if now - self._said < self._period and self._done < self._steps:
            return
        self._said = now
        left = (now - self._begun) / self._done * (self._steps - self._done)
        text = f"    {self._what}: step {self._done} of {self._steps}, {left:.0f} s left"
        start, end = ("\r", "\033[K") if self._is_terminal else ("", "\n")
        print(start + text, end=end, file=sys.stderr, flush=True)


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
    """A causal language model of transformers.

    Attributes:
        tokenizer: its own.
        begin: what the page begins with.
        about: what the page says of it.
    """

    model: Any
    tokenizer: Any
    begin: str
    about: str


LONGEST = 384
"""Tokens of a text, with its beginning, as far as the model goes."""


STEPS = 350
"""Of the training of the small model, of which each takes a tenth of a second on one core."""


def prose() -> str:
    """The paragraphs of the manual of Python that are sentences, of letters of ASCII."""
    from pydoc_data.topics import topics

    parts = "\n\n".join(topics.values()).split("\n\n")
    sentences = [" ".join(part.split()) for part in parts if re.match(r"[A-Z].*[.:]$", part, re.S)]
    return re.sub(r"[^\n !#-)+-~]", "", "\n".join(sentences))  # nor marks of emphasis


def trained_here(quick: bool) -> Checkpoint:
    """A small Llama, trained for less than a minute on the manual of Python.

    Args:
        quick: it is smaller and not trained. Its weights are wide: what it writes depends on all
            that comes before.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    text = prose()
    tokenizer = _tokenizer_of(text)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2 if quick else 3,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3 if quick else 0.02,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    about = "It has learned nothing: it writes pieces of words by chance."
    if not quick:
        _train(model, tokenizer(text, return_tensors="pt")["input_ids"][0])
        about = (
            "It learned for less than a minute, from the manual of the language Python: "
            "it writes words, and means nothing."
        )
    return Checkpoint(model.eval(), tokenizer, "The statement is executed", about)


def _train(model: nn.Module, data: Tensor, batch: int = 6, length: int = 192) -> None:
    """Trains a causal language model on token numbers, int64 (tokens,)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS + 1)
    with Progress("training the language model", STEPS) as progress:
        for _ in range(STEPS):
            starts = torch.randint(0, len(data) - length, (batch,))
            ids = torch.stack([data[start : start + length] for start in starts.tolist()])
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.step()


def _tokenizer_of(text: str) -> Any:
    """Of which a token is a frequent piece of a word, or an ASCII letter; it leaves out others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+|\s|.")
    rules.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    rules.decoder = decoders.Fuse()
    letters = ["\n", *map(chr, range(32, 127))]
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=letters, show_progress=False)
    rules.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=rules, clean_up_tokenization_spaces=False)


def checkpoint(folder: Path) -> Checkpoint:
    """Any causal language model in a folder that ``save_pretrained`` wrote, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder), "Once upon a time", "")


def build_generate(folder: Path, made: Checkpoint) -> None:
    torch_webgpu_compile.export_pipeline(
        made.model, made.tokenizer, folder / "bundle", most_tokens=LONGEST, runtime=False
    )
    (folder / "about.json").write_text(json.dumps({"begin": made.begin, "about": made.about}))
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
        build_generate(folder, trained_here(quick) if model is None else checkpoint(model))

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
