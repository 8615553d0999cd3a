"""Replays find the first pass that differs, and no difference where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.targets import TARGETS
from tests.replay import __main__ as command
from tests.replay import package, sources
from tests.replay.cases import program
from tests.replay.compare import first_difference
from tests.replay.recorder import Recorder
from tests.replay.recording import Recording
from tests.replay.sources import ASKING, PACKAGE, ROOT, ReplayError, Tree
from tests.replay.workers import record
from torch_webgpu_compile import compiler

FIELDS = {name: command.fields_of(target) for name, target in TARGETS.items()}


def recorded(name: str) -> Recording:
    return Recorder(package, FIELDS).record(program(name))


def stages_that_differ(before: Recording, after: Recording) -> list[str]:
    found = (first_difference(before, after, target) for target in FIELDS)
    return ["" if difference is None else difference.stage for difference in found]


@pytest.mark.parametrize("name", TARGETS)
def test_other_trees_are_told_the_whole_target(name: str) -> None:
    fields = json.loads(json.dumps(FIELDS[name]))
    assert package.target_of(fields) == TARGETS[name]


def test_the_first_pass_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recorded("golden/sibling_linears")
    assert stages_that_differ(before, recorded("golden/sibling_linears")) == [""] * len(FIELDS)
    idle = [
        replace(step, run=lambda value, state: value) if step.name == "join_siblings" else step
        for step in compiler.PASSES
    ]
    monkeypatch.setattr(compiler, "PASSES", tuple(idle))
    after = recorded("golden/sibling_linears")
    on_large = ["lavapipe", "nvidia", "dawn"]  # elsewhere siblings do not share a kernel
    assert stages_that_differ(before, after) == ["join_siblings"] * len(on_large) + ["", ""]
    comparison = command.Comparison(list(FIELDS))
    ((difference, where),) = comparison.add(before, after)
    assert where == on_large
    assert any(line.startswith("-group 0: siblings") for line in difference.shown(100))
    assert comparison.summary()[-1].endswith(" differ, 3 in their plans")
    assert "1 → 2" in "\n".join(comparison.summary())


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([{"ir": "a", "wgsl": "b"}], [{"ir": "a", "tilings": "c", "wgsl": "b"}], None),
        ([{"ir": "a", "fuse": None}], [{"ir": "a", "fuse": "d"}], (0, "fuse")),
        ([{"ir": "a"}], [{"ir": "a", "fuse": None}, {"ir": "e"}], (1, "")),
        ([{"ir": "a"}, {"ir": "e"}], [{"ir": "a"}], (1, "")),
        ([{"fx": "f", "ir": "a"}], [{"fx": "f", "error": "E: no"}], (0, "error")),
        ([{"fx": "f", "error": "E: no"}], [{"fx": "f", "error": "E: other"}], (0, "error")),
        ([{"hidden": "a", "ir": "b"}], [{"hidden": "c", "ir": "b"}], None),
    ],
)
def test_first_differences(before: Any, after: Any, wanted: Any) -> None:
    """A stage without a text has the one before it; one that a tree lacks is not compared."""
    recordings = Recording(), Recording()
    for recording, graphs in zip(recordings, (before, after), strict=True):
        for stages in graphs:
            recording.add("t", stages, {})
    kept = [Recording.loads(recording.dumps()) for recording in recordings]
    found = first_difference(*kept, "t", ["hidden"])
    assert (found and (found.graph, found.stage)) == wanted


@pytest.mark.rotates(4)
@pytest.mark.slow
def test_processes_and_trees_do_not_matter_and_changes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of a tree is what is asked, and orders of hashes leave no trace."""
    root = tmp_path / "other"
    shutil.copytree(ROOT / PACKAGE, root / PACKAGE)
    changed = root / PACKAGE / "templates/fourier.wgsl.jinja"
    changed.write_text(changed.read_text() + "\n// changed\n")
    names = ["golden/attention_over_a_cache", "golden/windowed_fourier_transform"]
    trees = Tree("this", ROOT, ROOT / ASKING, True), Tree("other", root, ROOT / ASKING, False)
    found, targets = [], json.dumps({"dawn": FIELDS["dawn"]})
    for number, tree in enumerate(trees):
        monkeypatch.setenv("PYTHONHASHSEED", str(number))
        folder, done = tmp_path / tree.label, list[str]()
        folder.mkdir(exist_ok=True)
        ended = record(tree, [*names, "none/ends the process"], folder, targets, 1, done.append)
        assert done == [*names, *ended]
        assert ended == ["none/ends the process"]
        contents = [(folder / sources.file_name(name)).read_bytes() for name in done]
        found.append(list(map(Recording.loads, contents)))
    differences = [first_difference(*pair, "dawn") for pair in zip(*found, strict=True)]
    assert [d and d.stage for d in differences] == [None, "wgsl", None]


def test_a_package_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    tree = Tree("1234 Old", tmp_path, ROOT / ASKING, False)
    with pytest.raises(ReplayError, match=r"1234 Old: .* asked by this tree's .*No module"):
        record(tree, ["golden/softmax"], tmp_path, "{}", 1, lambda name: None)


def test_recordings_are_kept_by_what_they_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / PACKAGE / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    asked: list[str] = []

    def fake(tree: Tree, names: Sequence[str], folder: Path, *rest: Any) -> None:
        asked.extend(names)
        for name in names:
            (folder / sources.file_name(name)).touch()

    monkeypatch.setattr(command, "record", fake)
    tree = Tree("a tree", tmp_path, ROOT / ASKING, True)
    options = SimpleNamespace(fresh=False, processes=1)

    def recorded_now(*names: str, targets: str = "{}") -> list[str]:
        asked.clear()
        command.recorded(tree, names, targets, options)
        return list(asked)

    assert recorded_now("a/x") == ["a/x"]
    assert recorded_now("a/x", "a/y") == ["a/y"]
    (source.parent / "a.pyc").write_text("compiled")
    assert recorded_now("a/x", "a/y") == []
    assert recorded_now("a/x", targets='{"dawn": {}}') == ["a/x"]
    source.write_text("2")
    assert recorded_now("a/x") == ["a/x"]
    source.write_text("1")
    assert recorded_now("a/x") == []
    monkeypatch.setattr(sources, "KEPT", 1)
    recorded_now("a/x", targets='{"phone": {}}')
    assert len(list(sources.cache_folder().iterdir())) == 1
