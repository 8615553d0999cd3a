"""What compiling one block of a model costs, and compiling all of them: ``python -m`` this module.

24 equal blocks of a transformer are compiled as they are, each as a region
(``torch.compiler.nested_compile_region``), and each by itself (``block.compile``). The numbers are
CPU seconds of this process for the first call, and for its backward; plans are not cached, kernels
are in the driver's cache.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, TOKENS = 24, 64, 4, 16
MODES = ("whole", "region", "block")
_REPEATS = 3


class Block(nn.Module):
    """Attention and two linear layers, each after a layer norm; x: (batch, tokens, `WIDTH`)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + added


class Region(Block):
    """A block that is a region."""

    forward = torch.compiler.nested_compile_region(Block.forward)


def model_of(mode: str, layers: int) -> Any:
    """A model compiled in one of the `MODES`."""
    kind = Region if mode == "region" else Block
    blocks = [kind() for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(100, WIDTH), *blocks, nn.LayerNorm(WIDTH))
    if mode != "block":
        return torch.compile(model, backend="webgpu")
    for block in blocks:
        block.compile(backend="webgpu")
    return model


def first_call_s(mode: str, trains: bool, layers: int = LAYERS) -> float:
    """CPU seconds of the first call of a model, and of its backward if it ``trains``."""
    torch._dynamo.reset()
    model = model_of(mode, layers)
    tokens = torch.randint(0, 100, (2, TOKENS))
    start = time.process_time()
    with torch.set_grad_enabled(trains):
        result = model(tokens)
    if trains:
        result.square().mean().backward()
    return time.process_time() - start


def main() -> None:
    """Prints a line for inference and for training, and each mode."""
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    for trains in (False, True):
        whole_s = 0.0
        for mode in MODES:
            first_call_s(mode, trains, 2)  # imports
            first_call_s(mode, trains)  # fills the driver's cache
            taken = statistics.median(first_call_s(mode, trains) for _ in range(_REPEATS))
            whole_s = whole_s or taken
            what = "training" if trains else "inference"
            print(f"{what:10}{mode:8}{taken:6.2f} s {taken / whole_s:5.2f}")


if __name__ == "__main__":
    main()
