"""``torch.autocast("webgpu")`` and ``torch.amp.GradScaler("webgpu")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_webgpu_compile.device import autocast, autocast_rules

LOWER, FULL = "lower", torch.float32


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(sizes, dtype=dtype, device="webgpu")


# (inputs are float32 or lower, call, dtype of the result)
CASES: dict[str, tuple[Any, Callable[[Tensor], Any], Any]] = {
    "mm": (FULL, lambda x: x @ x, LOWER),
    "linear": (FULL, lambda x: F.linear(x, x, x[0]), LOWER),
    "bmm": (FULL, lambda x: torch.bmm(x[None], x[None]), LOWER),
    "addmm": (FULL, lambda x: torch.addmm(x, x, x), LOWER),
    "einsum": (FULL, lambda x: torch.einsum("ij,kj->ik", x, x), LOWER),
    "conv1d": (FULL, lambda x: F.conv1d(x[None], x[None]), LOWER),
    "conv2d": (FULL, lambda x: F.conv2d(x[None, None], x[None, None]), LOWER),
    "conv_transpose2d": (FULL, lambda x: F.conv_transpose2d(x[None, None], x[None, None]), LOWER),
    "attention": (
        FULL,
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        LOWER,
    ),
    "exp": (LOWER, torch.exp, FULL),
    "log": (LOWER, torch.log, FULL),
    "pow": (LOWER, lambda x: x**2, FULL),
    "rsqrt": (LOWER, torch.rsqrt, FULL),
    "layer_norm": (LOWER, lambda x: F.layer_norm(x, (4,)), FULL),
    "group_norm": (LOWER, lambda x: F.group_norm(x, 2), FULL),
    "mse_loss": (LOWER, lambda x: F.mse_loss(x, x), FULL),
    "cross_entropy": (LOWER, lambda x: F.cross_entropy(x, x), FULL),
    "logsumexp": (LOWER, lambda x: x.logsumexp(0), FULL),
    "upsample": (LOWER, lambda x: F.interpolate(x[None], scale_factor=2.0), FULL),
    "softmax": (LOWER, lambda x: x.softmax(0), FULL),
    "log_softmax": (LOWER, lambda x: F.log_softmax(x, 0), FULL),
    "sum": (LOWER, lambda x: x.sum(), FULL),
    "sum of a dimension": (LOWER, lambda x: x.sum(0), FULL),
    "sum with a dtype": (LOWER, lambda x: x.sum(0, dtype=x.dtype), LOWER),
    "cumsum": (LOWER, lambda x: x.cumsum(0), FULL),
    "sum of integers": (LOWER, lambda x: x.long().sum(), torch.int64),
    "norm": (LOWER, lambda x: x.norm(), FULL),
    "norm of a dimension": (LOWER, lambda x: torch.ops.aten.norm(x, 2, [1]), FULL),
    "vector norm": (LOWER, torch.linalg.vector_norm, FULL),
    "addcmul": (LOWER, lambda x: torch.addcmul(x, x, x.float()), FULL),
    "addcmul, lower": (LOWER, lambda x: torch.addcmul(x, x, x), LOWER),
    "cat": (LOWER, lambda x: torch.cat([x, x.float()]), FULL),
    "index_put": (FULL, lambda x: x.index_put([torch.tensor([0])], x[0].half()), FULL),
    "add": (LOWER, lambda x: x + x, LOWER),
    "add, mixed": (LOWER, lambda x: x + x.float(), FULL),
    "relu": (FULL, torch.relu, FULL),
    "float64": (torch.float64, lambda x: x @ x, torch.float64),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(name: str, lower: torch.dtype) -> None:
    given, call, expected = CASES[name]
    x = ones(4, 4, dtype=lower if given == LOWER else given)
    with torch.autocast("webgpu", lower):
        result = call(x)
    assert result.dtype is (lower if expected == LOWER else expected)
    assert result.device.type == "webgpu"


def test_rules_name_operators() -> None:
    rules = autocast_rules
    names = [*rules.LOWER_PRECISION, *rules.FLOAT32, *rules.FLOAT32_RESULT, *rules.WIDEST]
    names += [*rules.FLOAT32_OVERLOAD, *rules.FLOAT32_OVERLOAD.values(), *rules.REFUSED]
    assert len(set(names)) == len(names)
    assert [name for name in names if autocast._overload(name) is None] == []


def test_defaults() -> None:
    assert torch.get_autocast_dtype("webgpu") is torch.float16
    x = ones(4, 4)
    with torch.autocast("webgpu"):
        assert torch.is_autocast_enabled("webgpu")
        assert (x @ x).dtype is torch.float16
        with torch.autocast("webgpu", enabled=False):
            assert (x @ x).dtype is torch.float32
    assert (x @ x).dtype is torch.float32
    assert torch.autocast("webgpu")(lambda: x @ x)().dtype is torch.float16


def test_other_dtypes_and_devices() -> None:
    x = ones(4, 4)
    with pytest.warns(UserWarning, match="only supports dtypes of"):
        context = torch.autocast("webgpu", torch.float64)
    with context:
        assert (x @ x).dtype is torch.float32
    with torch.autocast("cpu"):
        assert (x @ x).dtype is torch.float32
        assert torch.linalg.inv(x + torch.eye(4, device="webgpu")).dtype is torch.float32
    with torch.autocast("webgpu"):
        assert (x.cpu() @ x.cpu()).dtype is torch.float32


def test_refusals() -> None:
    x = ones(4, 4)
    with torch.autocast("webgpu"):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.addcmul(x.bfloat16(), x.bfloat16(), x.bfloat16())


def test_operators_compile_alike_with_and_without() -> None:
    """What is compiled under autocast serves calls without it."""
    x = torch.rand(3, 5, device="webgpu")
    with torch.autocast("webgpu"):
        inside = torch.std(x, 1)
    torch.testing.assert_close(torch.std(x, 1), inside)
    torch.testing.assert_close(inside.cpu(), torch.std(x.cpu(), 1))


def test_weights_are_cast_once() -> None:
    weight = nn.Parameter(ones(4, 4))
    x = ones(4, 4)
    with torch.autocast("webgpu"):
        F.linear(x, weight)
        (kept,) = autocast._casts.values()
        F.linear(x, weight)
        (again,) = autocast._casts.values()
        assert again[2] is kept[2]
        with torch.no_grad():
            weight.fill_(3)
        assert F.linear(x, weight)[0, 0].item() == 12
    assert not autocast._casts
    with torch.autocast("webgpu", cache_enabled=False):
        F.linear(x, weight)
        assert not autocast._casts


def train(device: str, dtype: torch.dtype | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    x, y = torch.randn(32, 8).to(device), torch.randn(32, 4).to(device)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(x), y)
        assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_training(dtype: torch.dtype) -> None:
    expected, found = train("cpu", None), train("webgpu", dtype)
    for a, b in zip(expected.parameters(), found.parameters(), strict=True):
        assert b.dtype is torch.float32
        # Four steps of 0.1 with gradients of the precision of the lower dtype.
        torch.testing.assert_close(b.cpu(), a, rtol=0.02, atol=0.01)


def test_scaler_skips_steps_with_infinite_gradients() -> None:
    parameter = nn.Parameter(ones(4))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("webgpu", init_scale=4.0)
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1] * 4
    assert scaler.get_scale() == 2
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter[0].item() == pytest.approx(0.9)
    restored = torch.amp.GradScaler("webgpu")
    restored.load_state_dict(scaler.state_dict())
    assert restored.get_scale() == 2


def test_custom_functions() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="webgpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not torch.is_autocast_enabled("webgpu")
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="webgpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    x = ones(4, 4, dtype=torch.float16).requires_grad_()
    with torch.autocast("webgpu"):
        y: Any = Product.apply(x)  # type: ignore[no-untyped-call]
    assert y.dtype is torch.float32
    y.sum().backward()


def test_compiled() -> None:
    model = nn.Linear(4, 4).to("webgpu")
    x = ones(2, 4)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("webgpu"):
            return model(x).softmax(-1)

    compiled = torch.compile(step, backend="webgpu", fullgraph=True)
    assert compiled(x).dtype is torch.float32
    torch.testing.assert_close(compiled(x), step(x), rtol=2e-3, atol=2e-3)
