"""Captured calls with symbolic sizes and numbers: reuse, guards, what stays constant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental import symbolic_shapes
from torch.utils._pytree import tree_leaves

from benchmarks.targets import H200
from tests.compilations import TARGET
from tests.eager_calls import check_call, check_reuse, describe, run_call, symbol_values
from tests.harness import compare, lower_checked
from torch_webgpu_compile.backend import native_operators
from torch_webgpu_compile.capture.eager.calls import CapturedCall, Output
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.ir.anchors import load_axes
from torch_webgpu_compile.ir.attention_nodes import AttentionGradient
from torch_webgpu_compile.ir.graph import LoopGraph
from torch_webgpu_compile.ir.nodes import Contraction
from torch_webgpu_compile.ir.text import format_graph
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.lowering.radix import tile_of
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.scheduler.rewrites.split import split_contractions
from torch_webgpu_compile.symbolic.sizes import Expr, evaluate, value_range

aten = torch.ops.aten
R = torch.randn


def captured(op: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    return capture_call(op, *describe((args, kwargs)), native_operators(), dynamic=True)


def with_numbers(op: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    return capture_call(op, *describe((args, kwargs)), native_operators(), numbers=True)


def accepts(call: CapturedCall, *args: Any, **kwargs: Any) -> bool:
    return call.accepts(tree_leaves(describe((args, kwargs))))


# ---- sizes


def test_other_sizes_and_numbers() -> None:
    op = aten.add.out
    call = captured(op, R(4, 5), R(5), alpha=0.5, out=R(4, 5))
    check_reuse(call, op, R(4, 5), R(5), alpha=0.5, out=R(4, 5))
    check_reuse(call, op, R(8, 9), R(9), alpha=-2.5, out=R(8, 9))
    check_reuse(call, op, R(400, 7), R(7), alpha=0.0, out=R(400, 7))


def test_no_symbol_looks_for_lines_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's search for them imports its exporter and Inductor, which takes a second."""
    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", lambda: pytest.fail("searched"))
    call = captured(aten.add.Tensor, R(4, 5), R(5), alpha=0.5)
    check_reuse(call, aten.add.Tensor, R(8, 9), R(9), alpha=0.25)


def test_guards_on_sizes() -> None:
    call = captured(aten.add.out, R(4, 5), R(5), alpha=0.5, out=R(4, 5))
    assert accepts(call, R(8, 9), R(9), alpha=0.5, out=R(8, 9))
    assert not accepts(call, R(8, 9), R(7), alpha=0.5, out=R(8, 9))  # sizes that do not fit
    assert not accepts(call, R(8, 9), R(9), alpha=0.5, out=R(12, 9))
    assert not accepts(call, R(1, 9), R(9), alpha=0.5, out=R(1, 9))  # 1 broadcasts
    assert not accepts(call, R(8, 1), R(1), alpha=0.5, out=R(8, 1))
    assert not accepts(call, R(0, 9), R(9), alpha=0.5, out=R(0, 9))
    assert not accepts(call, R(9), R(9), alpha=0.5, out=R(9))
    assert not accepts(call, R(9, 8).t(), R(9), alpha=0.5, out=R(8, 9))
    assert not accepts(call, R(8, 9), R(9)[:, None].expand(9, 9)[0], alpha=0.5, out=R(8, 9))


def test_sizes_of_other_classes() -> None:
    call = captured(aten.add.Tensor, R(4, 5), R(4, 5))
    assert not accepts(call, R(7, 5), R(7, 5))  # no multiple of a vector
    assert not accepts(call, R(4, 8), R(4, 8))  # one, where none is expected
    assert accepts(call, R(4000, 5), R(4000, 5))
    call = captured(aten.mm.default, R(64, 5), R(5, 7))
    assert accepts(call, R(188, 6), R(6, 9))
    assert not accepts(call, R(192, 6), R(6, 9))  # of another magnitude, which suits other tiles
    assert not accepts(call, R(44, 6), R(6, 9))


def test_a_list_of_equals_has_the_symbols_of_one() -> None:
    """Sixteen tensors to be joined would be sixteen symbols, which no expression of them knows."""
    equal, transposed = [R(5, 7) for _ in range(16)], [R(7, 5).t() for _ in range(16)]
    call = captured(aten.cat.default, equal)
    graph = lower_checked(call.captured)
    sizes = {size for entry in graph.inputs for size in graph.buffers[entry.buffer].sizes}
    assert len(sizes) == 2
    check_reuse(call, aten.cat.default, [R(11, 9) for _ in range(16)])
    assert not accepts(call, [*equal[1:], R(6, 7)])
    assert not accepts(call, [*equal[1:], R(7, 5).t()])
    check_reuse(captured(aten.stack.default, transposed, 1), aten.stack.default, transposed, 1)
    others = [R(3, 7), R(5, 7), R(7, 7)]
    check_reuse(
        captured(aten.cat.default, others), aten.cat.default, [R(9, 11), R(5, 11), R(7, 11)]
    )


@pytest.mark.parametrize(
    ("images", "side", "filled"),
    [((4, 8), (12, 32), 1), ((12, 12), (68, 72), 2)],
    ids=["short", "long"],
)
def test_a_sum_over_images_has_as_many_parts_as_the_call_asks_for(
    images: tuple[int, int], side: tuple[int, int], filled: int
) -> None:
    """Tiles of 64 × 64 of a class differ by up to 16 times: parts fill a GPU, twice if long."""
    op = aten.convolution_backward.default

    def arguments(images: int, channels: int, made: int, side: int) -> tuple[Any, ...]:
        x, w = R(images, channels, side, side), R(made, channels, 3, 3)
        lists = [1, 1], [1, 1], [1, 1], False, [0, 0]
        return R(images, made, side, side), x, w, None, *lists, 1, [False, True, False]

    first, other = (arguments(images[k], (52, 64)[k], (52, 136)[k], side[k]) for k in range(2))
    call = captured(op, *first)

    def divided(graph: LoopGraph) -> LoopGraph:
        graph = split_contractions(graph, TARGET)
        verify_loop_graph(graph)
        (node,) = (node for node in graph.nodes if isinstance(node, Contraction))
        divisions.append((node.batch[0], graph))
        return graph

    divisions: list[tuple[Expr, LoopGraph]] = []
    for args, tiles in ((first, 8), (other, 3 * 9)):
        leaves = tree_leaves(args)
        assert call.accepts(tree_leaves(describe((args, {}))))
        found = tree_leaves(run_call(call, leaves, rewrite=divided))
        # Sums of up to 170,000 products, in parts.
        compare(found, tree_leaves(op(*args)), rtol=1e-3, atol=2e-2)
        parts, graph = divisions[-1]
        filling = filled * cost.filling_workgroups(TARGET)
        assert evaluate(parts, symbol_values(graph, call, leaves)) == -(-filling // tiles)
        assert value_range(parts).stop - 1 <= filling  # else addresses would need 64 bits


def test_pixels_of_a_line_share_the_divisions_that_find_them() -> None:
    op, lists = aten.convolution_backward.default, ([2, 2], [3, 3], [1, 1], False, [0, 0])
    x, w = R(4, 3, 24, 24), R(8, 3, 7, 7)
    call = captured(op, R(4, 8, 12, 12), x, w, None, *lists, 1, [False, True, False])
    graph = lower_checked(call.captured)
    (node,) = (node for node in graph.nodes if isinstance(node, Contraction))
    assert load_axes(node, graph.buffers) == ("inner", "inner")  # pixels of one line, two apart
    static = capture_call(
        op,
        *describe(((R(4, 8, 12, 12), x, w, None, *lists, 1, [False, True, False]), {})),
        native_operators(),
    )
    graph = lower_checked(static.captured)
    (node,) = (node for node in graph.nodes if isinstance(node, Contraction))
    assert load_axes(node, graph.buffers) != ("inner", "inner")  # by constants: cheap


def test_keys_and_values_of_one_layout_share_their_symbols() -> None:
    """Their gradients then have the layouts of a kernel's results, which nothing has to copy."""
    q, k, v = R(1, 2, 8, 16), R(1, 2, 12, 16), R(1, 2, 12, 16)
    op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    masks = [True, True, True, False]
    number = torch.zeros((), dtype=torch.int64)

    def arguments(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        rest = None, None, q.shape[2], k.shape[2], 0.0, False, number, number
        return q, q, k, v, None, masks, q, q.sum(-1), *rest

    graph = lower_checked(captured(op, *arguments(q, k, v)).captured)
    kinds = [type(node) for node in graph.nodes]
    assert kinds.count(AttentionGradient) == 2
    assert kinds[-1] is AttentionGradient  # no copies after it
    call = captured(op, *arguments(q, k, v))
    assert accepts(call, *arguments(R(1, 2, 4, 16), R(1, 2, 16, 16), R(1, 2, 16, 16)))
    assert not accepts(call, *arguments(q, k, R(1, 12, 2, 16).transpose(1, 2)))


def test_rows_that_a_workgroup_holds_are_a_class() -> None:
    tiles = []
    for length in (4096, 4100):
        call = captured(aten.sort.default, R(4, length))
        graph = lower_checked(call.captured)
        tiles.append(tile_of(graph.buffers[graph.inputs[0].buffer].sizes[1], H200))
        assert [accepts(call, R(4, n)) for n in (3072, 12284)] == [length == 4096, length == 4100]
    assert tiles == [4096, 12_288]


@pytest.mark.parametrize("op", [aten.mm.default, aten.sum.dim_IntList, aten._softmax.default])
def test_the_graph_follows_from_the_call(op: Any) -> None:
    """Whichever of the calls that accept each other comes first, the graph is the same."""
    others = {aten.mm.default: lambda n: (R(n, 8),), aten.sum.dim_IntList: lambda n: ([1],)}
    rest = others.get(op, lambda n: (1, False))
    texts = set()
    for rows, columns in ((20, 9), (44, 11), (16, 3), (32, 5)):
        call = captured(op, R(rows, columns), *rest(columns))
        texts.add(format_graph(replace(lower_checked(call.captured), name="")))
    assert len(texts) == 1


def test_guards_on_the_rest() -> None:
    call = captured(aten.add.out, R(4, 5), R(5), alpha=0.5, out=R(4, 5))
    x, y = R(4, 5), R(5)
    assert not accepts(call, x.half(), y, alpha=0.5, out=R(4, 5))
    assert not accepts(call, x, y, alpha=2, out=R(4, 5))
    assert not accepts(call, x, y, alpha=float("inf"), out=R(4, 5))
    assert not accepts(call, x, y, alpha=float("nan"), out=R(4, 5))
    assert not accepts(call, x, y, out=R(4, 5))


def test_a_product_of_any_sizes() -> None:
    call = captured(aten.mm.default, R(4, 5), R(6, 5).t())
    check_reuse(call, aten.mm.default, R(8, 7), R(9, 7).t(), rtol=1e-5, atol=1e-5)
    assert not accepts(call, R(8, 7), R(7, 9))
    assert not accepts(call, R(8, 7), R(9, 6).t())


def test_sizes_as_arguments() -> None:
    call = captured(aten.full.default, [3, 4], 1.5)
    assert len(call.arguments) == 2
    check_reuse(call, aten.full.default, [9, 8], -2.5)
    assert not accepts(call, [1, 8], 1.5)
    call = captured(aten.arange.start_step, 0, 7, 1)
    check_reuse(call, aten.arange.start_step, 0, 11, 1)
    assert not accepts(call, 2, 11, 1)


def test_a_size_as_result() -> None:
    query = R(2, 3, 4, 8)
    op = aten._scaled_dot_product_fused_attention_overrideable.default
    call = captured(op, query, query, query)
    assert [k for k, result in enumerate(call.results) if isinstance(result, Output)] == [
        0,
        1,
        4,
        5,
    ]


def test_offsets_and_strides() -> None:
    memory = R(400)

    def view(offset: int, rows: int, columns: int, stride: int) -> torch.Tensor:
        return memory.as_strided((rows, columns), (stride, 1), offset)

    op = aten.add.Tensor
    call = captured(op, view(5, 3, 4, 9), view(64, 3, 4, 4))
    assert 1 not in call.captured.offsets  # it begins where memory is bound
    assert accepts(call, view(7, 5, 8, 11), view(0, 5, 8, 8))
    assert accepts(call, view(64 + 7, 5, 8, 11), view(0, 5, 8, 8))
    assert not accepts(call, view(64, 5, 8, 11), view(0, 5, 8, 8))
    assert not accepts(call, view(68, 5, 8, 11), view(0, 5, 8, 8))  # whole vectors
    assert not accepts(call, view(7, 5, 8, 11), view(1, 5, 8, 8))
    assert not accepts(call, view(7, 5, 8, 11), view(0, 5, 8, 9))
    check_reuse(call, op, view(64 + 7, 5, 8, 11), view(0, 5, 8, 8))
    check_reuse(call, op, view(1, 5, 8, 11), view(128, 5, 8, 8))


def test_changed_argument_with_a_symbolic_stride() -> None:
    memory = R(400)
    call = captured(aten.mul_.Tensor, memory.as_strided((3, 4), (9, 1)), R(3, 4))
    check_reuse(call, aten.mul_.Tensor, memory.as_strided((5, 8), (11, 1)), R(5, 8))


def test_two_changed_arguments_that_share_memory() -> None:
    call = captured(aten._foreach_mul_.Scalar, [R(3), R(4)], 0.5)
    x = R(8)
    assert accepts(call, [R(5), R(8)], 0.25)
    assert not accepts(call, [x[:4], x[4:]], 0.25)


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        (aten.sum.dim_IntList, (R(4, 5), [1]), (R(8, 7), [1])),
        (aten._softmax.default, (R(4, 5), -1, False), (R(8, 7), -1, False)),
        (aten.native_layer_norm.default, (R(4, 5), [5], R(5), R(5), 1e-5),
         (R(8, 7), [7], R(7), R(7), 1e-5)),
        (aten.cat.default, ([R(4, 5), R(3, 5)],), ([R(8, 7), R(5, 7)],)),
        (aten.embedding.default, (R(9, 4), torch.tensor([1, 2, 3])),
         (R(5, 8), torch.tensor([4, 0, 2]))),
        (aten.index_select.default, (R(4, 5), 0, torch.tensor([1, 2, 3])),
         (R(8, 7), 0, torch.tensor([4, 0, 2]))),
        (aten.where.self, (R(4, 5) > 0, R(4, 5), R(5)), (R(8, 7) > 0, R(8, 7), R(7))),
        (aten.gather.default, (R(4, 5), 1, torch.zeros(4, 3, dtype=torch.int64)),
         (R(8, 7), 1, torch.ones(8, 5, dtype=torch.int64))),
        (aten.bmm.default, (R(3, 4, 5), R(3, 5, 3)), (R(5, 8, 7), R(5, 7, 9))),
        (aten.addmm.default, (R(4), R(3, 5), R(5, 4)), (R(8), R(9, 7), R(7, 8))),
        (aten.tril.default, (R(4, 5),), (R(8, 7),)),
        (aten.clone.default, (R(4, 5).t(),), (R(8, 7).t(),)),
        (aten.repeat.default, (R(4), [3, 5]), (R(8), [5, 3])),
        (aten.cumsum.default, (R(4, 5), 1), (R(8, 7), 1)),
    ],
)  # fmt: skip
def test_operators_with_other_sizes(op: Any, first: Any, second: Any) -> None:
    call = captured(op, *first)
    check_reuse(call, op, *first, rtol=1e-5, atol=1e-5)
    check_reuse(call, op, *second, rtol=1e-5, atol=1e-5)


# ---- numbers


def test_numbers_alone_keep_sizes_constant() -> None:
    call = with_numbers(aten.add_.Tensor, R(4, 5), R(4, 5), alpha=0.5)
    assert call.free_numbers == {2}
    check_reuse(call, aten.add_.Tensor, R(4, 5), R(4, 5), alpha=0.25)
    assert not accepts(call, R(4, 6), R(4, 6), alpha=0.25)


@pytest.mark.parametrize(
    ("op", "args", "others"),
    [
        (aten.mul.Tensor, (R(4), 0.5), (R(4), -1.5)),
        (aten.add.Scalar, (R(4), 0.5), (R(4), 0.0)),
        (aten.rsub.Scalar, (R(4), 0.5), (R(4), 7.5)),
        (aten.div.Tensor, (R(4), 0.5), (R(4), 7.5)),
        (aten.fill_.Scalar, (R(4), 0.5), (R(4), 7.5)),
        (aten.masked_fill.Scalar, (R(4), R(4) > 0, 0.5), (R(4), R(4) > 0, -9.5)),
        (aten.clamp.default, (R(9), -0.5, 0.5), (R(9), -0.25, 0.75)),
        (aten.clamp_min.default, (R(9), -0.5), (R(9), 0.75)),
        (aten.gt.Scalar, (R(9), 0.5), (R(9), 0.25)),
        (aten.lerp_.Scalar, (R(9), R(9), 0.25), (R(9), R(9), 0.75)),
        (aten.leaky_relu.default, (R(9), 0.25), (R(9), 0.75)),
        (aten.threshold.default, (R(9), 0.25, 0.5), (R(9), 0.75, -2.5)),
        (aten.remainder.Scalar, (R(9), 0.25), (R(9), 0.75)),
        (aten.addcdiv_.default, (R(4), R(4), R(4)), (R(4), R(4), R(4))),
        (aten.where.ScalarOther, (R(9) > 0, R(9), 0.5), (R(9) > 0, R(9), 0.25)),
        (aten._foreach_mul_.Scalar, ([R(4), R(3)], 0.5), ([R(4), R(3)], 0.25)),
        (aten._foreach_add_.List, ([R(4), R(3)], [R(4), R(3)]), ([R(4), R(3)], [R(4), R(3)])),
        (aten._foreach_addcdiv_.ScalarList, ([R(4), R(3)], [R(4), R(3)], [R(4), R(3)], [0.5, 0.25]),
         ([R(4), R(3)], [R(4), R(3)], [R(4), R(3)], [1.5, 2.25])),
        (aten._foreach_lerp_.Scalar, ([R(4)], [R(4)], 0.25), ([R(4)], [R(4)], 0.125)),
    ],
)  # fmt: skip
def test_operators_with_other_numbers(op: Any, args: Any, others: Any) -> None:
    call = with_numbers(op, *args)
    check_reuse(call, op, *args)
    check_reuse(call, op, *others)


def test_numbers_of_foreach_operators_and_keywords() -> None:
    op = aten._foreach_add_.List
    call = with_numbers(op, [R(4), R(3)], [R(4), R(3)], alpha=0.5)
    assert len(call.free_numbers) == 1
    check_reuse(call, op, [R(4), R(3)], [R(4), R(3)], alpha=-0.125)


def test_the_learning_rate_of_fused_optimizers() -> None:
    settings: dict[str, Any] = {
        "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False,
        "maximize": False,
    }  # fmt: skip

    def lists(step: float) -> Any:
        shapes = ((3, 4), (5,))
        found = [[torch.rand(shape) for shape in shapes] for _ in range(4)]
        return [*found, [], [torch.tensor(step) for _ in shapes]]

    op = aten._fused_adam_.default
    call = with_numbers(op, *lists(1.0), lr=0.1, **settings)
    assert len(call.free_numbers) == 3  # lr, beta1, eps; not weight_decay, which may not be 0
    others = {**settings, "beta1": 0.8, "weight_decay": 0.2}
    check_reuse(call, op, *lists(5.0), lr=0.01, **others, rtol=1e-5, atol=1e-6)
    assert not accepts(call, *lists(5.0), lr=0.01, **{**settings, "beta2": 0.999})
    assert not accepts(call, *lists(5.0), lr=0.01, **{**settings, "weight_decay": 0.0})


def test_numbers_of_calls_with_float64_are_float64() -> None:
    x = torch.ones(3, dtype=torch.float64)
    for op, arguments in (
        (aten.mul.Tensor, (x,)),
        (aten.eq.Scalar, (x,)),
        (aten.fill_.Scalar, (x,)),
        (aten.where.ScalarOther, (x > 0, x)),
    ):
        call = with_numbers(op, *arguments, 0.3)
        assert len(arguments) in call.free_numbers
        assert call.numbers is not None
        given = np.frombuffer(call.numbers.compute([*arguments, 0.1]), np.float64)
        assert given.tolist() == [0.1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_numbers_that_float32_cannot_stand_for(dtype: torch.dtype) -> None:
    x = torch.ones(4).to(dtype)
    call = with_numbers(aten.fill_.Scalar, x, 0.1)
    assert call.numbers is None
    assert not accepts(call, x, 0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_numbers_where_pytorch_does(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, 0.7]).to(dtype)
    for op in (aten.eq.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.fill_.Scalar, aten.mul.Tensor):
        call = with_numbers(op, x, 0.1)
        assert call.free_numbers == {1}
        check_reuse(call, op, x, 0.3)
        check_reuse(call, op, x, 0.7)
        check_call(op, x, 0.1)
    for number in (0.1, 0.3, 0.7):  # so are those of tensors without dimensions
        check_call(aten.eq.Tensor, x, torch.tensor(number))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0])
def test_exponents_with_code_of_their_own_stay_constant(exponent: float) -> None:
    call = with_numbers(aten.pow.Tensor_Scalar, R(4), exponent)
    assert call.numbers is None
    assert not accepts(with_numbers(aten.pow.Tensor_Scalar, R(4), 1.5), R(4), exponent)


def test_what_is_computed_of_numbers_is_not_rounded_before() -> None:
    """1 - p, of which float32 has less than half of the digits if it has p first."""
    x = torch.ones(1000)
    call = with_numbers(aten._fused_dropout.default, x, 0.5)
    assert call.numbers is not None
    p = 1 - 2.0**-30
    assert np.frombuffer(call.numbers.compute([None, p]), np.float32).tolist() == [1.0, 1.0]
    call = with_numbers(aten.native_dropout.default, x, 0.5, True)
    assert call.numbers is not None
    numbers = np.frombuffer(call.numbers.compute([None, p, True]), np.float32).tolist()
    assert 2.0**30 in numbers
    zero = np.frombuffer(call.numbers.compute([None, 1.0, True]), np.float32).tolist()
    assert float("inf") in zero  # Python would raise


def test_infinities_stay_constant() -> None:
    call = with_numbers(aten.masked_fill.Scalar, R(4), R(4) > 0, float("-inf"))
    assert call.numbers is None


def test_a_number_that_the_trace_looks_at_is_guarded() -> None:
    op = aten.addmm.default
    call = with_numbers(op, R(4), R(3, 5), R(5, 4), beta=0.5, alpha=0.5)
    check_reuse(call, op, R(4), R(3, 5), R(5, 4), beta=0.25, alpha=2.5, rtol=1e-5, atol=1e-5)
    zero = R(4), R(3, 5), R(5, 4)
    if accepts(call, *zero, beta=0.0, alpha=0.5):
        check_reuse(call, op, *zero, beta=0.0, alpha=0.5, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_symbolic_says_so() -> None:
    with pytest.raises(UnsupportedOp, match="without symbols"):
        captured(aten.nonzero.default, R(4))
    with pytest.raises(UnsupportedOp, match="without symbols"):
        captured(aten.add.Tensor, R(4), R(5))
