"""A version of PyTorch without private names: all works that does without them."""

from __future__ import annotations

import pytest

from tests.missing_names import run_without_names

pytestmark = pytest.mark.rotates(4)

_PROGRAM = """
from torch_webgpu_compile.device import autoload
autoload.register()
x = torch.full((4, 4), 2.0, device="webgpu", requires_grad=True)
(x @ x).relu().sum().backward()
assert torch.equal(x.grad.cpu(), torch.full((4, 4), 16.0))
f = torch.compile(lambda x: (x @ x).relu().sum(), backend="webgpu")
ones = torch.ones(4, 4)
assert f(ones) == f(ones.to("webgpu")).cpu() == 64
try:
    f(ones.requires_grad_())
except Exception as error:
    print(error)
"""


def test_what_needs_none_of_them_works():
    """The eager device with gradients, and compiled inference; of training, an error says why."""
    run = run_without_names(_PROGRAM)
    assert run.returncode == 0, run.stderr
    assert "has no `torch._functorch.config`, which" in run.stdout
    assert "needs for compiled training; it was tried with PyTorch 2.11 to 2.14" in run.stdout
