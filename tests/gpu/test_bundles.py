"""Bundles in Python: state that entries share, what calls take and give, and bundles that lie."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bundles import FORWARD, WEIGHTS, edit, export_sample
from tests.plan_mutations import altered
from torch_webgpu_compile import (
    AdapterError,
    BundleError,
    InputError,
    WebGPUCompileError,
    counters,
    load_bundle,
)
from torch_webgpu_compile.bundle.verify import read_manifest

IDS = torch.tensor([1, 5, 11, 0])
CALLS = {
    "forward": {"ids": IDS.numpy()},
    "learn": {"gradient": np.ones((8, 8), np.float32)},
    "remember": {"row": np.ones((1, 8), np.float32), "position": [2]},
    "exchange": {"x": np.arange(8, dtype=np.float32)},
    "decide": {"x": np.arange(-8, 8, dtype=np.float32).reshape(2, 8) / 2},
    "draw": {"shape": np.zeros(5, np.float32)},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a bundle, and the state of the model that it is of."""
    folder = tmp_path_factory.mktemp("exported") / "bundle"
    return folder, export_sample(folder)


@pytest.fixture
def model(exported):
    before = {name: value.clone() for name, value in exported[1].state_dict().items()}
    yield exported[1]
    exported[1].load_state_dict(before)


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported[0], tmp_path / "bundle"))


def close(got, wanted, **tolerances):
    torch.testing.assert_close(torch.from_numpy(got), wanted, **tolerances)


@torch.no_grad()
def test_entries_share_their_state(folder, model):
    bundle = load_bundle(folder)

    def check_forward() -> int:
        before = counters.dispatches
        got, wanted = bundle.run("forward", CALLS["forward"]), model(IDS)
        close(got["mixed"], wanted["mixed"])
        close(got["columns"], wanted["columns"])
        close(got["half"], wanted["half"].float(), atol=1e-2, rtol=1e-2)
        return counters.dispatches - before

    first, again = check_forward(), check_forward()
    assert again < first  # the softmax of the weight is prepared once
    gradient = torch.randn(8, 8)
    close(bundle.run("learn", gradient=gradient.numpy())["output"], model.learn(gradient))
    assert check_forward() == first
    weight = torch.randn(8, 8)
    model.weight.copy_(weight)
    bundle.set_state("weight", weight.numpy())
    assert (check_forward(), check_forward()) == (first, again)
    for position in (2, 5, 2):
        row = torch.randn(1, 8)
        got = bundle.run("remember", row=row.numpy(), position=[position])["output"]
        close(got, model.remember(row, torch.tensor([position])))
    for _ in range(3):
        x = torch.randn(8)
        got, wanted = bundle.run("exchange", x=x.numpy()), model.exchange(x)
        close(got["0"], wanted[0])
        close(got["1"], x)
    for name, value in model.state_dict().items():
        close(bundle.state(name), value.float() if name == "narrow" else value)


def test_two_states_of_one_result(folder):
    """Our compiler gives each its own memory; other ones need not."""

    def change(manifest, files):
        plan = files["plans/float32-exchange.json"]
        first, second = (output for output in plan["outputs"] if output["mutates"] is not None)
        plan["buffers"][second["buffer"]]["role"] = "intermediate"
        second["buffer"] = first["buffer"]

    edit(folder, change)
    bundle = load_bundle(folder)
    bundle.run("exchange", CALLS["exchange"])
    wanted = np.arange(8).cumsum() * 2 + np.arange(1, 9)
    np.testing.assert_allclose(bundle.state("first"), wanted)
    bundle.set_state("first", np.zeros(8))
    np.testing.assert_allclose(bundle.state("second"), wanted)


@torch.no_grad()
def test_data_decide(folder, model):
    bundle = load_bundle(folder)
    for sign in (1, -1):
        x = torch.from_numpy(CALLS["decide"]["x"]) * sign
        got, wanted = bundle.run("decide", x=x.numpy()), model.decide(x)
        for name, value in wanted.items():
            close(got[name], value)
    assert bundle.state("seen") == model.seen == 2
    with pytest.raises(InputError, match=r"decide: .* is not 0"):
        bundle.run("decide", x=np.full((2, 8), 9, np.float32))
    assert bundle.state("seen") == 2


@pytest.mark.usefixtures("kept_garbage")
def test_state_stays_on_the_gpu(folder):
    bundle = load_bundle(folder)
    for name, inputs in CALLS.items():
        for _ in range(3):
            bundle.run(name, inputs)
    device = bundle.device
    before = counters.bytes_uploaded, counters.bytes_downloaded, device.pool.stats()
    for _ in range(4):
        bundle.run("learn", CALLS["learn"])
        bundle.run("exchange", CALLS["exchange"])
    assert counters.bytes_uploaded - before[0] == 4 * (256 + 32)
    assert counters.bytes_downloaded - before[1] == 4 * (256 + 32)
    assert device.pool.stats()["allocated"] == before[2]["allocated"]
    assert device.pool.stats()["reserved"] == before[2]["reserved"]


def test_random_numbers_of_a_seed(folder):
    """They are those of the device with this seed: `docs/bundle.md` says which."""
    bundle = load_bundle(folder, seed=5)
    first, second = (bundle.run("draw", CALLS["draw"])["output"] for _ in range(2))
    assert not np.array_equal(first, second)
    bundle.manual_seed(5 - (1 << 64))  # 64 bits of it count
    np.testing.assert_array_equal(bundle.run("draw", CALLS["draw"])["output"], first)
    assert not np.array_equal(load_bundle(folder).run("draw", CALLS["draw"])["output"], first)


def test_threads(folder):
    bundle = load_bundle(folder)
    wanted = bundle.run("forward", CALLS["forward"])["mixed"]

    def call(k: int) -> bool:
        count = 2 + k % 3
        got = bundle.run("forward", ids=IDS[:count].numpy())["mixed"]
        return bool(np.allclose(got, wanted[:count]))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(32)))
    assert bundle.state("seen") == 33


# ---- files of states


def test_states_are_saved_and_loaded(folder, model, tmp_path):
    bundle, path = load_bundle(folder), tmp_path / "saved.safetensors"
    bundle.run("learn", CALLS["learn"])
    bundle.save(path)
    saved = load_file(path)
    assert saved.keys() == model.state_dict().keys()
    assert {name: value.dtype for name, value in saved.items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    model.load_state_dict(saved)
    close(bundle.state("weight"), model.weight.detach())
    other = load_bundle(folder)
    other.load_state(path)
    for name in saved:
        np.testing.assert_array_equal(other.state(name), bundle.state(name))
    bundle.save(path, kinds=["buffer"])
    assert "weight" not in load_file(path)
    assert "cache" in load_file(path)
    assert [p.name for p in tmp_path.glob("saved*")] == ["saved.safetensors"]


def test_states_of_another_precision(folder, tmp_path):
    bundle, path = load_bundle(folder), tmp_path / "x.safetensors"
    narrow, weight = torch.randn(8), torch.randn(8, 8).half()
    save_file({"narrow": narrow, "weight": weight}, path)
    bundle.load_state(path)
    close(bundle.state("narrow"), narrow.bfloat16().float())
    close(bundle.state("weight"), weight.float())


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"other": torch.ones(1)}, "no state"),
        ({"weight": torch.ones(8, 9)}, r"weight \(8, 9\) is float32 \(8, 8\)"),
        ({"seen": torch.ones(())}, "is float32, and has to be int64"),
        ({"narrow": torch.full((8,), 1e300, dtype=torch.float64)}, "too large for bfloat16"),
    ],
)
def test_states_of_another_model(folder, tmp_path, tensors, text):
    bundle, path = load_bundle(folder), tmp_path / "x.safetensors"
    save_file({"cache": torch.ones(6, 8)} | tensors, path)
    with pytest.raises(InputError, match=text):
        bundle.load_state(path)
    assert not bundle.state("cache").any()
    path.write_bytes(b"no tensors")
    with pytest.raises(BundleError, match="no safetensors"):
        bundle.load_state(path)


# ---- what is given


def test_values_that_fit(folder):
    bundle = load_bundle(folder)
    wanted = bundle.run("forward", CALLS["forward"])["mixed"]
    ids = IDS.numpy()
    for value in (
        ids.tolist(),
        IDS,
        ids.astype(np.uint8),
        ids.astype(">i4"),
        np.stack([ids] * 2, 1)[:, 0],
    ):
        np.testing.assert_array_equal(bundle.run("forward", ids=value)["mixed"], wanted)
    bundle.set_state("narrow", [1 + 2**-8, 1 + 3 * 2**-8, 3e38, np.inf, np.nan, -0.0, 2**-133, 7])
    got = bundle.state("narrow")
    wanted = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3e38, np.inf, np.nan, -0.0, 2**-133, 7])
    close(got, wanted.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"ids": [1.5, 2]}, r"forward: the input ids is float64, and has to be int64.*\(n,\)"),
        ({"ids": np.array([1, 1 << 63], np.uint64)}, "not all in the range of int64"),
        ({"ids": ["a", "b"]}, "has to be int64"),
        ({"ids": [[1], [1, 2]]}, "the input ids is of list, which is no array"),
        ({"ids": [1]}, r"ids has the sizes \(1,\), not \(n,\) with n in 2 … 40"),
        ({"ids": np.zeros(41, int)}, "in 2 … 40"),
        ({"ids": [[1, 2]]}, r"sizes \(1, 2\), not \(n,\)"),
        ({"id": [1, 2]}, r"has no input 'id'; it takes ids: int64 \(n,\)"),
        ({}, "needs the input 'ids'"),
    ],
)
def test_values_that_do_not_fit(exported, inputs, text):
    bundle = load_bundle(exported[0])
    with pytest.raises(InputError, match=text):
        bundle.run("forward", inputs)


def test_numbers_that_are_too_large(exported):
    bundle = load_bundle(exported[0])
    with pytest.raises(InputError, match="too large for float32"):
        bundle.run("draw", shape=np.full(5, 1e39))
    bundle.run("draw", shape=np.full(5, np.inf))
    with pytest.raises(InputError, match="too large for bfloat16"):
        bundle.set_state("narrow", np.full(8, 3.4e38))
    with pytest.raises(InputError, match=r"sizes \(8,\), the value \(7,\)"):
        bundle.set_state("narrow", np.zeros(7))
    for call in (bundle.state, lambda name: bundle.set_state(name, 1), bundle.run):
        with pytest.raises(InputError, match="there are"):
            call("nothing")


# ---- which GPU, and what is not to be trusted


def test_the_first_variant_that_the_gpu_can_run(folder):
    def another(manifest, files):
        manifest["variants"].insert(0, manifest["variants"][0] | {"name": "large"})
        manifest["variants"][0]["limits"] = {"maxBufferSize": 1 << 52}

    edit(folder, another)
    assert load_bundle(folder).variant.name == "float32"
    with pytest.raises(AdapterError, match="large needs maxBufferSize"):
        load_bundle(folder, variant="large")
    with pytest.raises(InputError, match="no variant 'x'; there are large, float32"):
        load_bundle(folder, variant="x")


def test_damaged_weights(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(BundleError, match=r"safetensors.*SHA-256"):
        load_bundle(folder)


def test_kernels_of_strangers_are_checked(folder):
    """They may be any WGSL: unless told that the bundle is ours, drivers keep their bounds."""
    assert load_bundle(folder).device.checked
    assert not load_bundle(folder, trusted=True).device.checked


def test_a_plan_that_lies_about_sizes(folder):
    def change(manifest, files):
        output = files[FORWARD]["outputs"][0]
        output["strides"] = [{"c": -100, "t": [[1, output["sizes"][0]["t"][0][1]]]}, 1]

    edit(folder, change)
    with pytest.raises(BundleError, match=r"strides \(-96, 1\) from 0 on for the result mixed"):
        load_bundle(folder).run("forward", CALLS["forward"])


@pytest.mark.rotates(4)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_plan_says_is_harmless(folder, exported, seed):
    """Plans that were changed at random and that verification accepts, run."""
    chance = random.Random(seed)
    ran = 0
    while ran < 4:
        shutil.copytree(exported[0], folder, dirs_exist_ok=True)

        def change(manifest, files):
            name = chance.choice([name for name in files if name.startswith("plans/")])
            files[name] = altered(files[name], chance)

        edit(folder, change)
        try:
            read_manifest(folder)
        except BundleError:
            continue
        ran += 1
        try:
            bundle = load_bundle(folder)
            for name, inputs in CALLS.items():
                bundle.run(name, inputs)
        except WebGPUCompileError:
            pass
