"""What this package adds to a first call, beside ``backend="aot_eager"``: measured and compared.

    python -m tests.compile_budget               some models: part of scripts/test
    python -m tests.compile_budget --all         all of tests/zoo.py: part of scripts/nightly
    python -m tests.compile_budget --update      writes what it measures to compile_budget.json
    python -m tests.compile_budget --slower 30   as if this package took 30 % longer: has to fail

Measured is the CPU time of the first call of a graph, without pipelines, uploads and dispatches:
for our backend what is spent in this package (capture's passes, lowering to plan, verification),
in its ratio to all of the same call with ``aot_eager``. No GPU is needed: nothing is run, and the
results of graphs are empty tensors.

CPU time depends on what else a machine does: caches, clock and the sibling of a core are shared. So
both backends run at once on one core, in turns of milliseconds, and what slows one slows the other.
Each is a process of its own that is forked from one that has imported and tried everything, but has
compiled no model: no cache has to be emptied. A model fails if the median over many rounds is more
than a fifth above the recorded one; few rounds are enough where they show no sign of it.

It adds what AOTAutograd takes more or less because of our decompositions, which is too noisy to be
compared, as ``whole``: all of the call with our backend, in its ratio to ``aot_eager``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import select
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from tests import zoo
from tests.replay import package
from torch_webgpu_compile import stages
from torch_webgpu_compile.compiler import compile_graph
from torch_webgpu_compile.target import Target

RECORD = Path(__file__).with_suffix(".json")
MODELS = ("inference_llama", "training_mlp", "inference_mixed", "inference_mlp")
"""Those of every run: small or of two layers, for inference and training."""

MOST = 1.2
_CALM = 1.1  # so far from the limit that more rounds would not find a failure
_FEW, _MANY = 3, 9
_TABLES = ("inference", "training", "half", "dynamic")
_THEIRS = ("dynamo", "autograd")

Case = tuple[Callable[..., Any], tuple[Any, ...]]
Backend = Callable[..., Any]


@dataclass(frozen=True)
class Round:
    """CPU seconds of first calls that ran at once.

    Attributes:
        eager: with ``aot_eager``.
        whole, ours: with our backend: all, and what this package took of it.
        passes: the latter, by pass.
    """

    eager: float
    whole: float
    ours: float
    passes: dict[str, float]

    @property
    def ratio(self) -> float:
        """What this package adds."""
        return self.ours / self.eager


def is_worse(ratios: Sequence[float], recorded: float) -> bool | None:
    """Whether rounds show that a model takes more than `MOST` of what was recorded.

    Returns:
        None if it takes more rounds to know.
    """
    found = median(ratios) / recorded
    if len(ratios) < _MANY and (len(ratios) < _FEW or found > _CALM):
        return None
    return found > MOST


# ---- backends that run nothing


def _empty(graph: torch.fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    values = [getattr(node, "meta", {}).get("val", node) for node in output.args[0]]

    def made(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = [int(n) for n in value.shape], [int(n) for n in value.stride()]
            return torch.empty_strided(*layout, dtype=value.dtype)
        return int(value) if isinstance(value, torch.SymInt) else value

    return [made(value) for value in values]


def _unrun(graph: torch.fx.GraphModule, _: Any) -> Callable[[list[Any]], list[Any]]:
    def call(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return _empty(graph)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol
    return call


_aot_eager = aot_autograd(  # as PyTorch's is made
    fw_compiler=_unrun,
    bw_compiler=_unrun,
    inference_compiler=_unrun,
    partition_fn=min_cut_rematerialization_partition,
    keep_inference_input_mutations=True,
)


def _compile_one(graph: package.Graph) -> None:
    compile_graph(graph.captured, graph.phase, Target(), graph.options, use_cache=False)


def _refused(why: str) -> None:
    raise RuntimeError(f"a graph is left to PyTorch: {why}")


def _ours() -> Backend:
    compile_module = package.backend(_compile_one, _refused)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with stages.Stage("backend"):
            return compile_module(module, inputs)

    return backend


# ---- first calls


def _build(name: str, mode: Any) -> Case:
    kind, _, model = name.partition("_")
    torch.set_default_dtype(torch.bfloat16 if kind == "half" else torch.float32)
    table: dict[str, Callable[[], Case]] = getattr(zoo, kind.upper())
    with mode, torch.set_grad_enabled(kind == "training"):
        function, inputs = table[model]()
        if isinstance(function, nn.Module):
            function.train(kind == "training")
    return function, inputs


def _own(sums: stages.Sums) -> dict[str, float]:
    """Seconds that were spent in this package, by pass."""
    return {name or kind: s for (kind, name), s in sums.own_seconds.items() if kind not in _THEIRS}


def _first_call(
    name: str, case: Case, mode: Any, backend: Backend, slower: float = 0.0
) -> dict[str, Any]:
    """CPU seconds: all of it, and of this package by pass; the modules that it imported.

    ``slower``: spends this share of what this package took once more.
    """
    kind, (function, inputs), before = name.partition("_")[0], case, set(sys.modules)
    sums = stages.Sums()
    stages.clock = time.thread_time
    start = time.process_time()
    with mode, torch.set_grad_enabled(kind == "training"), stages.telling(sums):
        compiled = torch.compile(function, backend=backend, dynamic=kind == "dynamic" or None)
        output = compiled(*inputs)
        if kind == "training":
            output = output.to_tuple() if hasattr(output, "to_tuple") else output
            found = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
            sum(t.sum() for t in found if t.requires_grad).backward()
        end = time.thread_time() + slower * sum(_own(sums).values())
        with stages.Stage("pass", "slower"):
            while time.thread_time() < end:
                pass
    seconds = time.process_time() - start
    return {"seconds": seconds, "own": _own(sums), "modules": sorted({*sys.modules} - before)}


class _Child:
    """A forked process that computes something JSON can hold, on one core."""

    def __init__(self, compute: Callable[[], Any], core: int) -> None:
        self.pipe, end = os.pipe()
        self._process = os.fork()
        if self._process:
            os.close(end)
            return
        status = 1
        try:
            os.sched_setaffinity(0, {core})
            with os.fdopen(end, "w") as file:
                json.dump(compute(), file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def result(self) -> Any:
        """What it computed. Raises RuntimeError if it failed: it has said why."""
        with os.fdopen(self.pipe) as file:
            content = file.read()
        _, status = os.waitpid(self._process, 0)
        if status:
            raise RuntimeError("a measurement failed; what it said is above")
        return json.loads(content)


def _together(eager: Callable[[], Any], ours: Callable[[], Any], core: int) -> tuple[Round, bool]:
    """One call of ours, beside as many with ``aot_eager``; whether a module was imported."""
    child, other, found = _Child(ours, core), _Child(eager, core), list[dict[str, Any]]()
    while True:
        ready = select.select([child.pipe, other.pipe], [], [])[0]
        if child.pipe in ready or other.pipe in ready:
            found.append(other.result())
        if child.pipe in ready or select.select([child.pipe], [], [], 0)[0]:
            break
        other = _Child(eager, core)
    result = child.result()
    new = {name for each in (result, *found) for name in each["modules"]}
    for name in new:
        with suppress(Exception):
            import_module(name)
    seconds = sum(each["seconds"] for each in found) / len(found)
    own: dict[str, float] = result["own"]
    return Round(seconds, result["seconds"], sum(own.values()), own), bool(new)


# ---- the whole


def _rounds(name: str, recorded: float | None, most: int, slower: float, core: int) -> list[Round]:
    """As many as are needed to compare them with what was recorded, and at most so many."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        case = _build(name, mode)
    except DataDependentOutputException:  # the model's own code reads values
        mode = nullcontext()
        case = _build(name, mode)
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
    found: list[Round] = []
    discarded = False
    while len(found) < most:
        measured, imported = _together(
            lambda: _first_call(name, case, mode, _aot_eager),
            lambda: _first_call(name, case, mode, _ours(), slower),
            core,
        )
        if imported and not discarded:  # an import is no compilation
            discarded = True
            continue
        found.append(measured)
        ratios = [each.ratio for each in found]
        if recorded is not None and is_worse(ratios, recorded) is not None:
            break
    gc.unfreeze()
    return found


def _line(name: str, rounds: Sequence[Round], recorded: float | None) -> str:
    ratio, whole = median(r.ratio for r in rounds), median(r.whole / r.eager for r in rounds)
    spread = f"{min(r.ratio for r in rounds):.2f} to {max(r.ratio for r in rounds):.2f}"
    eager = median(r.eager for r in rounds)
    names = dict.fromkeys(name for r in rounds for name in r.passes)
    shares = {n: median(r.passes.get(n, 0.0) / r.eager for r in rounds) for n in names}
    longest = sorted(shares.items(), key=lambda entry: -entry[1])[:4]
    shown = ", ".join(f"{n} {share:.3f}" for n, share in longest)
    against = "" if recorded is None else f", recorded {recorded:.3f} ({ratio / recorded - 1:+.0%})"
    verdict = ""
    if recorded is not None and is_worse([r.ratio for r in rounds], recorded):
        verdict = f" FAILED: more than {MOST - 1:.0%} worse"
    return (
        f"{name:24} adds {ratio:.3f} × aot_eager's {eager:.2f} s{against}{verdict}\n"
        f"{'':24} {len(rounds)} rounds, {spread}; whole {whole:.2f} ×; {shown}"
    )


def _work(
    names: Sequence[str], recorded: dict[str, float], most: int, slower: float, core: int
) -> dict[str, float]:
    found = {}
    for name in names:
        known = recorded.get(name)
        rounds = _rounds(name, known, most if known is None else _MANY, slower, core)
        print(_line(name, rounds, known), flush=True)
        found[name] = round(median(each.ratio for each in rounds), 3)
    return found


def _warm_up() -> None:
    package.prepare()
    for kind in ("inference", "training"):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            case = nn.Linear(4, 4), (torch.ones(2, 4),)
        for backend in (_aot_eager, _ours()):
            torch._dynamo.reset()
            _first_call(kind, case, mode, backend)


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": ".".join(torch.__version__.split(".")[:2])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 if a model takes more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_budget", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", help="such as training_gpt2")
    parser.add_argument("--all", action="store_true", help="every model")
    parser.add_argument("--update", action="store_true", help="record what is measured")
    parser.add_argument("--slower", type=float, default=0.0, metavar="PERCENT")
    given = parser.parse_args(arguments)
    if not hasattr(os, "sched_setaffinity"):
        print("compile budget: not measured, as this system binds no process to a core")
        return 0
    every = [f"{kind}_{name}" for kind in _TABLES for name in getattr(zoo, kind.upper())]
    names = every if given.all else given.models or list(MODELS)
    record = json.loads(RECORD.read_text())
    recorded: dict[str, float] = record["ratios"]
    if given.update or record["versions"] != _versions():
        recorded = {}
    if not given.update and not recorded:
        print(f"compile budget: shown only, as what was recorded is of {record['versions']}")
    _warm_up()
    cores = sorted(os.sched_getaffinity(0))[: len(names)]
    most, slower = _MANY if given.update else _FEW, given.slower / 100
    sys.stdout.flush()  # children would print it again
    workers = []
    for k, core in enumerate(cores):
        compute = partial(_work, names[k :: len(cores)], recorded, most, slower, core)
        workers.append(_Child(compute, core))
    found = {name: ratio for worker in workers for name, ratio in worker.result().items()}
    if given.update:
        kept = record["ratios"] if record["versions"] == _versions() else {}
        record = {"versions": _versions(), "ratios": dict(sorted({**kept, **found}.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    worse = [name for name in found if name in recorded and found[name] > MOST * recorded[name]]
    if worse:
        print(
            f"compile budget: {', '.join(worse)} spend more in this package than recorded in "
            f"{RECORD.name}. Profile the passes that are named above; if it has to be so, record "
            f"it: python -m tests.compile_budget --update {' '.join(worse)}"
        )
    return int(bool(worse))


if __name__ == "__main__":
    # Before torch: no GPU is opened, and sets have the same order in every run.
    wanted = {"PYTHONHASHSEED": "0", "TORCH_WEBGPU_DEVICE": "0", "OMP_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, "-m", "tests.compile_budget", *sys.argv[1:]])
    sys.exit(main())
