"""Real architectures at tiny sizes, forward and backward: lowered and interpreted against eager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness import interpreting_backend
from tests.small_models import MODELS, tokens

pytestmark = [
    pytest.mark.rotates(9),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the models' own, and Dynamo's
]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    old = torch._dynamo.config.allow_rnn
    torch._dynamo.config.allow_rnn = True
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.config.allow_rnn = old


def leaves(output: Any) -> list[torch.Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    flat = torch.utils._pytree.tree_leaves(output)
    return [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest element: single ones may be differences of large sums."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.float() - expected.float()).abs().max()
    assert difference <= tolerance * max(1e-2, float(expected.float().abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend=interpreting_backend(), fullgraph=True)
        actual, expected = leaves(compiled(*inputs)), leaves(model(*inputs))
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, 1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_inference_in_bfloat16(name: str) -> None:
    model, inputs = MODELS[name]()
    model.eval().to(torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(model, backend=interpreting_backend(), fullgraph=True)
        actual, expected = leaves(compiled(*inputs)), leaves(model(*inputs))
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, 3e-2)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    model, inputs = MODELS[name]()
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    results = []
    for run in (model, torch.compile(model, backend=interpreting_backend(), fullgraph=True)):
        model.load_state_dict(state)
        model.zero_grad()
        outputs = [t for t in leaves(run(*inputs)) if t.requires_grad]
        sum((t * t.detach().cos()).sum() for t in outputs).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
        results.append([*(t.detach() for t in outputs), *grads, *buffers])
    for wanted, got in zip(*results, strict=True):
        close(got, wanted, 1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "convnet"])
def test_dynamic_sizes(name: str) -> None:
    model, _ = MODELS[name]()
    model.eval()
    backend = interpreting_backend()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for count in (3, 5):
            image = name == "convnet"
            batch = [torch.randn(count, 3, 16, 16) if image else tokens(2, count)]
            for got, wanted in zip(leaves(compiled(*batch)), leaves(model(*batch)), strict=True):
                close(got, wanted, 1e-4)
