"""Processes whose first use of the device is an unusual one."""

from __future__ import annotations

from tests.gpu.device.processes import run

# PyTorch makes real tensors of numbers also under a mode that traces, and initializes nothing then.
WHILE_TRACED = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.as_tensor(8, device="webgpu") + torch.tensor([1.5, 2.5], device="webgpu")
    assert x.device.type == "webgpu" and x.shape == (2,)
assert (torch.tensor([8.0], device="webgpu") + 1).tolist() == [9.0]
"""


def test_numbers_become_tensors_while_a_graph_is_traced() -> None:
    run(WHILE_TRACED, timeout=100)
