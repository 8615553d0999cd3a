"""What Dynamo is told, see `capture.graph.dynamo`."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.callback import callback_handler

from torch_webgpu_compile.capture.graph import dynamo


@pytest.mark.usefixtures("fresh")
def test_something_may_run_beside_the_first_trace():
    names, done = [], threading.Event()

    def work():
        names.append(threading.current_thread().name)
        done.set()
        raise RuntimeError("nobody hears this")

    before = list(callback_handler.start_callbacks)
    dynamo.on_first_compile(work)
    try:
        for k in range(2):
            assert torch.compile(lambda x, k=k: x + k, backend="eager")(torch.ones(2))[0] == 1 + k
            assert done.wait(10)
    finally:
        callback_handler.start_callbacks[:] = before
    assert names == ["torch-webgpu-first-compile"]
