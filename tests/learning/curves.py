"""The loss of each step of a training, and how far two may be from each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .tasks import Batch, Task


@dataclass(frozen=True, slots=True)
class Run:
    """A training.

    Attributes:
        losses: of each step, f64 (steps,).
        accuracy: on what was not trained on.
    """

    losses: Tensor
    accuracy: float


def train(
    task: Task,
    device: str,
    steps: int,
    *,
    is_compiled: bool = False,
    order: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Run:
    """Trains a new model, whose first parameters are the same in every call.

    Args:
        is_compiled: the loss is a compiled function.
        order: the rows of each batch are permuted, another way for each number: the same sums in
            another order.
        dtype: autocast's; f32: none.
    """
    torch.manual_seed(0)
    model = task.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.rate, total_steps=max(steps, 20)
    )
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    loss_of: Any = task.loss
    if is_compiled:
        loss_of = torch.compile(task.loss, backend="webgpu", fullgraph=True)
    losses = []
    for step in range(steps):
        batch = _permuted(task.batch(step), order)
        batch = tuple(tensor.to(device) for tensor in batch)
        optimizer.zero_grad()
        with _autocast(device, dtype):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        accuracy = task.accuracy(model, tuple(tensor.to(device) for tensor in task.test()))
    return Run(torch.stack(losses).cpu().double(), accuracy)


def _autocast(device: str, dtype: torch.dtype) -> Any:
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=dtype)


def _permuted(batch: Batch, order: int | None) -> Batch:
    if order is None:
        return batch
    places = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(order))
    return tuple(tensor[places] for tensor in batch)


FACTOR = 4.0
"""Of the difference that the order of one kind of sum makes.

On the device every sum has another order, not those over the rows alone, and functions such as
``exp`` are rounded otherwise. Roundings are independent of each other, so that ``n`` times as many
make √n times the difference; a step here has 10 to 30 sums, of which the rows are in two or three
(gradients of weights, statistics, the loss): at most 16 times as many. A learning rate that is
wrong by 1e-4 makes 10 to 50 times what is allowed, in 300 steps.
"""
FLOOR = 5e-7
"""Of the loss: four units in the last place, as a permutation may leave the first sums as they
are."""


def largest_so_far(values: Tensor) -> Tensor:
    """The largest of each value and those before it: differences grow, but cross zero."""
    return values.cummax(0).values


def excess(run: Run, reference: Run, others: Sequence[Run]) -> float:
    """The largest ratio, over the steps, of a run's difference to what it may be.

    Args:
        reference: on the CPU.
        others: on the CPU, with sums in other orders.

    Returns:
        At most 1 where the run is as close to ``reference`` as runs with other orders are.
    """
    curve = reference.losses
    spread = torch.stack([largest_so_far((other.losses - curve).abs()) for other in others])
    allowed = FACTOR * spread.amax(0) + FLOOR * curve.abs()
    return float((largest_so_far((run.losses - curve).abs()) / allowed).max())
