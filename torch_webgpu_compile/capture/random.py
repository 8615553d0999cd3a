"""Random operators on the GPU: decompositions into ``webgpu::seed`` and ``webgpu::uniform``.

Every random operator of a graph has a seed of its own. Seeds are drawn from PyTorch's default
generator at each call, so ``torch.manual_seed`` makes results repeatable; the numbers are not those
of eager PyTorch, as with other compilers. Operators with a generator argument, and those without a
row here, run on the host, with eager's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from .. import custom_ops as custom_ops  # defines the operators

aten = torch.ops.aten

# The significant bits of each dtype: a uniform number with more of them could round up to 1.
_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Integers are scaled from 24 random bits: a larger range would leave some of its values out.
_MAX_RANGE = 1 << 20

# A number per call site keeps equal calls apart when common subexpressions are removed.
_streams = itertools.count()

Size = Sequence[int | torch.SymInt]


def _uniform(size: Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) of a float dtype of at most 32 bits."""
    seed = torch.ops.webgpu.seed.default(next(_streams))
    numbers: Tensor = torch.ops.webgpu.uniform.default(seed, list(size))
    if dtype == torch.float32:
        return numbers
    scale = float(1 << _BITS[dtype])
    return ((numbers * scale).floor() / scale).to(dtype)


def _normal(size: Size) -> Tensor:
    """Standard normal numbers, by Box and Muller's method."""
    radius = (-2.0 * torch.log1p(-_uniform(size))).sqrt()
    return radius * torch.cos(_uniform(size) * (2.0 * math.pi))


def _is_float(dtype: torch.dtype) -> bool:
    return dtype in _BITS


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def rand(size: Size, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if not _is_float(_dtype(dtype)):
        return NotImplemented
    return _uniform(size, _dtype(dtype))


def rand_like(self: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return rand(self.shape, dtype=dtype or self.dtype)


def randn(size: Size, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if not _is_float(_dtype(dtype)):
        return NotImplemented
    return _normal(size).to(_dtype(dtype))


def randn_like(self: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return randn(self.shape, dtype=dtype or self.dtype)


def uniform(self: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Any:
    if generator is not None or not _is_float(self.dtype):
        return NotImplemented
    return _uniform(self.shape, self.dtype) * (high - low) + low


def normal_functional(
    self: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Any:
    if generator is not None or not _is_float(self.dtype):
        return NotImplemented
    return (_normal(self.shape) * std + mean).to(self.dtype)


def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    dtype = mean.dtype if isinstance(mean, Tensor) else std.dtype
    if generator is not None or not _is_float(dtype):
        return NotImplemented
    shapes = [value.shape for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return (_normal(shape) * std + mean).to(dtype)


def bernoulli(self: Tensor, *, generator: Any = None) -> Any:
    if generator is not None or not _is_float(self.dtype):
        return NotImplemented
    return (_uniform(self.shape) < self).to(self.dtype)


def bernoulli_p(self: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return (_uniform(self.shape) < p).to(self.dtype)


def exponential(self: Tensor, lambd: float = 1.0, generator: Any = None) -> Any:
    if generator is not None or not _is_float(self.dtype):
        return NotImplemented
    return (torch.log1p(-_uniform(self.shape)) * (-1.0 / lambd)).to(self.dtype)


def native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    if not train or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    mask = _uniform(input.shape) >= p
    return torch.where(mask, input * (1.0 / (1.0 - p)), 0.0).to(input.dtype), mask


def randint(high: int, size: Size, **keywords: Any) -> Any:
    return randint_low(0, high, size, **keywords)


def randint_low(
    low: int, high: int, size: Size, *, dtype: torch.dtype = torch.int64, **_: Any
) -> Any:
    if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= _MAX_RANGE:
        return NotImplemented
    return (_uniform(size) * float(high - low)).to(torch.int32).to(dtype or torch.int64) + low


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.rand.default: rand,
    aten.rand_like.default: rand_like,
    aten.randn.default: randn,
    aten.randn_like.default: randn_like,
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal_functional,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.exponential.default: exponential,
    aten.native_dropout.default: native_dropout,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
}


def keep_seeds(graph: torch.fx.GraphModule) -> None:
    """Makes the partitioner save seeds, so that a backward graph computes equal numbers again."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def take_seeds(graph: torch.fx.GraphModule) -> int:
    """Turns a graph's seeds into one more argument, int32 (number of seeds, 2); the number."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default)
    if not nodes:
        return 0
    like = nodes[0].meta["val"]
    arguments = graph.graph.find_nodes(op="placeholder")
    before = arguments[-1].next if arguments else next(iter(graph.graph.nodes))
    with graph.graph.inserting_before(before):
        seeds = graph.graph.placeholder("seeds")
    with like.fake_mode:
        seeds.meta["val"] = torch.empty((len(nodes), 2), dtype=torch.int32)
        row = torch.empty((2,), dtype=torch.int32)
    for index, node in enumerate(nodes):
        with graph.graph.inserting_before(node):
            taken = graph.graph.call_function(aten.select.int, (seeds, 0, index))
        taken.meta = {**node.meta, "val": row}
        node.replace_all_uses_with(taken)
        graph.graph.erase_node(node)
    graph.recompile()
    return len(nodes)
