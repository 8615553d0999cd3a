"""Functions of which data decide what runs, how often, and how large results are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from torch_webgpu_compile import EntryPoint


class Deciding(nn.Module):
    """A method for each kind of step that a composed plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(4))

    def halve(self, x: Tensor, limit: Tensor) -> tuple[Tensor, ...]:
        """As many turns as it takes; a state is changed by the number of them."""

        def holds(k: Tensor, x: Tensor) -> Tensor:
            return x.abs().sum() > limit

        def turn(k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return k + 1, (x @ self.weight).tanh() / 2

        turns, x = torch.while_loop(holds, turn, (torch.zeros((), dtype=torch.int64), x))
        self.seen.add_(turns)
        return turns, x, self.seen

    def choose(self, x: Tensor) -> Tensor:
        """One of two, each too long to compute both."""
        operands = (x,)
        return torch.cond(
            x.sum() > 0, lambda x: (x @ self.weight).sort(-1).values, lambda x: x.sin(), operands
        )

    def find(self, x: Tensor) -> dict[str, Tensor]:
        """Results of sizes that data decide, one of them empty."""
        chosen = x[x > 0]
        torch._check(chosen.shape[0] <= 7)
        values, counts = x.round().to(torch.int64).unique(return_counts=True)
        mean = chosen.sum() / chosen.shape[0]
        return {"where": x.nonzero(), "chosen": chosen * mean, "values": values, "counts": counts}

    def steps(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each turn gives a row."""

        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = (carry @ self.weight + row).softmax(-1)
            return carry, carry.sort(-1).values

        return scan(step, torch.zeros(4), rows)  # type: ignore[no-any-return]

    def turned(self, x: Tensor) -> Tensor:
        """A turn gives what it takes in another layout, which PyTorch itself refuses."""
        zero = torch.zeros((), dtype=torch.int64)
        state = torch.while_loop(lambda k, _: k < 3, lambda k, x: (k + 1, turn(x)), (zero, x))
        return state[1]

    def entries(self) -> dict[str, EntryPoint]:
        """Of a bundle."""
        n = torch.export.Dim("n", max=64)
        return {
            "halve": EntryPoint(self.halve, (torch.randn(3, 4), torch.tensor(0.1))),
            "choose": EntryPoint(self.choose, (torch.randn(3, 4),)),
            "turned": EntryPoint(self.turned, (torch.randn(3, 3),)),
            "find": EntryPoint(self.find, (torch.randn(3, 4),)),
            "steps": EntryPoint(self.steps, (torch.randn(5, 4),), None, ({0: n},)),
        }


def turn(x: Tensor) -> Tensor:
    """Of a square matrix."""
    return x.softmax(-1).t() + 1


def deciding() -> tuple[Deciding, list[tuple[str, tuple[Tensor, ...]]]]:
    """A model, and calls of its methods for which data decide otherwise."""
    torch.manual_seed(0)
    model = Deciding()
    x = torch.randn(3, 4)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(("halve", (x, torch.tensor(limit))) for limit in (0.1, 1e9, 2.0)),
        *(("choose", (sign * torch.rand(3, 4),)) for sign in (1, -1)),
        *(("find", (y,)) for y in (torch.zeros(3, 4), (x * 3).clamp(max=1) - 0.5)),
        *(("steps", (torch.randn(n, 4),)) for n in (5, 1)),
    ]
    return model, calls
