"""Long caches and long prompts: what is allocated beside them, and how long a submission takes.

Nothing is run: plans of symbolic sizes are looked at for the sizes of 32,768 tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from tests.decoding import Sizes, decode, layers_of
from tests.unit.test_joint import LARGE
from torch_webgpu_compile.plan.entry_point import sliced_kernel
from torch_webgpu_compile.plan.model import Dispatch
from torch_webgpu_compile.runtime.pacing import MAX_SECONDS, pace_of, slices_of
from torch_webgpu_compile.symbolic.sizes import evaluate, symbols_of

LONG = 32_768


def held_nbytes(plan):
    """Of what a call allocates, where places are shared."""
    places = {}
    for name, buffer in plan.buffers.items():
        if buffer.role in ("intermediate", "output"):
            key = name if buffer.role == "output" or buffer.slot is None else buffer.slot
            places[key] = max(places.get(key, 0), buffer.nbytes_for({}))
    return sum(places.values())


def test_a_token_allocates_nothing_as_large_as_a_cache():
    sizes = Sizes(positions=LONG, heads=4, kv_heads=2, head=16, layers=2)
    layers = layers_of(sizes)
    token, at = torch.randn(1, 1, sizes.hidden), torch.tensor([LONG - 2])
    target = replace(LARGE, max_buffer_nbytes=1 << 30)
    state = compile_function(lambda x, p: decode(sizes, x, p, layers), token, at, target=target)
    mutated = [output for output in state.plan.outputs if output.mutates is not None]
    assert len(mutated) == 4
    assert all(o.buffer == state.plan.inputs[o.mutates].buffer for o in mutated)  # in place
    (cache,) = {x.nbytes for layer in layers for x in (layer.keys, layer.values)}
    assert held_nbytes(state.plan) < cache / 16


def test_a_part_of_a_prompt_allocates_no_mask_of_a_long_cache():
    """Nor for the heads that share a key, nor a copy of the cache that it is written to."""
    chunk, heads, shared, size = 64, 4, 2, 16

    def prefill(q, new, keys, values, at):
        rows = torch.arange(chunk) + at
        keys.index_copy_(2, rows, new)
        values.index_copy_(2, rows, new * 2)
        mask = (torch.arange(LONG) <= rows[:, None])[None, None]
        k, v = (x.repeat_interleave(heads // shared, 1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    arguments = (
        torch.randn(1, heads, chunk, size),
        torch.randn(1, shared, chunk, size),
        *(torch.randn(1, shared, LONG, size) for _ in range(2)),
        torch.tensor(LONG // 2),
    )
    state = compile_function(prefill, *arguments, target=LARGE)
    assert held_nbytes(state.plan) < 8 * arguments[0].nbytes < chunk * LONG / 8


def layer(x, weight, out):
    heads, size = 32, 64
    q, k, v = F.linear(x, weight).view(1, -1, 3 * heads, size).transpose(1, 2).chunk(3, 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(attended.transpose(1, 2).reshape(1, -1, heads * size), out)


@pytest.mark.parametrize("adapter", ["discrete", "integrated", "cpu"])
def test_a_long_prompt_is_submitted_in_parts(adapter):
    """A layer at once takes far longer than a driver's watchdog waits; each slice does not."""
    x, weight = torch.randn(1, 16, 2048), torch.randn(6144, 2048)
    torch._dynamo.mark_dynamic(x, 1)
    plan = compile_function(layer, x, weight, torch.randn(2048, 2048), target=TARGET).plan
    assert any(symbols_of(s.flops) for s in plan.steps if isinstance(s, Dispatch))
    pace, total, slices = pace_of(adapter), 0.0, 0
    for step in plan.steps:
        assert isinstance(step, Dispatch)
        symbols = {s.name for size in step.sizes for s in symbols_of(size) if s.extent is None}
        sizes = dict.fromkeys(symbols, LONG)
        nbytes = evaluate(step.bytes_read + step.bytes_written, sizes)
        seconds = pace.seconds(nbytes, evaluate(step.flops, sizes))
        grid = tuple(evaluate(size, sizes) for size in step.grid)
        total += seconds
        if seconds > MAX_SECONDS:
            assert sliced_kernel(plan.kernels[step.kernel]) is not None
            parts = slices_of(grid, math.floor(math.prod(grid) * MAX_SECONDS / seconds))
            assert max(seconds * part.share(grid) for part in parts) <= MAX_SECONDS
            slices += len(parts)
    assert total > 4
    assert slices >= total / MAX_SECONDS / 2
