"""Plans on disk: an entry that is not what was stored is refused, whatever is wrong with it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.compilations import TARGET, compile_function
from tests.plan_mutations import altered, damaged, without_program
from torch_webgpu_compile.codegen.tilings.matmul import MatmulTiling
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan import cache_folder, serialize
from torch_webgpu_compile.plan.cache_folder import CacheFolder, CacheWarning
from torch_webgpu_compile.plan.model import Dispatch, HostStep
from torch_webgpu_compile.plan.verify import verify_plan
from torch_webgpu_compile.planner.match import verify_match
from torch_webgpu_compile.symbolic.sizes import as_symbol
from torch_webgpu_compile.tuning import autotune

KEY = hashlib.sha256(b"key").hexdigest()
OTHER_KEY = hashlib.sha256(b"other").hexdigest()
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX has pipes and modes")
as_user = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere"
)


@pytest.fixture(autouse=True)
def each_warns_again(monkeypatch):
    monkeypatch.setattr(cache_folder, "_warned", set())
    plan_cache.clear()
    yield
    plan_cache.clear()


def mixed(x, w):
    """Several kernels, of which some share memory, and a constant."""
    y = torch.softmax(x @ w, -1) + torch.tensor([0.5, 1.5, 2.5])
    return torch.cumsum(y @ y.t(), 0).sort(-1).values, y.sum(0), 3


ARGUMENTS = torch.randn(6, 4), torch.randn(4, 3)


def on_host(x):
    return torch.linalg.eigvalsh(x @ x.t()) + 1


@pytest.fixture(scope="module")
def state():
    return compile_function(mixed, *ARGUMENTS)


@pytest.fixture(scope="module")
def host_state():
    silent = CompileOptions(fallback="silent")
    return compile_function(on_host, torch.randn(5, 3), options=silent)


def read(folder, state, key=KEY):
    plan_cache.clear()
    return plan_cache.load(key, str(folder), lambda plan: verify_match(plan, state.graph))


def store(folder, state, key=KEY):
    plan_cache.store(key, state.plan, str(folder))
    (path,) = folder.glob(f"{plan_cache.installed(key)}*")
    return path


def test_what_is_stored_comes_back(tmp_path, state):
    store(tmp_path, state)
    assert read(tmp_path, state) == state.plan


def test_an_entry_has_its_key_and_its_checksum(tmp_path, state):
    path = store(tmp_path, state)
    path.rename(path.with_name(path.name.replace(*map(plan_cache.installed, (KEY, OTHER_KEY)))))
    assert read(tmp_path, state, OTHER_KEY) is None
    store(tmp_path, state, OTHER_KEY)  # takes the place of what is wrong
    assert read(tmp_path, state, OTHER_KEY) == state.plan


def test_damaged_bytes_are_refused(tmp_path, state):
    path = store(tmp_path, state)
    entry = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        changed = damaged(entry, chance)
        path.write_bytes(changed)
        assert read(tmp_path, state) == (state.plan if changed == entry else None)


def write_altered(folder: Path, data: object) -> None:
    content = json.dumps(data).encode()
    key = plan_cache.installed(KEY)
    CacheFolder(folder).write(f"{key}.plan", key, content)


@pytest.mark.parametrize("which", ["state", "host_state"])
def test_altered_plans_are_refused_or_right(which, tmp_path, request, caplog):
    state = request.getfixturevalue(which)
    data = serialize.to_json(state.plan)
    write_altered(tmp_path, data)
    assert read(tmp_path, state) == state.plan
    chance, refused = random.Random(0), 0
    for _ in range(200):
        write_altered(tmp_path, altered(data, chance))
        found = read(tmp_path, state)
        refused += found is None
        if found is not None:
            assert without_program(found) == without_program(state.plan)
    assert refused > 100


def change(data, path, value):
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    assert holder[path[-1]] != value
    holder[path[-1]] = value


def verified(data, graph):
    plan = serialize.from_json(data)
    verify_plan(plan)
    verify_match(plan, graph)


def number_of(plan, kind):
    return next(k for k, step in enumerate(plan.steps) if isinstance(step, kind))


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        ("intermediate", "nbytes", 4),
        ("intermediate", "sizes", [1 << 40]),
        ("intermediate", "dtype", "float16"),
        ("intermediate", "role", "input"),
        ("intermediate", "role", "executable"),
        ("output", "role", "intermediate"),
        ("constant", "role", "intermediate"),
        ("constant", "offset", 1),
        ("output", "name", "another"),
        ("output", "slot", 0),
        ("output", "strides", [1, 6]),
        ("input", "sizes", [6, 5]),
    ],
)
def test_buffers_are_verified(role, field, value, state):
    data = serialize.to_json(state.plan)
    name = next(name for name, buffer in state.plan.buffers.items() if buffer.role == role)
    change(data, ("buffers", name, field), value)
    with pytest.raises((VerificationError, serialize.PlanFormatError)):
        verified(data, state.graph)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bindings", []),
        ("grid", [65_536, 1, 1]),
        ("grid", [-1, 1, 1]),
        ("grid", [1.5, 1, 1]),
        ("kernel", 99),
        ("kernel", -1),
        ("kernel", True),
        ("parameters", [{"Expr": 1 << 31}]),
        ("grid", [{"c": 0, "t": [[1, ["s0", 2]]]}, 1, 1]),
        ("checks", [{"op": "aten.gather.default", "source": "", "dim": 0}]),
    ],
)
def test_dispatches_are_verified(field, value, state):
    data = serialize.to_json(state.plan)
    number = number_of(state.plan, Dispatch)
    change(data, ("steps", number, "Dispatch", field), value)
    with pytest.raises((VerificationError, serialize.PlanFormatError)):
        verify_plan(serialize.from_json(data))


def test_a_size_symbol_has_one_lower_bound():
    plan = compile_function(lambda x: x + 1, torch.randn(6, 4), dynamic=True).plan
    text = serialize.dumps(plan)
    verify_plan(serialize.loads(text))
    (size, *_) = next(b.sizes for b in plan.buffers.values() if b.role == "input")
    symbol = as_symbol(size)
    stored = json.dumps([symbol.name, symbol.lower]).encode()
    other = json.dumps([symbol.name, symbol.lower + 1]).encode()
    with pytest.raises(VerificationError):
        verify_plan(serialize.loads(text.replace(stored, other, 1)))


def test_windows_are_inside_their_buffers(state):
    data = serialize.to_json(state.plan)
    first = data["steps"][0]["Dispatch"]["bindings"][0]
    for offset, nbytes in ((256, None), (-256, None), (0, 1 << 20), (8, None)):
        first |= {"offset_nbytes": offset, "nbytes": nbytes}
        with pytest.raises(VerificationError, match="beyond"):
            verify_plan(serialize.from_json(data))


def test_memory_is_written_before_it_is_read(state):
    data = serialize.to_json(state.plan)
    data["steps"].reverse()
    with pytest.raises(VerificationError, match="before it is written"):
        verify_plan(serialize.from_json(data))


def test_slots_hold_one_value_at_a_time():
    state = compile_function(lambda x: (x @ x) @ (x @ x.t()), torch.randn(8, 8))
    data = serialize.to_json(state.plan)
    verify_plan(serialize.from_json(data))
    for buffer in data["buffers"].values():
        buffer["slot"] = 0 if buffer["slot"] is not None else None
    with pytest.raises(VerificationError, match="in one place at one time"):
        verify_plan(serialize.from_json(data))


def test_views_are_inside_their_buffers(state):
    data = serialize.to_json(state.plan)
    data["outputs"][0]["offset"] = 1
    with pytest.raises(VerificationError, match="more than"):
        verify_plan(serialize.from_json(data))


@pytest.mark.parametrize("target", ["aten.from_file.default", "aten.eigvals.default", "x"])
def test_the_host_runs_what_the_graph_has(target, tmp_path, host_state):
    number = number_of(host_state.plan, HostStep)
    data = serialize.to_json(host_state.plan)
    write_altered(tmp_path, data)
    assert read(tmp_path, host_state) == host_state.plan
    change(data, ("steps", number, "HostStep", "target"), target)
    write_altered(tmp_path, data)
    assert read(tmp_path, host_state) is None


def test_the_host_gets_the_arguments_of_the_graph(tmp_path, host_state):
    data = serialize.to_json(host_state.plan)
    step = data["steps"][number_of(host_state.plan, HostStep)]["HostStep"]
    step["arguments"].append("'/etc/passwd")
    write_altered(tmp_path, data)
    assert read(tmp_path, host_state) is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": "webgpu-plan", "name": ' * 900])
def test_text_that_is_nested_deeply_is_refused(text):
    with pytest.raises(serialize.PlanFormatError):
        serialize.loads(text)


def test_expressions_are_bounded(state):
    data = serialize.to_json(state.plan)
    one = [[1, [f"s{k}", 1]] for k in range(30)]
    factor = ["//", {"c": 1, "t": one}, {"c": 1, "t": []}]
    data["inputs"][0]["size"] = {"c": 0, "t": [[1, *[factor] * 30]]}
    start = time.process_time()
    with pytest.raises(serialize.PlanFormatError, match="terms"):
        serialize.from_json(data)
    assert time.process_time() - start < 20  # 30 to the power of 30 without a bound


# ---- the folder


def fill(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to(path.with_name("nothing"))


@posix
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling"])
def test_other_things_in_place_of_an_entry(kind, tmp_path, state):
    fill(tmp_path / f"{plan_cache.installed(KEY)}.plan", kind)
    found = []
    thread = threading.Thread(target=lambda: found.append(read(tmp_path, state)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [None]
    if kind == "folder":
        with pytest.warns(CacheWarning, match=r"[Ii]s a directory"):
            store(tmp_path, state)
    else:
        store(tmp_path, state)
        assert read(tmp_path, state) == state.plan


def test_size_is_bounded(tmp_path, state, monkeypatch):
    path = store(tmp_path, state)
    monkeypatch.setattr(cache_folder, "_MAX_NBYTES", path.stat().st_size - 1)
    assert read(tmp_path, state) is None
    path.unlink()
    CacheFolder(tmp_path).write(path.name, plan_cache.installed(KEY), bytes(1 << 20))
    assert not path.exists()


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["mkstemp", "replace", "mkdir"])
def test_a_full_disk_is_a_warning_once(call, tmp_path, state, monkeypatch):
    module = {
        "mkstemp": cache_folder.tempfile,
        "replace": cache_folder.os,
        "mkdir": cache_folder.Path,
    }[call]
    folder = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(module, call, full)
        with pytest.warns(CacheWarning, match="No space left on device"):
            plan_cache.store(KEY, state.plan, str(folder))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan_cache.store(OTHER_KEY, state.plan, str(folder))
    assert not folder.exists() or not list(folder.iterdir())
    store(folder, state)  # there is room again
    assert read(folder, state) == state.plan


def test_a_file_in_place_of_the_folder(tmp_path, state):
    folder = tmp_path / "file"
    folder.write_text("")
    for place in (folder, folder / "inside"):
        assert read(place, state) is None
        with pytest.warns(CacheWarning, match=str(place)):
            plan_cache.store(KEY, state.plan, str(place))


def test_no_path_at_all(state):
    assert read("a\0b", state) is None
    with pytest.warns(CacheWarning):
        plan_cache.store(KEY, state.plan, "a\0b")


@as_user
def test_a_folder_that_cannot_be_written(tmp_path, state):
    tmp_path.chmod(0o500)
    with pytest.warns(CacheWarning, match="Permission denied"):
        plan_cache.store(KEY, state.plan, str(tmp_path))


@posix
def test_a_folder_that_others_may_write_to(tmp_path, state):
    path = store(tmp_path, state)
    tmp_path.chmod(0o777)
    with pytest.warns(CacheWarning, match="every user may write"):
        assert read(tmp_path, state) is None
    path.unlink()
    plan_cache.store(KEY, state.plan, str(tmp_path))
    assert not path.exists()
    tmp_path.chmod(0o755)
    store(tmp_path, state)
    assert read(tmp_path, state) == state.plan


@posix
def test_a_folder_of_another_user(tmp_path, state, monkeypatch):
    store(tmp_path, state)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    if os.stat(tmp_path).st_uid:  # what root owns, root may change anyway
        with pytest.warns(CacheWarning, match="belongs to user"):
            assert read(tmp_path, state) is None


@posix
def test_a_new_folder_is_private(tmp_path, state):
    store(tmp_path / "a" / "b", state)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


# ---- tables of tilings

TILING = MatmulTiling(32, 32, 16, 4, 4, True, 8)


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"strips": 2}, True),
        ({"rows": 1 << 20}, False),
        ({"rows": 0}, False),
        ({"unroll": 7}, False),
        ({"strips": -1}, False),
        ({"double_buffer": 1}, False),
        ({"rows": "32"}, False),
        ({"inner": 16.0}, False),
    ],
)
def test_tables_hold_tilings_that_could_be_measured(change, is_used, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_measured", {})
    target = replace(TARGET, name="Some GPU", max_workgroup_nbytes=1 << 16)
    key = "32-bit 1x8x8x8 inner inner"
    fields = {name: getattr(TILING, name) for name in TILING.__slots__} | change
    content = json.dumps({key: fields}).encode()
    autotune._tables_in(str(tmp_path)).write("some-gpu-vulkan.json", target.identity, content)
    assert (key in autotune.known_tilings(target, str(tmp_path))) == is_used
    autotune._measured.clear()
    narrow = replace(target, max_workgroup_invocations=32)
    assert key not in autotune.known_tilings(narrow, str(tmp_path))


UNITS_TILING = UnitsTiling(Unit(16, 16, 16), "f16", 32, 128, 128, 32, 2, 2)


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"factor": "bf16"}, True),
        ({"inner": 64}, True),
        ({"inner": 48}, False),
        ({"factor": "f64"}, False),
        ({"lanes": 16}, False),
        ({"drained": 0}, False),
        ({"unit": {"m": 16, "n": 16, "k": 0}}, False),
        ({"unit": None}, False),
    ],
)
def test_tables_hold_tilings_of_the_matrix_units(change, is_used, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_measured", {})
    config = UNITS_TILING.config
    target = replace(
        TARGET,
        name="Some GPU",
        features=frozenset({"subgroup"}),
        subgroup_sizes=(32, 32),
        subgroup_matrix_configs=(config,),
    )
    key = "32-bit 1x512x512x512 inner inner f16 in units"
    content = json.dumps({key: asdict(UNITS_TILING) | change}).encode()
    autotune._tables_in(str(tmp_path)).write("some-gpu-vulkan.json", target.identity, content)
    known = autotune.known_tilings(target, str(tmp_path))
    assert (key in known) == is_used
    if not change:
        assert known[key] == UNITS_TILING
    autotune._measured.clear()
    without = replace(target, subgroup_matrix_configs=())
    assert key not in autotune.known_tilings(without, str(tmp_path))
