"""What eager calls compile, dispatch and move may not grow, nor what the host does for one.

`tests.eager_counts` counts, in processes that have compiled nothing. A number that became less is
to be lowered here. They are those of wgpu-native on Mesa's software adapter: others have other
kernels.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import pytest

from tests.eager_counts import OF_LENGTH, ROWS
from tests.gpu.device.processes import run_python
from torch_webgpu_compile.tensors import devices

SHARES = 8


class Bound(NamedTuple):
    """Of a first call ``kernels`` and ``plans`` that are compiled; of a steady one ``dispatches``,
    ``bytes`` between host and GPU, and ``functions`` of the package that it enters.
    """

    kernels: int
    plans: int
    dispatches: float
    bytes: float
    functions: int


BOUNDS = {
    "add": Bound(1, 1, 1, 0, 36),
    "add_": Bound(1, 1, 1, 0, 16),
    "view": Bound(0, 0, 0, 0, 0),
    "slice": Bound(0, 0, 0, 0, 1),
    "empty": Bound(0, 0, 0, 0, 9),
    "half": Bound(1, 1, 1, 0, 40),
    "contiguous": Bound(1, 1, 1, 0, 39),
    "sum": Bound(1, 1, 1, 0, 34),
    "softmax": Bound(1, 1, 1, 0, 36),
    "cat": Bound(1, 1, 1, 0, 39),
    "index": Bound(1, 1, 1, 0, 46),
    "item": Bound(0, 0, 0, 4, 51),
    "cpu": Bound(0, 0, 0, 64, 52),
    "upload": Bound(0, 0, 0, 64, 32),
    "layer_norm": Bound(1, 1, 1, 0, 43),
    "rms_norm": Bound(1, 1, 1, 0, 43),
    "gelu": Bound(1, 1, 1, 0, 36),
    "batch_norm": Bound(2, 2, 2, 0, 88),
    "randn": Bound(1, 1, 1, 0, 62),
    "linear": Bound(1, 1, 1, 0, 37),
    "linear_backward": Bound(5, 3, 4, 0, 126),
    "masked_attention": Bound(1, 1, 1, 0, 43),
    "attention_backward": Bound(5, 3, 4, 0, 131),
    "depthwise": Bound(1, 1, 1, 0, 40),
    "depthwise_backward": Bound(4, 3, 3, 0, 102),
    "convolution_7_backward": Bound(6, 3, 5, 0, 126),
    "convolution_1_backward": Bound(4, 3, 3, 0, 102),
    "convolution_3": Bound(1, 1, 1, 0, 40),
    "matmul_bf16": Bound(1, 1, 1, 0, 36),
    "matmul": Bound(1, 1, 1, 0, 36),
    "row_product": Bound(1, 1, 1, 0, 36),
    "topk": Bound(1, 1, 1, 0, 49),
    "topk_row": Bound(1, 1, 1, 0, 49),
    "sort": Bound(1, 1, 1, 0, 49),
    "argsort": Bound(1, 1, 1, 0, 41),
    "median": Bound(2, 1, 2, 0, 42),
    "top_p": Bound(10, 8, 10, 0, 175),
    "clip_grad_norm": Bound(8, 8, 8, 0, 310),
    "sgd": Bound(1, 1, 1, 0, 60),
    "adamw": Bound(3, 3, 2, 0, 180),
}
"""Of the rows of `benchmarks.eager_cases`, of small sizes."""

KERNELS_OF_LENGTHS = {
    "lengths:add": 3,
    "lengths:sum": 10,
    "lengths:var": 10,
    "lengths:softmax": 10,
    "lengths:softmax_gradient": 31,
    "lengths:layer_norm_gradient": 31,
    "lengths:cumsum": 10,
    "lengths:cat": 4,
    "lengths:gather": 8,
    "lengths:nonzero": 19,
    "lengths:sort": 8,
    "lengths:topk": 11,
    "lengths:randperm": 11,
    "lengths:mm": 7,
    "lengths:convolution_gradient": 34,
    "lengths:depthwise_gradient": 32,
    "lengths:attention": 45,
    "lengths:attention_gradient": 87,
}
"""Of calls with 1 to 200 columns, some of them of several operators: of each at most 12."""


@pytest.fixture(scope="module", autouse=True)
def _on_its_adapter() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    if "llvmpipe" not in devices.get_device(0).info.name:
        pytest.skip("other adapters have other kernels")


def counted(names: list[str]) -> dict[str, dict[str, float]]:
    """What `tests.eager_counts` prints, by name."""
    printed = run_python(["-W", "ignore", "-m", "tests.eager_counts", *names], {}, 300)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {counts.pop("name"): counts for counts in found}


@pytest.mark.rotates(SHARES)
@pytest.mark.parametrize("share", range(SHARES))
def test_no_row_costs_more(share: int) -> None:
    assert ROWS.keys() == BOUNDS.keys()
    worse = []
    for name, counts in counted(list(BOUNDS)[share::SHARES]).items():
        assert not counts.get("error"), f"{name}: {counts}"
        assert not counts["compiled_later"], f"{name}: a steady call compiles"
        assert not counts["fallbacks"], f"{name}: something ran on the host"
        for field, bound in BOUNDS[name]._asdict().items():
            if counts[field] > bound:
                worse.append(f"{name}: {counts[field]:g} {field} instead of {bound:g}")
    assert not worse


@pytest.mark.rotates(2 * SHARES)
@pytest.mark.parametrize("share", range(SHARES))
def test_lengths_compile_a_bounded_number_of_kernels(share: int) -> None:
    assert OF_LENGTH.keys() == KERNELS_OF_LENGTHS.keys()
    found = counted(list(OF_LENGTH)[share::SHARES])
    worse = {name: counts for name, counts in found.items() if not _is_within(name, counts)}
    assert not worse


def _is_within(name: str, counts: dict[str, float]) -> bool:
    return "kernels" in counts and counts["kernels"] <= KERNELS_OF_LENGTHS[name]
