"""The files of bundles: writing them, and refusing those that are not what they should be."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bundle_schema import schema
from tests.bundles import FORWARD, KERNELS, WEIGHTS, edit, export_sample
from tests.plan_mutations import altered
from torch_webgpu_compile import BundleError, export
from torch_webgpu_compile.bundle.files import BundleWriter, TensorBytes, write_tensors
from torch_webgpu_compile.bundle.manifest import CHUNK_NBYTES, FORMAT, VERSION, Manifest
from torch_webgpu_compile.bundle.tensors import read_header
from torch_webgpu_compile.bundle.verify import open_bundle, read_manifest
from torch_webgpu_compile.plan.model import FIRST_CHECK

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "bundle.schema.json"
EMPTY = Manifest(FORMAT, VERSION, "empty", "a test", CHUNK_NBYTES, {}, ())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "bundle"
    export_sample(folder)
    return folder


@pytest.fixture
def bundle(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


# ---- writing


def bytes_of(dtype: str, array: Any) -> TensorBytes:
    return TensorBytes(dtype, np.shape(array), np.frombuffer(np.asarray(array).tobytes(), "u1"))


def test_what_is_written_is_read(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    narrow = torch.randn(5).bfloat16()
    tensors = {
        "rows": bytes_of("float32", rows),
        "zeros": bytes_of("int64", np.zeros(2, np.int64)),
        "minus_zero": bytes_of("float32", np.float32(-0.0)),
        "narrow": bytes_of("bfloat16", narrow.view(torch.int16).numpy()),
        "empty": bytes_of("float32", np.zeros((0, 3), np.float32)),
        "large": bytes_of("uint8", np.arange(2000).astype(np.uint8)),
    }
    with BundleWriter(tmp_path / "b", shard_nbytes=1000) as writer:
        where = writer.add_tensors("weights/w", tensors)
        writer.add("a/text.json", "ä")
        manifest = writer.finish(EMPTY)
    assert where["zeros"] == where["empty"] == (None, 0)
    shards = [name for name in manifest.files if name.startswith("weights/")]
    assert shards == [f"weights/w-{k:05}.safetensors" for k in (1, 2)]
    assert manifest.files[shards[0]].nbytes <= 1000 < manifest.files[shards[1]].nbytes
    found = {}
    for shard in shards:
        found |= safetensors.torch.load_file(tmp_path / "b" / shard)
    assert found.keys() == {"rows", "minus_zero", "narrow", "large"}
    assert torch.equal(found["narrow"], narrow)
    assert found["rows"].tolist() == rows.tolist()
    for name, tensor in found.items():
        file, offset = where[name]
        content = (tmp_path / "b" / file).read_bytes()
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert content[offset : offset + len(data)] == data
    for name, file in manifest.files.items():
        content = (tmp_path / "b" / name).read_bytes()
        assert file.sha256 == hashlib.sha256(content).hexdigest() == file.chunks[0]
        assert (file.nbytes, len(file.chunks)) == (len(content), 1)
    for name in ("a/text.json", "manifest.json"):
        compressed = (tmp_path / "b" / f"{name}.gz").read_bytes()
        assert gzip.decompress(compressed) == (tmp_path / "b" / name).read_bytes()
    with BundleWriter(tmp_path / "b") as writer:
        writer.finish(EMPTY)
    left = sorted(path.name for path in (tmp_path / "b").rglob("*"))
    assert left == ["manifest.json", "manifest.json.gz"]


def test_what_lies_beside_a_bundle_is_of_its_version(tmp_path):
    """The manifest does not list it; the next bundle has its own, or none."""
    with BundleWriter(tmp_path) as writer:
        manifest = writer.finish(EMPTY, {"torch-webgpu.js": b"old", "bundle.d.ts": b"old"})
    assert manifest.files == {}
    with BundleWriter(tmp_path) as writer:
        writer.finish(EMPTY, {"torch-webgpu.js": b"new"})
    found = {path.name for path in tmp_path.iterdir()} - {"manifest.json", "manifest.json.gz"}
    assert found == {"torch-webgpu.js", "torch-webgpu.js.gz"}
    assert gzip.decompress((tmp_path / "torch-webgpu.js.gz").read_bytes()) == b"new"


@pytest.mark.skipif(os.name != "posix", reason="files have no modes")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_of_new_files(umask, tmp_path):
    tensors = {"ones": bytes_of("float32", np.ones(3, np.float32))}
    before = os.umask(umask)
    try:
        with BundleWriter(tmp_path / "b") as writer:
            writer.add_tensors("weights/w", tensors)
            writer.add("a.json", "{}")
            writer.finish(EMPTY)
        left = tmp_path / "left.safetensors"
        left.touch(0o600)
        write_tensors(left, tensors)
    finally:
        os.umask(before)
    files = [path for path in (left, *(tmp_path / "b").rglob("*")) if path.is_file()]
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


def test_chunks_of_a_file(tmp_path):
    data = np.random.default_rng(0).bytes(2 * CHUNK_NBYTES + 5)
    with BundleWriter(tmp_path) as writer:
        writer.add("data.json", data)
        (file,) = writer.finish(EMPTY).files.values()
    parts = [data[:CHUNK_NBYTES], data[CHUNK_NBYTES:-5], data[-5:]]
    assert list(file.chunks) == [hashlib.sha256(part).hexdigest() for part in parts]
    assert file.sha256 == hashlib.sha256(data).hexdigest()


def test_a_bundle_is_replaced_when_the_next_one_is_whole(exported, bundle):
    (bundle / "index.html").write_text("somebody else's")
    before = read_manifest(bundle)
    with suppress(KeyboardInterrupt), BundleWriter(bundle) as writer:
        writer.add("plans/new.json", "{}")
        raise KeyboardInterrupt
    assert not (bundle / ".writing").exists()
    assert read_manifest(bundle) == before
    writer = BundleWriter(bundle)  # is killed: nothing cleans up
    writer.add("plans/new.json", "{}")
    assert read_manifest(bundle) == before
    with BundleWriter(bundle) as writer:
        writer.add("new.json", "{}")
        writer.finish(EMPTY)
    found = {str(p.relative_to(bundle)) for p in bundle.rglob("*")}
    assert found == {"index.html", "manifest.json", "new.json", "manifest.json.gz", "new.json.gz"}


def test_an_interrupted_bundle_is_none_and_can_be_written_again(tmp_path, monkeypatch):
    folder = tmp_path / "b"
    writer = BundleWriter(folder)
    writer.add("a.json", "{}")
    with pytest.raises(BundleError, match="there is no bundle here"):
        read_manifest(folder)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.finish(EMPTY)
    with pytest.raises(BundleError, match="there is no bundle here"):
        read_manifest(folder)
    BundleWriter(folder).finish(EMPTY)
    assert json.loads((folder / "manifest.json").read_text())["format"] == FORMAT


@pytest.mark.parametrize("content", [None, "{}", "no JSON", '{"format": "another"}'])
def test_a_folder_with_something_else_is_left_alone(tmp_path, content):
    (tmp_path / "thesis.tex").write_text("years of work")
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(BundleError, match="not empty"):
        BundleWriter(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a\\b", "c:a", "https://a/b", ".a", "a//b", "a..b"]
)
def test_names_that_are_none(tmp_path, name):
    with BundleWriter(tmp_path / "b") as writer:
        for wrong in (f"{name}.json", "manifest.json", "a.html"):
            with pytest.raises(BundleError, match="may be named"):
                writer.add(wrong, b"")
    assert not (tmp_path / "b").exists()


def test_wrong_tensors(tmp_path):
    with BundleWriter(tmp_path) as writer:
        with pytest.raises(BundleError, match=r"x, float32 \(3,\), has 8 bytes, not 12"):
            writer.add_tensors("w", {"x": TensorBytes("float32", (3,), np.ones(8, np.uint8))})
        writer.add("a.json", b"")
        with pytest.raises(BundleError, match="two files"):
            writer.add("a.json", b"")


# ---- reading


def test_an_exported_bundle_is_verified(exported):
    manifest = read_manifest(exported)
    (variant,) = manifest.variants
    assert variant.entries.keys() == {"forward", "learn", "remember", "exchange", "decide", "draw"}
    states = {name for name, state in variant.state.items() if state.changes}
    assert states == {"seen", "weight", "cache", "first", "second"}


def flip(name: str, place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)

    return change


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def as_pipe(folder: Path) -> None:
    (folder / FORWARD).unlink()
    os.mkfifo(folder / FORWARD)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "no bundle here"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no bundle here"),
    "manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff{"), "no manifest"),
    "list": (lambda f: (f / "manifest.json").write_text("[]"), "no manifest"),
    "deep": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "no manifest"),
    "plan": (flip(FORWARD, 200), "SHA-256"),
    "kernels": (flip(KERNELS, 100), "SHA-256"),
    "missing": (lambda f: (f / WEIGHTS).unlink(), "cannot be read"),
    "cut": (cut, "the manifest says"),
    "pipe": (as_pipe, "no file"),
    "header": (flip(WEIGHTS, 6), "no safetensors"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files(bundle, name):
    damage, cause = DAMAGES[name]
    if name == "pipe" and sys.platform == "win32":
        pytest.skip("there are none")
    damage(bundle)
    with pytest.raises(BundleError, match=cause) as caught:
        read_manifest(bundle)
    assert str(bundle) in caught.value.file
    assert caught.value.next_step in str(caught.value)


def test_damaged_weights_are_found_as_they_are_read(bundle):
    flip(WEIGHTS, -1)(bundle)
    reader = open_bundle(bundle)
    with pytest.raises(BundleError, match=rf"{re.escape(WEIGHTS)}.*SHA-256"):
        list(reader.pieces(WEIGHTS))


def entry(m: Any, name: str = "forward") -> Any:
    return m["variants"][0]["entries"][name]


def state(m: Any, name: str) -> Any:
    return m["variants"][0]["state"][name]


def put(place: Any, **values: Any) -> None:
    place.update(values)


def listed_as(name: str) -> Callable[[Any, Any], None]:
    def change(m: Any, f: Any) -> None:
        m["files"][name] = m["files"].pop(FORWARD)
        entry(m)["plan"] = name

    return change


def twice(m: Any, f: Any) -> None:
    m["variants"] *= 2


HOST_STEP = {
    "HostStep": {
        "target": "aten.x",
        "outputs": [],
        "arguments": [],
        "keywords": [],
        "source": "",
        "changed": [],
        "numbers": [],
        "on_device": False,
    },
}
STARVED = {"input": None, "state": None, "seeds": None}

# What is changed in the manifest m or in the files f, and what the error has to say.
HOSTILE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # the manifest
    "format": (lambda m, f: put(m, format="x"), "format is 'x'"),
    "version": (lambda m, f: put(m, version=VERSION + 1), f"version {VERSION + 1} of the format"),
    "field": (lambda m, f: m.pop("name"), "Manifest.name is missing"),
    "unknown field": (lambda m, f: put(m, more=1), "has no .*more"),
    "type": (lambda m, f: put(state(m, "seen"), sizes="x"), "list expected"),
    "no variants": (lambda m, f: put(m, variants=[]), "no variants"),
    "two variants": (twice, "two variants"),
    "no entries": (lambda m, f: put(m["variants"][0], entries={}), "no entries"),
    "feature": (lambda m, f: put(m["variants"][0], features=["x"]), r"not known: \['x'\]"),
    "limit": (lambda m, f: put(m["variants"][0], limits={"maxX": 1}), "not known"),
    "limit of 0": (lambda m, f: put(m["variants"][0], limits={"maxBufferSize": 0}), "the limits"),
    # files
    "chunks of 0": (lambda m, f: put(m, chunk_nbytes=0), "chunks of 0"),
    "chunks of 6": (lambda m, f: put(m, chunk_nbytes=6), "chunks of 6"),
    "missing chunk": (lambda m, f: m["files"][WEIGHTS]["chunks"].pop(), "0 chunks, not 1"),
    "more chunks": (lambda m, f: m["files"][WEIGHTS]["chunks"].append("0" * 64), "2 chunks"),
    "no hash": (lambda m, f: put(m["files"][WEIGHTS], sha256="0" * 63), "no SHA-256"),
    "length": (lambda m, f: put(m["files"][WEIGHTS], nbytes=5), "the manifest says 5"),
    "negative length": (lambda m, f: put(m["files"][WEIGHTS], nbytes=-1), "-1 bytes"),
    **{
        f"file {name}": (listed_as(name), "can be named")
        for name in ("../x.json", "/etc/passwd", "a\\b.json", "https://x/y.json", "manifest.json")
    },
    "plan that is not listed": (lambda m, f: m["files"].pop(FORWARD), "lists no file 'plans/"),
    "kernels that are not listed": (lambda m, f: m["files"].pop(KERNELS), "lists no file 'kern"),
    "weights that are not listed": (lambda m, f: m["files"].pop(WEIGHTS), "lists no file 'weig"),
    # state
    "state before the data": (lambda m, f: put(state(m, "weight"), offset=8), "lies outside"),
    "state behind the end": (lambda m, f: put(state(m, "weight"), offset=1 << 40), "lies outside"),
    "state in JSON": (lambda m, f: put(state(m, "weight"), file=KERNELS), "no safetensors"),
    "offset of nothing": (lambda m, f: put(state(m, "seen"), offset=4), "offset and no file"),
    "negative size": (lambda m, f: put(state(m, "weight"), sizes=[-8, -8]), "has the sizes"),
    "huge size": (lambda m, f: put(state(m, "cache"), sizes=[1 << 62, 1 << 62]), "has the sizes"),
    "state of other sizes": (lambda m, f: put(state(m, "cache"), sizes=[6, 9]), "argument 2 is"),
    "state of another dtype": (lambda m, f: put(state(m, "seen"), dtype="int32"), "argument 1 is"),
    "state that stays": (lambda m, f: put(state(m, "seen"), changes=False), "does not change"),
    # entries
    "argument of nothing": (lambda m, f: put(entry(m)["arguments"][0], **STARVED), "not one"),
    "argument of two": (lambda m, f: put(entry(m)["arguments"][0], seeds=3), "not one"),
    "unknown input": (lambda m, f: put(entry(m)["arguments"][0], input="x"), "the input 'x'"),
    "unknown state": (lambda m, f: put(entry(m)["arguments"][1], state="x"), "the state 'x'"),
    "state twice": (lambda m, f: put(entry(m)["arguments"][2], state="weight"), "one state is two"),
    "fewer arguments": (lambda m, f: entry(m)["arguments"].pop(), "takes 5 arguments"),
    "seeds": (lambda m, f: put(entry(m, "draw")["arguments"][1], seeds=3), "argument 1 is"),
    "sizes from the number of a check": (lambda m, f: grid(f), "do not follow"),
    "many seeds": (lambda m, f: put(entry(m, "draw")["arguments"][1], seeds=1 << 40), "draws"),
    "input of another dtype": (lambda m, f: put(entry(m)["inputs"]["ids"], dtype="int32"), "int32"),
    "input of a free size": (lambda m, f: put(entry(m), sizes={}), "a size that no input gives"),
    "size of nothing": (lambda m, f: put(size(m), input="x"), "of an input 'x'"),
    "size of no dimension": (lambda m, f: put(size(m), dim=1), "of dimension 1"),
    "size below its bound": (lambda m, f: put(size(m), low=1), r"lies in 1 … 40"),
    "size without values": (lambda m, f: put(size(m), high=1), r"lies in 2 … 1"),
    "size without end": (lambda m, f: put(size(m), high=1 << 40), "lies in 2"),
    "result without a plan's": (lambda m, f: put(result(m), output=9), "no output for mixed"),
    "result of nothing": (lambda m, f: put(result(m), output=None), "not one thing"),
    "result of another dtype": (lambda m, f: put(result(m)["tensor"], dtype="int32"), "result mix"),
    "result of other sizes": (lambda m, f: put(result(m)["tensor"], sizes=[1]), "result mixed is"),
    "result of a state": (lambda m, f: put(result(m), output=None, state="seen"), "another tensor"),
    "structure": (lambda m, f: put(entry(m), structure="{"), "structure is no JSON"),
    "structure of nothing": (lambda m, f: put(entry(m), structure='{"result": "x"}'), "result 'x'"),
    "deep structure": (lambda m, f: put(entry(m), structure="[" * 80 + "]" * 80), "too deeply"),
    # plans
    "no plan": (lambda m, f: put(f, **{FORWARD: []}), "no plan"),
    "plan of another version": (lambda m, f: put(f[FORWARD], version=1), "version 1"),
    "no module": (lambda m, f: put(f[FORWARD]["kernels"][0], wgsl=99), "wgsl"),
    "negative module": (lambda m, f: put(f[FORWARD]["kernels"][0], wgsl=-1), "wgsl"),
    "no number": (lambda m, f: put(f[FORWARD]["kernels"][0], wgsl="fn main() {}"), "wgsl"),
    "another module": (lambda m, f: f[KERNELS].reverse(), "plan"),
    "modules": (lambda m, f: put(f, **{KERNELS: {"0": ""}}), "list of texts"),
    "host step": (lambda m, f: f[FORWARD]["steps"].append(HOST_STEP), "on the host"),
    "a buffer that is none": (lambda m, f: binding(f, buffer="x"), "no buffer x"),
    "binding behind the end": (lambda m, f: binding(f, offset_nbytes=1 << 20), "bound beyond"),
    "input that changes": (lambda m, f: put(changed(f), mutates=0), "changes argument 0"),
    "columns": (lambda m, f: plan(f, "learn")["buffers"]["in1"].update(strides=[1, 8]), "in rows"),
    "preparation of inputs": (lambda m, f: swap(m, "weight", "gradient"), "more than state"),
    "division by zero": (lambda m, f: put(result(m)["tensor"], sizes=[DIVISION, 8]), "positive"),
    # composed plans
    "no such plan": (lambda m, f: put(step(f, "Run"), plan=99), "no plan 99"),
    "a name before it is there": (lambda m, f: step(f, "Run")["arguments"].append("%z"), "%z"),
    "a name twice": (
        lambda m, f: plan(f, "decide")["steps"].append(NUMBER),
        "two values are named",
    ),
    "a number as a tensor": (lambda m, f: plan(f, "decide")["steps"].extend(READS), "is no tensor"),
    "host step in a nested plan": (lambda m, f: nested(f)["steps"].append(HOST_STEP), "host"),
    "dispatch between plans": (lambda m, f: hoist(f), "dispatch"),
    "nested too deeply": (lambda m, f: nest(f), "nested too deeply"),
    "a size from nowhere": (lambda m, f: put(nested(f)["inputs"][0], buffer=None), "do not fit"),
    "an input's size from data": (
        lambda m, f: put(entry(m, "decide")["inputs"]["x"], sizes=[None, 8]),
        "that data decide",
    ),
}


def nested(files: Any) -> Any:
    """The first plan that the composed one runs."""
    return plan(files, "decide")["plans"][0]


def step(files: Any, kind: str) -> Any:
    """The first step of this kind in the composed plan."""
    return next(s[kind] for s in plan(files, "decide")["steps"] if kind in s)


def hoist(files: Any) -> None:
    made = next(s for p in plan(files, "decide")["plans"] for s in p["steps"] if "Dispatch" in s)
    plan(files, "decide")["steps"].append(made)


def nest(files: Any) -> None:
    made = copy.deepcopy(plan(files, "decide"))
    for _ in range(60):
        made = {**made, "plans": [made]}
    plan(files, "decide").update(made)


READS = [
    {"Compute": {"name": "one", "value": {"float": 1.0}}},
    {"ReadNumber": {"buffer": "one", "name": "two"}},
]
NUMBER = {"Compute": {"name": "%arg0", "value": {"float": 1.0}}}
DIVISION = {"c": 0, "t": [[1, ["//", 1, 0]]]}


def size(m: Any) -> Any:
    (found,) = entry(m)["sizes"].values()
    return found


def result(m: Any) -> Any:
    return entry(m)["results"]["mixed"]


def plan(f: Any, name: str = "forward") -> Any:
    return f[f"plans/float32-{name}.json"]


def binding(f: Any, **values: Any) -> None:
    put(plan(f)["steps"][0]["Dispatch"]["bindings"][0], **values)


def grid(f: Any) -> None:
    checked = next(s["Dispatch"] for s in plan(f)["steps"] if s["Dispatch"]["checks"])
    checked["grid"][0] = {"c": 0, "t": [[1, [FIRST_CHECK.name, 0]]]}


def changed(f: Any) -> Any:
    return next(output for output in plan(f)["outputs"] if output["mutates"] is not None)


def swap(m: Any, old: str, new: str) -> None:
    """Makes an input of a state of the entry."""
    (argument,) = (a for a in entry(m)["arguments"] if a["state"] == old)
    put(argument, state=None, input=new)
    entry(m)["inputs"][new] = {"dtype": "float32", "sizes": [8, 8]}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles(bundle, name):
    change, cause = HOSTILE[name]
    edit(bundle, change)
    with pytest.raises(BundleError, match=cause):
        read_manifest(bundle)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(chance=st.randoms(use_true_random=False), changes=st.integers(1, 3))
def test_whatever_a_bundle_holds_the_error_says_so(exported, tmp_path, chance, changes):
    """Random changes of the JSON, behind the hashes."""
    folder = tmp_path / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(exported, folder)

    def change(manifest: Any, files: Any) -> None:
        for _ in range(changes):
            name = chance.choice([*files, "", "", ""])
            with suppress(RecursionError):  # of a copy of what an earlier change has nested
                made = altered(files[name] if name else manifest, chance)
                if name:
                    files[name] = made
                else:
                    manifest.clear()
                    manifest.update(made)

    edit(folder, change)
    with suppress(BundleError):
        read_manifest(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}}",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}',
        b"[" * 100_000,
    ],
)
def test_damaged_headers_of_tensors(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BundleError, match="header is damaged"):
        read_header(path)


# ---- the schema


def test_the_schema_is_that_of_the_dataclasses(update_golden):
    text = json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
    if update_golden:
        SCHEMA.write_text(text, encoding="utf-8")
    assert text == SCHEMA.read_text(encoding="utf-8"), "pytest tests/unit --update-golden"


def errors_of(value: Any, form: Any, whole: Any, place: str = "$") -> list[str]:
    """Where a value breaks a JSON schema, of the words that ours has."""
    if "$ref" in form:
        return errors_of(value, whole["$defs"][form["$ref"].rpartition("/")[2]], whole, place)
    if "anyOf" in form:
        found = [errors_of(value, part, whole, place) for part in form["anyOf"]]
        return [] if [] in found else [f"{place}: none of the forms"]
    if "const" in form:
        return [] if value == form["const"] else [f"{place}: {value!r}"]
    if "enum" in form:
        return [] if value in form["enum"] else [f"{place}: {value!r}"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kinds["number"] = float
    if type(value) is not kinds.get(form["type"], type(None)):
        return [f"{place}: no {form['type']}"]
    found = []
    if isinstance(value, dict):
        named, others = form.get("properties", {}), form["additionalProperties"]
        found += [
            f"{place}.{name}: missing" for name in form.get("required", []) if name not in value
        ]
        for name, item in value.items():
            part = named.get(name, others)
            inner = errors_of(item, part, whole, f"{place}.{name}") if part else ["unknown"]
            found += [f"{place}.{name}: {each}" for each in inner]
    if isinstance(value, list):
        first = form.get("prefixItems", [])
        if len(value) < len(first) or (len(value) > len(first) and form["items"] is False):
            return [f"{place}: {len(value)} items"]
        for k, item in enumerate(value):
            found += errors_of(item, first[k] if k < len(first) else form["items"], whole, place)
    return found


def test_manifests_follow_the_schema(bundle):
    text = (bundle / "manifest.json").read_text()
    assert errors_of(json.loads(text), schema(), schema()) == []
    for change in (
        lambda m: m.pop("name"),
        lambda m: put(m, more=1),
        lambda m: put(m, version=2),
        lambda m: put(size(m), low="2"),
        lambda m: put(state(m, "seen"), kind="x"),
        lambda m: put(result(m)["tensor"], sizes=[{"c": 0, "t": [[1, ["**", 1, 2]]]}]),
    ):
        manifest = json.loads(text)
        change(manifest)
        assert errors_of(manifest, schema(), schema())


def test_a_manifest_that_says_how_weights_are_packed(tmp_path):
    model, path = torch.nn.Linear(64, 64), tmp_path / "manifest.json"
    export(model, (torch.zeros(1, 64),), tmp_path, weights="int4")
    manifest = json.loads(path.read_text())
    assert errors_of(manifest, schema(), schema()) == []
    assert read_manifest(tmp_path).weights.states["weight"].sizes == (64, 64)
    for change in (
        lambda m: put(m["weights"], error="small"),
        lambda m: put(m["weights"], states={"bias2": m["weights"]["states"]["weight"]}),
        lambda m: m["weights"].pop("group"),
    ):
        changed = json.loads(json.dumps(manifest))
        change(changed)
        path.write_text(json.dumps(changed))
        with pytest.raises(BundleError):
            read_manifest(tmp_path)


def test_reading_needs_neither_torch_nor_jinja(exported):
    """Nor sympy, which comes with torch."""
    program = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jinja2", "sympy"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import torch_webgpu_compile.bundle.load, torch_webgpu_compile.bundle.files
from torch_webgpu_compile.bundle.verify import read_manifest
print(len(read_manifest({str(exported)!r}).variants[0].entries))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("6\n", "")
