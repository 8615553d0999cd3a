"""Nested tensors (``layout=torch.jagged``), in eager calls and in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.compiling import native

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("error::torch_webgpu_compile.fallbacks.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*is_fx_tracing"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]
LENGTHS = (3, 5, 0, 2)


class Block(nn.Module):
    """Attention with its projections and norm, a padded tensor, and a softmax over the rows."""

    def __init__(self, *, is_causal: bool, kv_heads: int) -> None:
        super().__init__()
        self.is_causal, self.kv_heads = is_causal, kv_heads
        self.norm, self.q = nn.LayerNorm(16), nn.Linear(16, 16)
        self.kv, self.out = nn.Linear(16, 8 * kv_heads), nn.Linear(16, 16)

    def project(self, x: Any) -> tuple[Any, ...]:
        x = self.norm(x)
        q, kv = self.q(x).unflatten(-1, (4, 4)), self.kv(x).unflatten(-1, (self.kv_heads, 8))
        return tuple(t.transpose(1, 2) for t in (q, *kv.chunk(2, -1)))

    def attend(self, *given: Any) -> Any:
        gqa = self.kv_heads != 4
        return F.scaled_dot_product_attention(*given, is_causal=self.is_causal, enable_gqa=gqa)

    def forward(self, x: Any) -> Any:
        x = x + F.gelu(self.out(self.attend(*self.project(x)).transpose(1, 2).flatten(-2)))
        return x, torch.softmax(x, 1)


def row_by_row(block: Block, values: Tensor) -> tuple[Tensor, Tensor]:
    rows = [row for row in values.split(LENGTHS) if len(row)]
    found = []
    for row in rows:
        attended = block.attend(*block.project(row[None]))[0]
        found.append(row + F.gelu(block.out(attended.transpose(0, 1).flatten(-2))))
    return torch.cat(found), torch.cat([torch.softmax(row, 0) for row in found])


@pytest.mark.rotates(3)
@pytest.mark.parametrize("how", ["eager", "compiled", "compiled for the CPU"])
@pytest.mark.parametrize(("is_causal", "kv_heads"), [(False, 4), (True, 2)])
def test_a_block(how: str, is_causal: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    block = Block(is_causal=is_causal, kv_heads=kv_heads)
    x = torch.randn(sum(LENGTHS), 16)

    def gradients(results: Any, *sources: Tensor) -> list[Tensor]:
        # PyTorch's own gradient of a softmax over rows mixes the rows, on the CPU, too.
        loss = (results[0] * torch.arange(16, device=results[0].device)).pow(2).mean()
        return [t.cpu() for t in torch.autograd.grad(loss, sources)]

    given = x.clone().requires_grad_()
    wanted = row_by_row(block, given)
    expected = gradients(wanted, given, *block.parameters())
    place = "cpu" if how == "compiled for the CPU" else "webgpu"
    block = block.to(place)
    there = x.to(place).requires_grad_()
    offsets = torch.tensor([0, *LENGTHS], device=place).cumsum(0)
    call: Callable[..., Any] = block if how == "eager" else native(block)
    results = call(torch.nested.nested_tensor_from_jagged(there, offsets, max_seqlen=5))
    assert [r.device.type for r in results] == [place] * 2
    values = [r.values() for r in results]
    for got, right in zip(values, wanted, strict=True):
        assert_close(got.cpu(), right, atol=2e-5, rtol=2e-5)
    assert_close(gradients(values, there, *block.parameters()), expected, atol=1e-4, rtol=1e-4)


def test_making_taking_apart_and_padding() -> None:
    rows = [torch.arange(2.0 * n).reshape(n, 2) for n in LENGTHS]
    made = torch.nested.nested_tensor(rows, layout=torch.jagged, device="webgpu")
    moved = torch.nested.nested_tensor(rows, layout=torch.jagged).to("webgpu")
    for nested in (made, moved, native(lambda x: x * 1)(made)):
        assert nested.device.type == "webgpu"
        for got, row in zip(nested.unbind(), rows, strict=True):
            assert_close(got.cpu(), row)
        padded = torch.nested.to_padded_tensor(nested, -1.0)
        assert_close(padded.cpu(), nn.utils.rnn.pad_sequence(rows, True, -1.0))
        assert_close(nested.sum(1).cpu(), torch.stack([row.sum(0) for row in rows]))


def test_one_graph_for_other_lengths_and_ragged_sizes_as_results() -> None:
    function = native(lambda x: (x * 2, x.shape[1], x.flatten(2)), dynamic=True)
    for lengths in ((2, 3), (4, 1, 1), (5, 6)):
        rows = [torch.rand(n, 3, 2) for n in lengths]
        given = torch.nested.nested_tensor(rows, layout=torch.jagged, device="webgpu")
        doubled, size, flat = function(given)
        assert size == given.shape[1] == flat.shape[1]
        assert_close(doubled.values().cpu(), torch.cat(rows) * 2)
        assert_close(flat.values().cpu(), torch.cat(rows).flatten(1))


def test_the_strided_layout_is_refused_where_one_is_made() -> None:
    """Autograd asks such tensors for their sizes where an exception ends the process."""
    rows = [torch.ones(2, 3, device="webgpu", requires_grad=True) for _ in range(2)]
    makers: tuple[Callable[[], Any], ...] = (
        lambda: torch.nested.as_nested_tensor(rows),
        lambda: torch.nested.as_nested_tensor(torch.stack(rows)),
        lambda: torch.nested.nested_tensor([row.detach() for row in rows], device="webgpu"),
    )
    for make in makers:
        with pytest.raises(NotImplementedError, match=r"torch\.jagged"):
            make()
