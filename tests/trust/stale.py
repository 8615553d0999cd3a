"""Parameters and buffers of CPU-tensor models that ordinary code changes, between compiled calls.

Most of these changes count no versions or use an address again: a GPU copy that is not renewed
gives the result of the old weights.
"""

from __future__ import annotations

import copy
import gc
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from torch_webgpu_compile.device.autoload import register

from .faults import Tally, fault

register()

Change = Callable[[nn.Module], None]


class Net(nn.Module):
    """A little of everything: dense weights, an embedding, norms, a tied head, a plain buffer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.batch = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, index: Tensor) -> Tensor:
        x = self.batch(self.norm(self.hidden(self.embedding(index)).tanh()))
        return self.head(x * self.scale)


def _each(model: nn.Module, change: Callable[[Tensor], object]) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                change(tensor)


def _reassigned(tensor: Tensor) -> None:
    tensor.data = tensor.data * (0.98 * torch.ones_like(tensor))
    tensor.data = tensor.data * 0.99


def _through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= 0.9


def _through_a_view(tensor: Tensor) -> None:
    tensor.data.view(-1).mul_(0.9)


def _flattened(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 0.9, model.parameters())


def _averaged(model: nn.Module) -> None:
    online = copy.deepcopy(model)
    _each(online, lambda t: t.mul_(0.5))
    for own, new in zip(model.parameters(), online.parameters(), strict=True):
        own.data.mul_(0.999).add_(new.data, alpha=0.001)


def _halved_and_back(model: nn.Module) -> None:
    model.half().float()


def _assigned_state(model: nn.Module) -> None:
    state = {k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _mapped_state(model: nn.Module) -> None:
    state = {k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(state, path)
        model.load_state_dict(torch.load(path, mmap=True), assign=True)


def _swapped(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if part is not getattr(model, "head", None):
                other = nn.Parameter(parameter.detach() * 0.9)
                torch.utils.swap_tensors(getattr(part, name), other)


def _resized_storage(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()  # PyTorch crashes where the memory is shared
    kept, storage = tensor.detach().clone(), tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)  # what FSDP does between uses
    storage.resize_(nbytes)
    tensor.data.copy_(kept * 0.9)


def _new_parameters(model: nn.Module) -> None:
    with torch.no_grad():
        for part in (model.hidden, model.norm, model.batch):
            part.weight = nn.Parameter(part.weight.data * 0.9)
            part.bias = nn.Parameter(part.bias.data * 0.9)


def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.9)


def _clamped(model: nn.Module) -> None:
    _each(model, lambda t: t.data.clamp_(-0.1, 0.1))


CHANGES: dict[str, Change] = {
    "data.mul_": lambda m: _each(m, lambda t: t.data.mul_(0.9)),
    "data assigned twice": lambda m: _each(m, _reassigned),
    "NumPy": lambda m: _each(m, _through_numpy),
    "a view of data": lambda m: _each(m, _through_a_view),
    "detach().mul_": lambda m: _each(m, lambda t: t.detach().mul_(0.9)),
    "data.clamp_": _clamped,
    "foreach on data": _foreach,
    "vector_to_parameters": _flattened,
    "moving average": _averaged,
    "half().float()": _halved_and_back,
    "load_state_dict(assign=True)": _assigned_state,
    "load_state_dict of a mapped file": _mapped_state,
    "swap_tensors": _swapped,
    "storage.resize_": lambda m: _each(m, _resized_storage),
    "new parameters": _new_parameters,
    "share_memory_": lambda m: _each(m, lambda t: t.share_memory_().data.mul_(0.9)),
    "in place": lambda m: _each(m, lambda t: t.mul_(0.9)),
}


def _compiled(model: nn.Module) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="webgpu")  # type: ignore[no-any-return]


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4, rtol=1e-4)


@fault("a change that PyTorch does not count, before inference", 240)
def uncounted_changes_before_inference(tally: Tally) -> None:
    """Every change, six times, each seen by the next call."""
    index = torch.arange(12) * 7
    torch.manual_seed(0)
    model = Net().eval()
    start = copy.deepcopy(model.state_dict())
    f = _compiled(model)
    with torch.no_grad():
        for name, change in CHANGES.items():
            model.load_state_dict(start)
            f(index)
            for k in range(6):
                change(model)
                gc.collect(0)
                tally(_equal(f(index), model(index)), f"{name}, the {k}th time")


@fault("a change that PyTorch does not count, between steps of training", 240)
def uncounted_changes_in_training(tally: Tally) -> None:
    """Gradients and statistics are those of eager steps from the same weights."""
    index = torch.arange(12) * 7
    torch.manual_seed(0)
    model = Net()
    start = copy.deepcopy(model.state_dict())
    f = _compiled(model)
    for name, change in CHANGES.items():
        model.load_state_dict(start)
        f(index).square().mean().backward()
        for k in range(3):
            change(model)
            eager = copy.deepcopy(model)
            for each, function in ((model, f), (eager, eager)):
                each.zero_grad()
                function(index).square().mean().backward()
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            right = all(_equal(a.grad, b.grad) for a, b in pairs)
            pairs = zip(model.buffers(), eager.buffers(), strict=True)
            right = right and all(_equal(a, b) for a, b in pairs)
            tally(right, f"{name}, the {k}th time")


@fault("fused optimizers, also of sparse gradients' rows", 240)
def fused_optimizers(tally: Tally) -> None:
    """Fifteen steps of a model, and of an embedding of which each step changes a few rows."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        for make in (Net, lambda: nn.Sequential(nn.Embedding(20_000, 8))):
            torch.manual_seed(0)
            model = make()
            eager = copy.deepcopy(model)
            f = _compiled(model)
            steps = [kind(m.parameters(), lr=0.05, fused=True) for m in (model, eager)]
            for k in range(15):
                index = torch.randint(400, (8,))
                losses = []
                for step, function in zip(steps, (f, eager), strict=True):
                    step.zero_grad()
                    loss = (function(index) - 1).square().mean()
                    loss.backward()
                    step.step()
                    losses.append(loss.detach())
                right = torch.allclose(*losses, rtol=1e-3)
                tally(right, f"{kind.__name__} of {type(model).__name__}, step {k}: {losses}")


def _averages(rank: int, port: int, results: object) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = Net().eval()
    f, index = _compiled(model), torch.arange(12)
    found = []
    collectives: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda t: dist.broadcast(t, 0),
        "all_reduce of data": lambda t: dist.all_reduce(t.data),
        "reduce": lambda t: dist.reduce(t, 0),
    }
    with torch.no_grad():
        for name, collective in collectives.items():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1 + 0.1 * rank)
            f(index)
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    collective(tensor)
                    tensor.data.div_(2)
            found.append((_equal(f(index), model(index)), f"{name}, rank {rank}"))
    results.put(found)  # type: ignore[attr-defined]
    dist.destroy_process_group()


@fault("collectives of gloo on parameters", 240)
def gloo_collectives(tally: Tally) -> None:
    """Two processes average and broadcast their parameters between calls."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_averages, args=(k, port, results)) for k in range(2)]
    for process in processes:
        process.start()
    for _ in processes:
        for survived, detail in results.get(timeout=200):
            tally(survived, detail)
    for process in processes:
        process.join()


def _hogwild(model: nn.Module) -> None:
    _each(model, lambda t: t.mul_(0.9))


@fault("another process that trains shared parameters", 240)
def shared_with_another_process(tally: Tally) -> None:
    """Each call sees what the other process has written before."""
    torch.manual_seed(0)
    model = Net().eval().share_memory()
    f, index = _compiled(model), torch.arange(12)
    context = torch.multiprocessing.get_context("spawn")
    with torch.no_grad():
        f(index)
        for k in range(3):
            process = context.Process(target=_hogwild, args=(model,))
            process.start()
            process.join()
            tally(_equal(f(index), model(index)), f"update {k}")


@fault("an index out of range in a call that changes statistics", 240)
def statistics_after_an_index_error(tally: Tally) -> None:
    """A call that raises changes nothing, and the next ones go on from there."""
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 999])
    for training in (False, True):
        torch.manual_seed(0)
        model = Net().train()
        eager = copy.deepcopy(model)
        f = _compiled(model)
        with torch.set_grad_enabled(training):
            f(good), eager(good)
            for k in range(6):
                before = copy.deepcopy(model.state_dict())
                try:
                    f(bad)
                    tally(False, f"{k}: nothing was raised")
                except IndexError:
                    pass
                after = model.state_dict()
                tally(all(torch.equal(before[n], after[n]) for n in before), f"{k}: changed")
                same = _equal(f(good), eager(good))
                pairs = zip(model.buffers(), eager.buffers(), strict=True)
                tally(same and all(_equal(*pair) for pair in pairs), f"{k}: diverged")


@fault("600 changes in random order, before calls of several graphs", 300)
def random_changes(tally: Tally) -> None:
    """Graphs that train, infer and read single layers share the copies of what changes."""
    random = Random(0)
    torch.manual_seed(0)
    model = Net()
    start = copy.deepcopy(model.state_dict())
    torch._dynamo.reset()

    def inner(x: Tensor) -> Tensor:
        return model.norm(model.hidden(x))

    whole, part = (torch.compile(f, backend="webgpu") for f in (model, inner))
    kept: list[dict[str, Tensor]] = []  # memory that is neither used again nor given back
    changes = [*CHANGES.items(), ("nothing", lambda m: None)]
    for k in range(600):
        if k % 40 == 0:
            model.load_state_dict(start)
        name, change = random.choice(changes)
        change(model)
        kept = [*kept, model.state_dict()][-random.randrange(1, 6) :]
        eager = copy.deepcopy(model)
        training = random.random() < 0.4
        model.train(training), eager.train(training)
        index = torch.randint(400, (12,))
        detail = f"{k}: {name}, {'training' if training else 'evaluation'}"
        if random.random() < 0.3:
            x = torch.randn(3, 24)
            with torch.set_grad_enabled(training):
                tally(_equal(part(x), eager.norm(eager.hidden(x))), f"{detail}, a part")
            continue
        with torch.set_grad_enabled(training):
            found, wanted = whole(index), eager(index)
        right = _equal(found, wanted)
        if training:
            model.zero_grad(), eager.zero_grad()
            found.square().mean().backward(), wanted.square().mean().backward()
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            right = right and all(_equal(a.grad, b.grad) for a, b in pairs)
        pairs = zip(model.buffers(), eager.buffers(), strict=True)
        tally(right and all(_equal(*pair) for pair in pairs), detail)
