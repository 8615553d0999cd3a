"""The parts of a first call, as the benchmarks tell them."""

from __future__ import annotations

import time

import torch

from benchmarks.call_split import split


def test_the_parts_of_a_training_step() -> None:
    """A backward graph is compiled in a thread of autograd's on a device of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 0.12345).softmax(1)  # of no other test: its pipelines are new

    x = torch.randn(7, 31, requires_grad=True)
    compiled = torch.compile(function, backend="webgpu")
    with split() as parts:
        start = time.perf_counter()
        compiled(x).square().sum().backward()
        first_s = time.perf_counter() - start
    found = parts.figures(first_s)
    assert found["kernels"] == 2  # forward and backward
    assert found["wgsl_nbytes"] > 1000
    seconds = [found[f"{part}_s"] for part in ("pytorch", "compiler", "pipelines", "rest")]
    assert min(seconds) > 0
    assert sum(seconds) == found["own_s"] + found["pytorch_s"] == first_s
    again = parts.seconds.copy()
    compiled(x.detach())
    assert parts.seconds == again  # nothing is split afterwards
