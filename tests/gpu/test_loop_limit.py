"""Long loops on the adapter of this machine, whose driver may end them (`max_loop_iterations`)."""

from __future__ import annotations

import struct

import pytest
import torch

from tests.compiling import native
from tests.gpu.runtime_plans import download
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.dtypes import uint32
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan.model import (
    Binding,
    Dispatch,
    Kernel,
    KernelBinding,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
)
from torch_webgpu_compile.runtime.device import device_for
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.symbolic.sizes import ONE, ZERO, as_expr

register()
pytestmark = [pytest.mark.rotates(6), pytest.mark.usefixtures("fresh")]

COUNTED = """
@group(0) @binding(0) var<storage, read_write> data: array<u32>;
@compute @workgroup_size(1)
fn main() {
  var count = 0u;
  for (var j = 0u; j < data[0]; j++) {
    for (var i = 0u; i < data[1]; i++) { count += ((i ^ data[2]) & 1u) | 1u; }
  }
  data[3] = count;
}
"""


def counted(outer: int, inner: int) -> int:
    """Iterations that a nest of two loops makes on the adapter."""
    device = device_for(resolve())
    four = as_expr(4)
    buffer = PlanBuffer("data", "input", uint32, (four,), (ONE,), ZERO, as_expr(16))
    kernel = Kernel("loops", "loops", COUNTED, (KernelBinding(True),), (1, 1, 1))
    step = Dispatch(0, (Binding("data"),), (ONE, ONE, ONE), (), ZERO, ZERO, ZERO)
    output = PlanOutput("data", (four,), (ONE,), ZERO, mutates=0)
    plan = Plan("loops", (kernel,), {"data": buffer}, (step,), (PlanInput("data"),), (output,))
    memory = device.upload_new(struct.pack("<4I", outer, inner, 3, 0))
    Executor(plan, device).bind({}, {"data": memory}).replay()
    found = torch.zeros(4, dtype=torch.int32)
    download(device, memory, found.numpy())
    return int(found[3])


@pytest.mark.parametrize(("outer", "inner"), [(1, 70_000), (70_000, 1), (300, 300)])
def test_the_driver_makes_as_many_iterations_as_its_target_says(outer: int, inner: int):
    limit = device_for(resolve()).target.max_loop_iterations
    found = counted(outer, inner)
    assert found == outer * inner if not limit else found <= limit


@pytest.mark.parametrize("place", ["cpu", "webgpu"])
def test_a_product_over_a_million_elements(place: str):
    left = torch.ones(2, 1_060_000, device=place)
    product = native(torch.matmul)(left, left.t())
    assert product.tolist() == [[1_060_000.0] * 2] * 2
    if place == "webgpu":
        assert (left @ left.t()).tolist() == product.tolist()


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.FallbackWarning")
def test_a_triangular_system_of_many_rows():
    matrix = torch.eye(1500) * 2
    matrix[1499, :1499] = 1
    rhs = torch.ones(1500, 16)
    wanted = torch.linalg.solve_triangular(matrix, rhs, upper=False)
    found = torch.linalg.solve_triangular(matrix.to("webgpu"), rhs.to("webgpu"), upper=False)
    torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.parametrize("place", ["cpu", "webgpu", "eager"])
def test_columns_of_a_length_that_is_known_late(place: str):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(0).sum(0) + x.argmax(0)

    call = function if place == "eager" else native(function, dynamic=True)
    for rows in (50, 60, 600_000, 70):  # two are enough for an eager operator to have symbols
        x = torch.zeros(rows, 3)
        x[rows - 2, 1] = 1
        found = call(x if place == "cpu" else x.to("webgpu")).cpu()
        torch.testing.assert_close(found, torch.tensor([1.0, rows - 1, 1.0]), rtol=1e-2, atol=0)
