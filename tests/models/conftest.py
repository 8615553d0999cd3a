"""Fixtures of the model tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Native support is claimed for everything here: an operator that runs on the host is a failure.
os.environ["TORCH_WEBGPU_FALLBACK"] = "error"

import torch
from model_checks import BACKEND


@pytest.fixture(autouse=True)
def isolated_compilation() -> Iterator[None]:
    """Each test compiles from scratch and with its own random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = {} if BACKEND == "webgpu" else {"allow_rnn": True}  # webgpu sets it itself
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()
