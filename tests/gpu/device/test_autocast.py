"""``torch.autocast("webgpu")`` and ``torch.amp.GradScaler("webgpu")``."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.device.processes import run
from torch_webgpu_compile.device.api import autocast as kernels
from torch_webgpu_compile.device.api import autocast_rules as rules

pytestmark = pytest.mark.rotates(12)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CONTEXT = "the context's dtype"
INPUT = "the input's dtype"


def device_tensor(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    torch.manual_seed(0)
    return (torch.rand(*sizes) * 0.8 + 0.1).to(dtype).to("webgpu")


def module(made: nn.Module) -> Any:
    return made.to("webgpu")


# What CUDA gives for an input of 4 x 4 of any of the three dtypes.
RESULTS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "mm": (lambda x: x @ x, CONTEXT),
    "mv": (lambda x: torch.mv(x, x[0]), CONTEXT),
    "bmm": (lambda x: torch.bmm(x[None], x[None]), CONTEXT),
    "addmm": (lambda x: torch.addmm(x, x, x), CONTEXT),
    "addmm_mixed": (lambda x: torch.addmm(x.float(), x, x.float()), CONTEXT),
    "baddbmm": (lambda x: torch.baddbmm(x[None], x[None], x[None]), CONTEXT),
    "addr": (lambda x: torch.addr(x, x[0], x[1]), CONTEXT),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x.float()), CONTEXT),
    "chain_matmul": (lambda x: torch.linalg.multi_dot([x, x.float(), x]), CONTEXT),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x), CONTEXT),
    "linear": (lambda x: F.linear(x, x.float(), x[0]), CONTEXT),
    "prelu": (lambda x: F.prelu(x, x.float()[0, :1]), CONTEXT),
    "conv1d": (lambda x: F.conv1d(x[None], x[..., None]), CONTEXT),
    "conv2d": (lambda x: F.conv2d(x[None, None], x[None, None, :2, :2].float()), CONTEXT),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x[None, None], x[None, None, :2, :2]),
        CONTEXT,
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 2, x.float()[None, None]),
        CONTEXT,
    ),
    "exp": (torch.exp, F32),
    "log": (torch.log, F32),
    "log1p": (torch.log1p, F32),
    "reciprocal": (torch.reciprocal, F32),
    "rsqrt": (torch.rsqrt, F32),
    "tan": (torch.tan, F32),
    "pow": (lambda x: x**2, F32),
    "pow_tensor": (lambda x: x**x, F32),
    "pow_base": (lambda x: 2**x, F32),
    "softplus": (F.softplus, F32),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), F32),
    "group_norm": (lambda x: F.group_norm(x[None], 2), F32),
    "mse_loss": (lambda x: F.mse_loss(x, x.float() + 1), F32),
    "l1_loss": (lambda x: F.l1_loss(x, x + 1), F32),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, x + 1), F32),
    "bce_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, x), F32),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
        F32,
    ),
    "kl_div": (lambda x: F.kl_div(x, x, reduction="batchmean"), F32),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x), F32),
    "cdist": (lambda x: torch.cdist(x, x), F32),
    "logsumexp": (lambda x: x.logsumexp(0), F32),
    "upsample": (lambda x: F.interpolate(x[None, None], scale_factor=2), F32),
    "sum": (torch.sum, F32),
    "sum_dim": (lambda x: x.sum(0), F32),
    "sum_dtype": (lambda x: x.sum(0, dtype=F16), F16),
    "prod": (lambda x: x.prod(1), F32),
    "cumsum": (lambda x: x.cumsum(0), F32),
    "softmax": (lambda x: x.softmax(-1), F32),
    "softmax_dtype": (lambda x: torch.softmax(x, -1, F16), F16),
    "log_softmax": (lambda x: F.log_softmax(x, -1), F32),
    "norm": (lambda x: x.norm(), F32),
    "norm_dim": (lambda x: torch.norm(x, 2, 1, True), F32),
    "vector_norm": (torch.linalg.vector_norm, F32),
    "relu": (torch.relu, INPUT),
    "add": (lambda x: x + x, INPUT),
    "sigmoid": (torch.sigmoid, INPUT),
    "mean": (torch.mean, INPUT),
    "max_pool2d": (lambda x: F.max_pool2d(x[None], 2), INPUT),
    "amax": (lambda x: x.amax(0), INPUT),
    "transpose": (lambda x: x.t(), INPUT),
    "add_mixed": (lambda x: x + x.float(), F32),
    "cat": (lambda x: torch.cat([x, x.float()]), F32),
    "addcmul": (lambda x: torch.addcmul(x, x.float(), x), F32),
    "atan2": (lambda x: torch.atan2(x, x.float()), F32),
    "dot": (lambda x: torch.dot(x[0], x[1].float()), F32),
    "cross": (lambda x: torch.linalg.cross(x[:, :3], x[:, :3]), INPUT),
    "tensordot": (lambda x: torch.tensordot(x, x.float(), 1), F32),
    "scatter_add": (
        lambda x: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long, device=x.device), x.float()),
        F32,
    ),
    "index_put": (
        lambda x: x.index_put((torch.zeros(1, dtype=torch.long, device=x.device),), x[1].float()),
        F32,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_results_have_the_dtypes_and_values_of_cuda(name: str, dtype: torch.dtype) -> None:
    function, rule = RESULTS[name]
    for given in (F32, dtype):
        x = device_tensor(4, 4, dtype=given)
        expected = function(x.cpu().float())
        with torch.autocast("webgpu", dtype=dtype):
            result = function(x)
        assert result.dtype is {CONTEXT: dtype, INPUT: given}.get(rule, rule)
        tolerance = 1e-2 if F16 in (dtype, result.dtype) else 6e-2
        torch.testing.assert_close(
            result.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance
        )


def test_the_rules_are_those_that_pytorch_has_for_cuda() -> None:
    registered: Any = torch._C._dispatch_get_registrations_for_dispatch_key
    kernels.register()
    ours, cuda = set(registered("AutocastPrivateUse1")), set(registered("AutocastCUDA"))
    assert ours >= {f"aten::{name}" for name in kernels._kernels()}
    assert {
        name
        for name in cuda - ours
        if name.startswith("aten::")
        and "cudnn_" not in name
        and "name" not in name.lower()  # overloads with named dimensions
    } == set()
    # Versions of PyTorch before 2.12 have no rule for it.
    assert ours - cuda <= {"aten::rms_norm"}


def test_each_operator_is_in_one_list() -> None:
    lists = (
        rules.LOWER_PRECISION,
        rules.float32(),
        rules.FLOAT32_BY_ARGUMENT,
        rules.FLOAT32_BY_OVERLOAD,
        rules.WIDEST,
        rules.REFUSED,
    )
    names = [name for names in lists for name in names]
    assert len(names) == len(set(names))


def test_binary_cross_entropy_says_what_to_use() -> None:
    x = device_tensor(4)
    with torch.autocast("webgpu"), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(x, x)
    F.binary_cross_entropy(x, x)


def test_doubles_integers_and_other_devices_are_left_alone() -> None:
    x = device_tensor(3, 3)
    with torch.autocast("webgpu"):
        assert (x.double() @ x.double()).dtype is F64
        assert x.double().sum().dtype is F64
        assert x.int().sum().dtype is torch.int64
        assert (x.cpu() @ x.cpu()).dtype is F32
    with torch.autocast("cpu"):
        assert (x @ x).dtype is F32
        assert (x.cpu() @ x.cpu()).dtype is BF16


def test_contexts_nest_and_decorate() -> None:
    x = device_tensor(3, 3)
    assert torch.get_autocast_dtype("webgpu") is F16
    with torch.autocast("webgpu"):
        assert (x @ x).dtype is F16
        with torch.autocast("webgpu", enabled=False):
            assert (x @ x).dtype is F32
            with torch.autocast("webgpu", dtype=BF16):
                assert (x @ x).dtype is BF16
        assert (x @ x).dtype is F16

    @torch.autocast("webgpu", dtype=BF16)
    def decorated() -> torch.dtype:
        return (x @ x).dtype

    assert decorated() is BF16
    assert (x @ x).dtype is F32
    with pytest.warns(UserWarning, match="only supports"), torch.autocast("webgpu", dtype=F64):
        assert (x @ x).dtype is F32


def test_a_device_with_an_index() -> None:
    run(  # a process in which nothing else has asked for autocast
        "import torch; x = torch.ones(2, 2, device='webgpu')\n"
        "with torch.autocast('webgpu:0', torch.bfloat16): assert (x @ x).dtype == torch.bfloat16"
    )


def test_threads_have_their_own_state() -> None:
    x = device_tensor(3, 3)
    seen: list[torch.dtype] = []
    with torch.autocast("webgpu"):
        thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))
        thread.start()
        thread.join()
    assert seen == [F32]


def test_weights_are_cast_once_in_a_context() -> None:
    layer, x = module(nn.Linear(3, 3)), device_tensor(2, 3)
    with torch.autocast("webgpu"):
        layer(x)
        first = dict(kernels.casts)
        assert len(first) == 2
        with torch.autocast("webgpu"):
            layer(x)
        assert kernels.casts == first
        with torch.autocast("webgpu", dtype=BF16):
            assert layer(x).dtype is BF16
    assert not kernels.casts
    with torch.autocast("webgpu", cache_enabled=False):
        layer(x)
        assert not kernels.casts


def test_weights_that_were_cast_are_freed() -> None:
    layer, x = module(nn.Linear(64, 64)), device_tensor(2, 64)
    with torch.autocast("webgpu"):
        layer(x)  # what compiled operators keep is not meant
    gc.collect()
    before = torch.webgpu.memory_allocated()  # type: ignore[attr-defined]
    with torch.autocast("webgpu"):
        layer(x)
    gc.collect()
    assert torch.webgpu.memory_allocated() == before  # type: ignore[attr-defined]


def test_what_no_grad_and_changes_leave_is_not_used() -> None:
    layer, x = module(nn.Linear(3, 3, bias=False)), device_tensor(2, 3)
    with torch.autocast("webgpu"):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        with torch.no_grad():
            layer.weight.zero_()
        assert not layer(x).any()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype: torch.dtype) -> None:
    layer = module(nn.Linear(4, 4))
    x = device_tensor(2, 4).requires_grad_()
    with torch.autocast("webgpu", dtype=dtype):
        hidden = layer(x)
        hidden.retain_grad()
        loss = hidden.exp().sum()
    loss.backward()
    assert loss.dtype is F32
    assert hidden.grad.dtype is dtype
    assert x.grad is not None
    found = [x.grad, layer.weight.grad, layer.bias.grad]
    assert [grad.dtype for grad in found] == [F32] * 3
    host = nn.Linear(4, 4)
    host.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
    y = x.detach().cpu().requires_grad_()
    host(y).exp().sum().backward()
    for grad, expected in zip(found, (y.grad, host.weight.grad, host.bias.grad), strict=True):
        torch.testing.assert_close(grad.cpu(), expected, rtol=5e-2, atol=5e-2)


def test_custom_functions() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="webgpu")
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="webgpu")
        def backward(ctx: Any, grad: Tensor) -> Any:
            a, b = ctx.saved_tensors
            assert (a @ b).dtype is F16  # as in the forward
            return (grad @ b.t()).float(), (a.t() @ grad).float()

    class InFloat32(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="webgpu", cast_inputs=F32)
        def forward(ctx: Any, a: Tensor) -> Tensor:
            assert (a @ a).dtype is F32
            return a * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="webgpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert (grad @ grad).dtype is F32
            return grad * 2

    a, b = device_tensor(3, 3).requires_grad_(), device_tensor(3, 3).requires_grad_()
    with torch.autocast("webgpu"):
        product = Product.apply(a, b)
        doubled = InFloat32.apply(a.half())
    assert (product.dtype, doubled.dtype) == (F16, F32)
    (product.sum() + doubled.sum()).backward()
    assert a.grad is not None
    assert a.grad.dtype is F32


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(cell: Any) -> None:
    layer = cell(4, 5)
    x = torch.randn(3, 2, 4)
    expected = layer(x)[0]
    layer.to("webgpu")
    with torch.autocast("webgpu"):
        result = layer(x.to("webgpu"))[0]
    assert result.dtype is F16
    torch.testing.assert_close(result.cpu().float(), expected, rtol=2e-2, atol=2e-2)
    result.float().sum().backward()
    assert all(weight.grad.dtype is F32 for weight in layer.parameters())
