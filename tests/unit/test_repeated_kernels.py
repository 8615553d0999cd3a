"""Layers that repeat: their kernels are generated once, and run on each layer's buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compilations import TARGET, compile_function
from tests.decoding import Sizes, decode, layers_of
from torch_webgpu_compile import codegen
from torch_webgpu_compile.codegen.tilings.choose import choose_tilings
from torch_webgpu_compile.ir.renaming import group_key
from torch_webgpu_compile.tuning.autotune import known_tilings

LARGE = replace(TARGET, max_storage_buffers=32, max_workgroup_nbytes=48 << 10)
DEPTH = 3


def encoder(x):
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(DEPTH)]
    return (lambda y: nn.Sequential(*layers).eval()(y)), (x,)


def mlp(x):
    weights = [torch.randn(32, 32) for _ in range(DEPTH)]

    def run(y, *ws):
        for w in ws:
            y = F.layer_norm(F.gelu(y @ w) + y, (32,)).cumsum(-1).index_select(0, torch.arange(2))
        return y

    return run, (x, *weights)


def decoder(x):
    sizes = Sizes(layers=DEPTH, positions=40)
    return partial(decode, sizes), (torch.randn(1, 1, 64), torch.tensor([3]), layers_of(sizes))


MODELS = {"encoder": (encoder, None), "mlp": (mlp, True), "decoder": (decoder, None)}


@pytest.mark.parametrize("name", MODELS)
def test_as_each_by_itself(name, monkeypatch):
    """Every call is the one that its group alone becomes; most groups are not generated."""
    build, dynamic = MODELS[name]
    function, arguments = build(torch.randn(2, 8, 32))
    state = compile_function(function, *arguments, dynamic=dynamic, target=LARGE)
    tiled = choose_tilings(state.schedule, LARGE, known_tilings(LARGE, ""))
    render_group, rendered = codegen._render_group, []

    def counted(group, *rest):
        rendered.append(group)
        return render_group(group, *rest)

    monkeypatch.setattr(codegen, "_render_group", counted)
    calls = codegen.render(tiled, LARGE).calls
    groups, buffers = state.schedule.groups, state.schedule.graph.buffers
    alone = [
        call
        for group, *chosen in zip(groups, tiled.tilings, tiled.problems, strict=True)
        for call in render_group(group, buffers, LARGE, *chosen)
    ]
    assert list(calls) == alone
    assert len(rendered) < len(groups)


def test_layouts_matter():
    """The same function of a contiguous and of a transposed tensor: two forms."""
    functions = (lambda x: x.exp().sum(0)), (lambda x: x.t().exp().sum(0))
    sizes = (4, 8), (8, 4)
    forms = set()
    for function, size in zip(functions, sizes, strict=True):
        state = compile_function(function, torch.ones(size))
        (group,) = state.schedule.groups
        found = group_key(group, state.schedule.graph.buffers)
        assert found is not None
        forms.add(found[0])
    assert len(forms) == 2
