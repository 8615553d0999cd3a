"""Captured operator calls on the GPU: offsets, mutations, symbolic sizes and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.eager_calls import describe, run_eagerly
from tests.gpu.runtime_plans import download
from tests.providers import device_in_use
from torch_webgpu_compile.callables.signature import Signature, bound_offset
from torch_webgpu_compile.capture.eager.calls import CapturedCall, Output
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan.model import PlanOutput
from torch_webgpu_compile.runtime.device import Device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.symbolic.sizes import evaluate
from torch_webgpu_compile.torch_ops.dtypes import torch_dtype

aten = torch.ops.aten
R = torch.randn


@pytest.fixture(scope="module")
def device() -> Device:
    return device_in_use()


class Runner:
    """A captured call, compiled: the least that a caller has to do."""

    def __init__(self, call: CapturedCall, device: Device) -> None:
        self.call = call
        self.device = device
        options = resolve(None, {"fallback": "error"})
        state = compile_graph(call.captured, call.phase, device.target, options)
        self.plan = state.plan
        self.signature = Signature(state.plan, state.phase, state.captured.static_inputs)
        self.executor = Executor(state.plan, device)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The results that are outputs; changes arguments."""
        leaves = tree_leaves((args, kwargs))
        values = [leaves[k] for k in self.call.arguments]
        if self.call.numbers is not None:
            numbers = self.call.numbers
            values.append(torch.frombuffer(bytearray(numbers.compute(leaves)), dtype=numbers.dtype))
        sizes = self.signature.variant(values).sizes
        externals = {}
        for value, entry in zip(values, self.plan.inputs, strict=True):
            if entry.buffer is not None:
                memory = _memory(value)
                externals[entry.buffer] = self.device.allocate(max(len(memory), 4))
                self.device.upload(externals[entry.buffer], memory)
        bound = self.executor.bind(sizes, externals)
        bound.replay()
        results = []
        for output in self.plan.outputs:
            value = self._read(output, sizes, bound)
            if output.mutates is None:
                results.append(value)
            else:
                values[output.mutates].copy_(value)
        return results

    def _read(self, output: PlanOutput, sizes: dict[str, int], bound: Any) -> Any:
        if output.buffer is None:
            return output.constant if output.size is None else evaluate(output.size, sizes)
        dtype = torch_dtype(self.plan.buffers[output.buffer].dtype)
        data = np.zeros(bound.buffer(output.buffer).nbytes, np.uint8)
        download(self.device, bound.buffer(output.buffer), data)
        shape = [evaluate(size, sizes) for size in output.sizes]
        strides = [evaluate(stride, sizes) for stride in output.strides]
        assert output.offset is not None
        flat = torch.from_numpy(data[: len(data) // dtype.itemsize * dtype.itemsize]).view(dtype)
        return flat.as_strided(shape, strides, evaluate(output.offset, sizes))


def _memory(tensor: Tensor) -> Any:
    """The bytes from where a tensor's memory is bound to the end of its storage."""
    start = tensor.storage_offset() - bound_offset(tensor)
    data = np.asarray(tensor.untyped_storage(), np.uint8)
    return np.ascontiguousarray(data[start * tensor.element_size() :])


def check(device: Device, op: Any, *calls: Any, **symbols: bool) -> Runner:
    """Captures the first of ``calls``, (args, kwargs), and runs all of them."""
    call = capture_call(op, *describe(calls[0]), native_operators(), **symbols)
    runner = Runner(call, device)
    for args, kwargs in calls:
        assert call.accepts(tree_leaves(describe((args, kwargs))))
        expected, changed = run_eagerly(op, *args, **kwargs)
        results = iter(runner(*args, **kwargs))
        for result, wanted in zip(call.results, tree_leaves(expected), strict=True):
            if isinstance(result, Output):
                torch.testing.assert_close(next(results), wanted)
        torch.testing.assert_close(tree_leaves((args, kwargs)), changed)
    return runner


def test_out(device: Device) -> None:
    runner = check(device, aten.add.out, ((R(33, 4), R(4)), {"alpha": 2, "out": R(33, 4)}))
    assert runner.plan.dispatch_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
def test_offsets(device: Device, dtype: torch.dtype) -> None:
    memory = (R(800) * 3).to(dtype)
    for first, second in ((4, 63), (5, 257), (64, 3)):
        x = memory[first : first + 24].view(6, 4)
        y = memory[second : second + 24].view(6, 4)
        check(device, aten.logical_xor.default, ((x, y), {}))
        if dtype.is_floating_point:
            check(device, aten.sum.dim_IntList, ((x, [1]), {}))
            check(device, aten.mm.default, ((x, y.t()), {}))


def test_symbolic_offsets_and_strides(device: Device) -> None:
    memory = R(4000)

    def view(offset: int, rows: int, columns: int, stride: int) -> Tensor:
        return memory.as_strided((rows, columns), (stride, 1), offset)

    calls = [
        ((view(5, 3, 4, 9), view(64, 3, 4, 4)), {}),
        ((view(64 + 7, 33, 40, 41), view(128, 33, 40, 40)), {}),
    ]
    check(device, aten.mul.Tensor, *calls, dynamic=True)


def test_expanded_arguments(device: Device) -> None:
    check(device, aten.mul.Tensor, ((R(3, 1).expand(3, 5), R(5).expand(3, 5)), {}))


def test_argument_changed_and_read(device: Device) -> None:
    x = R(8, 8)
    check(device, aten.add_.Tensor, ((x, x.clone().t()), {}))
    check(device, aten.addcmul_.default, ((x.t(), R(8, 8), R(8, 8)), {"value": 0.5}))


def test_other_sizes_and_numbers(device: Device) -> None:
    calls = [
        ((R(n, m), R(m)), {"alpha": 0.1 * n, "out": R(n, m)}) for n, m in ((4, 5), (32, 70), (8, 3))
    ]
    check(device, aten.add.out, *calls, dynamic=True)


def test_an_optimizer_step_with_other_learning_rates(device: Device) -> None:
    def call(step: int) -> Any:
        lists = [[torch.rand(33, 4), torch.rand(7)] for _ in range(4)]
        steps = [torch.tensor(float(step)), torch.tensor(float(step))]
        settings = {"lr": 0.1 / step, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1}
        settings |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
        return (*lists, [], steps), settings

    check(device, aten._fused_adamw_.default, *map(call, (1, 2, 100)), numbers=True)


def test_foreach_with_other_scalars(device: Device) -> None:
    def call(scale: float) -> Any:
        lists = [[torch.rand(33, 4) + 1, torch.rand(7) + 1] for _ in range(3)]
        return (*lists, [0.5 * scale, 0.25 * scale]), {}

    check(device, aten._foreach_addcdiv_.ScalarList, call(1.0), call(-3.0), numbers=True)
