"""The cache folder that nobody asked for: where it is, what is in it, how large it becomes."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.compilations import compile_function
from torch_webgpu_compile import options
from torch_webgpu_compile.__main__ import main
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan import stored_entries
from torch_webgpu_compile.plan.cache_folder import CacheFolder

ROOT = Path(__file__).parents[2]
TAIL = Path("torch_webgpu_compile", "plans")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The default folder of a user without variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("TORCH_WEBGPU_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    plan_cache.clear()
    yield Path(options.resolve().cache)
    plan_cache.clear()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "HOME/.cache"),
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "HOME/.cache"),
        ("linux", {"LOCALAPPDATA": "/elsewhere"}, "HOME/.cache"),
        ("darwin", {"XDG_CACHE_HOME": "/elsewhere"}, "HOME/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/elsewhere"}, "/elsewhere"),
        ("win32", {}, "HOME/AppData/Local"),
    ],
)
def test_the_default_folder(folder, tmp_path, platform, variables, expected):
    found = options.default_cache(variables, platform)
    assert Path(found) == Path(expected.replace("HOME", str(tmp_path))) / TAIL


def test_other_folders_and_none(folder):
    assert options.from_environment({}).cache == str(folder)
    assert options.from_environment({"TORCH_WEBGPU_CACHE": "0"}).cache is None
    assert options.from_environment({"TORCH_WEBGPU_CACHE": "/x"}).cache == "/x"
    assert options.resolve(options={"cache": 0}, environment={}).cache is None


@pytest.mark.skipif(os.name != "posix", reason="POSIX has users")
def test_no_folder_without_a_home_of_ones_own(folder, tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert (options.default_cache() is None) == (owner != 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert options.default_cache() == str(folder)
    for home in ("relative", str(tmp_path / "absent")):
        monkeypatch.setenv("HOME", home)
        assert options.default_cache() is None


def plan():
    return compile_function(lambda x: x + 1, torch.ones(3)).plan


def key_of(number):
    return hashlib.sha256(bytes([number])).hexdigest()


@pytest.mark.parametrize("kind", ["file", "open"])
def test_a_default_folder_that_is_no_use_is_silently_none(kind, folder):
    folder.parent.mkdir(parents=True)
    if kind == "file":
        folder.write_text("")
    elif os.name == "posix":
        folder.mkdir()
        folder.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_cache.store(key_of(0), plan(), str(folder))
        plan_cache.clear()
        assert plan_cache.load(key_of(0), str(folder), lambda _: None) is None


def strangers(folder):
    """Files that are not plans of the cache, and a link that has the name of one."""
    measured = folder / "machines" / "adapter"
    measured.parent.mkdir()
    unfinished = f"{key_of(9)}.plan.abcdefgh.tmp"
    files = [measured, *(folder / name for name in ("notes.txt", "a.plan", unfinished))]
    for file in files:
        file.write_bytes(bytes(1000))
    link = folder / f"{key_of(10)}.plan"
    link.symlink_to(files[1])
    os.utime(link, (0, 0), follow_symlinks=False)
    return [*files, link]


def test_plans_used_longest_ago_are_removed(folder, monkeypatch):
    entries = CacheFolder(folder)
    kinds = itertools.cycle(stored_entries.KINDS)
    names = [stored_entries.file_name(key_of(k), next(kinds)) for k in range(10)]
    for number, name in enumerate(names):
        assert entries.write(name, key_of(number), bytes(1000))
        os.utime(folder / name, (number + 1, number + 1))
    kept = strangers(folder) if os.name == "posix" else []
    abandoned = folder / f"{key_of(0)}.plan.12345678.tmp"
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    assert entries.read(names[0], key_of(0))  # now it is the one used last
    size = (folder / names[0]).stat().st_size
    monkeypatch.setattr(stored_entries, "MAX_NBYTES", 8 * size)
    monkeypatch.setattr(stored_entries, "_KEPT_NBYTES", 3 * size)
    stored_entries.prune(str(folder))
    left = {Path(each.path).name for each in stored_entries.stored_entries(str(folder))}
    assert left == {names[0], names[8], names[9]}
    assert all(path.exists() for path in kept)
    assert not abandoned.exists()


def test_pruning_is_rare(folder, monkeypatch):
    pruned = []
    monkeypatch.setattr(stored_entries, "prune", pruned.append)
    monkeypatch.setattr(stored_entries, "_written", {})
    small = plan()
    for number in range(3):
        plan_cache.store(key_of(number), small, str(folder))
    assert len(pruned) == 1
    os.utime(folder / ".pruned", (0, 0))
    plan_cache.store(key_of(3), small, str(folder))
    assert len(pruned) == 2
    monkeypatch.setattr(stored_entries, "_PRUNE_NBYTES", 10)
    plan_cache.store(key_of(4), small, str(folder))
    assert len(pruned) == 3


def test_the_command(folder, capsys, monkeypatch):
    assert main(["cache"]) == 0
    assert f"{folder}\n" in (printed := capsys.readouterr().out)
    assert " 0 compiled plans, 0 bytes" in printed
    for number in range(2):
        plan_cache.store(key_of(number), plan(), str(folder))
    CacheFolder(folder).write(f"{key_of(0)}.dawn", key_of(0), bytes(1000))
    (folder / "notes.txt").write_text("")
    assert main(["cache"]) == 0
    printed = capsys.readouterr().out
    assert " 2 compiled plans" in printed
    assert re.search(r" 1 kernels.*, 1,\d\d\d bytes", printed)
    assert main(["cache", "--clear"]) == 0
    printed = capsys.readouterr().out
    assert " 3 files" in printed
    assert re.search(r" 0 compiled plans.* 0 kernels", printed, re.DOTALL)
    assert (folder / "notes.txt").exists()
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    assert main(["cache", "--clear"]) == 0
    assert "no cache folder" in capsys.readouterr().out


PROGRAM = """
import torch
from tests.compilations import compile_function
from torch_webgpu_compile import counters
from torch_webgpu_compile.compiler import compile_graph
from torch_webgpu_compile.options import resolve
state = compile_function(lambda x: x.softmax(-1), torch.ones(3, 4))
found = compile_graph(state.captured, state.phase, state.target, resolve())
print(counters.plan_cache_hits, found.plan == state.plan)
"""


@pytest.mark.rotates(3)
def test_a_second_process_finds_its_plan(folder):
    environment = {**os.environ, "TORCH_WEBGPU_CACHE": ""}  # as unset
    command = [sys.executable, "-c", PROGRAM]
    found = [
        subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert found == [["0", "True"], ["1", "True"]]
    kinds = [entry.kind for entry in stored_entries.stored_entries(str(folder))]
    assert sorted(kinds) == ["graph", "plan"] + ["template"] * (len(kinds) - 2)


@pytest.mark.parametrize("edited", ["plan/cache.py", "templates/a.wgsl.jinja"])
def test_an_edit_makes_other_keys(edited, tmp_path, monkeypatch):
    for name in ("__init__.py", "plan/cache.py", "templates/a.wgsl.jinja", "plan/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(plan_cache, "__file__", str(tmp_path / "plan" / "cache.py"))
    digest = plan_cache.installation_digest.__wrapped__
    before = digest()
    (tmp_path / "plan" / "notes.txt").write_text("23")
    assert digest() == before
    time.sleep(0.02)  # some file systems have times of 10 ms
    (tmp_path / edited).write_text("2")
    assert digest() != before


def test_plans_with_large_constants_stay_in_memory(folder):
    large = replace(plan(), constants={"c": bytes((16 << 20) + 1)})
    plan_cache.store(key_of(0), large, str(folder))
    assert not list(folder.glob("*.plan"))
    assert plan_cache.load(key_of(0), str(folder), lambda _: None) is large


def test_entries_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used is found by another installation with the same sources, and by no other."""
    here, there, made = str(tmp_path / "here"), str(tmp_path / "there"), plan()
    plan_cache.store("graph", made, here)
    entries = {key: data for key, data in plan_cache.used_entries() if key == "graph.plan"}
    plan_cache.clear()
    monkeypatch.setattr(plan_cache, "installation_digest", lambda: "another folder")
    plan_cache.take_entry("graph.plan", b"other sources\n" + entries["graph.plan"], there)
    assert plan_cache.load("graph", there, lambda _: None) is None
    plan_cache.take_entry("graph.plan", entries["graph.plan"], there)
    assert plan_cache.load("graph", there, lambda _: None) == made
