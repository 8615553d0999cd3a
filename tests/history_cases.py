"""Calls and trainings that are to give the same bits whatever their process ran before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (64, 100)
OTHERS = ((7, 33), (50, 41), (81, 27), (128, 256))


@dataclass(frozen=True)
class Case:
    """What two processes compute, one after the other, that should be the same.

    Attributes:
        first, second: (folder that both have) → a result. The first one has run other things
            before, or the second one, which is resumed.
    """

    first: Callable[[Path], Any]
    second: Callable[[Path], Any]


def _call(function: Callable[[Tensor], Any], *, backward: bool = False) -> Case:
    """A function of a matrix, or its gradient."""

    def run(sizes: Sequence[int]) -> Any:
        x = torch.randn(tuple(sizes), generator=torch.Generator().manual_seed(sum(sizes)))
        x = x.to("webgpu").requires_grad_(backward)
        result = function(x)
        if not backward:
            return result
        weights = torch.arange(result.numel(), device="webgpu").reshape(result.shape) / 64
        return torch.autograd.grad(result, x, weights.cos())[0]

    def used(folder: Path) -> Any:
        for sizes in OTHERS:
            run(sizes)
        return run(SIZES)

    return Case(used, lambda folder: run(SIZES))


def _depthwise(x: Tensor) -> Tensor:
    images = x[::2, ::2].expand(2, 4, -1, -1)
    return F.conv2d(images, x[:7, :7].expand(4, 1, -1, -1), padding=3, groups=4)


def _convolution(x: Tensor) -> Tensor:
    images = x.reshape(1, 1, *x.shape).expand(2, 8, *x.shape)
    return F.conv2d(images, x[None, :7, :5].expand(16, 8, -1, -1), padding=2)


def _accumulated(x: Tensor) -> Tensor:
    rows = torch.arange(len(x), device=x.device) * 5 % 3
    return torch.zeros_like(x).index_put((rows,), x, accumulate=True)


class _Network(nn.Module):
    """Convolutions, batch and layer norms, products."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.BatchNorm2d(8), nn.GELU()),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.LayerNorm(8 * 6 * 6), nn.Linear(8 * 6 * 6, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.body(images)
        return found


class _Training:
    """A small network's, on batches of which the last of each epoch is smaller."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Network().to("webgpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def epoch(self, number: int, sizes: Sequence[int] = (32, 32, 20)) -> None:
        generator = torch.Generator().manual_seed(number)
        for size in sizes:
            images = torch.randn(size, 1, 12, 12, generator=generator).to("webgpu")
            labels = torch.randint(10, (size,), generator=generator).to("webgpu")
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()

    def evaluate(self) -> None:
        """On batches of sizes that it is not trained with."""
        self.model.eval()
        with torch.no_grad():
            for size in (50, 7, 41):
                self.model(torch.randn(size, 1, 12, 12).to("webgpu"))
        self.model.train()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _train(folder: Path) -> Any:
    training = _Training()
    training.epoch(0)
    training.epoch(1)
    return training.state()


def _train_twice(folder: Path) -> Any:
    _train(folder)
    return _train(folder)


def _train_after_another(folder: Path) -> Any:
    """As a search for the best batch size does."""
    _Training().epoch(0, (48, 9, 25))
    return _train(folder)


def _save_and_go_on(folder: Path) -> Any:
    training = _Training()
    training.epoch(0)
    torch.save(training.state(), folder / "state")
    training.epoch(1)
    return training.state()


def _resume(folder: Path) -> Any:
    """Looks first at what it has loaded."""
    training = _Training()
    state = torch.load(folder / "state")
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.evaluate()
    training.epoch(1)
    return training.state()


CASES = {
    "sum": _call(torch.sum),
    "row_sums": _call(partial(torch.sum, dim=1)),
    "softmax": _call(lambda x: x.softmax(1)),
    "cumsum": _call(lambda x: x.cumsum(1)),
    "var": _call(lambda x: x.var(0)),
    "layer_norm_gradient": _call(lambda x: F.layer_norm(x, x.shape[1:]), backward=True),
    "batch_norm": _call(lambda x: F.batch_norm(x, None, None, training=True)),
    "depthwise_gradient": _call(_depthwise, backward=True),
    "convolution_gradient": _call(_convolution, backward=True),
    "mm": _call(lambda x: x @ x.mT),
    "row_product": _call(lambda x: x[:1] @ x.mT),
    "index_put": _call(_accumulated),
    "cross_entropy_gradient": _call(
        lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device) % 5), backward=True
    ),
    "same_training": Case(_train_twice, _train),
    "other_training": Case(_train_after_another, _train),
    "resumed_training": Case(_save_and_go_on, _resume),
}
