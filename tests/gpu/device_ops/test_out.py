"""``out=``, ``resize_``, ``set_`` and strides in place: tensors that get other memory."""

from __future__ import annotations

import pytest
import torch

from tests.device_checks import compare


def test_out_is_resized():
    def f(device):
        x = torch.arange(12.0, device=device).view(3, 4)
        empty = torch.empty(0, device=device)
        total = torch.empty(0, device=device)
        torch.mul(x, 2, out=empty)
        torch.sum(x, 1, out=total)
        values, indices = (
            torch.empty(0, device=device),
            torch.empty(0, dtype=torch.int64, device=device),
        )
        torch.max(x, 1, out=(values, indices))
        transposed = torch.empty(0, device=device)
        torch.add(x.t(), 1, out=transposed)
        return empty, total, values, indices, transposed

    compare(f)


def test_out_of_wrong_sizes_warns():
    def f(device):
        out = torch.zeros(3, device=device)
        torch.mul(torch.ones(4, device=device), 2, out=out)
        return out

    with pytest.warns(UserWarning, match="output with one or more elements was resized") as found:
        compare(f)
    assert len(found) == 2  # one on each device


OUT_ERRORS = {
    "dtype": lambda d: torch.mul(
        torch.ones(3, device=d), 2.5, out=torch.ones(3, dtype=torch.int64, device=d)
    ),
    "sizes": lambda d: torch.ones(3, device=d).add_(torch.ones(2, 3, device=d)),
    "broadcast": lambda d: torch.add(torch.ones(3, device=d), torch.ones(4, device=d)),
    "matmul": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "integers": lambda d: torch.ones(3, dtype=torch.int64, device=d).mul_(2.5),
    "dim": lambda d: torch.ones(3, device=d).sum(2),
    "view": lambda d: torch.ones(3, 4, device=d).t().view(12),
    "gradient": lambda d: torch.mul(
        torch.ones(3, device=d, requires_grad=True), 2, out=torch.ones(3, device=d)
    ),
    "leaf": lambda d: torch.ones(3, device=d, requires_grad=True).add_(1),
    "item": lambda d: torch.ones(3, device=d).item(),
    "bool": lambda d: bool(torch.ones(3, device=d)),
    "index": lambda d: torch.ones(3, device=d)[4],
    "reshape": lambda d: torch.ones(3, device=d).reshape(2, 2),
    "cat": lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(2, 4, device=d)]),
    "stack": lambda d: torch.stack([]),
    "conv": lambda d: torch.conv1d(torch.ones(1, 3, 4, device=d), torch.ones(1, 2, 3, device=d)),
    "negative": lambda d: torch.empty(-1, device=d),
    "set_": lambda d: torch.ones(3, device=d).as_strided((5,), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("call", OUT_ERRORS)
def test_errors_are_pytorchs(call):
    compare(OUT_ERRORS[call], host=None)


def test_resize():
    def f(device):
        x = torch.arange(12.0, device=device)
        part = x[6:]
        part.resize_(3)
        grown = torch.arange(4.0, device=device)
        grown.resize_(2, 4)[0].add_(1)
        grown.resize_(2)
        x.resize_(2, 3).mul_(2)
        fresh = torch.empty(0, device=device).resize_(2, 2).fill_(3)
        last = torch.empty(1, 3, 2, 2, device=device)
        last.resize_(2, 3, 2, 2, memory_format=torch.channels_last).fill_(1)
        like = torch.empty(0, device=device).resize_as_(x).fill_(5)
        return x, part, grown, fresh, like, last

    compare(f)


def test_set():
    def f(device):
        x, y = torch.zeros(10, device=device), torch.arange(6.0, device=device)
        x.set_(y)
        x.add_(1)
        z = torch.empty(0, device=device)
        z.set_(y.untyped_storage(), 2, (2, 2), (2, 1))
        z[0] = -1
        w = torch.ones(3, device=device).set_()
        return x, y, z, w, x.is_set_to(y)

    compare(f)


def test_strides_in_place():
    def f(device):
        x = torch.arange(10.0, device=device)
        x.as_strided_((2, 3), (3, 1), 1)
        x.mul_(2)
        y = torch.arange(6.0, device=device).view(2, 3)
        y.t_().add_(1)
        y.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
        return x, y

    compare(f)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"dtype": torch.float32, "device": "webgpu"}, "scalar type Long but got"),
        ({"dtype": torch.int64, "device": "cpu"}, "to be on the same device"),
    ],
)
def test_positions_need_integers_on_the_device(out, message):
    with pytest.raises(RuntimeError, match=message):
        torch.nonzero(torch.ones(3, device="webgpu"), out=torch.empty(0, **out))
