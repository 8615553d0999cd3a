"""Bundles that were tampered with are refused, with what is wrong, before anything is allocated."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from torch_webgpu_compile.errors import BundleError
from torch_webgpu_compile.web.export import export
from torch_webgpu_compile.web.files import BundleFiles, BundleWriter
from torch_webgpu_compile.web.schema import schema
from torch_webgpu_compile.web.verify import read_kernels, read_plan, verify_manifest

SCHEMA = Path(__file__).parents[2] / "docs" / "bundle.schema.json"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A training step, so that states change, and a prediction of any batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    folder = tmp_path_factory.mktemp("bundle") / "b"
    return export(
        {
            "step": (step, (torch.randn(5, 3),)),
            "predict": (model, (torch.randn(5, 3),), None, ({0: Dim("batch", max=9)},)),
        },
        folder,
    )


def read(folder: Path) -> None:
    """Everything that loading does before it needs a GPU."""
    files = BundleFiles(folder)
    verify_manifest(files.manifest)
    for variant in files.manifest.variants:
        modules = read_kernels(files, variant)
        for name in variant.entries:
            read_plan(files, variant, name, modules)
        for state in variant.state.values():
            if state.file is not None:
                list(files.chunks(state.file))


def tampered(bundle: Path, folder: Path, change) -> Path:
    """The bundle with another manifest; other files are links."""
    folder.mkdir()
    for path in bundle.iterdir():
        if path.name != "manifest.json":
            (folder / path.name).symlink_to(path)
    data = json.loads((bundle / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    return folder


def test_a_bundle_is_read(bundle):
    read(bundle)


def variant(data):
    return data["variants"][0]


def weights(data):
    return next(name for name in data["files"] if name.endswith(".safetensors"))


CHANGES = {
    "is of no bundle": lambda d: d.update(format="zip"),
    "version 2": lambda d: d.update(version=2),
    "chunks of 3 bytes": lambda d: d.update(chunk_nbytes=3),
    "there are no variants": lambda d: d.update(variants=[]),
    "is no path inside": lambda d: d["files"].update({"../x.json": d["files"][weights(d)]}),
    "has no SHA-256": lambda d: d["files"][weights(d)].update(sha256="0"),
    "0 chunks": lambda d: d["files"][weights(d)].update(chunks=[]),
    "SHA-256; copy": lambda d: d["files"][weights(d)].update(chunks=["0" * 64]),
    "the manifest says": lambda d: d["files"][weights(d)].update(nbytes=4000),
    "not among the files": lambda d: variant(d).update(kernels="kernels/other.json"),
    "the features": lambda d: variant(d).update(features=["ray-tracing"]),
    "the limits": lambda d: variant(d).update(limits={"maxSeats": 4}),
    "the sizes of": lambda d: variant(d)["state"]["0.weight"].update(sizes=[-1]),
    "bytes": lambda d: variant(d)["state"]["0.weight"].update(sizes=[1 << 31, 1 << 31]),
    "outside of its file": lambda d: variant(d)["state"]["0.weight"].update(offset=1 << 20),
    "no dimension of an input": lambda d: next(
        iter(variant(d)["entries"]["predict"]["sizes"].values())
    ).update(dim=1),
    "not one thing": lambda d: variant(d)["entries"]["step"]["arguments"][0].update(seeds=1),
    "argument 0": lambda d: variant(d)["entries"]["step"]["arguments"][0].update(input="y"),
    "other arguments": lambda d: variant(d)["entries"]["step"]["arguments"].pop(),
    "argument 1 has another dtype or size": lambda d: variant(d)["state"]["0.weight"].update(
        sizes=[12]
    ),
    "what is no state": lambda d: variant(d)["state"]["0.weight"].update(changes=False),
    "structure is no JSON": lambda d: variant(d)["entries"]["step"].update(structure="["),
    "is no output": lambda d: variant(d)["entries"]["predict"]["results"]["output"].update(
        output=3
    ),
    "Manifest.name is missing": lambda d: d.pop("name"),
}


@pytest.mark.parametrize("text", CHANGES)
def test_what_is_tampered_with_is_refused(text, bundle, tmp_path):
    folder = tampered(bundle, tmp_path / "b", CHANGES[text])
    with pytest.raises(BundleError, match=text):
        read(folder)


def places(data, path=()):
    """The paths of all values in nested lists and dictionaries."""
    yield path
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


WRONG = st.none() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_other_value_is_harmless(bundle, tmp_path_factory, data):
    found = json.loads((bundle / "manifest.json").read_text())
    path = data.draw(st.sampled_from(list(places(found))))
    wrong = data.draw(WRONG)

    def change(manifest):
        if not path:
            manifest.clear()
            return
        target = manifest
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = wrong

    folder = tampered(bundle, tmp_path_factory.mktemp("t") / "b", change)
    with contextlib.suppress(BundleError):  # or it is a bundle still, as with another name
        read(folder)


def test_plans_are_verified(bundle, tmp_path):
    files = BundleFiles(bundle)
    (chosen,) = files.manifest.variants
    modules = read_kernels(files, chosen)
    with pytest.raises(BundleError, match="a kernel has no module"):
        read_plan(files, chosen, "step", modules[:0])
    with pytest.raises(BundleError, match="other bindings"):
        read_plan(files, chosen, "step", [text.replace("read_write", "read") for text in modules])


def test_no_folder_is_lost(bundle, tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(BundleError, match="holds something else"):
        BundleWriter(tmp_path)
    with pytest.raises(BundleError, match="is no bundle"):
        BundleFiles(tmp_path)
    with BundleWriter(tmp_path / "new") as writer:
        writer.add("plans/a.json", b"{}")  # and is never finished
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


def test_the_schema_is_that_of_the_dataclasses(request):
    text = json.dumps(schema(), indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "run this test with --update-golden"
