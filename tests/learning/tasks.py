"""Small models with data that every machine has: digits, and the documentation of Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import train_digits, train_text

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What a model learns.

    Attributes:
        build: a model on the CPU, of PyTorch's random numbers.
        batch: the training data of a step, on the CPU: the same whenever it is asked for.
        loss: of a model and a batch, a mean over its rows.
        accuracy: of a model and the batch `test`, where larger is better.
        test: data that no step trains on.
        rate: the learning rate of AdamW.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    accuracy: Callable[[nn.Module, Batch], float]
    test: Callable[[], Batch]
    rate: float


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


# ---- digits, by a convolutional network


@cache
def _digits() -> tuple[Batch, Batch]:
    training, test = train_digits.digits(seed=0)
    return training.tensors, test.tensors


def _digit_batch(step: int) -> Batch:
    images, labels = _digits()[0]
    chosen = torch.randint(len(images), (32,), generator=_generator(step))
    return images[chosen], labels[chosen]


def _convnet() -> nn.Module:
    """Smooth: where ``relu`` or a maximum has a kink, one rounding sends two runs apart at once, at
    a step that chance decides. No biases before batch norm: their gradients are 0 but for rounding,
    of which AdamW makes steps of full length.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _share_right(model: nn.Module, batch: Batch) -> float:
    inputs, labels = batch
    return (model(inputs).argmax(-1) == labels).float().mean().item()


# ---- characters, by a transformer and by an LSTM


@cache
def _text() -> train_text.Text:
    return train_text.Text(train_text.documentation())


CHARACTERS = 24
"""Of a row of text."""


def _windows(starts: Tensor) -> Batch:
    windows = [_text()[start] for start in starts.tolist()]
    characters, following = (torch.stack(part) for part in zip(*windows, strict=True))
    return characters[:, :CHARACTERS].contiguous(), following[:, :CHARACTERS].contiguous()


def _text_batch(step: int) -> Batch:
    half = len(_text()) // 2
    return _windows(torch.randint(half, (16,), generator=_generator(step)))


def _text_test() -> Batch:
    half = len(_text()) // 2
    return _windows(torch.randint(half, (64,), generator=_generator(-1)) + half - 100)


def _transformer() -> nn.Module:
    return train_text.Transformer(len(_text().alphabet), features=32, heads=2, dropout=0.0)


class Recurrent(nn.Module):
    """Characters, int64 (rows, characters), to logits of the next, by an LSTM."""

    def __init__(self, kinds: int, features: int = 48) -> None:
        super().__init__()
        self.characters = nn.Embedding(kinds, features)
        self.lstm = nn.LSTM(features, features, batch_first=True)
        self.output = nn.Linear(features, kinds)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.output(self.lstm(self.characters(characters))[0])
        return logits


def _recurrent() -> nn.Module:
    return Recurrent(len(_text().alphabet))


# ---- the noise in noisy digits: a diffusion model


LEVELS = 50
"""Of noise: the share of the image falls from nearly 1 to nearly 0."""


class Denoiser(nn.Module):
    """A U-Net of two resolutions: f32 (images, 1, 8, 8) and levels, int64 (images,), to noise."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 2 * features)
        self.enter = nn.Conv2d(1, features, 3, padding=1)
        self.norm_1 = nn.GroupNorm(4, features)
        self.down = nn.Conv2d(features, 2 * features, 3, stride=2, padding=1)
        self.norm_2 = nn.GroupNorm(4, 2 * features)
        self.middle = nn.Conv2d(2 * features, 2 * features, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * features, features, 2, stride=2)
        self.leave = nn.Conv2d(2 * features, 1, 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor) -> Tensor:
        wide = F.silu(self.norm_1(self.enter(images)))
        deep = self.down(wide) + self.level(levels)[:, :, None, None]
        deep = F.silu(self.middle(F.silu(self.norm_2(deep))))
        noise: Tensor = self.leave(torch.cat([self.up(deep), wide], dim=1))
        return noise


def _noised(images: Tensor, generator: torch.Generator) -> Batch:
    """Noisy images, their levels, and the noise."""
    levels = torch.randint(LEVELS, (len(images),), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    share = torch.cos((levels + 0.5) / LEVELS * torch.pi / 2).view(-1, 1, 1, 1)
    return share * (2 * images - 1) + (1 - share**2).sqrt() * noise, levels, noise


def _noised_batch(step: int) -> Batch:
    return _noised(_digit_batch(step)[0], _generator(step))


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    images, levels, noise = batch
    return F.mse_loss(model(images, levels), noise)


TASKS = {
    "cnn": Task(_convnet, _digit_batch, _classified, _share_right, lambda: _digits()[1], rate=3e-3),
    "transformer": Task(_transformer, _text_batch, _classified, _share_right, _text_test, 3e-3),
    "lstm": Task(_recurrent, _text_batch, _classified, _share_right, _text_test, 1e-2),
    "diffusion": Task(
        Denoiser,
        _noised_batch,
        _denoised,
        lambda model, batch: -_denoised(model, batch).item(),
        lambda: _noised(_digits()[1][0], _generator(-1)),
        rate=3e-3,
    ),
}
