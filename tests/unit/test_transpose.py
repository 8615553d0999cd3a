"""Which map groups go through tiles in workgroup memory, without an adapter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import compile_function


def kernels_of(function, *arguments, **options):
    calls = compile_function(function, *arguments, **options).calls
    return [call.kernel for call in calls]


X = torch.zeros(512, 256)
IMAGE = torch.zeros(4, 32, 28, 28)
TILED = {
    "t": (lambda x: x.t().contiguous(), X),
    "arithmetic": (lambda x: torch.relu(x.t() * 2).contiguous(), X),
    "odd": (lambda x: x.t().contiguous(), torch.zeros(501, 255)),
    "batched": (lambda x: x.mT.contiguous(), torch.zeros(3, 128, 128)),
    "reversed": (lambda x: x.permute(2, 1, 0).contiguous(), torch.zeros(64, 10, 64)),
    "channels_last": (lambda x: x.to(memory_format=torch.channels_last), IMAGE),
    "float16": (lambda x: x.t().contiguous(), X.half()),
    "bfloat16": (lambda x: x.t().contiguous(), X.bfloat16()),
    "int64": (lambda x: x.t().contiguous(), X.long()),
    "both orders": (lambda x: x.t() + x.view(256, 512), X),
}
NOT_TILED = {
    "same order": lambda x: x.view(8, 64, 256).transpose(0, 1).contiguous(),
    "view": lambda x: x.t() + 1,
    "few rows": lambda x: x[:5].t().contiguous(),
    "small": lambda x: x[:64, :64].t().contiguous(),
    "broadcast": lambda x: x[:, :1] + x[:1],
    "every second": lambda x: x[:, ::2].contiguous(),
    "padded": lambda x: F.pad(x.t(), (1, 1)).contiguous(),
    "words of several invocations": lambda x: (x[:, 1:].t() > 0)[:, 3:].contiguous(),
}


@pytest.mark.parametrize("name", TILED)
def test_tiles(name):
    function, x = TILED[name]
    (kernel,) = kernels_of(function, x)
    assert kernel.kind == "transpose"
    assert kernel.workgroup_nbytes <= 16 << 10


@pytest.mark.parametrize("name", NOT_TILED)
def test_no_tiles(name):
    (kernel,) = kernels_of(NOT_TILED[name], X)
    assert kernel.kind == "pointwise"


def test_symbolic_sizes_have_tiles_where_those_traced_with_have():
    (kernel,) = kernels_of(lambda x: x.t().contiguous(), X, dynamic=True)
    assert kernel.kind == "transpose"
    (kernel,) = kernels_of(lambda x: x.t().contiguous(), X[:3, :5], dynamic=True)
    assert kernel.kind == "pointwise"


def test_both_sides_are_vectors():
    (kernel,) = kernels_of(lambda x, y: (x.t() + y).contiguous(), X, torch.zeros(256, 512))
    assert kernel.wgsl.count("load4_x0(") == kernel.wgsl.count("load4_x1(")
    assert "store4_x2(" in kernel.wgsl
    assert "load_x" not in kernel.wgsl
    # Height and width are one dimension of 784 elements, in 25 tiles rather than 28.
    (kernel,) = kernels_of(lambda x: x.to(memory_format=torch.channels_last), IMAGE)
    assert "load4_x0(" in kernel.wgsl
    assert "u) % 25u" in kernel.wgsl or "/ 25u" in kernel.wgsl
