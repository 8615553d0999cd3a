"""Products of groups of rows (`torch._grouped_mm`, mixture of experts), against one by one."""

from __future__ import annotations

from itertools import pairwise, starmap

import pytest
import torch
import transformers
from torch import Tensor

from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]

autoload.register()

# Where groups end: few rows, empty groups, more than one block, rows behind the last group, none.
ENDS = ([1, 1, 4, 5], [0, 17, 17, 40], [100, 120, 290, 300], [3, 30, 31, 33], [0, 0, 0, 0])


def offsets(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def slices(ends: list[int]) -> list[slice]:
    return list(starmap(slice, pairwise([0, *ends])))


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to("webgpu") for tensor in tensors]


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_rows(ends, dtype):
    rows = torch.randn(max(ends[-1], 7), 32).to(dtype)
    matrices = torch.randn(4, 48, 32).to(dtype).transpose(1, 2)
    wanted = torch.zeros(len(rows), 48, dtype=dtype)
    for part, matrix in zip(slices(ends), matrices, strict=True):
        wanted[part] = rows[part] @ matrix
    got = torch._grouped_mm(*on_device(rows, matrices), offs=offsets(ends).to("webgpu"))
    # Sums of 32 terms in another order; of bf16, rounded to 8 bits by both.
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert not counters.fallbacks


@pytest.mark.parametrize("ends", ENDS[:2], ids=str)
def test_groups_of_columns_and_of_terms(ends):
    count, offs = ends[-1], offsets(ends).to("webgpu")
    left, right = torch.randn(4, 16, 32), torch.randn(count, 32).t()
    # Sums of up to 32 terms in another order, as below.
    got = torch._grouped_mm(*on_device(left, right), offs=offs).cpu()
    wanted = [a @ right[:, part] for a, part in zip(left, slices(ends), strict=True)]
    torch.testing.assert_close(got, torch.cat(wanted, 1), atol=1e-4, rtol=1e-4)
    left, right = torch.randn(count, 16).t(), torch.randn(count, 32)
    got = torch._grouped_mm(*on_device(left, right), offs=offs).cpu()
    wanted = [left[:, part] @ right[part] for part in slices(ends)]
    torch.testing.assert_close(got, torch.stack(wanted), atol=1e-4, rtol=1e-4)
    a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 8)
    torch.testing.assert_close(torch._grouped_mm(*on_device(a, b)).cpu(), a @ b)


def test_the_matrices_of_a_group_are_not_copied():
    rows, matrices = torch.randn(64, 64), torch.randn(2, 64, 1024)
    torch.webgpu.reset_peak_memory_stats()
    moved = on_device(rows, matrices)
    before = torch.webgpu.memory_allocated()
    torch._grouped_mm(*moved, offs=offsets([30, 64]).to("webgpu"))
    assert torch.webgpu.max_memory_allocated() - before < 2 * matrices.numel() * 4


# Dynamo of PyTorch 2.11 looks at gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
def test_training_a_mixture_of_experts(compiled):
    config = transformers.MixtralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    moved = transformers.MixtralForCausalLM(config).to("webgpu")
    moved.load_state_dict(model.state_dict())
    tokens = torch.randint(100, (2, 12))
    step = torch.compile(moved, backend="webgpu") if compiled else moved
    counters.reset()
    loss = model(tokens, labels=tokens).loss
    got = step(tokens.to("webgpu"), labels=tokens.to("webgpu")).loss
    torch.testing.assert_close(got.cpu(), loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    got.backward()
    # Sums over 24 tokens in another order, of gradients that are small beside 1.
    for own, other in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, atol=1e-5, rtol=1e-4)
    assert not counters.fallbacks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_histograms_of_integers(dtype):
    numbers = torch.tensor([0, 1, 1, 3, 7, 2, 3, 3]).to(dtype)
    for bounds in ({"bins": 4, "min": 0, "max": 3}, {"bins": 3, "min": 1, "max": 7}, {"bins": 5}):
        got = torch.histc(numbers.to("webgpu"), **bounds)
        assert got.dtype == dtype
        assert got.cpu().tolist() == torch.histc(numbers.float(), **bounds).tolist()
