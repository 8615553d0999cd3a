"""ONNX Runtime with its WebGPU provider: ``pip install onnxruntime onnx onnxruntime-ep-webgpu``."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from .timing import marginal_seconds_per_call, seconds, seconds_per_call


def missing() -> str:
    """Why it cannot be measured; empty when it can be tried."""
    wanted = ("onnxruntime", "onnx", "onnxruntime_ep_webgpu")
    absent = [name for name in wanted if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else ""


class _Module(nn.Module):
    """The exporter wants a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def _without_packed_sequences() -> contextlib.AbstractContextManager[Any]:
    """transformers looks for several texts in one row, with operators that ONNX does not have."""
    name = "transformers.masking_utils"
    if name not in sys.modules:
        return contextlib.nullcontext()
    return mock.patch(f"{name}.find_packed_sequence_indices", return_value=None)


def export(function: Callable[..., Any], inputs: tuple[Tensor, ...], path: Path) -> None:
    """Writes the ONNX file; tracing exporter, as it needs nothing but ``onnx``."""
    module = function if isinstance(function, nn.Module) else _Module(function)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with warnings.catch_warnings(), torch.no_grad(), _without_packed_sequences(), quiet:
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            inputs,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=[f"input_{index}" for index in range(len(inputs))],
            output_names=["output"],
        )


@cache
def _register() -> None:
    """Once per process: a worker measures several cases."""
    import onnxruntime
    import onnxruntime_ep_webgpu as provider

    onnxruntime.set_default_logger_severity(3)
    onnxruntime.register_execution_provider_library("webgpu", provider.get_library_path())


def open_session(path: Path) -> Any:
    """A session on the WebGPU provider. Raises RuntimeError without one."""
    import onnxruntime
    import onnxruntime_ep_webgpu as provider

    _register()
    name = provider.get_ep_name()
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise RuntimeError("ONNX Runtime found no WebGPU device")
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices[:1], {})
    return onnxruntime.InferenceSession(str(path), sess_options=options)


def measure(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], budget_s: float
) -> dict[str, Any]:
    """``seconds`` leaves outputs on the GPU where the bindings allow it: see ``outputs``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(function, inputs, path)
        session: Any = None

        def load() -> None:
            nonlocal session
            session = open_session(path)

        load_s = seconds(load)
    arrays = {f"input_{index}": np.ascontiguousarray(x.numpy()) for index, x in enumerate(inputs)}
    result: dict[str, Any] = {"first_call_s": load_s + seconds(lambda: session.run(None, arrays))}
    result["call_with_transfers_s"] = seconds_per_call(
        lambda: session.run(None, arrays), lambda: None, budget_s
    )
    try:
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("output", "webgpu", 0)
        # `synchronize_outputs` returns before the GPU is done; a copy of the output does not.
        result["seconds"] = marginal_seconds_per_call(
            lambda: session.run_with_iobinding(binding), binding.copy_outputs_to_cpu, budget_s
        )
        result["outputs"] = "on the GPU"
    except Exception as error:
        result["seconds"] = result["call_with_transfers_s"]
        result["outputs"] = f"copied to the host ({type(error).__name__}: {str(error)[:200]})"
    return result
