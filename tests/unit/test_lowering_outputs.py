"""Graph outputs: strides, aliasing, mutations, constants, host calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import TARGET, aot_capture, capture, check, lower_checked, run_graph
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.ir.buffers import BufferOrigin
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.nodes import HostCall, Pointwise
from torch_webgpu_compile.lowering.graph import lower


def sample() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 1,
        lambda x: (x + 1).t(),
        lambda x: x.t() + 1,
        lambda x: (x + 1)[:, 1:3],
        lambda x: (x + 1)[1],
        lambda x: (x + 1).flatten()[2:],
        lambda x: (x + 1).reshape(2, 6).t(),
        lambda x: (x + 1).expand(2, 3, 4),
        lambda x: (x + 1)[:1].expand(5, 4),
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x,
        lambda x: torch.ones(2, 3),
        lambda x: (x + 1).to(memory_format=torch.preserve_format).permute(1, 0).unsqueeze(0),
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.view(1, 3, 4, 1).contiguous(memory_format=torch.channels_last) + 1,
        lambda x: torch.empty_strided((3, 4), (1, 3)).copy_(x),
    ],
)
def test_strides(fn: Callable[[torch.Tensor], Any]) -> None:
    check(fn, sample())  # compares strides with those of the fake result
    check(fn, sample().t().contiguous().t())


def test_a_view_of_an_intermediate_is_not_copied() -> None:
    graph = lower_checked(capture(lambda x: ((x + 1)[:, 1:3].t(), x.t() + 1), sample()))
    assert len(graph.nodes) == 2


def test_outputs_that_alias_in_pytorch_share_memory() -> None:
    graph = lower_checked(capture(lambda x: _pair(x), sample()))
    assert graph.outputs[0].buffer == graph.outputs[1].buffer
    graph = lower_checked(capture(lambda x: _cloned_pair(x), sample()))
    assert graph.outputs[0].buffer != graph.outputs[1].buffer


def _pair(x: torch.Tensor) -> Any:
    y = x + 1
    return y, y.t()


def _cloned_pair(x: torch.Tensor) -> Any:
    y = x + 1
    return y, y.clone()


def test_outputs_never_are_inputs() -> None:
    graph = lower_checked(capture(lambda x: (x, x.clone(), x[0]), sample()))
    for output in graph.outputs:
        assert graph.buffers[output.buffer or ""].origin is BufferOrigin.INTERMEDIATE


def test_constants_and_none() -> None:
    check(lambda x: (x.shape[0], None, x + 1, 2.5, True), sample())


def test_sizes_are_returned() -> None:
    captured = capture(lambda x: (x.shape[0] * 2, x + 1), sample(), dynamic=True)
    assert run_graph(lower_checked(captured), [sample()])[0] == 6


def test_mutated_inputs() -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        return state * 3

    captured, _ = aot_capture(step, sample(), sample().t().contiguous().t())
    graph = lower_checked(captured)
    (mutation,) = [o for o in graph.outputs if o.mutates is not None]
    assert graph.inputs[mutation.mutates or 0].buffer == "in1"
    assert [int(s) for s in mutation.strides] == [1, 3]
    arrays = interpret(graph, [sample().numpy(), sample().numpy()])
    torch.testing.assert_close(torch.from_numpy(arrays[-1].copy()), sample() * 3)


def test_dead_code_is_dropped() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.sort(x.exp())
        return x + 1

    graph = lower_checked(capture(fn, sample()))
    assert len(graph.nodes) == 1
    assert set(graph.buffers) == {"in0", "add"}


def test_host_call_and_its_report() -> None:
    reports: list[tuple[str, ...]] = []
    captured = capture(lambda x: torch.linalg.qr(x[:, :3] + torch.eye(3))[0] * 2, sample())
    graph = lower(captured, TARGET, lambda *report: reports.append(report))
    assert [type(n) for n in graph.nodes] == [Pointwise, HostCall, Pointwise]
    assert reports == [
        ("aten.linalg_qr.default", "float32", "", "no GPU kernel for this operator yet")
    ]
    check(lambda x: torch.linalg.qr(x[:, :3] + torch.eye(3) * 9)[0], sample(), allow_host=True)


def test_a_dtype_without_kernels_goes_to_the_host() -> None:
    x = sample().double()
    check(lambda x: (x.t() * 2).sum(0)[1:], x, allow_host=True)
    check(lambda x: x.t(), x, allow_host=True)
    check(lambda x: (x * 0.1).float() + 1, x, allow_host=True)
    graph = lower_checked(capture(lambda x: x + torch.tensor(2.0, dtype=torch.float64), sample()))
    assert [type(n) for n in graph.nodes] == [Pointwise]


def test_errors_name_the_operator_and_the_next_step() -> None:
    mask = sample() > 3
    captured = capture(lambda x, m: x.masked_select(m), sample(), mask, dynamic=True)
    with pytest.raises(UnsupportedOp, match=r"aten.masked_select.default: .* depends on data"):
        lower(captured, TARGET)

    def refuse(op: str, dtype: str, source: str, cause: str) -> None:
        raise UnsupportedOp(op, cause, "use another operator", source)

    captured = capture(lambda x: torch.linalg.qr(x[:, :3])[0], sample())
    with pytest.raises(UnsupportedOp, match="use another operator"):
        lower(captured, TARGET, refuse)


def test_origins_hold_the_line_of_code() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    captured, _ = aot_capture(torch.compile, sample(), dynamo=fn)
    (node,) = lower_checked(captured).nodes
    assert node.origins[0].op == "aten.sin.default"
    assert node.origins[0].source.endswith("return x.sin()")
    assert "test_lowering_outputs.py" in node.origins[0].source
