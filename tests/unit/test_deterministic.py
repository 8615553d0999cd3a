"""Lowering for ``torch.use_deterministic_algorithms``: no result hangs on which update is first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.compilations import compile_function
from tests.harness import check
from torch_webgpu_compile.codegen.tilings.matmul import MatmulTiling
from torch_webgpu_compile.compiler import cache_key
from torch_webgpu_compile.ir.graph import LoopGraph
from torch_webgpu_compile.ir.nodes import Scatter
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.target import Machine, Target
from torch_webgpu_compile.tuning import autotune

pytestmark = pytest.mark.rotates(3)

aten = torch.ops.aten

ROWS = torch.tensor([4, 0, 4, 2, 4, 0])
COLUMNS = torch.tensor([1, 1, 0, 2, 1, 2])
GRID = torch.tensor([[5, 0, 5, -1], [2, 0, 1, 5]])


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def of(x: Tensor) -> Tensor:
        result = function(x)
        weights = torch.linspace(-1, 2, result.numel()).reshape(result.shape)
        return torch.autograd.grad((result * weights).sum(), x)[0]

    return of


def bags(x: Tensor) -> Tensor:
    return F.embedding_bag(ROWS, x, torch.tensor([0, 2, 2, 5]), mode="mean")


# Of x [6, 5].
SUMS: dict[str, Callable[[Tensor], Any]] = {
    "index_add": lambda x: x.index_add(0, ROWS, x * 2),
    "index_add columns": lambda x: x.index_add(1, COLUMNS, x[:, ROWS % 5] * 2, alpha=3),
    "index_put": lambda x: x.index_put((ROWS,), x * 2, accumulate=True),
    "index_put two": lambda x: x.index_put((ROWS, COLUMNS), x[:, 0], accumulate=True),
    "index_put columns": lambda x: aten.index_put(x, [None, COLUMNS], x[:, ROWS % 5], True),
    "index_put grid": lambda x: x.index_put((GRID,), x[:4] * 2, accumulate=True),
    "scatter_add": lambda x: x.scatter_add(0, (ROWS[:, None] + COLUMNS[:4]) % 6, x[:, 1:]),
    "scatter_add rows": lambda x: x.scatter_add(1, (ROWS[:4, None] + COLUMNS) % 5, x.t()[:4] * 2),
    "put": lambda x: x.put(GRID, x[0, :4].repeat(2, 1), accumulate=True),
    "half": lambda x: x.half().index_add(0, ROWS, x.half()),
}
# The same of their gradients.
GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "embedding": gradient(lambda x: F.embedding(GRID % 6, x, padding_idx=2)),
    "embedding_bag": gradient(bags),
    "gather": gradient(lambda x: x.gather(0, (ROWS[:, None] + COLUMNS[:4]) % 6)),
    "take": gradient(lambda x: x.take(GRID)),
    "bilinear": gradient(
        lambda x: F.interpolate(x[None, None], size=(9, 7), mode="bilinear", align_corners=False)
    ),
    "bicubic": gradient(lambda x: F.interpolate(x[None, None], scale_factor=1.7, mode="bicubic")),
    "nearest": gradient(lambda x: F.interpolate(x[None, None], size=(9, 11), mode="nearest")),
    "grid_sample": gradient(
        lambda x: F.grid_sample(
            x[None, None], torch.linspace(-1.2, 1, 24).view(1, 3, 4, 2), align_corners=False
        )
    ),
    "reflection": gradient(lambda x: F.pad(x[None], (2, 3, 1, 2), mode="reflect")),
    "replication": gradient(lambda x: F.pad(x[None], (2, 3, 1, 2), mode="replicate")),
    "max_pool": gradient(lambda x: F.max_pool2d(x[None], 3, 1)),
    "adaptive": gradient(lambda x: F.adaptive_max_pool2d(x[None], (4, 3))),
}
# Where several updates name an element, eager PyTorch lets the last one win on one thread.
CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "index_put": lambda x: x.index_put((ROWS,), x * 2),
    "index_put two": lambda x: x.index_put((ROWS, COLUMNS), x[:, 0]),
    "index_put columns": lambda x: aten.index_put(x, [None, COLUMNS], x[:, ROWS % 5]),
    "scatter": lambda x: x.scatter(0, (ROWS[:, None] + COLUMNS[:4]) % 6, x[:, 1:]),
    "put": lambda x: x.put(GRID, x[0, :4].repeat(2, 1)),
    "index_copy": lambda x: x.index_copy(0, ROWS, x * 2),
    "max_unpool": lambda x: F.max_unpool2d(x[None], GRID[:1, :1].expand(1, 6, 5) % 30, 1, 1, 0),
}


def sample() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(2))


def atomics(graph: LoopGraph) -> list[str]:
    """Scatters of floats; of integers are those that sort, which name each element once."""
    scatters = [node.output for node in graph.nodes if isinstance(node, Scatter)]
    return [name for name in scatters if graph.buffers[name].dtype.is_float]


# What a dispatch costs decides between comparing all pairs of updates and sorting them.
COMPARED, SORTED = Target(), Target(machine=Machine(dispatch_seconds=0))


@pytest.mark.parametrize("target", [COMPARED, SORTED], ids=["compared", "sorted"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, dynamic: bool, target: Target) -> None:
    graph = check(SUMS[name], sample(), deterministic=True, dynamic=dynamic, target=target)
    assert not atomics(graph)


@pytest.mark.parametrize("target", [COMPARED, SORTED], ids=["compared", "sorted"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, target: Target) -> None:
    graph = check(GRADIENTS[name], sample().requires_grad_(), deterministic=True, target=target)
    assert not atomics(graph)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Eager PyTorch chooses as its threads come, of several elements for one place."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("target", [COMPARED, SORTED], ids=["compared", "sorted"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str, dynamic: bool, target: Target) -> None:
    graph = check(CHOICES[name], sample(), deterministic=True, dynamic=dynamic, target=target)
    assert not atomics(graph)


def test_what_has_one_result_in_any_order_has_atomics() -> None:
    def one_row(x: Tensor) -> Tensor:
        return x.index_put((torch.tensor(3),), x[:3].sum(), accumulate=True)

    def integers(x: Tensor) -> Tensor:
        return x.int().index_add(0, ROWS, x.int())

    for function in (one_row, integers):
        graph = check(function, sample(), deterministic=True)
        assert sum(isinstance(node, Scatter) for node in graph.nodes) == 1


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, "nan"), (torch.int16, "32767")])
def test_empty_memory_shows_that_it_was_not_written(dtype: torch.dtype, wanted: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.empty(3, dtype=dtype) + x.to(dtype)

    options = CompileOptions(fallback="error", deterministic=True, fill_empty=True)
    state = compile_function(function, torch.ones(3), options=options)
    assert state.depends_on_determinism
    assert wanted in str(state.graph.nodes)


def test_measured_tilings_are_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a problem": MatmulTiling(32, 32, 8, 4, 4, False, 4)}
    monkeypatch.setattr(autotune, "known_tilings", lambda target, folder: table)
    repeatable = CompileOptions(deterministic=True)
    assert autotune.tilings_for(Target(), CompileOptions()) == table
    assert autotune.tilings_for(Target(), repeatable) == {}


def test_plans_of_both_kinds_have_keys_of_their_own() -> None:
    def function(x: Tensor) -> Tensor:
        return x.index_add(0, ROWS, x)

    states = [
        compile_function(
            function, sample(), options=CompileOptions(fallback="error", deterministic=on)
        )
        for on in (False, True)
    ]
    keys = {cache_key(s.graph, s.target, s.options) for s in states}
    assert len(keys) == 2
    assert all(state.depends_on_determinism for state in states)
    assert not compile_function(torch.relu, sample()).depends_on_determinism
