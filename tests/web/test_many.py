"""Bundles of many kinds in one page: equal to the same bundle in Python on the same adapter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from tests.eager_samples import OPERATORS
from tests.fuzz.choosers import RandomChooser
from tests.fuzz.families import draw_program
from tests.small_models import MODELS
from tests.web.test_runtime import RUN, assert_equal
from torch_webgpu_compile import export
from torch_webgpu_compile.errors import WebGPUCompileError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh"),
]

_numbers = itertools.count()  # of bundles

Check = Callable[[Callable[..., Any], Sequence[Tensor]], None]


@pytest.fixture
def check(in_one_page, in_python, site) -> Check:
    """Exports a function, and calls it in the page and in Python."""

    def run(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        name = f"many-{next(_numbers)}"
        with torch.no_grad():
            folder: Path = export(function, tuple(inputs), site[0] / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        names = manifest["variants"][0]["entries"]["forward"]["inputs"]
        calls = [["forward", {n: x.tolist() for n, x in zip(names, inputs, strict=True)}]]
        calls *= 2  # the second call finds what the first has prepared
        found = in_one_page(RUN, {"bundle": name, "calls": calls})
        assert_equal(found, in_python(folder, calls))

    return run


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, check: Check) -> None:
    model, inputs = MODELS[name]()
    check(model.eval(), inputs)


def test_orders_and_preparations_without_states(check: Check) -> None:
    """A weight of constants alone is computed once, by the first call."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        weight = torch.arange(4096.0).sin().view(64, 64).softmax(-1)
        return x @ weight, *x.flatten().topk(5), x.median()

    check(function, [torch.randn(3, 64)])


@pytest.mark.rotates(64)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, check: Check) -> None:
    """A sample of OpInfo's each."""
    info = OPERATORS[name]
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=False)
    for sample in itertools.islice(samples, 8):
        leaves, spec = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[k] for k in places]
        if not inputs or any(not x.numel() or x.is_complex() for x in inputs):
            continue

        def function(*given: Tensor, leaves=leaves, places=places, spec=spec) -> Any:
            found = dict(zip(places, given, strict=True))
            values = [found.get(k, leaf) for k, leaf in enumerate(leaves)]
            input, args, kwargs = _pytree.tree_unflatten(values, spec)
            return info.op(input, *args, **kwargs)

        try:
            results = _pytree.tree_leaves(function(*(x.clone() for x in inputs)))
        except Exception:  # PyTorch cannot run this sample
            continue
        if not all(isinstance(r, Tensor) and not r.is_complex() for r in results):
            continue
        try:
            check(function, [x.clone() for x in inputs])
        except WebGPUCompileError as error:
            pytest.skip(f"it cannot be exported: {error}")
        return
    pytest.skip("no sample has tensors alone")


@pytest.mark.rotates(16)
@pytest.mark.parametrize("seed", range(64))
def test_random_programs(seed: int, check: Check) -> None:
    chooser = RandomChooser(seed)
    program = draw_program(chooser)
    while not all(x.numel() for x in program.arguments):
        program = draw_program(chooser)
    check(program.function, program.arguments)
