"""Programs for `torchrun`: training by several processes, which raises where it differs from one's.

Each trains a model on the device, every process on its share of the batches or of the weights, and
the same model on the CPU by itself, on whole batches.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torch_webgpu_compile.device.autoload import register

register()

WIDTH, WORDS, LENGTH = 8, 12, 4


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return result


class Net(nn.Module):
    """Words to the logits of words, perhaps with a batch norm of features."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.features = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        if self.features is not None:
            x = self.features(x.transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.head(self.norm(x))
        return result


def loss_of(model: Callable[[Tensor], Tensor], words: Tensor) -> Tensor:
    wanted = (words * 5 + 1) % WORDS
    return nn.functional.cross_entropy(model(words).flatten(0, 1).float(), wanted.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


class Run:
    """Training of ``model`` beside that of a copy of ``reference`` on the CPU.

    Args:
        shares: into how many parts a batch is divided, and ``share``, which is this process's.
    """

    def __init__(self, model: nn.Module, reference: nn.Module, share: int, shares: int) -> None:
        self.model, self.reference, self.share, self.shares = model, reference, share, shares
        self.call: Any = model
        self.around: Any = contextlib.nullcontext
        self.optimizer, self.expected = optimizer_of(model), optimizer_of(reference)

    def batch(self, step: int) -> Tensor:
        """int64 (8, LENGTH) on the CPU."""
        return torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(step))

    def step(self, step: int, tolerance: float = 1e-4, device: str = "webgpu") -> None:
        words = self.batch(step)
        with self.around():
            loss = loss_of(self.call, words.chunk(self.shares)[self.share].to(device))
            loss.backward()
        if torch.__version__ < (2, 13):
            self.sum_parts()
        self.step_alone(step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert norm.device.type == device
        torch.testing.assert_close(norm.cpu(), self.norm, atol=tolerance, rtol=10 * tolerance)

    def sum_parts(self) -> None:
        """Sums gradients that lie as terms of sums; older optimizers take each for a gradient."""
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                placements = parameter.placements
                parameter.grad = parameter.grad.redistribute(placements=placements)

    def step_alone(self, step: int) -> None:
        loss_of(self.reference, self.batch(step)).backward()
        self.norm = nn.utils.clip_grad_norm_(self.reference.parameters(), 0.5)
        self.expected.step()
        self.expected.zero_grad()

    def compare(self, tolerance: float = 1e-4) -> None:
        found = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        on_host = {name: value.cpu() for name, value in found.items()}
        expected = dict(self.reference.state_dict())
        torch.testing.assert_close(on_host, expected, atol=tolerance, rtol=tolerance)


def made(batch_norm: bool = False) -> tuple[Net, Net]:
    """A model on the device and the same on the CPU."""
    torch.manual_seed(0)
    reference = Net(batch_norm)
    return copy.deepcopy(reference).to("webgpu"), reference


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def shard(model: Net, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def sharded(is_compiled: bool = False, tolerance: float = 1e-4, **options: Any) -> None:
    """FSDP2: of each weight, every process holds a part between steps."""
    model, reference = made()
    shard(model, init_device_mesh("webgpu", (dist.get_world_size(),)), **options)
    run = Run(model, reference, *world())
    if is_compiled:
        run.call = torch.compile(model, backend="webgpu")
    for step in range(2):
        run.step(step, tolerance)
    run.compare(tolerance)


def fully_sharded() -> None:
    """FSDP2, compiled, and with parameters in bfloat16 for products."""
    sharded(is_compiled=True, reshard_after_forward=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(mp_policy=policy, tolerance=3e-2)


def synchronized_norm() -> None:
    """SyncBatchNorm: the statistics, running ones too, are those of whole batches."""
    model, reference = made(batch_norm=True)
    parallel = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    run = Run(model, reference, *world())
    run.call = parallel
    for step in range(2):
        run.step(step)
    run.compare()


def split(model: Net, mesh: DeviceMesh, **head: Any) -> None:
    """Tensor and sequence parallelism."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "wide": ColwiseParallel(input_layouts=Shard(1)),
            "narrow": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **head),
    }
    parallelize_module(model, mesh, plan)


def tensor_parallel() -> None:
    """Tensor parallelism, eager with `loss_parallel`, and compiled: collectives in graphs."""
    mesh = init_device_mesh("webgpu", (dist.get_world_size(),))
    model, reference = made()
    split(model, mesh, output_layouts=Shard(-1), use_local_output=False)
    run = Run(model, reference, 0, 1)
    run.around = loss_parallel
    run.step(0)
    run.compare()
    model, reference = made()
    split(model, mesh, output_layouts=Replicate())
    run = Run(model, reference, 0, 1)
    run.call = torch.compile(model, backend="webgpu")
    run.step(0)
    run.compare()


def compiled_collectives() -> None:
    """Each waits for its result, and none counts as a fallback."""
    rank, count = world()
    group = dist.group.WORLD
    # Their names since PyTorch 2.12, and before.
    kind = "single" if hasattr(functional, "all_gather_single") else "tensor"
    all_gather = getattr(functional, f"all_gather_{kind}")
    reduce_scatter = getattr(functional, f"reduce_scatter_{kind}")
    reduce_scatter_into = getattr(dist, f"reduce_scatter_{kind}")

    @torch.compile(backend="webgpu", fullgraph=True)
    def compiled(x: Tensor) -> tuple[Tensor, ...]:
        summed = functional.all_reduce(x * 2, "sum", group)
        gathered = all_gather(x + 1, 0, group)
        scattered = reduce_scatter(gathered * 2, "avg", 0, group)
        exchanged = functional.all_to_all_single(gathered.flatten(), None, None, group)
        return summed - x, gathered, scattered, exchanged, functional.broadcast(x, 1, group) + x

    x = torch.tensor([float(rank), 1.0], device="webgpu")
    total = sum(range(count))
    everyone = [value for other in range(count) for value in (other + 1, 2)]
    expected = (
        [2 * total - rank, 2 * count - 1],
        everyone,
        [2 * (rank + 1), 4],
        [rank + 1, 2] * count,
        [1 + rank, 2],
    )
    for found, values in zip(compiled(x), expected, strict=True):
        assert found.device.type == "webgpu"
        assert found.tolist() == values, (found, values)
    pending = torch.zeros(1, device="webgpu")
    work = reduce_scatter_into(pending, torch.ones(count, device="webgpu"), async_op=True)
    work.wait()
    assert pending.item() == count


def saved(folder: Path) -> None:
    """Two dimensions, FSDP and tensor parallelism, and a checkpoint after the second step."""
    _, count = world()
    mesh = init_device_mesh("webgpu", (count // 2, 2), mesh_dim_names=("data", "tensor"))
    model, reference = made()
    split(model, mesh["tensor"], output_layouts=Replicate())
    shard(model, mesh["data"])
    run = Run(model, reference, mesh["data"].get_local_rank(), count // 2)
    run.step(0)
    run.step(1)
    run.compare()
    pending = dcp.async_save(state_of(run), checkpoint_id=folder)
    run.step(2)  # does not change what is being saved
    pending.result()
    run.compare()


def loaded(folder: Path, device: str = "webgpu") -> None:
    """The checkpoint of `saved`, by other processes; training goes on."""
    _, reference = made()
    model = Net().to(device)
    shard(model, init_device_mesh(device, (dist.get_world_size(),)))
    run = Run(model, reference, *world())
    state = state_of(run)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    run.step_alone(0)
    run.step_alone(1)
    run.compare()
    run.step(2, device=device)
    run.compare()


def loaded_on_cpu(folder: Path) -> None:
    loaded(folder, "cpu")


def state_of(run: Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def killed(folder: Path) -> None:
    """Process 1 is killed once; what the others then raise is written, and all begin again."""
    rank, count = world()
    checkpoint = folder / "checkpoint"
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to("webgpu")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="webgpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, 4):
        if step == 2 and first == 0 and rank == 1 and count > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        try:
            parallel(whole.chunk(count)[rank].to("webgpu")).square().mean().backward()
        except RuntimeError as error:
            (folder / "error").write_text(str(error))
            raise
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, checkpoint)
        dist.barrier()
    if rank == 0:
        torch.save([first, model.state_dict()], folder / f"result{count}")


def main() -> None:
    """The programs that the arguments name; those that need a folder get it from the last one."""
    warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch 2.13 has changed
    *names, folder = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        program = globals()[name]
        program(*[Path(folder)] * ("folder" in program.__code__.co_varnames))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
