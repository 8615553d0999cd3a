"""What a training step sends to other processes: bytes that the loopback interface carried.

``torchrun --standalone --nproc-per-node=4 -m benchmarks.distributed_bytes``, with nothing else that
uses the interface. The figures are in ``docs/distributed.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, STEPS = 256, 8, 3
_SENT = 8  # the column of /proc/net/dev


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return result


def sent() -> int:
    """Bytes sent over the loopback interface since the machine was started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[_SENT])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).to("webgpu")


def data_parallel(hook: Callable[..., Any] | None = None) -> nn.Module:
    found = DistributedDataParallel(model(), broadcast_buffers=False)
    if hook is not None:
        found.register_comm_hook(None, hook)
    return found


def sharded(**options: Any) -> nn.Module:
    mesh = init_device_mesh("webgpu", (dist.get_world_size(),))
    whole = model()
    for block in whole:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(whole, mesh=mesh, **options)


_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "DDP": data_parallel,
    "DDP, bf16_compress_hook": lambda: data_parallel(default_hooks.bf16_compress_hook),
    "FSDP2": sharded,
    "FSDP2, reshard_after_forward=False": lambda: sharded(reshard_after_forward=False),
    "FSDP2, parameters and reduction in bf16": lambda: sharded(mp_policy=_BFLOAT16),
}


def measure(make: Callable[[], nn.Module]) -> float:
    """Bytes that a process sends per parameter and step."""
    numel = LAYERS * sum(p.numel() for p in Block().parameters())
    trained = make()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

    def train(steps: int) -> int:
        for _ in range(steps):
            trained(torch.ones(8, WIDTH, device="webgpu")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        dist.barrier()
        return sent()

    before = train(2)
    dist.barrier()  # all have read the counter
    return (train(STEPS) - before) / (STEPS * dist.get_world_size() * numel)


def main() -> None:
    """Prints a line for each kind of training."""
    dist.init_process_group("gloo")
    for name, make in KINDS.items():
        found = measure(make)
        if int(os.environ["RANK"]) == 0:
            print(f"{name}: {found:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
