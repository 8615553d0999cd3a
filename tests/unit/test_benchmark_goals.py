"""Goals of the benchmark suites, their report, and a runner that survives its workers."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import compile_cases, compile_worker, eager, generate, report, training
from benchmarks.__main__ import resume
from benchmarks.cases import CASES
from benchmarks.convolution_cases import layers
from benchmarks.eager_cases import MODELS, ROWS
from benchmarks.eager_worker import fingerprint
from benchmarks.goals import (
    AtLeast,
    AtMost,
    AtMostShare,
    CopyShare,
    Faster,
    FlopRate,
    Goal,
    Leaner,
    Work,
    judge,
)
from benchmarks.kernel_counts import counts
from benchmarks.random_weights import with_cheap_weights
from benchmarks.runner import SYSTEMS, WORK, Runner, Settings
from benchmarks.suites import SUITES, rows_of
from benchmarks.targets import TARGETS
from torch_webgpu_compile.options import default_cache

LIMITS = {"copy_bytes_per_second": 4e12}
OURS = {"seconds": 2e-3, "gpu_s": 1e-3, "relative_difference": 1e-6, "gpu_nbytes": 110}


def verdict(goal: Goal, results: dict[str, Any], work: Work = Work(), cuda: bool = True) -> Any:  # noqa: B008
    return judge(goal, {"webgpu": OURS} | results, LIMITS, work, cuda)


@pytest.mark.parametrize(
    ("goal", "others", "work", "value", "reached"),
    [
        # A kernel's time is the least of both clocks, on both sides.
        (Faster("inductor", 1.1, "Inductor"), {"seconds": 1.2e-3}, Work(), 1.2, True),
        (Faster("inductor", 1.1, "I"), {"seconds": 1.2e-3, "gpu_s": 1e-3}, Work(), 1.0, False),
        (Faster("inductor", 1.1, "I", "stream"), {"seconds": 1.2e-3}, Work(), 0.6, False),
        (CopyShare(0.97), {}, Work(nbytes=4_000_000_000), 1.0, True),
        (CopyShare(0.97), {}, Work(nbytes=3_800_000_000), 0.95, False),
        (FlopRate(40e12), {}, Work(flops=41_000_000_000), 41e12, True),
        (AtMost("seconds", 2500, "µs"), {}, Work(), 2000, True),
        (AtLeast("gpu_nbytes", 100, "B"), {}, Work(), 110, True),
        (AtLeast("gpu_nbytes", 111, "B"), {}, Work(), 110, False),
        (AtMost("gpu_nbytes", 109), {}, Work(), 110, False),
        (Leaner("inductor", 1.1, "it"), {"gpu_nbytes": 100}, Work(), 1.1, True),
        (Leaner("inductor", 1.1, "it"), {"gpu_nbytes": 90}, Work(), 110 / 90, False),
        (AtMostShare("seconds", 0.5, "cold"), {"seconds": 4e-3}, Work(), 0.5, True),
        (AtMostShare("seconds", 0.5, "cold"), {"seconds": 3.9e-3}, Work(), 20 / 39, False),
    ],
)
def test_judge(goal: Goal, others: Any, work: Work, value: float, reached: bool) -> None:
    found = verdict(goal, {"inductor": others}, work)
    assert found.value == pytest.approx(value)
    assert found.reached is reached
    assert (found.share >= 1 - 1e-9) is reached


def test_weights_are_the_work_of_a_case_that_names_none() -> None:
    found = verdict(CopyShare(0.5), {"webgpu": OURS | {"weights_nbytes": 2_400_000_000}})
    assert found.value == pytest.approx(0.6)


def test_peers_without_cuda_give_a_ratio_and_no_answer() -> None:
    found = verdict(Faster("eager", 1.0, "cuBLAS"), {"eager": {"seconds": 1.0}}, cuda=False)
    assert (found.reached, found.note) == (None, "no CUDA")
    assert found.value == pytest.approx(1000)
    memory = verdict(Leaner("eager", 1.1, "it"), {"eager": {"seconds": 1.0}}, cuda=False)
    assert (memory.reached, memory.note) == (None, "no CUDA")
    webgpu_peer = Faster("tinygrad_webgpu", 8, "tinygrad", needs_cuda=False)
    assert verdict(webgpu_peer, {"tinygrad_webgpu": {"seconds": 1.0}}, cuda=False).reached


@pytest.mark.parametrize("difference", [0.5, math.nan, math.inf])
def test_a_wrong_result_reaches_no_goal(difference: float) -> None:
    ours = OURS | {"relative_difference": difference}
    found = verdict(FlopRate(1.0), {"webgpu": ours}, Work(flops=1000))
    assert found.reached is False
    assert "wrong result" in found.note


def test_failures_are_told_from_what_is_not_there() -> None:
    goal = Faster("inductor", 1.0, "Inductor")
    assert verdict(goal, {}).reached is None
    assert verdict(goal, {"inductor": {"error": "it crashed"}}).reached is None
    assert verdict(goal, {"webgpu": {"error": "it crashed"}, "inductor": OURS}).reached is False
    missing = {"error": "there is no case 'decode'", "missing": True}
    assert verdict(goal, {"webgpu": missing, "inductor": missing}).reached is None


def test_suites_name_systems_and_merge() -> None:
    rows = rows_of(["models", "memory", "compile"])
    assert rows["gpt2"] == {"webgpu", "inductor", "eager"}
    assert rows["lstm"] == {"inductor", "wgpu", "wgpudawn"}
    assert set().union(*rows_of(SUITES).values()) <= set(SYSTEMS)


def test_suites_name_cases() -> None:
    known = {"benchmarks.worker": CASES, "benchmarks.compile_worker": compile_cases.CASES}
    for suite in SUITES.values():
        missing = {row.case for row in suite.rows} - set(known[suite.worker])
        assert not missing, f"{suite.name} names cases that its worker does not have"
    assert not set(CASES) & set(compile_cases.CASES), "a case is measured by one worker"


def test_the_convolutions_are_those_of_resnet50() -> None:
    assert len(layers()) == 53
    # 4.09 GMAC per image of 224×224 (He et al., arXiv:1512.03385, with the stride in the 3×3)
    assert sum(layer.flops_per_image for layer in layers()) == pytest.approx(2 * 4.087e9, rel=1e-3)


def results() -> dict[str, Any]:
    return {
        "date": "2026-11-21",
        "small": False,
        "suites": ["attention", "decode"],
        "machine": {"adapter": "A GPU (Vulkan)", "torch": "2.11.0", "torch_device": "A GPU"},
        "limits": LIMITS,
        "cases": {
            "attention": {
                WORK: {"nbytes": 0, "flops": 10**9},
                "webgpu": OURS
                | {"host_replay_s": 1e-5, "host_s_per_dispatch": 1e-5, "dispatches": 1}
                | {"kernels": 1, "bytes_read": 0, "bytes_written": 0},
                "eager": {"seconds": 1e-3},
            },
            "decode": {"webgpu": {"error": "there is no case 'decode'", "missing": True}},
        },
    }


def test_report(tmp_path: Path) -> None:
    text = report.text(results())
    assert "reached 1 of 3, open 2" in text
    assert "there is no case 'decode'" in text
    path = report.save(results(), tmp_path / "run.json")
    table = report.markdown([json.loads(path.read_text())])
    assert "| attention | 2 ms | 1 ms | 1 ms |" in table
    assert "| attention | 1.00 × | ≥ 0.8 × PyTorch's best f32 SDPA | yes |" in table


WORKER = """
import json, os, sys, time
def send(answer):
    print(json.dumps(answer), flush=True)
send({"ready": True})
for line in sys.stdin:
    request = json.loads(line)
    send({"starting": "build"})
    send({"system": "build", "result": {"nbytes": 1, "flops": 2}})
    for system in request["systems"]:
        send({"starting": system})
        if system == "crashes":
            os._exit(3)
        if system == "hangs":
            time.sleep(60)
        send({"system": system, "result": {"process": os.getpid()}})
        if system == "loses the GPU":
            send({"done": request["case"], "usable": False})
            sys.exit()
    send({"done": request["case"], "usable": True})
"""


def runner(tmp_path: Path, timeout_s: float = 50.0, fresh: bool = False) -> Runner:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    settings = Settings(small=True, budget_s=0.1, thorough=False)
    return Runner(settings, timeout_s, fresh, command=(sys.executable, str(path)))


def test_one_worker_measures_many_cases(tmp_path: Path) -> None:
    with runner(tmp_path) as running:
        first, second = (running.measure(case, ["a", "b"]) for case in ("x", "y"))
    assert first == second
    assert first[WORK] == {"nbytes": 1, "flops": 2}


def test_fresh_workers(tmp_path: Path) -> None:
    with runner(tmp_path, fresh=True) as running:
        assert running.measure("x", ["a"]) != running.measure("y", ["a"])


@pytest.mark.parametrize("system", ["crashes", "loses the GPU"])
def test_a_lost_worker_loses_one_system(tmp_path: Path, system: str) -> None:
    with runner(tmp_path) as running:
        found = running.measure("x", ["a", system, "b"])
    assert found["a"]["process"] != found["b"]["process"]
    if system == "crashes":
        assert found[system] == {"error": "the process ended with 3"}


def test_a_case_that_hangs_loses_the_rest_of_it(tmp_path: Path) -> None:
    with runner(tmp_path, timeout_s=3.0) as running:
        running.measure("x", ["a"])  # the start has time of its own
        found = running.measure("x", ["a", "hangs", "b"])
        assert "no result" in found["hangs"]["error"]
        assert "error" in found["b"]
        assert "process" in running.measure("y", ["a"])["a"]


def test_goals_of_generating_tokens() -> None:
    case = generate.CASES["decode_bf16_batch8"]
    step = {"seconds": 8e-3, "host_s": 2e-3, "nbytes": 24e9, "extra_nbytes": 0.0}
    found = generate.figures(case, step, {"decode_bf16": 160.0})
    assert found["tokens_per_second"] == pytest.approx(1000)
    times, host = generate.verdicts(case, {"webgpu": found}, 4e12, by_cuda=True, is_real=True)
    assert (times.value, times.reached) == (pytest.approx(6.25), True)
    assert (host.value, host.reached) == (pytest.approx(0.25), True)
    alone = generate.figures(case, step, {})
    times, _ = generate.verdicts(case, {"webgpu": alone}, 4e12, by_cuda=True, is_real=True)
    assert times.reached is None
    # Weights and cache in 8 ms are 3 TB/s: of a copy's rate, which is that of the peer's GPU.
    long = generate.CASES["decode_bf16_32k"]
    systems = {"webgpu": generate.figures(long, step, {}), "cuda": step}
    share, _ = generate.verdicts(long, systems, 4e12, by_cuda=True, is_real=True)
    assert (share.value, share.reached) == (pytest.approx(0.75), True)
    assert generate.verdicts(long, systems, 4e12, by_cuda=True, is_real=False)[0].reached is None
    # A call of ``generate`` says seconds of a token; packed weights are compared with its bf16.
    packed = generate.CASES["generate_int8"]
    found = generate.figures(packed, {"seconds": 1e-3}, {"decode_bf16": 1.0, "generate_bf16": 500})
    (times,) = generate.verdicts(packed, {"webgpu": found}, 4e12, by_cuda=True, is_real=True)
    assert (times.value, times.reached) == (pytest.approx(2), True)


def first_calls(count: int) -> dict[str, Any]:
    """Results of the suite: Inductor takes 10 s, and ours 1, 2, … s."""
    names = [row.case for row in SUITES["compile"].rows][:count]

    def ours(k: int) -> dict[str, Any]:
        parts = dict.fromkeys((*report._PARTS, "pipelines_in_threads_s"), 0.1)
        call = {**parts, "kernels": 7, "wgsl_nbytes": 8000}
        return {"cold_s": k, "second_s": k, "second_own_s": k, "cold": call, "second": call}

    theirs = {"cold_s": 10.0, "second_s": 10.0, "cold": {}, "second": {}}
    cases = {
        name: {"inductor": theirs, "wgpu": ours(k), "wgpudawn": ours(k)}
        for k, name in enumerate(names, 1)
    }
    return {**results(), "suites": ["compile"], "limits": {}, "cases": cases}


def test_first_calls() -> None:
    found = first_calls(14)
    assert [v.value for _, case, v in report.verdicts(found) if case == "lstm"] == [0.2, 0.2, 2] * 2
    medians = [v for _, case, v in report.verdicts(found) if case == "median"]
    assert [(v.value, v.reached) for v in medians] == [(0.75, False)] * 2
    assert "| lstm | 10.00 | 10.00 | 2.00 | 2.00 | 2.00 | 2.00 | 7 | 8 | 0.10 |" in report.markdown(
        [found]
    )
    assert "lstm, wgpu-native" in report.text(found)
    # Results that are not those of Inductor reach no goal; half of the cases have no median.
    found = first_calls(7)
    found["cases"]["lstm"]["wgpu"]["relative_difference"] = 0.5
    reached = [v.reached for _, case, v in report.verdicts(found) if case == "lstm"]
    assert reached == [False, False, False, True, True, False]
    assert all(v.reached is None for _, case, v in report.verdicts(found) if case == "median")


def test_runs_are_resumed() -> None:
    todo = rows_of(["compile"])
    new = {"small": False, "suites": ["compile"], "machine": results()["machine"]}
    earlier = first_calls(4)
    for case in earlier["cases"].values():
        case["machine"] = new["machine"]
    swin, lstm, llama, _ = list(earlier["cases"].values())
    del swin["wgpudawn"]
    lstm["wgpu"] = {"error": "there was no time left"}
    llama["machine"], llama["wgpu"] = {"adapter": "another"}, {"error": "it crashed"}
    left = resume(new, earlier, todo, named=["llama_512_f16"])
    names = list(todo)
    assert list(left) == names
    assert [left[name] for name in names[:5]] == [
        {"wgpudawn"},
        {"wgpu"},
        todo["llama_512"],
        todo["llama_512_f16"],
        todo["llama_4x128_bf16"],
    ]
    assert new["cases"]["lstm"]["wgpudawn"]["cold_s"] == 2
    with pytest.raises(SystemExit, match="other suites"):
        resume(new | {"suites": ["models"]}, earlier, todo, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the function has to be there in the process")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_first_calls_have_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_worker.atexit, "_run_exitfuncs", lambda: None)  # this process's

    def call(*arguments: Any) -> dict[str, Any]:
        if arguments == ("dies",):
            os._exit(3)
        return {"process": os.getpid(), "value": 1 / arguments[0]}

    monkeypatch.setattr(compile_worker, "first_call", call)
    first, second = (compile_worker.in_new_process(4) for _ in range(2))
    assert first["value"] == 0.25
    assert len({first["process"], second["process"], os.getpid()}) == 3
    with pytest.raises(RuntimeError, match="division by zero"):
        compile_worker.in_new_process(0)
    with pytest.raises(RuntimeError, match="ended with 3"):
        compile_worker.in_new_process("dies")


def test_nothing_is_cached_elsewhere(tmp_path: Path) -> None:
    caches = compile_worker.caches_in(tmp_path)
    assert default_cache({"XDG_CACHE_HOME": caches["XDG_CACHE_HOME"] or ""}, "linux") is not None
    folders = [value for value in caches.values() if value not in (None, "0", "1", "false")]
    assert folders
    assert all(Path(folder).parent == tmp_path and Path(folder).is_dir() for folder in folders)


def test_cheap_weights_keep_the_scale() -> None:
    model = with_cheap_weights(lambda: nn.Sequential(*[nn.Linear(600, 600) for _ in range(2)]))
    weights = [layer.weight for layer in model]
    for weight in weights:
        assert weight.std().item() == pytest.approx((2 / 600) ** 0.5, rel=0.05)
        assert weight.unique().numel() > 300_000
    assert model(torch.randn(8, 600)).isfinite().all()


def test_counts_of_kernels() -> None:
    layers = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()

    def build(small: bool) -> Any:
        return nn.Sequential(*layers), (torch.randn(8, 16),)

    case = compile_cases.CompileCase(build, compile_cases.compiled("forward"))
    found = counts(case, TARGETS["nvidia"], small=True)
    # Both layers are one kernel, which is counted once.
    assert (len(found.pipelines), found.dispatches) == (1, 2)
    assert found.wgsl_nbytes > 1000


def test_goals_of_training_steps() -> None:
    case = training.CASES["resnet50_16"]
    step = {"seconds": 20e-3, "host_s": 5e-3, "gpu_nbytes": 10 << 20, "first_s": 6.0}
    peers = {"eager": {**step, "seconds": 25e-3}, "inductor": {**step, "first_s": 10.0}}
    systems: dict[str, Any] = {"webgpu": {**step, "losses": [2.0, 1.0]}, **peers}
    systems["webgpu"] = training.figures(systems, [2.0, 1.0])
    values = [verdict.value for verdict in training.verdicts(case, systems, is_real=True)]
    assert values == pytest.approx([1.25, 1, 1, 0.6, 0.25])
    systems["webgpu"] = training.figures(systems, [2.0, 1.5])  # it learns something else
    assert not any(verdict.reached for verdict in training.verdicts(case, systems, is_real=True))


@pytest.mark.parametrize(
    ("theirs", "ours", "limit"),
    [
        ({"seconds": 1e-5, "host_s": 9e-6}, 1.4e-5, 1.5),  # the host decides
        ({"seconds": 1e-5, "host_s": 2e-6}, 1.2e-5, 1.3),
        ({"seconds": 1e-5, "host_s": 2e-6}, 1.4e-5, 1.3),
    ],
)
def test_goals_of_eager_calls(theirs: Any, ours: float, limit: float) -> None:
    row = ROWS["add"]
    used = {"seconds": ours, "host_s": 1.2 * theirs["host_s"], "bits": "a", "checks": [2.0]}
    fresh = {**used, "seconds": 0.8 * ours}
    measured: dict[str, Any] = {"eager": {**theirs, "checks": [2.0]}, "fresh": fresh}
    measured["webgpu"] = used
    systems = eager.figures(row, measured)
    found = eager.verdicts(row, systems, has_cuda=True, is_real=True)
    ratio = ours / theirs["seconds"]
    shares = [verdict.share for verdict in found]
    assert shares == pytest.approx([limit / ratio, 1.5 / 1.2, 0.8 * 1.1, 1.0])
    assert [verdict.reached for verdict in found] == [ratio <= limit, True, False, True]
    # Small sizes tell of bits, and of nothing else.
    fresh["bits"] = "b"
    found = eager.verdicts(row, systems, has_cuda=False, is_real=False)
    assert [verdict.reached for verdict in found] == [None, None, None, False]
    # What computes something else reaches nothing.
    systems = eager.figures(row, {**measured, "eager": {**theirs, "checks": [2.5]}})
    assert systems["webgpu"]["relative_difference"] == pytest.approx(0.2)
    drawn = dataclasses.replace(row, is_random=True)
    assert "relative_difference" not in eager.figures(drawn, measured)["webgpu"]


def test_a_used_process_has_not_seen_the_sizes_that_are_measured() -> None:
    for row in ROWS.values():
        for small in (False, True) if row not in MODELS else (False,):
            sizes = row.small if small else row.sizes
            assert sizes not in row.other_sizes(small) or max(sizes) == 1, row.name


def test_fingerprints_tell_places_and_signs() -> None:
    x = torch.tensor([1.0, 2.0])
    turned, negative = fingerprint((x.flip(0), 3)), fingerprint((-x, 3))
    found = fingerprint((x, 3))
    assert found["checks"] == [2.5, 3.0]
    assert turned["checks"] == [2.0, 3.0]
    assert negative["checks"] == found["checks"]
    assert len({found["bits"], turned["bits"], negative["bits"]}) == 3


def test_benchmarks_import_from_each_other_what_is_there() -> None:
    """Most of them run on a real GPU only, and type checks leave them out."""
    files = {
        path.stem: ast.parse(path.read_text()) for path in Path(eager.__file__).parent.glob("*.py")
    }
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                known = set(files) if node.module is None else _defined(files[node.module])
                missing = {alias.name for alias in node.names} - known
                assert not missing, f"{name} imports {missing} from {node.module}"


def _defined(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found
