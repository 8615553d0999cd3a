"""Fixtures of the model tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.models.model_checks import BACKEND


@pytest.fixture(autouse=True)
def isolated_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test compiles from scratch, with its own random numbers and without fallbacks.

    Native support is claimed for everything here: an operator that runs on the host is a failure.
    """
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "error")
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = {} if BACKEND == "webgpu" else {"allow_rnn": True}  # webgpu sets it itself
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()
