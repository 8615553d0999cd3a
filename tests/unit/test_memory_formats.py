"""Results of captured calls have the strides that PyTorch's kernels for the CPU give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.eager_calls import describe
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import native_operators

aten = torch.ops.aten

IMAGES = torch.rand(2, 6, 5, 3).movedim(-1, 1)
VOLUMES = torch.rand(2, 6, 4, 5, 3).movedim(-1, 1)
ROWS = torch.rand(5, 3, 2).permute(2, 1, 0)
GAPS = torch.rand(2, 5, 8).mT[:, ::2]


def norm(x: Tensor) -> Any:
    return aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5


def norm_gradients(x: Tensor) -> Any:
    saved = aten.native_batch_norm.default(*norm(x)[1:])[1:]
    rest = None, None, None, *saved, True, 1e-5, [True, False, False]
    return aten.native_batch_norm_backward.default, torch.ones(x.shape), x, *rest


def pool_gradient(x: Tensor) -> Any:
    y, at = aten.max_pool3d_with_indices.default(x, [2])
    geometry = [2], [2], [0], [1], False
    op = aten.max_pool3d_with_indices_backward.default
    return op, torch.ones(y.shape), x, *geometry, at


def adaptive_pool_gradient(x: Tensor) -> Any:
    y, at = aten.adaptive_max_pool2d.default(x, [2, 2])
    return aten.adaptive_max_pool2d_backward.default, torch.ones(y.shape), x, at


def unpooled(x: Tensor) -> Any:
    y, at = aten.max_pool2d_with_indices.default(x, [2])
    return aten.max_unpool2d.default, y, at, x.shape[2:]


CALLS: dict[str, Any] = {
    "dropout": lambda x: (aten.native_dropout.default, x, 0.5, True),
    "gradient of dropout": lambda x: (aten.native_dropout_backward.default, x, x > 0.5, 2.0),
    "bernoulli": lambda x: (aten.bernoulli.default, x),
    "bernoulli of a number": lambda x: (aten.bernoulli.p, x, 0.5),
    "randint_like": lambda x: (aten.randint_like.default, x, 3),
    "randn_like": lambda x: (aten.randn_like.default, x),
    "poisson": lambda x: (aten.poisson.default, x),
    "rrelu": lambda x: (aten.rrelu_with_noise.default, x, x + 0, 0.1, 0.3, True),
    "log_sigmoid": lambda x: (aten.log_sigmoid_forward.default, x),
    "roll": lambda x: (aten.roll.default, x, [1], [1]),
    "batch norm": norm,
    "gradients of batch norm": norm_gradients,
}
OF_IMAGES: dict[str, Any] = {
    "reflection": lambda x: (aten.reflection_pad2d.default, x, [1, 1, 1, 1]),
    "gradient of replication": lambda x: (
        *(aten.replication_pad2d_backward.default, torch.ones(2, 3, 8, 7), x),
        [1, 1, 1, 1],
    ),
    "gradient of adaptive_max_pool2d": adaptive_pool_gradient,
    "max_unpool2d": unpooled,
}
OF_VOLUMES: dict[str, Any] = {
    "replication": lambda x: (aten.replication_pad3d.default, x, [1, 1, 1, 1, 1, 1]),
    "max_pool3d": lambda x: (aten.max_pool3d_with_indices.default, x, [2]),
    "gradient of max_pool3d": pool_gradient,
}
CASES = {
    **{
        f"{name} of {kind}": (call, x)
        for name, call in CALLS.items()
        for kind, x in {"images": IMAGES, "volumes": VOLUMES, "rows": ROWS, "gaps": GAPS}.items()
    },
    **{name: (call, IMAGES) for name, call in OF_IMAGES.items()},
    **{name: (call, VOLUMES) for name, call in OF_VOLUMES.items()},
    "max_pool3d without a batch": (OF_VOLUMES["max_pool3d"], VOLUMES[0]),
    "gradient of max_pool3d without a batch": (pool_gradient, VOLUMES[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_strides(name: str) -> None:
    make, x = CASES[name]
    check_strides(*make(x))


@pytest.mark.parametrize("x", [IMAGES, ROWS, GAPS], ids=("images", "rows", "gaps"))
def test_crops_are_copies_of_views(x: Tensor) -> None:
    for pad in ([-1, -1], [0, -1, -1, 0], [-1, 1], [0, 0]):
        check_strides(aten.constant_pad_nd.default, x, pad, dynamic=True)


def check_strides(op: Any, *args: Any, dynamic: bool = False) -> None:
    arguments = describe((tuple(args), {}))
    call = capture_call(op, *arguments, native_operators(), dynamic=dynamic)
    (results,) = next(iter(call.captured.module.graph.find_nodes(op="output"))).args
    values = [node.meta["val"] for node in results if node is not None]
    found = [tuple(int(stride) for stride in value.stride()) for value in values]
    wanted = [t.stride() for t in tree_leaves(op(*args)) if isinstance(t, Tensor)]
    assert found[: len(wanted)] == wanted
