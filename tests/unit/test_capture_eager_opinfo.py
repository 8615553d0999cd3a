"""The ATen calls of PyTorch's operator samples, in-place and out= variants too, against eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.eager_calls import describe, run_call
from tests.eager_samples import OPERATORS, Call, calls_of, copied, variants_of
from tests.harness import compare
from torch_webgpu_compile.backend import native_operators
from torch_webgpu_compile.capture.eager.calls import CapturedCall, Output
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.errors import UnsupportedOp

pytestmark = [
    pytest.mark.rotates(16),
    pytest.mark.filterwarnings("ignore"),  # of deprecated operators
]

# Every kind of capture: elementwise, reductions, products, indexing, several results, factories.
FAST = """add mul true_divide clamp where exp sigmoid remainder pow sum mean var amax argmax all
softmax cumsum cummax mm addmm bmm linear index_select gather scatter_add index_add index_put
masked_fill cat stack topk sort nn.functional.layer_norm nn.functional.batch_norm
nn.functional.conv2d nn.functional.max_pool2d nn.functional.cross_entropy nn.functional.embedding
nn.functional.gelu nn.functional.pad nn.functional.interpolate.bilinear tril arange full_like
logical_and bitwise_and eq floor_divide unbind aminmax var_mean addcdiv lerp""".split()  # noqa: SIM905
# Results that depend on random numbers, or hold whatever memory held.
RANDOM = [
    "rand",
    "bernoulli",
    "normal",
    "multinomial",
    "exponential",
    "cauchy",
    "geometric",
    "uniform",
    "dropout",
    "rrelu",
    "log_normal",
    "empty",
    "poisson",
    "fractional_max_pool",
    "lowrank",
]
# Results that PyTorch leaves open (signs of singular vectors), or samples with dropout.
OPEN = frozenset(
    {
        "svd",
        "linalg.svd",
        "linalg.eigh",
        "linalg.eig",
        "nn.functional.scaled_dot_product_attention",
        "nn.functional.multi_head_attention_forward",
    }
)
# Results that PyTorch leaves open, or contents of memory that nothing wrote.
_OPEN = ("svd", "eig", "qr", "empty", "lstsq", "_fft", "ormqr", "householder", "geqrf", "pinv")


# PyTorch gives views of one tensor; binary_cross_entropy.out writes to a resized copy of ``out``;
# some kernels of embedding_bag leave the sizes of bags 0.
_PECULIAR = frozenset(
    {
        "unsafe_split",
        "unsafe_chunk",
        "nn.functional.binary_cross_entropy",
        "nn.functional.embedding_bag",
    }
)
# The positions of equal values.
_WITH_TIES = frozenset({"argsort", "topk", "kthvalue", "sort", "msort", "mode"})


def is_comparable(name: str, dtype: torch.dtype) -> bool:
    if dtype is not torch.float32 and name in _WITH_TIES:
        return False
    return name not in OPEN | _PECULIAR and not any(word in name for word in (*RANDOM, *_OPEN))


def cases() -> Iterator[Any]:
    """(operator, dtype); those outside of `FAST` are slow tests."""
    for name, info in OPERATORS.items():
        for dtype in (torch.float32, torch.int64, torch.bool):
            if dtype in info.supported_dtypes("cpu") and is_comparable(name, dtype):
                is_fast = name in FAST and dtype is torch.float32
                marks = () if is_fast else pytest.mark.slow
                yield pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype}")


@pytest.mark.parametrize(("name", "dtype"), list(cases()))
def test_calls(name: str, dtype: torch.dtype) -> None:
    count = 2 if name in FAST else 1
    for call in calls_of(OPERATORS[name], dtype, count, backward=True):
        for variant in (call, *variants_of(call)):
            check(variant)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPERATORS if is_comparable(n, torch.float32)])
def test_calls_with_symbols(name: str) -> None:
    """Each call with a graph of an earlier one, if that accepts it."""
    graphs: dict[str, list[CapturedCall]] = {}
    count = 3 if name in FAST else 2
    for call in calls_of(OPERATORS[name], torch.float32, count, backward=True):
        for variant in (call, *variants_of(call)):
            described = describe((variant.args, variant.kwargs))
            leaves, spec = tree_flatten(described)
            known = graphs.setdefault(f"{variant.op} {spec}", [])
            found = next((graph for graph in known if graph.accepts(leaves)), None)
            if found is None:
                try:
                    found = capture_call(variant.op, *described, native_operators(), dynamic=True)
                except UnsupportedOp:
                    continue
                assert found.accepts(leaves)
                known.append(found)
            check(variant, found)


def check(call: Call, captured: CapturedCall | None = None) -> None:
    """Compares a call with eager; passes over what a graph cannot express."""
    args, kwargs = copied((call.args, call.kwargs))
    eager_args, eager_kwargs = copied((call.args, call.kwargs))
    try:
        expected = call.op(*eager_args, **eager_kwargs)
    except RuntimeError:  # arguments that overlap in memory, for example
        return
    leaves = tree_leaves((args, kwargs))
    try:
        if captured is None:
            captured = capture_call(call.op, *describe((args, kwargs)), native_operators())
        actual = run_call(captured, leaves, allow_host=True)
    except UnsupportedOp:
        return
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    compare(tree_leaves(actual), tree_leaves(expected), **tolerance)
    check_strides(captured, actual, expected)
    compare(leaves, tree_leaves((eager_args, eager_kwargs)), **tolerance)


def check_strides(call: CapturedCall, actual: Any, expected: Any) -> None:
    pairs = zip(call.results, tree_leaves(actual), tree_leaves(expected), strict=True)
    for result, got, wanted in pairs:
        if isinstance(result, Output) and isinstance(wanted, Tensor) and wanted.numel() > 0:
            strides = zip(wanted.shape, got.stride(), wanted.stride(), strict=True)
            assert all(n == 1 or a == b for n, a, b in strides), (got.stride(), wanted.stride())
