"""Which products share a dispatch, or even invocations, without an adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile.bundle.targets import BROWSER
from torch_webgpu_compile.codegen.tilings.contraction import problem_of
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.graph import AnchorGroup, PairGroup, SiblingGroup
from torch_webgpu_compile.ir.verify_schedule import verify_schedule

pytestmark = pytest.mark.rotates(3)

randn = torch.randn
DESKTOP = replace(TARGET, max_storage_buffers=32)


def compiled(function, *arguments, target=DESKTOP, **options):
    return compile_function(function, *arguments, target=target, **options)


def sizes_of(state) -> list[int]:
    """Products of each kernel that computes products."""
    found = []
    for group in state.schedule.groups:
        if isinstance(group, SiblingGroup):
            found.append(len(group.groups))
        elif isinstance(group, PairGroup):
            found.append(2)
        elif isinstance(group, AnchorGroup):
            found.append(1)
    return found


def three(x, q, k, v, bias):
    return F.linear(x, q, bias), torch.relu(F.linear(x, k)), F.linear(x, v) * 2


WEIGHTS = [randn(64, 32), randn(20, 32), randn(37, 32), randn(64)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("sizes", [(40, 32), (2, 20, 32), (5, 32)])
def test_products_of_one_operand_share_a_dispatch(sizes, dynamic):
    state = compiled(three, randn(sizes), *WEIGHTS, dynamic=dynamic)
    # 64 and 20 columns are stored in fours, and 37 one by one; of symbolic sizes all are.
    assert sizes_of(state) == ([3] if dynamic else [2, 1])


def test_results_that_are_stored_in_fours_and_one_by_one_are_two_kernels():
    state = compiled(three, randn(40, 32), *WEIGHTS)
    assert state.plan.dispatch_count == 2  # 64 and 20 columns; 37


@pytest.mark.parametrize(("rows", "products", "kernels"), [(40, [1, 1, 1], 1), (5, [3], 1)])
def test_where_somebody_waits_for_the_compiler_equal_kernels_are_better(rows, products, kernels):
    def function(x, q, k, v):
        return x @ q, x @ k, x @ v

    weights = [randn(32, 64) for _ in range(3)]
    state = compiled(function, randn(rows, 32), *weights, target=BROWSER)
    assert sizes_of(state) == products
    assert len(state.plan.kernels) == kernels


def test_a_product_of_a_sibling_is_none():
    def function(x, w, v):
        y = x @ w
        return y, (x + y) @ v, x @ v

    assert sizes_of(compiled(function, randn(32, 32), randn(32, 32), randn(32, 32))) == [2, 1]


def test_a_detour_over_other_kernels_is_a_dependency():
    def function(x, w, v):
        y = torch.softmax(x @ w, -1)
        return x @ (v * y.sum(0, keepdim=True))

    assert sizes_of(compiled(function, randn(32, 32), randn(32, 32), randn(32, 32))) == [1, 1]


def test_dependencies_through_other_siblings_are_seen():
    """a → b and c → d: of {a, d} and {b, c} only one pair may share, else they need each other."""

    def function(x, y, u, v):
        a = x @ u
        c = y @ u
        b = y @ torch.softmax(a, -1)
        d = x @ torch.softmax(c, -1)
        return b, d, v

    state = compiled(function, *(randn(32, 32) for _ in range(4)))
    verify_schedule(state.schedule, state.target)
    assert sum(sizes_of(state)) == 4


def test_products_that_fill_a_gpu_stay_alone():
    def function(x, w, v):
        return x @ w, x @ v

    wide = compiled(function, randn(2048, 8), randn(8, 2048), randn(8, 2048))
    assert sizes_of(wide) == [1, 1]


def test_bindings_stay_within_the_limit():
    x, weights, biases = (
        randn(40, 32),
        [randn(64, 32) for _ in range(3)],
        [randn(64) for _ in range(3)],
    )

    def function(x, weights, biases):
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    for limit, wanted in ((8, [2, 1]), (10, [3]), (4, [1, 1, 1])):
        target = replace(TARGET, max_storage_buffers=limit)
        state = compiled(function, x, weights, biases, target=target)
        assert sizes_of(state) == wanted
        assert all(len(kernel.bindings) <= limit for kernel in state.plan.kernels)


def test_gradients_of_weights_share_the_input():
    def function(x, p, q):
        return p.t() @ x, q.t() @ x  # of 16 and of 24 rows

    state = compiled(function, randn(40, 32), randn(40, 16), randn(40, 24))
    assert sizes_of(state) == [2]
    assert state.plan.dispatch_count == 1


def test_a_tied_weight_is_bound_once():
    def function(x, w, b):
        return F.linear(x, w), F.linear(x, w, b)

    state = compiled(function, randn(40, 32), randn(64, 32), randn(64))
    (kernel,) = state.plan.kernels
    assert len(kernel.bindings) == 5


def test_the_problem_names_every_product():
    def function(x, q, k):
        return F.linear(x, q), F.linear(x, k)

    assert key_of(function, *WEIGHTS[:2]) == "32-bit 1x40x64+40x20x32 inner inner"
    assert key_of(swiglu, randn(24, 32), randn(24, 32)) == "32-bit 1x40x2*24x32 inner inner"


def key_of(function, *weights):
    schedule = compiled(function, randn(40, 32), *weights).schedule
    (group,) = schedule.groups
    return problem_of(group, schedule.graph.buffers).key


def test_siblings_that_need_each_other_are_refused():
    def function(x, w):
        y = x @ w
        return y @ w, y

    schedule = compiled(function, randn(32, 32), randn(32, 32)).schedule
    wrong = replace(schedule, groups=(SiblingGroup(schedule.groups),))
    with pytest.raises(VerificationError, match="products that do not need each other's"):
        verify_schedule(wrong, TARGET)


# ---- pairs


def swiglu(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def pairs_of(state) -> list[PairGroup]:
    return [group for group in state.schedule.groups if isinstance(group, PairGroup)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 40, 2000])
def test_a_gated_product_is_one_kernel_that_stores_once(rows, dtype):
    weights = [randn(64, 32, dtype=dtype) for _ in range(2)]
    state = compiled(swiglu, randn(rows, 32, dtype=dtype), *weights)
    assert len(pairs_of(state)) == state.plan.dispatch_count == 1
    (kernel,) = state.plan.kernels
    assert len(kernel.bindings) == 4


@pytest.mark.parametrize("swap", [False, True])
def test_what_else_needs_the_first_result_gets_it(swap):
    def function(x, gate, up):
        g, u = F.linear(x, gate), F.linear(x, up)
        return torch.sigmoid(u if swap else g) * (g if swap else u), g, u

    state = compiled(function, randn(40, 32), randn(64, 32), randn(64, 32))
    assert len(pairs_of(state)) == state.plan.dispatch_count == 1
    (kernel,) = state.plan.kernels
    assert len(kernel.bindings) == 6


def test_a_sum_over_the_first_result_comes_between():
    def function(x, gate, up):
        g = F.linear(x, gate)
        return g * F.linear(x, up) + torch.softmax(g, 0)

    state = compiled(function, randn(40, 32), randn(64, 32), randn(64, 32))
    verify_schedule(state.schedule, state.target)
    assert not pairs_of(state)


@pytest.mark.parametrize(
    ("x", "y", "p", "q"),
    [
        (0, 1, randn(64, 32), randn(64, 32)),  # of two inputs
        (0, 0, randn(64, 32), randn(1, 32)),  # broadcast: not point by point
    ],
)
def test_other_products_are_no_pairs(x, y, p, q):
    inputs = randn(40, 32), randn(40, 32)

    def function(inputs, p, q):
        return F.silu(F.linear(inputs[x], p)) * F.linear(inputs[y], q)

    assert not pairs_of(compiled(function, inputs, p, q))


def test_a_transposed_result_is_no_pair():
    def function(x, p, q):
        return F.linear(x, p).t() * F.linear(x, q)

    assert not pairs_of(compiled(function, randn(32, 16), randn(32, 16), randn(32, 16)))


def test_a_pair_without_room_for_its_bindings_is_none():
    def function(x, gate, up, b, c):
        return F.silu(F.linear(x, gate, b)) * F.linear(x, up, c)

    arguments = randn(40, 32), randn(64, 32), randn(64, 32), randn(64), randn(64)
    for limit, wanted in ((5, 0), (6, 1)):
        target = replace(TARGET, max_storage_buffers=limit)
        state = compiled(function, *arguments, target=target)
        assert len(pairs_of(state)) == wanted


# ---- models


def dispatches(module, *inputs) -> int:
    return compiled(lambda *x: module(*x).last_hidden_state, *inputs).plan.dispatch_count


@pytest.mark.slow
def test_a_layer_of_bert_is_seven_dispatches():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    counts = [
        dispatches(
            BertModel(BertConfig(num_hidden_layers=layers, **sizes), False).eval(),
            torch.randint(0, 99, (2, 16)),
        )
        for layers in (1, 2)
    ]
    assert counts[1] - counts[0] == 7


@pytest.mark.slow
def test_a_layer_of_llama_is_eight_dispatches():
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    counts = [
        dispatches(
            LlamaModel(
                LlamaConfig(
                    num_hidden_layers=n,
                    num_key_value_heads=2,
                    vocab_size=99,
                    use_cache=False,
                    **sizes,
                )
            ).eval(),
            torch.randint(0, 99, (2, 16)),
        )
        for n in (1, 2)
    ]
    assert counts[1] - counts[0] == 8
