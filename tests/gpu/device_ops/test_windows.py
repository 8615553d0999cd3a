"""Windows, frequencies, permutations and shares of rows, on the device and in graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiling import native
from tests.device_checks import compare, compare_eager_and_compiled, numbers

SIZES = (0, 1, 2, 17)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("periodic", [False, True])
def test_windows(periodic):
    def f(x):
        made = []
        for n in SIZES:
            for window in (
                *(torch.hann_window, torch.hamming_window, torch.blackman_window),
                *(torch.bartlett_window, torch.kaiser_window),
            ):
                made.append(window(n, periodic, device=x.device) * x)
            made.append(torch.hamming_window(n, periodic, 0.3, 0.2, device=x.device) * x)
            made.append(torch.kaiser_window(n, periodic, 7.0, device=x.device) * x)
        return made

    compare_eager_and_compiled(f, torch.ones(()))


def test_frequencies():
    def f(x):
        sizes = SIZES[1:]
        places = {"device": x.device}
        ends = [torch.fft.fftfreq(n, 0.7, **places) * x for n in sizes]
        return ends, [torch.fft.rfftfreq(n, 0.7, **places) * x for n in sizes]

    compare_eager_and_compiled(f, torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16])
def test_permutations(dtype):
    for n in (0, 1, 2, 200):
        order = torch.randperm(n, dtype=dtype, device="webgpu")
        assert order.dtype is dtype
        assert torch.equal(order.cpu().long().sort().values, torch.arange(n))


def test_permutations_of_a_seed_into_a_tensor_and_in_a_graph():
    torch.manual_seed(1)
    out = torch.empty(3, dtype=torch.int64, device="webgpu")
    first, second = torch.randperm(50, device="webgpu"), torch.randperm(50, out=out)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(torch.randperm(50, device="webgpu"), first)
    shuffle = native(lambda x: x[torch.randperm(x.shape[0], device=x.device)])
    for device in ("cpu", "webgpu"):
        x = torch.arange(100.0, device=device)
        found = shuffle(x)
        assert not torch.equal(found, x)
        assert torch.equal(found.sort().values, x)


@pytest.mark.parametrize(
    ("n", "dtype"), [(-1, torch.int64), (300, torch.int8), (5000, torch.float16), (3, torch.bool)]
)
def test_what_is_no_permutation(n, dtype):
    compare(lambda device: torch.randperm(n, dtype=dtype, device=device), host=None)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("indices", [torch.tensor([[1, 2, 1], [3, 1, 9]]), torch.tensor(4)])
def test_embedding_scales_gradients_by_frequency(indices, padding_idx):
    def f(weight, factor, indices):
        read = F.embedding(indices, weight, padding_idx, scale_grad_by_freq=True)
        return torch.autograd.grad((read * factor).sum(), weight)

    def eager(device):
        factor = numbers(*indices.shape, 3, device=device, grad=False)
        return f(numbers(10, 3, device=device), factor, indices.to(device))

    compare(eager)
    for device in ("cpu", "webgpu"):
        weight = numbers(10, 3, device=device)
        read = native(lambda w, i: F.embedding(i, w, padding_idx, scale_grad_by_freq=True))
        factor = numbers(*indices.shape, 3, device=device, grad=False)
        (read(weight, indices.to(device)) * factor).sum().backward()
        torch.testing.assert_close(weight.grad.cpu(), eager("cpu")[0])


@pytest.mark.rotates(3)
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weight_norm_has_gradients(dim):
    def f(device, compiled=lambda module: module):
        torch.manual_seed(0)
        found = []
        for normalize in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
            layer = normalize(nn.Conv1d(3, 4, 3), dim=dim).to(device)
            compiled(layer)(numbers(2, 3, 8, device=device, grad=False)).square().sum().backward()
            found += [parameter.grad for parameter in layer.parameters()]
        return found

    wanted = f("cpu")
    compare(f, rtol=1e-4, atol=1e-4)
    for device in ("cpu", "webgpu"):
        found = [gradient.cpu() for gradient in f(device, native)]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_bytes_of_another_dtype_in_a_graph():
    """On the adapter: 64 bits of two uint32 are no signed numbers."""

    def f(x):
        return (
            x.view(torch.int64).clone(),
            x.view(torch.uint32).to(torch.int64),
            x.view(torch.int8)[..., ::3],
        )

    x = torch.tensor([-1, 5, 7, -1, -3, -9, 1, 1 << 30], dtype=torch.int32)
    for device in ("cpu", "webgpu"):
        torch.testing.assert_close([y.cpu() for y in native(f)(x.to(device))], [*f(x)])
