"""Floats that change between calls of a compiled function: symbols, not constants of the code."""

from __future__ import annotations

import pytest
import torch

from torch_webgpu_compile import counters

FUNCTIONS = {
    "x + s": lambda x, s: x + s,
    "x * s / s": lambda x, s: x * s / s,
    "add alpha": lambda x, s: torch.add(x, x * 2, alpha=s),
    "sub alpha": lambda x, s: torch.sub(x, x * 2, alpha=s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "lerp": lambda x, s: torch.lerp(x, x * 2, s),
}


@torch._dynamo.config.patch(specialize_float=False)
def test_a_graph_serves_all_numbers():
    x = torch.randn(5)
    found = {}
    for name, function in FUNCTIONS.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="webgpu", dynamic=True)
        for number in (0.5, 1.25):
            torch.testing.assert_close(compiled(x, number), function(x, number))
        before = counters.plans_compiled
        torch.testing.assert_close(compiled(x, 2.5), function(x, 2.5))
        found[name] = counters.plans_compiled - before
    if torch.__version__ < "2.12":
        pytest.skip("this PyTorch makes a constant of some")
    assert not any(found.values()), found
