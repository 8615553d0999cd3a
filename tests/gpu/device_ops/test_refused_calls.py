"""What PyTorch refuses is refused here, with its types and messages; see `tests.refused_calls`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.refused_calls import (
    EXCEPTIONS,
    RefusedCall,
    calls_by_name,
    difference,
    moved,
    raised,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators

CALLS = calls_by_name()
R, Z = torch.randn, torch.zeros
INTS = torch.int64
INDEX = torch.tensor([0, 1])
HERE = {
    "a product of two dtypes": (torch.mm, R(3, 3), R(3, 3).half()),
    "whole numbers and a layer of floats": (F.linear, Z(2, 2, dtype=INTS), R(2, 2)),
    "attention of two dtypes": (
        F.scaled_dot_product_attention,
        *(R(1, 2, 3, 4), R(1, 2, 3, 4).half(), R(1, 2, 3, 4).half()),
    ),
    "attention of two widths": (
        F.scaled_dot_product_attention,
        *(R(1, 2, 3, 4), R(1, 2, 3, 5), R(1, 2, 3, 4)),
    ),
    "int32 classes": (F.cross_entropy, R(2, 4), Z(2, dtype=torch.int32)),
    "softmax of a dimension too many": (torch.softmax, R(2, 3), 2),
    "sort of a dimension too many": (torch.sort, R(4), 1),
    "indices that do not broadcast": (
        torch.index_put,
        *(Z(5, 5), (INDEX, torch.tensor([0, 1, 2])), Z(())),
    ),
    "values that do not broadcast": (torch.index_put, Z(5, 5), (INDEX,), R(3, 5)),
    "large values that do not broadcast": (torch.index_put, Z(99, 80), (INDEX,), R(3, 80)),
    "rows of other sizes": (torch.index_add, Z(5, 5), 0, INDEX, R(2, 4)),
    "rows of another dtype": (torch.index_add, Z(5, 5), 0, INDEX, R(2, 5).half()),
    "a source of another size": (torch.select_scatter, Z(2, 5), R(4), 0, 1),
    "padding beyond the size": (F.pad, R(1, 1, 4), (4, 4), "reflect"),
    "a histogram of nothing": (torch.histc, R(4), 3, 2, 1),
    "dropout of whole numbers": (F.dropout, Z(3, dtype=INTS)),
    "a weight of another size": (F.layer_norm, R(2, 4), (4,), R(5)),
    "a pool of five dimensions": (F.adaptive_avg_pool2d, R(1, 1, 8, 4, 3), (5, 3)),
    "distances of whole numbers": (torch.cdist, Z(2, 3, dtype=INTS), R(2, 3)),
    "a large bias of three dimensions": (torch.addmm, R(1, 64, 50), R(64, 30), R(30, 50)),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", CALLS)
def test_error_inputs(name: str) -> None:
    """PyTorch's own error inputs."""
    found = {
        call.name: difference(call, compile=False, device=True)
        for call in CALLS[name]()
        if call.name not in EXCEPTIONS
    }
    assert not {name: text for name, text in found.items() if text}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", CALLS)
def test_error_inputs_compiled(name: str) -> None:
    """One of PyTorch's error inputs of each, compiled: it raises something."""
    call = next((call for call in CALLS[name]() if call.name not in EXCEPTIONS), None)
    assert call is None or not difference(call, compile=True, device=True)


def _here(name: str) -> RefusedCall:
    function, *args = HERE[name]
    return RefusedCall(name, function, (tuple(args), {}))


@pytest.mark.parametrize("name", HERE)
def test_eager_calls(name: str) -> None:
    """What tracing does not refuse, but PyTorch's kernels do."""
    assert difference(_here(name), compile=False, device=True) == ""


@pytest.mark.rotates(2)
@pytest.mark.parametrize("device", [True, False], ids=["device", "cpu"])
@pytest.mark.parametrize("name", HERE)
def test_compiled_calls(name: str, device: bool) -> None:
    """Dynamo's graphs are made of tensors without contents, which are refused as seldom."""
    assert difference(_here(name), compile=True, device=device) == ""


@pytest.mark.rotates(2)
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("name", HERE)
def test_compiled_calls_under_autocast(name: str, outside: bool) -> None:
    """What autocast makes of the arguments is refused, or taken."""
    function, *args = HERE[name]

    def region(device: str) -> Any:
        return torch.autocast(device, torch.bfloat16)

    def inside(*values: Any) -> Any:
        with region("webgpu"):
            return function(*values)

    def plain(*values: Any) -> Any:
        return function(*values)

    torch._dynamo.reset()
    with region("cpu"):
        expected = raised(function, (tuple(args), {}))
    compiled = torch.compile(plain if outside else inside, backend="webgpu", fullgraph=True)
    with region("webgpu") if outside else nullcontext():
        found = raised(compiled, moved((tuple(args), {})))
    assert (found is None) == (expected is None), found or expected


def test_a_refused_call_changes_nothing() -> None:
    """The tensor stays as it is; the next call works, and the refused one is refused again."""
    table = torch.zeros(5, device="webgpu")
    index = torch.tensor([0, 1], device="webgpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must have the same scalar type"):
            table.index_add_(0, index, torch.ones(2, device="webgpu").half())
        table.index_add_(0, index, torch.ones(2, device="webgpu"))
    assert table.tolist() == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("fill", [(torch.Tensor.normal_, 0.0), (torch.Tensor.uniform_, 0.5)])
def test_numbers_that_kernels_take_as_data(fill) -> None:
    """After valid calls of other numbers, too, an invalid one is refused."""
    function, first = fill
    values = torch.empty(3, device="webgpu")
    for second in (1.0, 2.0, 3.0):
        function(values, first, second)
    before = values.tolist()
    with pytest.raises(RuntimeError, match="expects"):
        function(values, first, -1.0)
    assert values.tolist() == before


def test_shared_memory() -> None:
    """Operators that add rows do not read what they write."""

    def call(device: str) -> Exception | None:
        rows = torch.ones(4, 4, device=device)
        index = torch.tensor([0, 1, 2, 3], device=device)
        return raised(rows.index_add_, ((0, index, rows), {}))

    assert str(call("webgpu")) == str(call("cpu")) != "None"


def test_other_devices() -> None:
    """A generator of the CPU does not serve the device, nor an index there a tensor of the CPU."""
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match="Expected a 'webgpu' device type for generator"):
        torch.rand(4, device="webgpu", generator=generator)
    for index in (INDEX, torch.tensor([True, False])):
        with pytest.raises(RuntimeError, match="indices should be either on cpu"):
            torch.ones(2)[index.to("webgpu")]
        with pytest.raises(RuntimeError, match="indices should be either on cpu"):
            torch.ones(2)[index.to("webgpu")] = 1.0
    assert torch.ones(2, device="webgpu")[INDEX].tolist() == [1, 1]
