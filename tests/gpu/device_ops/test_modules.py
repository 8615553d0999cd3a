"""PyTorch's module samples (``module_db``) on the device: forward, backward, training and not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.coverage import DATA, Coverage
from tests.device_checks import DEVICE
from tests.device_values import copied, on_device
from torch_webgpu_compile import counters

pytestmark = [
    pytest.mark.rotates(16),
    pytest.mark.filterwarnings("ignore"),  # of deprecated arguments
]

SAMPLES = 6
HOSTED = {op for hosted in Coverage.load(DATA).hosted.values() for op in hosted}
# FractionalMaxPool: the samples' random numbers are drawn on the CPU with another dtype.
MODULES = {i.name: i for i in module_db if not i.name.startswith("nn.FractionalMaxPool")}
# Their results are random while they train.
RANDOM = {
    "nn.Dropout", "nn.Dropout1d", "nn.Dropout2d", "nn.Dropout3d", "nn.AlphaDropout",
    "nn.FeatureAlphaDropout", "nn.RReLU", "nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d",
}  # fmt: skip


def is_random(name, sample, training):
    """Whether results depend on the device's random numbers: lazy modules draw their parameters."""
    return name.startswith("nn.Lazy") or (training and (name in RANDOM or dropout_of(sample)))


def made(info, sample, training):
    """A module with the same parameters at every call, or the error of its constructor."""
    torch.manual_seed(0)
    arguments = sample.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).float().train(training)
    if info.is_lazy:  # parameters are made by the first call
        module(*copied(sample.forward_input.args), **sample.forward_input.kwargs)
    return module


def run(module, values, seeds=None):
    """Results, gradients of arguments and parameters, and buffers, after one pass each way."""
    args, kwargs = values
    torch.manual_seed(1)
    results = module(*args, **kwargs)
    outputs = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    gradients = ()
    if outputs and leaves:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]
        gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return results, gradients, list(module.buffers())


def samples_of(info, training):
    return info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name, training):
    info = MODULES[name]
    counters.reset()
    ran = 0
    for sample in itertools.islice(samples_of(info, training), SAMPLES):
        if sample.forward_input is None:
            continue
        module = made(info, sample, training)
        values = sample.forward_input.args, sample.forward_input.kwargs
        moved = copy.deepcopy(module).to(DEVICE)
        moved_values = on_device(values)
        wanted = run(module, copied(values))
        got = run(moved, moved_values)
        if is_random(name, sample, training):
            got, wanted = (tree_map_only(Tensor, torch.zeros_like, v) for v in (got, wanted))
        compare(got, wanted)
        ran += 1
    assert ran or info.is_lazy
    unexpected = set(counters.fallbacks) - HOSTED
    assert not unexpected, f"on the host: {sorted(unexpected)}"


def dropout_of(sample):
    return sample.constructor_input.kwargs.get("dropout", 0.0)


def compare(got, wanted):
    left, right = tree_leaves(got), tree_leaves(wanted)
    assert len(left) == len(right)
    for g, w in zip(left, right, strict=True):
        if isinstance(w, Tensor):
            assert g.device.type == DEVICE
            # Sums over a batch in another order.
            torch.testing.assert_close(g.cpu(), w.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            assert g == w


# ---- what happens to modules, not in them


def test_moving_a_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert model.to(DEVICE) is model
    assert {p.device.type for p in model.parameters()} == {DEVICE}
    assert {b.device.type for b in model.buffers()} == {DEVICE}
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    optimizer.step()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.cpu().to(DEVICE)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), state[key].cpu())
    model.half()
    assert model[0].weight.dtype is torch.float16
    model.double().float().webgpu()
    assert model[0].weight.device.type == DEVICE


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    model = Tied().to(DEVICE)
    assert model.head.weight is model.embedding.weight
    model(torch.tensor([1, 2], device=DEVICE)).sum().backward()
    assert len(list(model.parameters())) == 1


def test_loading_a_state():
    source, target = nn.LSTM(3, 4, 2), nn.LSTM(3, 4, 2).to(DEVICE)
    target.load_state_dict(source.state_dict())
    for key, value in target.state_dict().items():
        assert value.device.type == DEVICE
        torch.testing.assert_close(value.cpu(), source.state_dict()[key])
    source.load_state_dict(target.state_dict())
    target.load_state_dict(source.state_dict(), assign=True)


def test_making_modules_on_the_device():
    with torch.device(DEVICE):
        inside = nn.Linear(3, 4)
    direct = nn.Conv2d(2, 3, 3, device=DEVICE, dtype=torch.float16)
    with torch.device("meta"):
        empty = nn.Linear(3, 4)
    empty.to_empty(device=DEVICE).reset_parameters()
    for module in (inside, direct, empty):
        assert {p.device.type for p in module.parameters()} == {DEVICE}
    assert inside.weight.abs().max() <= 3**-0.5
    assert torch.isfinite(empty(torch.ones(2, 3, device=DEVICE))).all()


def test_initializers():
    torch.manual_seed(0)
    w = torch.empty(64, 32, device=DEVICE)
    for fill in (
        nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_,
        nn.init.trunc_normal_, nn.init.ones_, nn.init.zeros_, nn.init.eye_, nn.init.dirac_,
    ):  # fmt: skip
        fill(w[:, :, None] if fill is nn.init.dirac_ else w)
        assert torch.isfinite(w).all()
    nn.init.normal_(w, 1.0, 0.5)
    assert abs(w.mean().item() - 1) < 0.1
    nn.init.constant_(w, 3)
    assert w.unique().tolist() == [3.0]


def test_parametrizations_and_pruning():
    torch.manual_seed(0)
    x = torch.ones(2, 6, device=DEVICE)
    for wrap in (
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ):
        layer = wrap(nn.Linear(6, 6)).to(DEVICE)
        layer(x).sum().backward()
        assert torch.isfinite(layer(x)).all()
    layer = prune.l1_unstructured(nn.Linear(6, 6).to(DEVICE), "weight", 0.5)
    assert layer.weight.count_nonzero() == 18


def test_packed_sequences():
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    x, lengths = torch.randn(3, 5, 3), torch.tensor([5, 3, 2])
    results = []
    for device in ("cpu", DEVICE):
        lstm.to(device)
        packed = nn.utils.rnn.pack_padded_sequence(x.to(device), lengths, batch_first=True)
        output, _ = lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        results.append(padded.detach().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
