"""What PyTorch offers for any accelerator, and does in C++ for those that it knows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_webgpu_compile

needs_copies = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there PyTorch's own copies between devices are CUDA's"
)


@needs_copies
@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL")
@pytest.mark.parametrize("indices", [["webgpu:0"], [0, 1]])
def test_data_parallel(indices, fresh):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    here = nn.DataParallel(copy.deepcopy(model).to("webgpu"), device_ids=indices)
    x = torch.randn(5, 4)
    for given in (x, x.to("webgpu")):
        here.zero_grad()
        result = here(given)
        result.square().sum().backward()
        assert result.device == torch.device("webgpu:0")
    expected = model(x)
    expected.square().sum().backward()
    torch.testing.assert_close(result.cpu(), expected)
    for mine, theirs in zip(here.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@needs_copies
def test_copies_between_devices():
    comm = nn.parallel.comm
    x = torch.arange(10.0).view(5, 2)
    here = x.to("webgpu:1")
    for made in comm.broadcast(here, [0, 1]), comm.broadcast(x, out=[here, torch.empty_like(here)]):
        assert all(torch.equal(copied.cpu(), x) for copied in made)
    parts = comm.scatter(x, [1, 0], [2, 3])
    assert [part.device.index for part in parts] == [1, 0]
    assert torch.equal(comm.gather(parts, destination="cpu"), x)
    assert comm.gather(parts, destination=1).device.index == 1
    assert torch.equal(comm.gather(parts, out=torch.empty_like(here)).cpu(), x)
    halves = comm.scatter(here, out=[torch.empty(5, 1, device="webgpu") for _ in "ab"], dim=1)
    assert torch.equal(torch.cat(halves, 1).cpu(), x)


def test_record_stream():
    x = torch.ones(4, device="webgpu")
    x.record_stream(torch.webgpu.current_stream())
    compiled = torch.compile(lambda t: t * 2, backend="webgpu")(x)
    compiled.record_stream(torch.Stream("webgpu"))


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_backends_of_attention(backend):
    backend = SDPBackend.__members__[backend]
    qkv = [torch.randn(1, 2, 16, 8, device="webgpu", requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*qkv)
    with sdpa_kernel(backend):
        found = F.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(found, expected)
    is_fused = "Fused" in found.grad_fn.name()
    assert is_fused == (backend is not SDPBackend.MATH)
    if is_fused:
        with sdpa_kernel(backend), pytest.raises(RuntimeError, match=r"No available kernel.*MATH"):
            F.scaled_dot_product_attention(*(value[0] for value in qkv))
    with sdpa_kernel([SDPBackend.MATH, backend], set_priority=True):
        assert "Fused" not in F.scaled_dot_product_attention(*qkv).grad_fn.name()


def test_autograds_profiler_times_the_host(capfd):
    x = torch.ones(4, device="webgpu")
    with (
        pytest.warns(UserWarning, match=r"torch_webgpu_compile\.profile"),
        torch.autograd.profiler.profile(use_device="webgpu") as profile,
    ):
        x + 1
    assert "aten::add" in profile.key_averages().table()
    assert "Exception" not in capfd.readouterr().err


def test_inductor_says_what_to_use():
    x = torch.ones(4, device="webgpu")
    module = torch.fx.symbolic_trace(lambda value: value + 1)
    with pytest.raises(RuntimeError, match=r'backend="webgpu".*torch_webgpu_compile\.export'):
        torch._inductor.compile(module, [x])
    assert callable(torch_webgpu_compile.export)
