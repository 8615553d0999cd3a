"""An index out of range is an error on the GPU too: named, raised once, at a point that waits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_webgpu_compile
from tests.index_calls import CALLS, Call, numbers
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.errors import IndexOutOfRangeError
from torch_webgpu_compile.tensors import devices

autoload.register()
DEVICE = "webgpu"
pytestmark = [pytest.mark.rotates(6), pytest.mark.filterwarnings("ignore:index_reduce")]


def on(place: str, value: Tensor) -> Tensor:
    return value.to(DEVICE) if place == "device" else value


def refuses(run: Callable[[], Any], value: int, call: Call) -> IndexOutOfRangeError:
    """Runs, waits, and checks the error; the device has nothing more to say after it."""
    with pytest.raises(IndexOutOfRangeError) as found:
        run().cpu()
    error = found.value
    assert (error.index, error.size, error.dim) == (value, call.size, call.dim)
    assert error.op.startswith("aten.")
    torch.webgpu.synchronize()
    return error


@pytest.mark.parametrize("place", ["cpu", "device"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_compiled(call: Call, place: str) -> None:
    torch._dynamo.reset()
    x = on(place, numbers())
    compiled = torch.compile(call.run, backend="webgpu", dynamic=False)
    wanted = call.run(numbers(), call.good())
    torch.testing.assert_close(compiled(x, on(place, call.good())).cpu(), wanted)
    for value in call.wrong:
        error = refuses(lambda v=value: compiled(x, on(place, call.bad(v))), value, call)
        assert "index_calls.py" in error.source
        torch.testing.assert_close(compiled(x, on(place, call.good())).cpu(), wanted)
    torch.testing.assert_close(x.cpu(), numbers())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_eager(call: Call) -> None:
    x = numbers().to(DEVICE)
    wanted = call.run(numbers(), call.good())
    for value in call.wrong:
        error = refuses(lambda v=value: call.run(x, call.bad(v).to(DEVICE)), value, call)
        assert not error.source  # a compiled operator serves calls of many lines
        torch.testing.assert_close(call.run(x, call.good().to(DEVICE)).cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_indices(dtype: torch.dtype) -> None:
    x = numbers().to(DEVICE)
    index = torch.tensor([0, 5, 2], dtype=dtype).to(DEVICE)
    for function in (lambda: x.index_select(0, index), lambda: x[index]):
        with pytest.raises(IndexOutOfRangeError, match=r"index 5 .* size 5"):
            function().cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_dtypes_of_elements(dtype: torch.dtype) -> None:
    x = numbers(dtype).to(DEVICE)
    good, bad = torch.tensor([4, 0, 3]), torch.tensor([4, 0, 5])
    for run in (
        lambda i: x.index_select(0, i),
        lambda i: x.t().contiguous()[:, i],
        lambda i: x.index_copy(0, i, x[:3]),
        lambda i: x.index_add(0, i, x[:3]),
    ):
        with pytest.raises(IndexOutOfRangeError, match=r"index 5 .* size 5"):
            run(bad.to(DEVICE)).cpu()
        run(good.to(DEVICE)).cpu()


def test_writes_out_of_range_are_not_made() -> None:
    x = numbers().to(DEVICE)
    index = torch.tensor([1, 7]).to(DEVICE)
    x.index_fill_(0, index, -1.0)
    with pytest.raises(IndexError):
        torch.webgpu.synchronize()
    wanted = numbers()
    wanted[1] = -1.0
    torch.testing.assert_close(x.cpu(), wanted)


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, i: x.gather(0, i),
    "index_select": lambda x, i: x.index_select(0, i),
    "scatter": lambda x, i: x.scatter(0, i, 3.0),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_of_numbers_there_is_only_the_first(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="webgpu")
    x, good, bad = torch.tensor(2.0), torch.tensor(0), torch.tensor(1)
    for run, place in ((function, DEVICE), (compiled, DEVICE), (compiled, "cpu")):
        torch.testing.assert_close(run(x.to(place), good.to(place)).cpu(), function(x, good))
        with pytest.raises(IndexOutOfRangeError, match=r"index 1 .* size 1"):
            run(x.to(place), bad.to(place)).cpu()


@pytest.mark.parametrize("place", ["cpu", DEVICE])
def test_a_mask_chooses_no_more_than_there_is(place: str) -> None:
    torch._dynamo.reset()
    x, source = numbers().to(place), torch.arange(6.0).to(place)

    def scattered(x: Tensor, most: Tensor) -> Tensor:
        return x.masked_scatter(x <= most, source)

    def assigned(x: Tensor, most: Tensor) -> Tensor:
        return x.index_put((x <= most,), source)

    for function in (scattered, assigned):
        compiled = torch.compile(function, backend="webgpu")
        wanted = numbers()
        wanted.view(-1)[:6] = torch.arange(6.0)
        for _ in range(2):
            result = compiled(x, torch.tensor(6.0).to(place)).cpu()
            torch.testing.assert_close(result, wanted)
            with pytest.raises(IndexOutOfRangeError, match=r"index 6 .* 6"):
                compiled(x, torch.tensor(7.0).to(place)).cpu()


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda y: y.cpu(),
    "item": lambda y: y[0, 0].item(),
    "tolist": lambda y: y.tolist(),
    "synchronize": lambda y: torch.webgpu.synchronize(),
    "another tensor": lambda y: torch.ones(3, device=DEVICE).cpu(),
    "stream": lambda y: torch.webgpu.current_stream().synchronize(),
    "event": lambda y: torch.webgpu.current_stream().record_event().synchronize(),
    "print": repr,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_every_wait_raises(wait: Callable[[Tensor], Any]) -> None:
    x = numbers().to(DEVICE)
    y = x.index_select(0, torch.tensor([5]).to(DEVICE))
    with pytest.raises(IndexOutOfRangeError, match=r"aten\.index_select\.default: index 5"):
        wait(y)
    wait(y)


def test_an_error_of_printing_leaves_nothing_behind() -> None:
    """PyTorch's guard around printing was kept by the error's traceback."""
    y = numbers().to(DEVICE).index_select(0, torch.tensor([5]).to(DEVICE))
    before = torch._C._dispatch_tls_local_exclude_set()
    with pytest.raises(IndexOutOfRangeError) as raised:
        repr(y)
    assert torch._C._dispatch_tls_local_exclude_set() == before, raised.traceback


def test_the_first_error_is_named_and_later_calls_are_told_of_their_own() -> None:
    x = numbers().to(DEVICE)
    x.index_select(0, torch.tensor([9]).to(DEVICE))
    x.gather(0, torch.tensor([[8]]).to(DEVICE))
    with pytest.raises(IndexOutOfRangeError, match=r"index_select.*index 9"):
        torch.webgpu.synchronize()
    x.gather(0, torch.tensor([[8]]).to(DEVICE))
    with pytest.raises(IndexOutOfRangeError, match=r"gather.*index 8"):
        torch.webgpu.synchronize()


def test_no_wait_and_no_submit_is_added() -> None:
    device = devices.get_device(0)
    x, index = numbers().to(DEVICE), torch.tensor([1, 2]).to(DEVICE)

    def submissions(function: Callable[[], Tensor]) -> int:
        function().cpu()
        torch.webgpu.synchronize()
        before = device.backend.submissions
        function().cpu()
        return device.backend.submissions - before

    assert submissions(lambda: x.index_select(0, index)) == submissions(lambda: x + 1) == 1
    before = device.backend.submissions
    x.index_select(0, index)
    assert device.backend.submissions == before
    assert torch_webgpu_compile.counters is not None


def test_a_large_download_takes_the_status_along() -> None:
    x = torch.ones(1 << 21, device=DEVICE)  # 8 MiB: several staging buffers, filled to the end
    y = x.index_select(0, torch.tensor([1 << 21]).to(DEVICE))
    found = torch.zeros(1 << 21)
    with pytest.raises(IndexOutOfRangeError):
        found.copy_(x)
    assert y.shape == (1,)
    torch.testing.assert_close(found, torch.zeros(1 << 21))
    torch.testing.assert_close(x.cpu(), torch.ones(1 << 21))


def test_training_raises_and_goes_on() -> None:
    torch._dynamo.reset()
    table = torch.nn.Embedding(5, 4)
    compiled = torch.compile(lambda i: table(i).square().sum(), backend="webgpu")
    good, bad = torch.tensor([0, 4, 4]), torch.tensor([0, 5, 4])
    for index in (good, bad, good):
        table.zero_grad()
        if index is bad:
            with pytest.raises(IndexOutOfRangeError, match=r"index 5 .* size 5"):
                compiled(index)
            continue
        compiled(index).backward()
        wanted = torch.zeros(5, 4).index_add(0, index, 2 * table.weight.detach()[index])
        torch.testing.assert_close(table.weight.grad, wanted)


@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_raises_changes_nothing(training: bool) -> None:
    torch._dynamo.reset()
    norm, table = torch.nn.BatchNorm1d(4), torch.nn.Embedding(5, 4)
    compiled = torch.compile(lambda x, i: norm(x) + table(i), backend="webgpu")
    x, good, bad = torch.randn(2, 4), torch.tensor([0, 4]), torch.tensor([0, 5])
    eager = copy.deepcopy(norm)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            compiled(x, good)
            eager(x)
            with pytest.raises(IndexOutOfRangeError, match=r"index 5 .* size 5"):
                compiled(x, bad)
            torch.testing.assert_close(norm.state_dict(), eager.state_dict())


def test_what_is_prepared_from_wrong_indices_is_told_every_time() -> None:
    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(8, 300))
            self.register_buffer("index", torch.arange(256) % 8)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table[self.index].t().contiguous().exp()

    torch._dynamo.reset()
    module, x = Bias().eval(), torch.randn(3, 300)
    compiled = torch.compile(module, backend="webgpu")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-3)
        module.index[7] = 8
        for _ in range(3):
            with pytest.raises(IndexOutOfRangeError, match=r"index 8 .* size 8"):
                compiled(x)
        module.index[7] = 7
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-3)


def test_symbolic_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: x.index_select(0, i) + 1, backend="webgpu", dynamic=True)
    for rows in (5, 9, 300):
        x = torch.randn(rows, 4)
        index = torch.arange(rows).flip(0)
        torch.testing.assert_close(compiled(x, index), x[index] + 1)
        index[3] = rows
        with pytest.raises(IndexOutOfRangeError, match=rf"index {rows} .* size {rows}"):
            compiled(x, index)


def test_predicated_indices_are_not_wrong() -> None:
    """Rows that do not fill their workgroup, sums that are divided, and masked loads."""
    torch._dynamo.reset()

    def function(x: Tensor, i: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x[i], (3, 2))
        return padded.softmax(-1) + x.take(i).sum() + x[i].sum(0).mean()

    compiled = torch.compile(function, backend="webgpu")
    x = torch.randn(37, 23)
    for count in (37, 5001):
        index = torch.randint(0, 37, (count,))
        index[-1] = -1
        torch.testing.assert_close(compiled(x, index), function(x, index), rtol=1e-4, atol=1e-3)


def test_an_error_is_raised_in_the_thread_that_made_it() -> None:
    x, bad = numbers().to(DEVICE), torch.tensor([9]).to(DEVICE)
    launched, read = threading.Event(), threading.Event()
    told: list[BaseException] = []

    def faulty() -> None:
        result = x.index_select(0, bad)
        launched.set()
        read.wait()
        try:
            result.cpu()
        except IndexOutOfRangeError as error:
            told.append(error)

    thread = threading.Thread(target=faulty)
    thread.start()
    launched.wait()
    torch.testing.assert_close(x.cpu(), numbers())  # somebody else's error
    torch.webgpu.synchronize()
    read.set()
    thread.join()
    assert len(told) == 1
    torch.webgpu.synchronize()


def test_an_error_of_a_thread_that_has_ended_is_a_warning() -> None:
    x, bad = numbers().to(DEVICE), torch.tensor([9]).to(DEVICE)
    thread = threading.Thread(target=lambda: x.index_select(0, bad), name="careless")
    thread.start()
    thread.join()
    with pytest.warns(RuntimeWarning, match=r"'careless' has ended.*index 9 .* size 5"):
        torch.testing.assert_close(x.cpu(), numbers())
    torch.webgpu.synchronize()
