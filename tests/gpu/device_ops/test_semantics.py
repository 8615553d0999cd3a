"""Indexing, dtypes, scalars, devices: what scripts expect of tensors on any device."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch

from tests.device_checks import DEVICE, compare

pytestmark = pytest.mark.rotates(6)

# ---- indexing


def grid(device):
    return torch.arange(60.0, device=device).view(3, 4, 5)


INDICES = {
    "int": lambda x, i: x[1, -1],
    "slices": lambda x, i: x[1:, ::2, -3:],
    "ellipsis": lambda x, i: x[..., 2],
    "new axis": lambda x, i: x[:, None, 1:2],
    "tensor": lambda x, i: x[i([2, 0, 2])],
    "tensors": lambda x, i: x[i([0, 2]), i([1, 3])],
    "apart": lambda x, i: x[i([0, 2]), :, i([1, 3])],
    "broadcast": lambda x, i: x[i([[0], [2]]), i([1, 3])],
    "negative": lambda x, i: x[:, i([-1, -4])],
    "scalar tensor": lambda x, i: x[i(1), i(2)],
    "list": lambda x, i: x[[0, 2], [1, 1]],
    "mask": lambda x, i: x[x > 17],
    "row mask": lambda x, i: x[x[:, 0, 0] > 1],
    "two-dimensional mask": lambda x, i: x[x[..., 0] > 11],
    "later mask": lambda x, i: x[:, x[0, :, 0] > 4],
    "mask and tensor": lambda x, i: x[x[:, 0, 0] >= 0, i([0, 1, 3])],
    "empty mask": lambda x, i: x[x > 1000],
    "empty index": lambda x, i: x[i([]).long()],
    "bool": lambda x, i: x[True],
    "int32": lambda x, i: x[i([2, 1]).int()],
    "a row of an empty": lambda x, i: x[:0][:, 1],
}


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
@pytest.mark.parametrize("index", INDICES)
def test_index(index, place):
    """Index tensors may be on the device or on the CPU."""

    def f(device):
        where = device if place == DEVICE else "cpu"
        return INDICES[index](grid(device), lambda values: torch.tensor(values, device=where))

    compare(f)


ASSIGNED = {
    "int": lambda x, i: x.__setitem__((1, 2), 7.0),
    "slice": lambda x, i: x.__setitem__((slice(1, 3), slice(None), 2), -1),
    "row": lambda x, i: x.__setitem__(0, x[2].clone()),
    "broadcast": lambda x, i: x.__setitem__((slice(None), 1), i([1.0, 2, 3, 4, 5])),
    "tensor": lambda x, i: x.__setitem__(i([2, 0]), 5.0),
    "tensors": lambda x, i: x.__setitem__((i([0, 1]), i([3, 2])), x[:2, 0].clone()),
    "mask": lambda x, i: x.__setitem__(x > 30, 0.0),
    "mask of values": lambda x, i: x.__setitem__(x > 50, i([float(k) for k in range(9)])),
    "row mask": lambda x, i: x.__setitem__(x[:, 0, 0] > 10, x[:2].clone()),
    "row mask of one": lambda x, i: x.__setitem__(x[:, 0, 0] > 10, x[0, 0].clone()),
    "later mask": lambda x, i: x.__setitem__((slice(None), x[0, :, 0] > 4), 9.0),
    "CPU scalar": lambda x, i: x.__setitem__((1, 1), torch.tensor(3.0)),
    "of another dtype": lambda x, i: x.__setitem__(1, torch.ones(4, 5, device=x.device).int()),
    "through a view": lambda x, i: x.permute(2, 0, 1)[1].__setitem__(i([1, 2]), 8.0),
    "put": lambda x, i: x.put_(i([3, 50]), i([1.5, 2.5])),
    "add": lambda x, i: x.index_add_(1, i([0, 0, 3]), x[:, :3].clone(), alpha=2),
    "copy": lambda x, i: x.index_copy_(2, i([4, 1]), x[..., :2].clone()),
    "fill": lambda x, i: x.index_fill_(0, i([1]), 6.0),
    "scatter": lambda x, i: x.scatter_(0, i([[[1], [0]], [[2], [1]]]), -5.0),
    "scatter_add": lambda x, i: x.scatter_add_(2, i([[[1, 1, 0]]]), x[:1, :1, :3].clone()),
    "masked_fill": lambda x, i: x.masked_fill_(x % 2 == 0, -1),
    "masked_scatter": lambda x, i: x.masked_scatter_(x > 57, i([0.5, 0.25])),
    "accumulate": lambda x, i: x.index_put_(
        (i([0, 0, 1]), i([1, 1, 1])), torch.ones(3, 5, device=x.device), accumulate=True
    ),
    "accumulate masked": lambda x, i: x.index_put_(
        (x > 56,), i([1.0, 2.0, 3.0]), accumulate=True
    ),
    "fill_diagonal": lambda x, i: x[0].fill_diagonal_(3.0),
}  # fmt: skip


@pytest.mark.parametrize("assignment", ASSIGNED)
def test_assign(assignment):
    def f(device):
        x = grid(device)
        ASSIGNED[assignment](x, lambda values: torch.tensor(values, device=device))
        return x

    compare(f)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.uint8], ids=str)
def test_accumulate_duplicates(dtype):
    def f(device):
        x = torch.zeros(7, dtype=dtype, device=device)
        index = torch.arange(40, device=device) % 5
        ones = torch.ones(40, dtype=dtype, device=device)
        x.index_put_((index,), ones, accumulate=True)
        return x, x.clone().index_add_(0, index, ones), x.clone().scatter_add_(0, index, ones)

    compare(f, host=None)


INDEX_ERRORS = {
    "mask sizes": lambda x: x[torch.ones(2, 4, dtype=torch.bool, device=x.device)],
    "values": lambda x: x.__setitem__(x > 50, torch.ones(3, device=x.device)),
    "too many": lambda x: x[0, 0, 0, 0],
    "float": lambda x: x[torch.ones(2, device=x.device)],
    "out of range": lambda x: x[5],
    "select": lambda x: x.index_select(4, torch.tensor([0], device=x.device)),
}


@pytest.mark.parametrize("call", INDEX_ERRORS)
def test_index_errors(call):
    compare(lambda device: INDEX_ERRORS[call](grid(device)), host=None)


def test_what_depends_on_data():
    def f(device):
        x = torch.tensor([[0.0, 2.0, 2.0], [-1.0, 0.0, 2.0]], device=device)
        return (
            x.nonzero(),
            torch.argwhere(x > 0),
            torch.nonzero(x, as_tuple=True),
            x.masked_select(x > 0),
            torch.where(x > 1),
            torch.count_nonzero(x, 1),
            torch.nonzero(torch.tensor(3, device=device)),
            torch.nonzero(torch.tensor(0, device=device)),
            torch.nonzero(torch.zeros(3, 0, device=device)),
            x.bool().any().item(),
            torch.equal(x, x.clone()),
            torch.equal(x, x[:1]),
            torch.allclose(x, x + 1e-9),
            [float(v) for v in x[0]],
            x.tolist(),
        )

    compare(f)


# ---- dtypes


REAL = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
WIDE = [torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", [*REAL, *WIDE], ids=str)
def test_conversions(source):
    def f(device):
        x = torch.tensor([0, 1, 2, 3, 100, 127], device=device).to(source)
        results = [x.to(target) for target in (*REAL, *WIDE)]
        y = torch.empty(6, dtype=source, device=device)
        y.copy_(torch.tensor([1.0, 0.0, 3.0, 5.0, 7.0, 120.0], device=device))
        return results, y, x[::2].clone(), x.view(2, 3).t().contiguous()

    compare(f, host=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_conversions_of_strange_numbers(dtype):
    def f(device):
        x = torch.tensor([0.0, -0.0, 1.5, -2.5, 3.999, float("inf"), -float("inf"), float("nan")])
        x = x.to(device).to(dtype)
        finite = x[:5]
        return (
            x.float(), x.half(), x.bfloat16(), x.bool(), finite.int(), finite.to(torch.int8),
            torch.signbit(x[:7]), x.isnan(), x.isinf(), x.round(), x == x, (x + 1).clamp(-1, 1),
            torch.nan_to_num(x.float(), 5.0), x.abs().sqrt(), torch.maximum(x, -x), x.sign(),
        )  # fmt: skip

    compare(f)


@pytest.mark.parametrize("pair", list(itertools.combinations(REAL[:9], 2)), ids=str)
def test_promotion(pair):
    def f(device):
        a = torch.tensor([1, 2, 5], device=device).to(pair[0])
        b = torch.tensor([3, 1, 2], device=device).to(pair[1])
        return a + b, b * a, torch.where(a > 1, a, b), a == b, torch.cat([a, b])

    compare(f)


def test_integers_wrap_around():
    def f(device):
        x = torch.tensor([2**62, 2**63 - 1, -(2**63), 5], device=device)
        y = torch.tensor([250, 127, 128, 3], device=device)
        return (
            x + x, x * 3, x // 7, x % 7, x - 9, -x, x >> 3, x & 255, x.sum(), x.max(),
            y.to(torch.uint8) + 10, y.to(torch.int8), y.to(torch.int8) * 2, y.to(torch.int16) ** 3,
            y.int() // -4, y.int() % -4, torch.tensor([-7, 7], device=device) // 2,
        )  # fmt: skip

    compare(f)


# ---- scalars


def test_numbers_and_scalar_tensors():
    def f(device):
        x = torch.arange(4.0, device=device)
        half, whole = torch.tensor(0.5), torch.tensor(3)
        on = torch.tensor(2.0, device=device)
        return (
            x + 1, 1 - x, x / 3, 2 ** x, x * half, half * x, x + whole, whole - x.int(), x * on,
            on * half, half * on, x.int() * 2.5, x.int() + True, x == 1, x.clamp(half, 2),
            torch.where(x > 1, x, 0.0), torch.where(x > 1, x, half), x.add(1, alpha=2), on.item(),
            x.mul_(half).add_(whole), torch.add(on, 1), x.sum() + half, x.lerp(x + 1, half),
            x.index_fill(0, torch.tensor([1], device=device), half),
        )  # fmt: skip

    compare(f)


def test_empty_tensors():
    def f(device):
        x = torch.empty(0, 3, device=device)
        return (
            x + 1, x.sum(), x.sum(0), x.sum(1), x.mean(), x @ torch.ones(3, 2, device=device),
            x.t() @ x, torch.cat([x, torch.ones(2, 3, device=device)]), x.prod(), x.bool().all(),
            x.reshape(3, 0), x.view(-1, 3), x.clone(), x.to(torch.int64), x.cpu().to(device),
            torch.nn.functional.relu(x), x.softmax(1), x.expand(4, 0, 3).contiguous(),
            torch.zeros(0, device=device).cumsum(0), x.norm(), x.transpose(0, 1).contiguous(),
        )  # fmt: skip

    compare(f)


def test_empty_reductions_without_identity():
    compare(lambda device: torch.empty(0, device=device).max(), host=None)
    compare(lambda device: torch.empty(0, 3, device=device).argmax(0), host=None)


def test_factories():
    def f(device):
        like = torch.ones(2, 3, dtype=torch.int32, device=device).t()
        return (
            torch.zeros(2, 3, device=device), torch.ones(4, dtype=torch.int64, device=device),
            torch.full((2,), 7, device=device), torch.full((2,), 2.5, device=device),
            torch.arange(5, device=device), torch.arange(1, 9, 2.5, device=device),
            torch.linspace(0, 1, 5, device=device),
            torch.eye(3, device=device), torch.eye(2, 4, device=device),
            torch.tensor([[1, 2], [3, 4]], device=device), torch.tensor(True, device=device),
            torch.zeros_like(like), torch.ones_like(like), torch.full_like(like, 3),
            torch.zeros_like(like, dtype=torch.float32), like.new_zeros(2), like.new_full((2,), 3),
            like.new_tensor([1, 2]), like.new_ones(1),
            torch.empty_strided((2, 3), (1, 2), device=device).fill_(1),
            torch.zeros(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last),
            torch.asarray([1.0, 2.0], device=device), torch.scalar_tensor(3.0, device=device),
            torch.triu(torch.ones(3, 3, device=device)), torch.empty_like(like).zero_(),
            torch.hann_window(6, device=device), torch.vander(torch.arange(3.0, device=device)),
        )  # fmt: skip

    compare(f, rtol=1e-5, atol=1e-6)


def test_factories_in_another_default_dtype():
    """The same calls give other dtypes than before: what is compiled for one is not for another."""

    def f(device):
        count = torch.arange(4, device=device)
        return (
            torch.ones(3, device=device), torch.zeros(3, device=device), count / 2, count * 2.5,
            torch.full((3,), 2.5, device=device), torch.arange(0.0, 3, device=device),
            torch.eye(3, device=device), count.sin(), torch.where(count > 1, 1.0, 2.0),
            torch.scalar_tensor(3.0, device=device), torch.clamp(count, min=0.5),
        )  # fmt: skip

    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16):
            torch.set_default_dtype(dtype)
            compare(f, rtol=1e-2, atol=1e-2)
    finally:
        torch.set_default_dtype(default)


def test_factories_in_double_precision():
    compare(lambda device: torch.logspace(0, 2, 3, device=device), host=None)


# ---- devices


@pytest.mark.rotates(1)
def test_tensors_on_two_devices():
    x, y = torch.ones(3, device=DEVICE), torch.ones(3)
    for call in (
        lambda: x + y,
        lambda: y + x,
        lambda: x.add_(y),
        lambda: torch.cat([x, y]),
        lambda: x @ y,
        lambda: torch.where(x > 0, y, x),
        lambda: torch.nn.functional.linear(x, torch.ones(2, 3)),
        lambda: torch.mul(x, 2, out=y),
    ):
        with pytest.raises(RuntimeError, match=r"same device|device type|on device"):
            call()


def test_copies_between_devices():
    x = torch.arange(24.0).view(4, 6)
    on = x.to(DEVICE)
    assert on.device == torch.device(DEVICE, 0)
    for part in (lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t[2, 3:]):
        torch.testing.assert_close(part(on).cpu(), part(x))
        target = torch.zeros(4, 6, device=DEVICE)
        part(target).copy_(part(x))
        wanted = torch.zeros(4, 6)
        part(wanted).copy_(part(on))
        torch.testing.assert_close(target.cpu(), wanted)
    torch.testing.assert_close(torch.empty(6, 4).copy_(on.t()), x.t())
    torch.testing.assert_close(torch.empty(4, 6, dtype=torch.int32).copy_(on), x.int())
    torch.testing.assert_close(
        torch.zeros(4, 6, device=DEVICE).copy_(x[0]).cpu(), x[:1].expand(4, 6)
    )
    assert on.to(DEVICE) is on
    assert on.to(DEVICE, copy=True) is not on
    assert on.to("cpu").device.type == "cpu"
    assert x.to(on).device == on.device
    assert on.type() == "torch.webgpu.FloatTensor" or "webgpu" in on.type().lower()
    with pytest.raises(TypeError, match="convert"):
        on.numpy()


def test_python_protocols():
    x = torch.tensor([1.5, -2.0], device=DEVICE)
    assert [float(v) for v in x] == [1.5, -2.0]
    assert len(x) == 2
    assert x[0].item() == 1.5
    assert int(x[1]) == -2
    assert bool(x[0])
    assert f"{x[0]:.2f}" == "1.50"
    assert x.tolist() == [1.5, -2.0]
    assert "device='webgpu:0'" in repr(x)
    assert "1.5000, -2.0000" in repr(x)
    assert "size=(0, 3)" in repr(torch.empty(0, 3, device=DEVICE))
    assert -2.0 in x
    assert torch.is_tensor(x)
    assert x.is_webgpu
    assert not x.is_cpu
    assert list(range(5))[torch.tensor(3, device=DEVICE)] == 3
    assert hash(x) != hash(x.clone())
    assert copy.copy(x).tolist() == x.tolist()
    y = copy.deepcopy(x)
    y.add_(1)
    assert x.tolist() == [1.5, -2.0]
    assert pickle.loads(pickle.dumps(x)).tolist() == x.tolist()


PRODUCTS = {
    "addmm": lambda bias, m, v, beta: torch.addmm(bias, m, m, beta=beta),
    "addmv": lambda bias, m, v, beta: torch.addmv(bias[0], m, v, beta=beta),
    "addbmm": lambda bias, m, v, beta: torch.addbmm(bias, m[None], m[None], beta=beta),
    "baddbmm": lambda bias, m, v, beta: torch.baddbmm(bias[None], m[None], m[None], beta=beta),
    "addr": lambda bias, m, v, beta: torch.addr(bias, v, v, beta=beta),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_beta_of_zero_ignores_the_bias(name):
    """Also once the operator is compiled for any number."""
    for beta in (0.5, 0.25, 0.0, 2.0):

        def call(device, beta=beta):
            bias = torch.full((2, 2), math.nan if beta == 0 else 3.0, device=device)
            matrix = torch.arange(4.0, device=device).view(2, 2)
            return PRODUCTS[name](bias, matrix, matrix[1], beta)

        compare(call)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_sums_and_products_in_bool(name, dim):
    x = torch.tensor([[1.5, 0.0, 3.0], [2.0, -2.0, 2.0]])
    keywords = {"dtype": torch.bool} | ({} if dim is None else {"dim": dim})
    wanted = getattr(torch, name)(x, **keywords)
    assert torch.equal(getattr(torch, name)(x.to("webgpu"), **keywords).cpu(), wanted)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_rows_of_no_segment(reduce):
    """Lengths that do not add up, if PyTorch is told not to check them."""
    data, lengths = torch.randn(10, 3), torch.tensor([1, 2, 0, 6])

    def f(data, lengths):
        return torch.segment_reduce(data, reduce, lengths=lengths, unsafe=True, initial=1)

    results = []
    for device in ("cpu", "webgpu"):
        leaf = data.to(device).detach().requires_grad_()
        result = f(leaf, lengths.to(device))
        results.append((result.detach().cpu(), torch.autograd.grad(result.sum(), leaf)[0].cpu()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("sizes", [(0, 2), (3, 0)])
def test_expanded_empty_tensors_may_change(sizes):
    x = torch.empty((), device="webgpu").expand(sizes)
    assert x.add_(1).shape == sizes
    assert x.copy_(torch.zeros(sizes)).shape == sizes


@pytest.mark.parametrize("number", [torch.inf, 2, True, 1 + 2j, 1e300])
def test_copies_of_numbers(number):
    dtype = torch.complex64 if isinstance(number, complex) else torch.float32
    x = torch.zeros(2, 3, dtype=dtype, device=DEVICE)
    for found in (x.copy_(number), x.t().zero_().copy_(number, non_blocking=True)):
        assert torch.equal(found.cpu(), torch.zeros(found.shape, dtype=dtype).copy_(number))


def test_what_a_mask_chooses_keeps_the_order_of_strides():
    x = torch.randn(4, 3, 2, 5)
    mask = torch.arange(4) % 2 == 0
    for value in (x, x.movedim(-1, 1), x.transpose(1, 2)[..., ::2]):
        chosen = value.to(DEVICE)[mask.to(DEVICE)]
        assert chosen.stride() == value[mask].stride()
        assert torch.equal(chosen.cpu(), value[mask])
