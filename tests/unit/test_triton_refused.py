"""A Triton kernel in a graph is refused: Triton has no WebGPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from torch_webgpu_compile.capture.control_flow.calls import calls_between
from torch_webgpu_compile.errors import UnsupportedOp


def graph_with(operator: Any) -> GraphModule:
    """A graph as Dynamo makes it of ``kernel[(1,)](x, out)``; the operators need no Triton."""
    mode = FakeTensorMode()
    graph = Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4)
    doubled = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    doubled.meta["val"] = x.meta["val"]
    kernel = graph.call_function(
        operator,
        (),
        {
            "kernel_idx": 0,
            "constant_args_idx": 0,
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x": doubled, "out": x},
        },
    )
    kernel.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    kernel[(1,)](x, out)'
    graph.output((doubled,))
    return GraphModule({}, graph)


@pytest.mark.parametrize(
    "operator",
    [triton_kernel_wrapper_mutation, triton_kernel_wrapper_functional],
    ids=str,
)
def test_a_triton_kernel_is_refused(operator: Any) -> None:
    module = graph_with(operator)
    with pytest.raises(UnsupportedOp) as info:
        calls_between(module.graph)
    assert info.value.op == "a Triton kernel"
    assert "no WebGPU backend" in info.value.cause
    assert info.value.source == "model.py:7: kernel[(1,)](x, out)"
