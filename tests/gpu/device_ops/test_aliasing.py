"""Views and in-place operators on them: memory that several tensors see, and its versions."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import DEVICE, compare
from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(9)

# ---- views


VIEWS = {
    "rows": lambda x: x[2:5],
    "a row": lambda x: x[3],
    "columns": lambda x: x[:, 1:4],
    "a column": lambda x: x[:, 2],
    "every other": lambda x: x[1::2, ::3],
    "transposed": lambda x: x.t(),
    "transposed part": lambda x: x[1:, 2:].t(),
    "reshaped": lambda x: x.view(6, -1)[1:3],
    "diagonal": lambda x: x.diagonal(1),
    "unfolded": lambda x: x.unfold(1, 2, 2)[2],
    "as_strided": lambda x: x.as_strided((3, 2), (7, 2), 5),
    "one element": lambda x: x[4, 4:5],
    "scalar": lambda x: x[4, 4],
    "empty": lambda x: x[3:3],
    "split": lambda x: x.split(3)[1],
    "squeezed": lambda x: x[2:3].squeeze(0).unsqueeze(-1),
    "permuted": lambda x: x.view(3, 4, 6).permute(2, 0, 1)[1:4],
    "real part": lambda x: x.view(torch.int32) if x.dtype is torch.float32 else x[1:],
}
DTYPES = [torch.float32, torch.float16, torch.uint8, torch.bool, torch.int64, torch.int16]


def numbers(dtype, device):
    x = torch.arange(72, device=device).view(12, 6)
    return (x % 5 == 0) if dtype is torch.bool else (x % 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read(view, dtype):
    def f(device):
        part = VIEWS[view](numbers(dtype, device))
        return part.clone(), part + 1, part.contiguous()

    compare(f)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_changed(view, dtype):
    """Every other view sees the change, and no other element changes."""

    def f(device):
        x = numbers(dtype, device)
        flat, part = x.view(-1), VIEWS[view](x)
        if dtype is torch.bool:
            part.logical_not_()
        else:
            part.mul_(2).add_(1)
        seen = x.clone(), flat.sum(), x.t().contiguous(), part.clone()
        part.fill_(3)
        part.copy_(part.clone())
        return x, *seen

    compare(f)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_into_views(dtype):
    def f(device):
        x = numbers(dtype, device)
        y = x.clone()
        y[1:3] = x[4:6]
        y[:, 3] = x[:, 0]
        y[5:, ::2] = x[:7, ::2]
        y[:, 1:2] = x[:, 4:5]
        y.t()[2:4] = x.t()[:2]
        y[7] = 1
        y[2, 2] = 0
        y[8:10] = x[0]
        return y

    compare(f)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.int16], ids=str)
def test_parts_of_words(dtype):
    """Elements of less than 4 bytes share words with their neighbours."""

    def f(device):
        x = torch.zeros(101, dtype=dtype, device=device)
        x[3:50] = 1
        x[51:100:2] = 1
        x[7] = 0
        x[10:13] = 0
        x[20:33:3] = 0
        y = x[5:]
        y[:9].logical_not_() if dtype is torch.bool else y[:9].add_(3)
        z = x[1:97].view(8, 12)
        z[:, 3:5] = z[:, 7:9]
        return x, y, z

    compare(f)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_what_shares_memory_with_nothing_is_written_where_it_is(dtype):
    def f(device):
        x = torch.arange(256 * 8).reshape(256, 8).remainder(7).to(dtype).to(device)
        for part in (x, x[128:], x[:, ::2], x[:128].t(), x[64:129, 1:4], x[3], x[:, 5], x[5, 3]):
            part.add_(1)
        x[64:128].mul_(x[64:128])  # twice the same memory
        x[128:192].mul_(x[:64])  # other memory of the same storage
        return x

    x = compare(f)
    torch.webgpu.synchronize()
    before = torch.webgpu.memory_allocated()
    torch.webgpu.reset_peak_memory_stats()
    counters.reset()
    x[128:].add_(1)
    assert counters.dispatches == 1
    assert torch.webgpu.max_memory_allocated() == before
    if dtype.itemsize >= 4:  # else it shares words with what lies beside it
        x[3:5, 1:6].add_(1)
        x[:, 7].fill_(2)
        assert counters.dispatches == 3


def test_many_rows_of_a_column():
    """More runs than are copied one by one."""

    def f(device):
        x = torch.zeros(300, 7, device=device)
        x[:, 2] = 5
        x[:, 3].add_(2)
        x[:, 4:6] += torch.arange(300.0, device=device)[:, None]
        return x

    compare(f)


def test_parts_beyond_the_binding_alignment():
    """Storage offsets that are no multiples of 256 bytes, small and large."""

    def f(device):
        x = torch.zeros(5000, device=device)
        for start in (1, 63, 64, 65, 127, 1000, 4097):
            x[start : start + 301 : 3] += start
            x[start : start + 50].mul_(2)
        return x, x[4097:4500:7] + 1

    compare(f)


def test_views_of_other_dtypes():
    def f(device):
        x = torch.ones(32, device=device)  # no bytes make a subnormal number: GPUs may flush those
        bits, halves, octets = x.view(torch.int32), x.view(torch.float16), x.view(torch.uint8)
        bits[3:7] = 1 << 29
        x[4:6] = 1.5
        octets[41:60:3] = 7
        halves[33:40] = 2.0
        octets[100:104].view(torch.int32).fill_(77 << 23)  # not NaN: its sign is not defined
        x[8:].mul_(2)
        return x, bits, halves, octets, octets[8:16].view(torch.int64)

    compare(f)


def test_a_view_and_its_base_in_one_call():
    def f(device):
        x = torch.arange(12.0, device=device).view(3, 4)
        x.add_(x[:, :1].clone())
        x.mul_(x)
        x[0].add_(x[1])
        torch.add(x, x.clone(), out=x)
        torch.mul(x[0], 2, out=x[2])
        x.copy_(x.flip(0))
        return x

    compare(f)


def test_views_outlive_their_base():
    def f(device):
        x = torch.arange(1000.0, device=device)
        parts = [x[k : k + 10] for k in range(0, 100, 10)]
        x.add_(1)  # new memory for the storage
        del x
        for part in parts:
            part.mul_(2)
        return parts

    compare(f)


def test_detached_and_data():
    def f(device):
        x = torch.ones(4, device=device, requires_grad=True)
        x.data.mul_(3)
        x.detach()[1] = 7
        y = x * 2
        x.data = torch.zeros(4, device=device)
        return x, y

    compare(f)


def test_real_and_imaginary_parts():
    def f(device):
        x = torch.arange(12.0, device=device).view(6, 2)
        z = torch.view_as_complex(x)
        torch.view_as_real(z)[:, 0].add_(1)
        z.real.mul_(2)
        z.imag[2:] = -1
        return x, torch.view_as_real(z)

    compare(f)


# ---- what PyTorch refuses


REFUSED = {
    "expanded": lambda x: x[:4].expand(3, 4).add_(1),
    "expanded copy": lambda x: x[:4].expand(3, 4).copy_(x[4:8]),
    "expanded from the host": lambda x: x[:4].expand(3, 4).mul_(torch.tensor(2.0)),
    "shifted": lambda x: x[1:].add_(x[:-1]),
    "shifted copy": lambda x: x[1:].copy_(x[:-1]),
    "shifted out=": lambda x: torch.mul(x[:-1], 2, out=x[1:]),
    "expanded out=": lambda x: torch.mul(x[:4], 2, out=x[:1].expand(4)),
    "in a list": lambda x: torch._foreach_add_([x[:4].expand(3, 4)], 1.0),
    "random": lambda x: x[:4].expand(3, 4).normal_(),
    "scatter": lambda x: x[:4].scatter_(0, torch.zeros_like(x[:4], dtype=torch.int64), x[1:5]),
    "transposed": lambda x: x.view(3, 4)[:, :3].add_(x.view(3, 4)[:, :3].t()) and None,
}


@pytest.mark.parametrize("call", REFUSED)
def test_overlaps_are_refused(call):
    def f(device):
        x = torch.arange(12.0, device=device)
        REFUSED[call](x)
        return None if call == "transposed" else x

    compare(f)


def test_expanded_targets_that_are_allowed():
    def f(device):
        x = torch.arange(12.0, device=device)
        x[:4].expand(3, 4).fill_(1)
        x[4:5].expand(3).zero_()
        return x

    compare(f)


def test_changes_of_expanded_tensors_with_a_warning():
    def f(device):
        x = torch.arange(12.0, device=device)
        mask = torch.eye(3, 4, dtype=torch.bool, device=device)
        x[:4].expand(3, 4).masked_fill_(mask, 7)
        return x

    with pytest.warns(UserWarning, match="masked_fill_ on expanded tensors is deprecated"):
        compare(f, host={"aten.masked_fill_.Scalar"})


def test_tensors_that_overlap_themselves():
    def f(device):
        x = torch.arange(9.0, device=device)
        x.as_strided((3, 3), (2, 1)).add_(1)
        return x.as_strided((3, 3), (2, 1)) * 2

    compare(f, host={"aten.add_.Tensor"})


def test_lists_of_parts_of_one_storage():
    def f(device):
        x = torch.arange(12.0, device=device)
        torch._foreach_add_([x[:6], x[6:]], 1.0)
        torch._foreach_mul_([x[2:4], x[5:8]], [x[2:4], x[8:11]])
        return x

    compare(f)


@pytest.mark.rotates(1)
def test_lists_of_overlapping_parts():
    """One after the other, as everywhere."""

    def f(device):
        x = torch.arange(256.0, device=device)
        torch._foreach_add_([x[:70], x[128:198]], 1.0)  # without overlap, but aligned alike
        torch._foreach_add_([x[:70], x[64:134]], 1.0)
        torch._foreach_add_([x[:3], x[2:5]], 1.0)
        torch._foreach_mul_([x, x], 2.0)
        return x

    compare(f, host={"aten._foreach_add_.Scalar", "aten._foreach_mul_.Scalar"})


# ---- version counters


def test_changes_are_counted():
    x = torch.zeros(4, device=DEVICE)
    versions = [x._version]
    for change in (
        lambda: x.add_(1),
        lambda: x[1:].mul_(2),
        lambda: x.view(2, 2)[:, 0].fill_(1),
        lambda: torch.add(x, 1, out=x),
        lambda: x.copy_(torch.ones(4)),
        lambda: x.__setitem__(slice(0, 2), 5.0),
        lambda: torch._foreach_add_([x], 1.0),
        lambda: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
        lambda: x.uniform_(),
    ):
        change()
        versions.append(x._version)
    assert versions == list(range(10))
    x.data.add_(1)
    x + 1
    assert x._version == 9


def test_saved_tensors_are_checked():
    def f(device):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        y[1:].add_(1)
        y.sum().backward()

    compare(f)


def test_a_saved_tensor_keeps_its_values():
    """The memory of a storage is replaced by in-place operators: who saved it sees no change."""

    def f(device):
        x = torch.arange(1.0, 5.0, device=device, requires_grad=True)
        w = torch.full((4,), 2.0, device=device)
        y = x * w
        (y * y).sum().backward()
        with torch.no_grad():
            w.add_(1)
            x.sub_(0.1 * x.grad)
        return x, x.grad, w

    compare(f)
