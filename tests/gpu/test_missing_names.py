"""A version of PyTorch without private names: all works that does without them."""

from __future__ import annotations

import os
import subprocess
import sys

_WITHOUT = """
from torch_webgpu_compile import torch_private
from torch_webgpu_compile.torch_private import symbols
def resolve(row):
    if row.loss is not symbols.Loss.FATAL:
        raise AttributeError(row.name)
    return symbols.resolve(row)
torch_private.resolve = resolve
import torch
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
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "has no `functorch.compile.min_cut_rematerialization_partition`, which" in run.stdout
    assert "needs for compiled training; it was tried with PyTorch 2.11 to 2.14" in run.stdout
