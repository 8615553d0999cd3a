"""docs/operators.md: which of PyTorch's operators are native, by dtype, from a real run of OpInfo.

    python -m tests.coverage            every sample; writes docs/operators.json and .md
    python -m tests.coverage add sort   these operators again, beside what is there of the others
    python -m tests.coverage --kind out these kinds again, likewise
    python -m tests.coverage --kind forward,backward --dtype float32,int64
    python -m tests.coverage --render   the page again, from the JSON
    TORCH_WEBGPU_PROVIDER=wgpudawn python -m tests.coverage --limit 10      the page's row of Dawn

The run takes most of an hour on two cores with a software adapter. A test compares a share of all
samples with the JSON file on each run: an entry may not get worse without it being written there.
Each provider has a JSON file; the page is that of wgpu, with what is otherwise on another one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import higher_order
from tests.providers import PROVIDERS
from tests.sweep_device import FAILURES, OUTCOMES, Totals, label_of, make_requests, run_requests
from torch_webgpu_compile.options import from_environment
from torch_webgpu_compile.runtime.adapters import choose_provider

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"
DATA = PAGE.with_suffix(".json")  # of wgpu

DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
}
KINDS = {"forward": "F", "backward": "B", "dynamic": "D", "inplace": "I", "out": "O"}
# Samples at most, where each is run in several ways: at three sizes, into several results.
SAMPLES = {"dynamic": 3, "inplace": 2, "out": 2}
# How results are written does not depend on what is computed.
DTYPES_OF = {"inplace": ("float32",), "out": ("float32",)}
# What one of the samples of an entry was at worst, from good to bad.
STATES = ("native", "recompiled", "host", "failed")

# Dense factorisations and what is nothing without them: a GPU gains little at their usual sizes.
FACTORISATIONS = frozenset(
    f"aten.{name}"
    for name in (
        *("_cholesky_solve_helper", "_linalg_det", "_linalg_eigh", "_linalg_eigvals"),
        *("_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky", "cholesky_inverse"),
        *("geqrf", "linalg_cholesky_ex", "linalg_eig", "linalg_householder_product"),
        *("linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq"),
        *("linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp"),
        *("linalg_pinv", "linalg_qr", "linalg_solve_triangular", "lu_unpack", "ormqr"),
        *("triangular_solve",),
    )
)
"""ATen operators, without overloads."""


@dataclass
class Coverage:
    """What a run found.

    Attributes:
        runs: of each run that gave entries, the adapter, PyTorch's version, samples by outcome, and
            the operators, if not all.
        entries: by operator, dtype and kind, one of `STATES`. Those without samples are absent.
        hosted: by operator, the ATen operators that ran on the host in any of its entries.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    hosted: dict[str, list[str]] = field(default_factory=dict)

    def add(self, request: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Takes in the result of one request of a sweep."""
        state = state_of(result)
        if state is None:
            return
        op, fallbacks = request["op"], result["fallbacks"]
        self.entries.setdefault(op, {}).setdefault(request["dtype"], {})[request["kind"]] = state
        if fallbacks:
            self.hosted[op] = sorted({*self.hosted.get(op, ()), *fallbacks})

    def add_run(self, run: dict[str, Any]) -> None:
        """Takes in a run; one of the same share, of which no entry is left, goes."""
        results = ("outcomes", "seconds", "workers", "adapter", "torch")
        share = {key: value for key, value in run.items() if key not in results}
        kept = [r for r in self.runs if share != {k: v for k, v in r.items() if k not in results}]
        self.runs = [*kept, run]

    def forget(self, op: str, kinds: Sequence[str], dtypes: Sequence[str]) -> None:
        """Drops an operator's entries of these kinds and dtypes, which will be made again."""
        for dtype in dtypes:
            for kind in kinds:
                self.entries.get(op, {}).get(dtype, {}).pop(kind, None)
        if set(kinds) == set(KINDS) and set(dtypes) == set(DTYPES):
            self.hosted.pop(op, None)

    def is_factorisation(self, op: str) -> bool:
        """Whether dense factorisations are among what runs on the host of an operator."""
        hosted = self.hosted.get(op, ())
        return any(aten.rpartition(".")[0] in FACTORISATIONS for aten in hosted)

    def share(self, dtype: str, kind: str) -> tuple[int, int]:
        """Native entries, and all of them but those whose factorisations are on the host."""
        states = [
            state
            for op, by_dtype in self.entries.items()
            if (state := by_dtype.get(dtype, {}).get(kind))
            and not (state == "host" and self.is_factorisation(op))
        ]
        return sum(state in ("native", "recompiled") for state in states), len(states)

    def is_native(self, op: str, dtype: str, kind: str) -> bool:
        """Whether no sample of an entry may run on the host; not if there is no such entry."""
        state = self.entries.get(op, {}).get(dtype, {}).get(kind)
        return state in ("native", "recompiled")

    def total(self) -> tuple[int, int]:
        """`share` of all dtypes and kinds together."""
        shares = [self.share(dtype, kind) for dtype in DTYPES for kind in KINDS]
        return sum(native for native, _ in shares), sum(total for _, total in shares)

    def save(self, path: Path) -> None:
        """Writes it as JSON, with letters for states, one line for each operator."""
        lines = [json.dumps({"runs": self.runs})[1:-1]]
        for op in sorted(self.entries):
            row: dict[str, Any] = {
                dtype: "".join(states[kind][0] if kind in states else "-" for kind in KINDS)
                for dtype, states in self.entries[op].items()
            }
            if op in self.hosted:
                row["hosted"] = self.hosted[op]
            lines.append(f"{json.dumps(op)}: {json.dumps(row)}")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @staticmethod
    def load(path: Path) -> Coverage:
        """Reads what `save` wrote."""
        rows = json.loads(path.read_text())
        found = Coverage(rows.pop("runs"))
        states = {state[0]: state for state in STATES}
        for op, row in rows.items():
            found.hosted |= {op: row.pop("hosted")} if "hosted" in row else {}
            found.entries[op] = {
                dtype: {
                    kind: states[letter]
                    for kind, letter in zip(KINDS, letters, strict=True)
                    if letter != "-"
                }
                for dtype, letters in row.items()
            }
        return found


def state_of(result: Mapping[str, Any]) -> str | None:
    """The worst of an entry's samples; None without any."""
    outcomes = result["outcomes"]
    if any(outcomes.get(name) for name in FAILURES):
        return "failed"
    if not outcomes.get("passed") and not outcomes.get("recompiled"):
        return None
    if result["fallbacks"]:
        return "host"
    return "recompiled" if outcomes.get("recompiled") else "native"


# ---- the page


_LEGEND = """\
Each cell names what was run of an operator's samples: **F** forward, **B** backward, **D** with
changing sizes (three of them; the last may not compile anything), **I** in place, **O** with
``out=`` (both of float32 only). A capital letter is native in every sample; a small one ran on the
host, at least in part; *d* in italics compiled again for a size; **!** is a failure; an empty cell
is a dtype that PyTorch's CPU kernels do not have either.
"""


def data_of(provider: str) -> Path:
    """The JSON file of a provider."""
    return DATA if provider == "wgpu" else DATA.with_stem(f"{DATA.stem}-{provider}")


def page() -> str:
    """The page, from all JSON files."""
    others = {p: Coverage.load(data_of(p)) for p in PROVIDERS[1:] if data_of(p).exists()}
    return render(Coverage.load(DATA), others)


def render(coverage: Coverage, others: Mapping[str, Coverage] = MappingProxyType({})) -> str:
    """The page.

    Args:
        others: what was found on other providers, by their names.
    """
    parts = [
        "# Operators",
        "",
        "For everyone who wants to know whether an operator runs on the GPU: this page answers,",
        "for each of PyTorch's operators and dtypes, what is native, and what runs on the host.",
        "",
        "PyTorch's own operator samples (OpInfo) on the device `webgpu`, compared with the CPU.",
        "Made by `python -m tests.coverage`; do not edit.",
        "",
        *map(_run_line, coverage.runs),
        "",
        _LEGEND,
        *_shares(coverage),
        "",
        *_providers({"wgpu": coverage, **others}),
        *_on_the_host(coverage),
        "",
        *higher_order.section(),
        "## All entries",
        "",
        *_table(("operator", *DTYPES.values()), _rows(coverage)),
    ]
    return "\n".join(parts) + "\n"


def _run_line(run: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in run["outcomes"].items())
    names = ", ".join(f"`{name}`" for name in run["operators"])
    again = f" of these operators again: {names}" if names else ""
    only = [", ".join(run[what]) for what in ("kinds", "dtypes") if run[what]]
    again += f", only {' of '.join(only)}" if only else ""
    each = f", at most {run['limit']} of each entry" if run["limit"] else ""
    took = f" in {run['seconds'] / 60:.0f} minutes with {run['workers']} processes"
    return f"- {run['adapter']}; PyTorch {run['torch']}; samples{again}{each}: {counts}{took}."


def _shares(coverage: Coverage) -> list[str]:
    rows = []
    for dtype in DTYPES:
        cells = []
        for kind in KINDS:
            native, total = coverage.share(dtype, kind)
            cells.append(f"{native} of {total} ({native / total:.1%})" if total else "")
        rows.append((dtype, *cells))
    return [
        "## Native entries",
        "",
        "Not counting dense factorisations and what is built on them, which are listed below.",
        "",
        *_table(("dtype", *KINDS), rows),
    ]


def _providers(found: Mapping[str, Coverage]) -> list[str]:
    """A row for each, and the entries that are native on the first one only."""
    if len(found) == 1:
        return []
    first, *others = found
    rows, sections = [], []
    for provider, coverage in found.items():
        outcomes = sum((Counter(run["outcomes"]) for run in coverage.runs), Counter[str]())
        failed = sum(
            state == "failed"
            for by_dtype in coverage.entries.values()
            for states in by_dtype.values()
            for state in states.values()
        )
        adapters = dict.fromkeys(run["adapter"] for run in coverage.runs)
        native, total = coverage.total()
        share = f"{native} of {total} ({native / total:.1%})"
        samples = f"{outcomes.total():,}"
        rows.append((provider, ", ".join(adapters), samples, str(failed), share))
    for provider in others:
        runs = list(map(_run_line, found[provider].runs))
        own = [
            (f"`{op}`", *(_cell(by_dtype.get(dtype, {})) for dtype in DTYPES))
            for op, by_dtype in _lost(found[provider], found[first]).items()
        ]
        head = f"Native on {first}, but not on {provider}:"
        table = _table(("operator", *DTYPES.values()), own)
        sections += [*runs, "", head, "", *table, ""] if own else [*runs, ""]
    columns = ("provider", "adapter", "samples", "failed entries", "native entries")
    return ["## Providers", "", *_table(columns, rows), "", *sections]


def _lost(found: Coverage, first: Coverage) -> dict[str, dict[str, dict[str, str]]]:
    """The entries of `found` that are native in `first` only."""
    lost: dict[str, dict[str, dict[str, str]]] = {}
    for op in sorted(found.entries):
        for dtype, states in found.entries[op].items():
            for kind, state in states.items():
                if first.is_native(op, dtype, kind) and not found.is_native(op, dtype, kind):
                    lost.setdefault(op, {}).setdefault(dtype, {})[kind] = state
    return lost


def _on_the_host(coverage: Coverage) -> list[str]:
    factorisations = [op for op in sorted(coverage.hosted) if coverage.is_factorisation(op)]
    others = [op for op in sorted(coverage.hosted) if not coverage.is_factorisation(op)]
    names = ", ".join(f"`{op}`" for op in factorisations)
    rows = [(f"`{op}`", ", ".join(f"`{aten}`" for aten in coverage.hosted[op])) for op in others]
    return [
        "## On the host",
        "",
        f"Dense factorisations and what is built on them: {names}.",
        "",
        "Others, in at least one sample of one dtype, with the ATen operators that have no kernel:",
        "",
        *_table(("operator", "on the host"), rows),
    ]


def _rows(coverage: Coverage) -> Iterable[tuple[str, ...]]:
    for op in sorted(coverage.entries):
        by_dtype = coverage.entries[op]
        yield f"`{op}`", *(_cell(by_dtype.get(dtype, {})) for dtype in DTYPES)


def _cell(states: Mapping[str, str]) -> str:
    marks = {"host": str.lower, "recompiled": lambda c: f"*{c.lower()}*", "failed": lambda _: "!"}
    shown = (marks.get(states[k], str)(letter) for k, letter in KINDS.items() if k in states)
    return " ".join(shown)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


# ---- the run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help="names of OpInfos to run again")
    parser.add_argument("--render", action="store_true", help="write the page from the JSON file")
    parser.add_argument("--kind", help="of " + ", ".join(KINDS) + "; all by default")
    parser.add_argument("--dtype", help="of " + ", ".join(DTYPES) + "; all by default")
    parser.add_argument("--limit", type=int, help="samples of each entry; all by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one entry")
    options = parser.parse_args()
    failed, data = 0, data_of(choose_provider(from_environment().provider))
    if not options.render:
        failed = _run(options, data)
    PAGE.write_text(page())
    coverage = Coverage.load(data)
    for kind in KINDS:
        print(kind, *(f"{d} {n}/{t}" for d in DTYPES for n, t in [coverage.share(d, kind)] if t))
    raise SystemExit(failed)


def _run(options: argparse.Namespace, data: Path) -> int:
    """Runs everything and writes the JSON file; 1 if something failed."""
    import torch

    from torch_webgpu_compile.device.autoload import register
    from torch_webgpu_compile.tensors import devices

    register()
    requests = []
    kinds = options.kind.split(",") if options.kind else list(KINDS)
    dtypes = options.dtype.split(",") if options.dtype else list(DTYPES)
    for request in make_requests(kinds, dtypes, options.ops):
        kind = request["kind"]
        if request["dtype"] in DTYPES_OF.get(kind, DTYPES):
            limits = [n for n in (options.limit, SAMPLES.get(kind)) if n is not None]
            requests.append({**request, "limit": min(limits, default=None)})
    totals, start = Totals(), time.monotonic()
    is_share = bool(options.ops or options.kind or options.dtype)
    coverage = Coverage.load(data) if is_share and data.exists() else Coverage()
    for name in options.ops or list(coverage.entries):
        coverage.forget(name, kinds, dtypes)
    for request, result in run_requests(requests, options.workers, options.timeout):
        totals.add(request, result)
        coverage.add(request, result)
        for failure in result["failures"]:
            print(failure, flush=True)
        if result["seconds"] > 60:
            print(f"slow: {label_of(request)} {result['seconds']:.0f} s", flush=True)
    seconds = time.monotonic() - start
    totals.print(seconds, hosted=True)
    outcomes = totals.outcomes
    run = {
        "adapter": devices.get_device(0).target.name,
        "torch": torch.__version__.partition("+")[0],
        "limit": options.limit,
        "operators": sorted(options.ops),
        "kinds": kinds if options.kind else [],
        "dtypes": dtypes if options.dtype else [],
        "outcomes": {name: outcomes[name] for name in OUTCOMES if name != "skipped"},
        "seconds": round(seconds),
        "workers": options.workers,
    }
    coverage.add_run(run)
    coverage.save(data)
    return 1 if totals.failed else 0


if __name__ == "__main__":
    main()
