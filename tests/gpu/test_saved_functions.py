"""``aot_compile``: functions that are saved, and loaded without compiling anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_webgpu_compile import counters
from torch_webgpu_compile.callables import stored
from torch_webgpu_compile.errors import AdapterError, WebGPUCompileError
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.runtime.device import device_for


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def saved(model: Model, x: Tensor, file: Path, **keywords: Any) -> Any:
    compiled: Any = torch.compile(model, fullgraph=True, backend="webgpu", **keywords)
    function = compiled.forward.aot_compile(((x,), {}))
    function.save_compiled_function(str(file))
    return function


def loaded(file: Path) -> Any:
    with file.open("rb") as content:
        return torch.compiler.load_compiled_function(content)  # type: ignore[arg-type]


def gradients(result: Tensor, model: Model) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result.square().sum(), list(model.parameters()))


def test_forward_and_backward(tmp_path: Path) -> None:
    """With sizes that are symbols."""
    model, file = Model(), tmp_path / "function"
    saved(model, torch.randn(5, 6), file, dynamic=True)
    before = counters.plans_compiled
    function, x = loaded(file), torch.randn(9, 6)
    result = function(model, x)
    got = gradients(result, model)
    assert counters.plans_compiled == before
    wanted = model(x)
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(got, gradients(wanted, model))


@torch.no_grad()
def test_for_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with more is refused by name, in the process that compiles and in those that load."""
    model, x, file = Model(), torch.randn(5, 6), tmp_path / "function"
    here = device_for(resolve()).target
    less = replace(here, name="a smaller GPU", max_workgroup_nbytes=16 << 10)
    saved(model, x, file, options={"target": less})
    torch.testing.assert_close(loaded(file)(model, x), model(x))
    monkeypatch.setattr(stored, "sources_digest", lambda: "another")
    with pytest.raises(WebGPUCompileError, match="another version"):
        loaded(file)
    monkeypatch.undo()
    more = replace(here, name="a larger GPU", features=here.features | {"subgroups"})
    more = replace(more, subgroup_sizes=(48, 48))
    function = saved(model, x, file, options={"target": more})
    for call in (lambda: function(model, x), lambda: loaded(file)):
        with pytest.raises(AdapterError, match=r"a larger GPU and needs .*subgroups of 48"):
            call()
