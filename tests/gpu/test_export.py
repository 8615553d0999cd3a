"""Bundles that `export` wrote, run by `load_bundle`, beside the functions that they are of."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sympy.core.cache import clear_cache
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

import torch_webgpu_compile
from tests.deciding import deciding, turn
from torch_webgpu_compile import (
    EntryPoint,
    IndexOutOfRangeError,
    InputError,
    UnsupportedOp,
    export,
    load_bundle,
)
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime.device import device_for

pytestmark = pytest.mark.rotates(3)


def close(got, wanted, **tolerances):
    torch.testing.assert_close(torch.from_numpy(np.asarray(got)), wanted, **tolerances)


def mlp():
    torch.manual_seed(0)
    # Without a bias before the norm: its gradients are rounding errors, which Adam scales to 1.
    return nn.Sequential(
        nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


def test_sizes_that_calls_choose(tmp_path):
    model = mlp().eval()
    export(
        model, (torch.randn(8, 16),), tmp_path / "b", dynamic_shapes=({0: Dim("batch", max=64)},)
    )
    bundle = load_bundle(tmp_path / "b")
    for batch in (1, 8, 64):
        x = torch.randn(batch, 16)
        close(bundle.run("forward", input=x.numpy())["output"], model(x).detach())
    with pytest.raises(ValueError, match="batch"):
        bundle.run("forward", input=np.zeros((65, 16), np.float32))


def test_half_precision_beside_single(tmp_path):
    if not device_for(from_environment()).target.has_float16:
        pytest.skip("this adapter has no shader-f16")
    model, x = mlp().eval(), torch.randn(8, 16)
    export(model, (x,), tmp_path / "b", precision=("float32", "float16"))
    wanted = model(x).detach()
    single = load_bundle(tmp_path / "b", variant="float32").run("forward", input=x.numpy())
    close(single["output"], wanted)
    half = load_bundle(tmp_path / "b", variant="float16")
    assert half.state("0.weight").dtype == np.float16
    got = half.run("forward", input=x.numpy())["output"]
    close(got.astype(np.float32), wanted, atol=5e-3, rtol=5e-3)


def test_a_model_trained_in_a_bundle(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def predict(x):
        model.eval()
        with torch.no_grad():
            found = model(x).softmax(-1)
        model.train()
        return found

    x, y = torch.randn(24, 16), torch.randint(0, 4, (24,))
    start = copy.deepcopy(model.state_dict())
    entries = {"train_step": (train_step, (x, y)), "predict": (predict, (x[:5],))}
    bundle = load_bundle(export(entries, tmp_path / "b"))
    for _ in range(20):
        close(bundle.run("train_step", x=x.numpy(), y=y.numpy())["loss"], train_step(x, y)["loss"])
    got = bundle.run("predict", x=x[:5].numpy())["output"]
    close(got, predict(x[:5]), atol=1e-4, rtol=1e-4)
    bundle.save(tmp_path / "trained.safetensors")

    from safetensors.torch import load_file

    saved = load_file(tmp_path / "trained.safetensors")
    assert set(saved) == set(start)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, atol=1e-4, rtol=1e-4)


class Decoder(nn.Module):
    """One layer of attention with a cache, and the next token."""

    def __init__(self, length=24, heads=2, size=16, tokens=50):
        super().__init__()
        self.shape = heads, size
        self.embedding = nn.Embedding(tokens, heads * size)
        self.projections = nn.Linear(heads * size, 3 * heads * size)
        self.out = nn.Linear(heads * size, tokens)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, size), persistent=False)

    def forward(self, ids, position):
        q, k, v = (
            part.unflatten(-1, self.shape).transpose(1, 2)
            for part in self.projections(self.embedding(ids)).chunk(3, -1)
        )
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = torch.arange(self.keys.shape[2])[None] <= position[:, None]
        found = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        logits = self.out(found.transpose(1, 2).flatten(-2)[:, -1])
        return logits.argmax(-1, keepdim=True), position[-1:] + 1


def test_tokens_decoded_with_a_cache(tmp_path):
    torch.manual_seed(0)
    model = Decoder().eval()
    length = Dim("length", max=23)
    ids, position = torch.randint(0, 50, (1, 5)), torch.arange(5)
    shapes = {"ids": {1: length}, "position": {0: length}}
    with torch.no_grad():
        entries = {
            "prefill": EntryPoint(model, (ids, position), dynamic_shapes=shapes),
            "decode": EntryPoint(model, (ids[:, :1], position[:1])),
        }
        bundle = load_bundle(export(entries, tmp_path / "b"))
        assert not model.keys.any()
        token, at = model(ids, position)
        got = bundle.run("prefill", ids=ids.numpy(), position=position.numpy())
        for _ in range(12):
            close(got["0"], token)
            close(got["1"], at)
            got = bundle.run("decode", ids=got["0"], position=got["1"])
            token, at = model(token, at)
        close(bundle.state("keys"), model.keys)


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "jinja2", "sympy")))  # importing them is an error
import numpy as np
from torch_webgpu_compile import load_bundle
bundle = load_bundle(sys.argv[1])
print(*bundle.run("forward", input=np.ones((2, 16)))["output"].ravel())
"""


def test_without_pytorch(tmp_path):
    model = mlp().eval()
    export(model, (torch.randn(2, 16),), tmp_path / "b")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "b")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    got = np.array(ran.stdout.split(), np.float32).reshape(2, 4)
    close(got, model(torch.ones(2, 16)).detach())


def test_an_index_out_of_range(tmp_path):
    export(nn.Embedding(5, 4), (torch.tensor([1, 2]),), tmp_path / "b")
    bundle = load_bundle(tmp_path / "b")
    with pytest.raises(IndexOutOfRangeError, match="index 7 is out of bounds"):
        bundle.run("forward", input=[0, 7])
    assert bundle.run("forward", input=[0, 4])["output"].any()


def test_an_index_without_dimensions(tmp_path):
    table = torch.linspace(0, 1, 1000)
    example = torch.randn(4), torch.tensor(3)
    bundle = load_bundle(export(lambda x, t: x * table[t], example, tmp_path / "b"))
    x = torch.randn(4)
    for t in (0, 7, 999, -1, -1000):
        close(bundle.run("forward", x=x.numpy(), t=t)["output"], x * table[t])
    for t in (1000, -1001):
        with pytest.raises(IndexOutOfRangeError, match=rf"index {t} is out of bounds"):
            bundle.run("forward", x=x.numpy(), t=t)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, r"needs the input 'input'; it takes input: float32 \(8, 16\)"),
        ({"input": np.zeros((8, 16)), "x": 1}, "no input 'x'; it takes input"),
        ({"input": np.zeros((8, 15))}, r"sizes \(8, 15\), not \(8, 16\)"),
        ({"input": np.zeros((8, 16), complex)}, "is complex128, and has to be float32"),
    ],
)
def test_inputs_that_do_not_fit(inputs, text, tmp_path):
    bundle = load_bundle(export(mlp().eval(), (torch.randn(8, 16),), tmp_path / "b"))
    with pytest.raises(InputError, match=text):
        bundle.run("forward", inputs)


def test_random_numbers_follow_the_seed(tmp_path):
    export(nn.Dropout(0.5), (torch.ones(1000),), tmp_path / "b")

    def draws(seed):
        bundle = load_bundle(tmp_path / "b", seed=seed)
        x = np.ones(1000, np.float32)
        return [bundle.run("forward", input=x)["output"] for _ in range(2)]

    first, second = draws(1)
    assert not np.array_equal(first, second)
    assert 400 < np.count_nonzero(first) < 600
    np.testing.assert_array_equal(draws(1), [first, second])
    assert not np.array_equal(draws(2)[0], first)


class Recurrent(nn.Module):
    """A gated recurrence, a branch, a map and an associative scan: all of them in kernels."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.rand(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        def step(h, now):
            h = torch.sigmoid(self.gate) * h + now
            return h, h.clone()

        _, rows = scan(step, x.new_zeros(8), self.linear(x))
        rows = torch.cond(rows.sum() > 0, lambda r: r.cos(), lambda r: r.sin() * 2, (rows,))
        rows = map_rows(lambda row: row.softmax(0) * self.gate, rows)
        return associative_scan(torch.maximum, rows, 0, combine_mode="generic")


@pytest.mark.parametrize("length", [3, 100])
def test_loops_and_branches_that_are_kernels(length, tmp_path):
    torch.manual_seed(0)
    model = Recurrent()
    export(model, (torch.rand(length, 8),), tmp_path / "b")
    bundle = load_bundle(tmp_path / "b")
    for sign in (1, -1):
        x = torch.randn(length, 8).abs() * sign
        with torch.no_grad():
            close(bundle.run("forward", x=x.numpy())["output"], model(x))


def test_on_the_device(tmp_path):
    torch_webgpu_compile.register_device()
    model, x = mlp().eval().to("webgpu"), torch.randn(4, 16, device="webgpu")
    bundle = load_bundle(export(model, (x,), tmp_path / "b"))
    got = bundle.run("forward", input=x.cpu().numpy())["output"]
    close(got, model(x).detach().cpu())


def trained_by_a_branch(x):
    y = torch.cond(x.sum() > 0, lambda x: (x @ x).sort().values, lambda x: x.sin(), (x,))
    y.sum().backward()
    return x.grad


@torch.no_grad()
def test_data_decide_what_a_bundle_runs(tmp_path):
    model, calls = deciding()
    bundle = load_bundle(export(model.entries(), tmp_path / "b"))
    assert "find(x: float32 (3, 4)) -> where: int64 (?, 2), chosen: float32 (?,)" in repr(bundle)
    for entry, inputs in calls:
        names = bundle.entries[entry].inputs
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        wanted = tree_leaves(getattr(model, entry)(*inputs))
        for got, value in zip(bundle.run(entry, given).values(), wanted, strict=True):
            close(got, value, atol=1e-5, rtol=1e-5)
    close(bundle.state("seen"), model.seen)
    x = torch.randn(3, 3)
    close(bundle.run("turned", x=x.numpy())["output"], turn(turn(turn(x))))
    with pytest.raises(InputError, match=r"find: .* does not hold, at deciding.py:.*_check"):
        bundle.run("find", x=np.ones((3, 4)))


def test_symbols_are_told_by_what_they_are(tmp_path, monkeypatch):
    """Once a symbol has left sympy's cache, PyTorch may give another one that is equal."""
    replace = ShapeEnv.replace

    def other(env, expression):
        found = pickle.dumps(replace(env, expression))
        clear_cache()
        return pickle.loads(found)

    monkeypatch.setattr(ShapeEnv, "replace", other)
    x = torch.tensor([1.0, -1, 2])
    bundle = load_bundle(export(lambda x: x[x > 0] * 2, (x,), tmp_path / "b"))
    np.testing.assert_allclose(bundle.run("forward", {"x": -x.numpy()})["output"], [2])


@torch.no_grad()
def test_counts_that_have_to_be_equal(tmp_path):
    """PyTorch has one name for both then: the bundle still checks them."""
    x, y = torch.tensor([1.0, -1, 2, 3]), torch.tensor([3.0, 2, -1, 1])
    bundle = load_bundle(export(lambda x, y: x[x > 0] + y[y > 0], (x, y), tmp_path / "b"))
    close(bundle.run("forward", x=x.numpy(), y=y.numpy())["output"], torch.full((3,), 4.0))
    with pytest.raises(InputError, match=r"does not hold|is not"):
        bundle.run("forward", x=x.numpy(), y=-y.numpy())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: torch.linalg.eigh(x)[0], r"eigh.*a bundle has no host.*\n.*test_export.py:"),
        (lambda x: x.double() + 1, r"float64.*target browser"),
        (lambda x: x.new_zeros(1 << 27) + x[0, 0], "does not fit into a buffer of the target"),
        (lambda x: x if x.sum() > 0 else -x, r"torch.cond.*\n.*test_export.py:.*if x.sum"),
        (
            lambda x: torch.unique(x, dim=0),
            r"unique_dim.*a bundle has no host.*\n.*test_export.py:",
        ),
        (lambda x: trained_by_a_branch(x.requires_grad_()), "cond: a bundle has no gradients"),
    ],
)
def test_what_a_browser_cannot_run_is_refused(function, text, tmp_path):
    with pytest.raises(UnsupportedOp, match=text):
        export(function, (torch.randn(4, 4),), tmp_path / "b")
    assert not (tmp_path / "b").exists()
