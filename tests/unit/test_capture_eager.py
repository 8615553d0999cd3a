"""Single calls of ATen operators, captured from descriptions of their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.eager_calls import check_call, describe
from tests.harness import TARGET
from torch_webgpu_compile.capture.eager.calls import CapturedCall, Output, ResultArgument
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import native_operators
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.lowering.graph import lower

aten = torch.ops.aten


def captured(op: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    described = describe((args, kwargs))
    return capture_call(op, *described, native_operators())


def test_a_new_tensor_is_an_output() -> None:
    call = check_call(aten.add.Tensor, torch.randn(3, 4), torch.randn(4), alpha=2)
    assert call.results == (Output(0),)
    assert call.arguments == (0, 1)
    assert call.mutated == ()


def test_out_is_written_and_not_read() -> None:
    out = torch.full((3, 4), float("nan"))
    call = check_call(aten.add.out, torch.randn(3, 4), torch.randn(4), out=out)
    assert call.results == (ResultArgument(2),)
    assert call.mutated == (2,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_place(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype)
    call = check_call(aten.mul_.Tensor, x, torch.randn(4).to(dtype))
    assert call.results == (ResultArgument(0),)


def test_in_place_on_a_transposed_tensor() -> None:
    check_call(aten.add_.Tensor, torch.randn(4, 3).t(), torch.randn(3, 4))


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag])
def test_what_lazily_conjugated_and_negated_tensors_mean_is_read(lazy: Any) -> None:
    view = lazy(torch.randn(3, 4, dtype=torch.complex64))
    assert view.is_conj() or view.is_neg()
    check_call(aten.exp.default, view)


def test_a_number_in_place_of_a_tensor() -> None:
    check_call(aten.add.Tensor, torch.arange(5), 2.5)


def test_offsets() -> None:
    memory = torch.randn(100)
    call = check_call(aten.add.Tensor, memory[5:17].view(3, 4), memory[63:75].view(3, 4))
    assert call.captured.offsets == {0: 5, 1: 63}


def test_expanded_argument() -> None:
    check_call(aten.mul.Tensor, torch.randn(3, 1).expand(3, 4), torch.randn(3, 4))


def test_argument_changed_and_read() -> None:
    x = torch.randn(3, 4)
    call = check_call(aten.add_.Tensor, x, x)
    assert call.mutated == (0,)
    check_call(aten.addcmul.out, x, x, x.t().reshape(3, 4), out=x)


def test_two_changed_arguments_that_share_memory_are_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(UnsupportedOp, match="share memory"):
        captured(aten._foreach_add_.Scalar, [x, x], 1.0)


def test_several_changed_lists() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5)]
    call = check_call(aten._foreach_addcmul_.Scalar, tensors, tensors, tensors, 0.5)
    assert call.mutated == (0, 1)


def test_dtype_of_out_is_kept() -> None:
    check_call(aten.add.out, torch.arange(4), torch.arange(4), out=torch.empty(4))


def test_out_of_other_sizes() -> None:
    call = captured(aten.add.out, torch.randn(4), torch.randn(3, 1), out=torch.empty(0))
    assert call.resized == call.mutated == (2,)
    graph = lower(call.captured, TARGET)
    (output,) = graph.outputs
    assert [size.constant for size in output.sizes] == [3, 4]
    check_call(aten.add.out, torch.randn(4), torch.randn(3, 1), out=torch.empty(0))


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="cannot be traced"):
        captured(aten.nonzero.default, torch.randn(4))


def test_views_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="view"):
        captured(aten.transpose.int, torch.randn(4, 3), 0, 1)


def test_errors_of_pytorch_stay() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        captured(aten.add.Tensor, torch.randn(3), torch.randn(4))


def test_random_numbers_take_seeds() -> None:
    call = captured(aten.normal_.default, torch.empty(3), 0.0, 1.0, generator=torch.Generator())
    assert call.phase.seeds == 2
    assert call.arguments == (0,)
    assert len(call.captured.module.graph.find_nodes(op="placeholder")) == 2


def test_factory_on_another_device() -> None:
    call = captured(aten.full.default, [2, 3], 1.5, device=torch.device("meta"), pin_memory=True)
    assert call.arguments == ()
    (output,) = call.captured.module.graph.find_nodes(op="output")
    assert output.args[0][0].meta["val"].device == torch.device("cpu")


def test_an_exact_match_is_accepted() -> None:
    x, y = torch.randn(3, 4), torch.randn(4)
    call = captured(aten.add.Tensor, x, y, alpha=2)

    def accepts(*args: Any, **kwargs: Any) -> bool:
        leaves = torch.utils._pytree.tree_leaves(describe((args, kwargs)))
        return call.accepts(leaves)

    assert accepts(x, y, alpha=2)
    assert accepts(y.expand(3, 4).contiguous(), x[0].clone(), alpha=2)
    assert not accepts(x, y, alpha=2.0)
    assert not accepts(x, y, alpha=3)
    assert not accepts(x, y)
    assert not accepts(x.t().contiguous().t(), y, alpha=2)
    assert not accepts(x, torch.randn(5)[1:], alpha=2)
    assert not accepts(x.double(), y, alpha=2)
