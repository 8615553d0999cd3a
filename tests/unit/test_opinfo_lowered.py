"""PyTorch's own operator samples (OpInfo, float32), lowered and interpreted against eager.

`HOST` lists the operators that have no kernels: one that gets or loses its kernels must be moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.harness import TARGET, capture, compare, run_graph
from tests.unit.opinfo_host import HOST
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.lowering.graph import lower

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of deprecated operators
]
SAMPLES = 3
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


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def is_tested(op: Any) -> bool:
    name = name_of(op)
    skipped = any(word in name for word in RANDOM) or name.startswith(("sparse", "to_sparse"))
    return torch.float32 in op.supported_dtypes("cpu") and not skipped


OPERATORS = {name_of(op): op for op in op_db if is_tested(op)}


def samples_of(op: Any) -> list[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """(function of the tensors of a sample, these tensors)."""
    found = []
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), SAMPLES):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def fn(*tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec) -> Any:
            rest = iter(tensors)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            first, args, kwargs = tree_unflatten(filled, spec)
            return op.op(first, *args, **kwargs)

        found.append((fn, [x for x in leaves if isinstance(x, torch.Tensor)]))
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    on_host: list[str] = []
    for fn, tensors in samples_of(OPERATORS[name]):
        try:
            with torch.no_grad():
                expected = tree_flatten(fn(*[t.clone() for t in tensors]))[0]
            captured = capture(fn, *tensors)
        except Exception as error:  # PyTorch itself cannot run or trace this sample
            pytest.skip(f"not traceable: {type(error).__name__}")
        try:
            graph = lower(captured, TARGET, lambda op, *rest: on_host.append(op))
        except UnsupportedOp as error:
            on_host.append(error.op)
            continue
        verify_loop_graph(graph)
        if name not in OPEN:
            compare(run_graph(graph, tensors), expected, rtol=1e-4, atol=1e-4)
    assert bool(on_host) == (name in HOST), on_host
