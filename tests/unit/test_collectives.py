"""Collectives of a graph: steps of the host, in the order in which the graph has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.compilations import compile_function
from torch_webgpu_compile.plan.model import HostStep

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"
)


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_collectives_keep_their_order_whatever_is_fused():
    """``x + 1`` and ``y + b`` would share a kernel, which would make the second come first."""

    # The first name is PyTorch 2.11's, and deprecated since.
    old, new = "all_gather_tensor", "all_gather_single"
    gather = getattr(functional, new if hasattr(functional, new) else old)

    def function(x, y):
        group = dist.group.WORLD
        a = functional.all_reduce(x + 1, "sum", group)
        b = gather(y, 0, group)
        return a, x + 1 + b

    compilation = compile_function(function, torch.ones(16), torch.ones(16))
    targets = [step.target for step in compilation.plan.steps if isinstance(step, HostStep)]
    assert targets == [
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_gather_into_tensor.default",
    ]
