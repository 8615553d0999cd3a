"""Targets as files, and what a GPU lacks for a plan that was made for another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_webgpu_compile.bundle.target_file import load_target, save_target
from torch_webgpu_compile.bundle.targets import lacks_for, target_of
from torch_webgpu_compile.errors import OptionError
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan.model import Plan
from torch_webgpu_compile.target import Machine, Target

TARGET = Target(
    name="a GPU",
    features=frozenset({"shader-f16", "subgroup"}),
    subgroup_sizes=(32, 32),
    subgroup_matrix_configs=(("f16", "f32", 16, 16, 16),),
    machine=Machine(multiprocessors=7),
)
PLAN = Plan("plan", (), {}, (), (), ())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    save_target(TARGET, file)
    assert load_target(file) == target_of(file) == TARGET
    assert target_of("browser").name == "browser"
    assert resolve(None, {"target": file}).target == str(file)
    assert resolve(None, {"target": TARGET}).target is TARGET


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *owners, last = path.split(".")
    for owner in owners:
        data = data[owner]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("format", "webgpu-plan", "no file of a target"),
        ("package", "0.0.1", "written by torch-webgpu-compile 0.0.1"),
        ("more", 1, "other entries"),
        ("target.speed", 1, "speed"),
        ("target.max_grid", "many", "max_grid"),
        ("target.max_grid", -1, "max_grid is not possible"),
        ("target.machine.flops_per_second", "nan", "flops_per_second is not possible"),
    ],
)
def test_other_files_are_refused(path: str, value: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    save_target(TARGET, file)
    data = json.loads(file.read_text())
    _set(data, path, value)
    file.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=told):
        load_target(file)


@pytest.mark.parametrize("content", [None, b"", b"\xff{", b"[" * 9999])
def test_no_json_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match="doctor --save-target"):
        target_of(str(file))


def test_what_a_gpu_lacks() -> None:
    assert lacks_for(PLAN, TARGET, replace(TARGET, name="another", machine=Machine())) == []
    plain = replace(TARGET, features=frozenset(), subgroup_sizes=(0, 0), subgroup_matrix_configs=())
    assert lacks_for(PLAN, plain, TARGET) == []
    assert lacks_for(PLAN, TARGET, plain) == [
        *("shader-f16", "subgroup", "subgroups of 32", "the same matrix units"),
    ]
    for field in ("exp_keeps_nan", "keeps_subnormal_halves"):
        has, has_not = (replace(TARGET, **{field: value}) for value in (True, False))
        assert lacks_for(PLAN, has, has_not) == [field]
        assert not lacks_for(PLAN, has_not, has)
    ends = replace(TARGET, max_loop_iterations=65535)
    assert lacks_for(PLAN, TARGET, ends)
    assert not lacks_for(PLAN, ends, ends)
