"""A small transformer learns to write Python's documentation, character by character, on the GPU.

``python examples/train_text.py`` takes the text that ``help()`` shows, which every Python has, and
ends with a sample of what the model writes. With ``--checkpoint FILE`` a run that was stopped goes
on where it was saved last, with the losses that it would have had. ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import torch_webgpu_compile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTEXT = 64
"""Characters that the model sees at once."""
BATCH = 16


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: int64 (`CONTEXT`,) of characters, and of those that follow each.

    Attributes:
        alphabet: the characters, at their numbers.
    """

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self._numbers = {character: number for number, character in enumerate(self.alphabet)}
        self._data = self.encoded(text)

    def encoded(self, text: str) -> Tensor:
        """The numbers of characters: int64 (characters,)."""
        return torch.tensor([self._numbers[character] for character in text])

    def decoded(self, numbers: Tensor) -> str:
        """The characters of numbers."""
        return "".join(self.alphabet[number] for number in numbers.tolist())

    def __len__(self) -> int:
        return len(self._data) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self._data[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


def documentation() -> str:
    """The topics of Python's ``help()``."""
    from pydoc_data.topics import topics

    return "\n".join(topic.strip() for topic in topics.values())


class Block(nn.Module):
    """Causal attention and two linear layers, each on normalized inputs and added to them."""

    def __init__(self, features: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.query_key_value = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.mlp = nn.Sequential(
            nn.Linear(features, 4 * features),
            nn.GELU(),
            nn.Linear(4 * features, features),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, characters, features = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(rows, characters, 3, self.heads, -1)
        attention = F.scaled_dot_product_attention(
            *heads.permute(2, 0, 3, 1, 4),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        x = x + self.output(attention.transpose(1, 2).reshape(rows, characters, features))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Characters, int64 (rows, characters), to logits of the next, (rows, characters, kinds)."""

    def __init__(
        self, kinds: int, features: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(kinds, features)
        self.positions = nn.Embedding(CONTEXT, features)
        self.blocks = nn.Sequential(*[Block(features, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(features)
        self.output = nn.Linear(features, kinds)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


class Training:
    """All that a run changes: what is saved is what it needs to go on as if never stopped.

    Args:
        steps: of the whole run, which the learning rate follows.
    """

    def __init__(
        self, text: Text, device: torch.device, dtype: torch.dtype, steps: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.text, self.device, self.dtype, self.steps = text, device, dtype, steps
        self.model = Transformer(len(text.alphabet)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self.order = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def _rate(self, step: int) -> float:
        """Rises for the first twentieth, then falls as half a cosine to a tenth."""
        warmup = max(1, self.steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))

    def run(self, steps: int) -> None:
        """Takes ``steps`` steps."""
        windows = RandomSampler(
            self.text, replacement=True, num_samples=BATCH * steps, generator=self.order
        )
        loader = DataLoader(self.text, BATCH, sampler=windows, generator=self.order)
        losses = []
        self.model.train()
        for characters, following in loader:
            characters, following = characters.to(self.device), following.to(self.device)
            self.optimizer.zero_grad()
            with torch.autocast(
                self.device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32
            ):
                logits = self.model(characters)
                loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.detach())  # on the GPU: nothing waits for it
        self.losses += torch.stack(losses).tolist()

    def save(self, path: Path) -> None:
        """Writes a checkpoint; the one that was there stays until this one is whole."""
        random = {"cpu": torch.get_rng_state(), "order": self.order.get_state()}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            random[self.device.type] = module.get_rng_state(self.device)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": random,
            "losses": self.losses,
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Goes back to a checkpoint.

        Raises:
            RuntimeError: it is of another model: of another text, for example.
        """
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.losses = state["losses"]
        torch.set_rng_state(state["random"]["cpu"])
        self.order.set_state(state["random"]["order"])
        if self.device.type != "cpu" and self.device.type in state["random"]:
            module = torch.get_device_module(self.device)
            module.set_rng_state(state["random"][self.device.type], self.device)


@torch.inference_mode()
def sample(
    model: nn.Module, text: Text, device: torch.device, characters: int, temperature: float = 0.8
) -> str:
    """What the model writes after a new line."""
    model.eval()
    written = text.encoded("\n").unsqueeze(0).to(device)
    for _ in range(characters):
        logits = model(written[:, -CONTEXT:])[:, -1] / temperature
        following = torch.multinomial(logits.float().softmax(-1), 1)
        written = torch.cat([written, following], dim=1)
    return text.decoded(written[0])


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], str]:
    """The program; returns the loss of each step and the sample."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="webgpu", help="default: webgpu")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of autocast")
    parser.add_argument("--checkpoint", type=Path, help="where to save the run as it goes")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (50)")
    parser.add_argument("--characters", type=int, default=200, help="of the sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    given = parser.parse_args(arguments)
    if given.resume and not given.checkpoint:
        parser.error("--resume needs --checkpoint")

    if given.device.startswith("webgpu"):
        torch_webgpu_compile.register_device()
    device = torch.device(given.device)
    text = Text(documentation())
    training = Training(text, device, DTYPES[given.dtype], given.steps, given.seed)
    if given.compile:
        # The same parameters: what is saved does not know that the model is compiled.
        training.model.compile(backend="webgpu" if device.type == "webgpu" else "inductor")
    if given.resume:
        training.load(given.checkpoint)
        print(f"going on after step {len(training.losses)}")
    while (done := len(training.losses)) < given.steps:
        start = time.perf_counter()
        training.run(min(given.every, given.steps - done))
        steps = len(training.losses) - done
        mean = sum(training.losses[done:]) / steps
        seconds = time.perf_counter() - start
        print(f"step {done + steps:4}  loss {mean:.3f}  {seconds / steps * 1e3:.0f} ms per step")
        if given.checkpoint:
            training.save(given.checkpoint)
    written = sample(training.model, text, device, given.characters)
    print(written)
    return training.losses, written


if __name__ == "__main__":
    main()
