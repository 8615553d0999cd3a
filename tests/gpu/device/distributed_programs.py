"""What the two processes of `test_distributed` run, which raises where a result is wrong."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

DEVICE = torch.device("webgpu:0")
BATCH = 4


def main() -> None:
    """Everything, as the process that the environment says: most of the time goes into imports."""
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch 2.13 has changed
    settings: list[tuple[str | None, tuple[Any, ...]]] = [("gloo", (collectives, data_parallel))]
    if not torch.cuda.is_available():  # else the default is NCCL, which has no tensors of the host
        settings.append((None, (default_backend,)))
    for backend, programs in settings:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=2,
            init_method=f"file://{os.environ['MEETING']}-{backend}",
            timeout=timedelta(seconds=60),
        )
        for program in programs:
            program(rank)
    dist.all_reduce(torch.ones(1 << 16, device=DEVICE), async_op=True)  # and nobody waits


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def check(found: Tensor | Sequence[Tensor], *expected: Any) -> None:
    """Raises where device tensors have other values."""
    tensors = [found] if isinstance(found, Tensor) else found
    assert all(each.device == DEVICE for each in tensors)
    assert [each.tolist() for each in tensors] == [*expected], (tensors, expected)


def collectives(rank: int) -> None:
    dist.barrier()
    dist.monitored_barrier()
    reduce_everywhere(rank)
    share(rank)
    reduce_and_scatter(rank)
    messages(rank)
    objects(rank)


def reduce_everywhere(rank: int) -> None:
    expected = {"SUM": [3, 4], "AVG": [1.5, 2], "MAX": [2, 2], "MIN": [1, 2], "PRODUCT": [2, 4]}
    for name, values in expected.items():
        x = tensor(rank + 1, 2)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        check(x, values)
    pending = [(tensor(rank, i)) for i in range(5)]
    for work in [dist.all_reduce(x, async_op=True) for x in pending]:
        work.wait()
    check(pending, *([1, 2 * i] for i in range(5)))
    wide = torch.zeros(2, 4, device=DEVICE)
    part = wide[:, 1:3]  # a part of a storage
    part.fill_(rank + 1)
    dist.all_reduce(part)
    check(wide, [[0, 3, 3, 0]] * 2)
    parameter = nn.Parameter(tensor(rank))
    dist.all_reduce(parameter.data)
    with torch.inference_mode():
        dist.all_reduce(parameter)
    check(parameter.detach(), [2])
    half, whole = tensor(rank, 1).bfloat16(), torch.tensor([rank + 1], device=DEVICE)
    dist.all_reduce(half)
    dist.all_reduce(whole, group=dist.new_group([0, 1]))
    check([half, whole], [1, 2], [3])
    several = [tensor(rank), tensor(1, 2)]
    dist.all_reduce_coalesced(several)
    check(several, [1], [2, 4])
    with pytest.raises(RuntimeError, match="BAND"):
        dist.all_reduce(tensor(1), op=dist.ReduceOp.BAND)


def share(rank: int) -> None:
    x = tensor(rank + 1, 2)
    dist.broadcast(x, 1)
    check(x, [2, 2])
    found = [tensor(0, 0), tensor(0, 0)]
    dist.all_gather(found, tensor(rank, 5))
    check(found, [0, 5], [1, 5])
    joined = tensor(0, 0, 0, 0)
    dist.all_gather_into_tensor(joined, tensor(rank, 5))
    check(joined, [0, 5, 1, 5])
    gathered = [tensor(0), tensor(0)]
    dist.gather(tensor(rank + 4), gathered if rank == 0 else None, 0)
    if rank == 0:
        check(gathered, [4], [5])
    mine = tensor(0)
    dist.scatter(mine, [tensor(7), tensor(8)] if rank == 1 else None, 1)
    check(mine, [7 + rank])
    exchanged = tensor(0, 0)
    dist.all_to_all_single(exchanged, tensor(rank, rank + 10))
    check(exchanged, [10 * rank, 10 * rank + 1])


def reduce_and_scatter(rank: int) -> None:
    x = tensor(rank + 1, 2)
    dist.reduce(x, 0)
    if rank == 0:
        check(x, [3, 4])
    mine = tensor(0, 0)
    dist.reduce_scatter(mine, [tensor(rank, 1), tensor(rank, 2)])
    check(mine, [1, 2 + 2 * rank])
    dist.reduce_scatter_tensor(mine, tensor(rank, 1, rank, 3))
    check(mine, [1, 2 + 4 * rank])


def messages(rank: int) -> None:
    other = 1 - rank
    x = tensor(0, 0)
    if rank == 0:
        dist.send(tensor(3, 4), 1)
        assert dist.recv(x) == 1  # from anyone
        check(x, [6, 8])
    else:
        dist.recv(x, 0)
        dist.send(x * 2, 0)
    x = tensor(0)
    receiving = dist.irecv(x, other)
    assert receiving is not None
    sending = dist.isend(tensor(rank + 20), other)
    assert sending is not None
    receiving.wait()
    sending.wait()
    check(x, [other + 20])
    exchange = [dist.P2POp(dist.irecv, x, other), dist.P2POp(dist.isend, tensor(rank), other)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    check(x, [other])


def objects(rank: int) -> None:
    given: list[Any] = [{"a": 1}, tensor(5)] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, 0, device=DEVICE)
    assert given[0] == {"a": 1}
    check(given[1], [5])
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]


def default_backend(rank: int) -> None:
    """The host's tensors are served, too."""
    x, y = tensor(rank), torch.tensor([rank])
    dist.all_reduce(x)
    dist.all_reduce(y)
    dist.barrier()
    check(x, [1])
    assert y.tolist() == [1]


class Net(nn.Module):
    """A perceptron, perhaps with statistics as buffers, or with parameters that are not used."""

    def __init__(self, norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


def train(model: Any, x: Tensor, y: Tensor, accumulate: bool) -> None:
    """Two steps; with ``accumulate``, each on the gradients of two batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        if accumulate and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                nn.functional.mse_loss(model(x[2]), y[2]).backward()
        elif accumulate:
            nn.functional.mse_loss(model(x[2]), y[2]).backward()
        nn.functional.mse_loss(model(x[step]), y[step]).backward()
        optimizer.step()


def data_parallel(rank: int) -> None:
    compare(rank)
    compare(rank, gradient_as_bucket_view=True, bucket_cap_mb=1e-4, device_ids=[0])
    compare(rank, accumulate=True)
    compare(rank, unused=True, find_unused_parameters=True)
    compare(rank, unused=True, static_graph=True)
    compare(rank, static_graph=True, gradient_as_bucket_view=True)
    compare(rank, hook=default_hooks.bf16_compress_hook, tolerance=1e-2)
    compare(rank, norm=True)
    compare(rank, compiled="outside")
    compare(rank, compiled="inside")
    sharded_optimizer()


def compare(
    rank: int,
    norm: bool = False,
    unused: bool = False,
    accumulate: bool = False,
    hook: Any = None,
    tolerance: float = 1e-5,
    compiled: str = "",
    **options: Any,
) -> None:
    """Trains on the device, each process on a half of every batch.

    Raises AssertionError where the weights differ from those of one process on the host with whole
    batches. (With statistics of halves they do: then, from those of two processes on the host.)
    """
    torch.manual_seed(0)
    model = Net(norm, unused)
    reference: nn.Module = copy.deepcopy(model)
    x, y = torch.randn(3, 2 * BATCH, 6), torch.randn(3, 2 * BATCH, 3)
    half = slice(BATCH * rank, BATCH * rank + BATCH)
    if rank == 1:
        nn.init.zeros_(model.first.weight)  # process 0 sends its own
    model = model.to(DEVICE)
    inner = torch.compile(model, backend="webgpu") if compiled == "inside" else model
    parallel: Any = DistributedDataParallel(inner, **options)
    if compiled == "outside":  # after eager calls: their kernels are in Python, which Dynamo sees
        parallel(x[0].to(DEVICE)).sum().backward()
        parallel = torch.compile(parallel, backend="webgpu")
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    train(parallel, x[:, half].to(DEVICE), y[:, half].to(DEVICE), accumulate)
    if norm:
        train(DistributedDataParallel(reference), x[:, half], y[:, half], accumulate)
    else:
        train(reference, x, y, accumulate)
    assert all(p.grad is None or p.grad.device == DEVICE for p in model.parameters())
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(reference.state_dict()), atol=tolerance, rtol=tolerance)


def sharded_optimizer() -> None:
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    parallel = DistributedDataParallel(model.to(DEVICE))
    for net, optimizer in (
        (parallel, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)),
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
    ):
        device = DEVICE if net is parallel else torch.device("cpu")
        net(torch.ones(BATCH, 6, device=device)).sum().backward()
        optimizer.step()
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(reference.state_dict()))
