"""The long run notices what its workers do, whatever that is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

from . import long
from .choosers import RandomChooser
from .families import FAMILIES, draw_program
from .pipelines import PyTorchFault, compare
from .programs import Drawing, Program, Value

pytestmark = pytest.mark.filterwarnings("ignore")

# Graph 2 crashes, graph 4 hangs, graph 5 is wrong.
_WORKER = """
import json, os, sys, time
first, graphs = (int(sys.argv[sys.argv.index(name) + 1]) for name in ("--first", "--graphs"))
for graph in range(first, first + graphs):
    print(json.dumps({"start": graph}), flush=True)
    if graph == 2:
        os.abort()
    if graph == 4:
        time.sleep(60)
    print(json.dumps({"end": graph, **({"problem": "wrong"} if graph == 5 else {})}), flush=True)
"""


def test_crashes_and_hangs_are_failures_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(f"#!{sys.executable}\n{_WORKER}")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    arguments = argparse.Namespace(seed=0, family="", dynamic="", interpreter=False, limit=5.0)
    tally = long.Tally()
    long.run_range(arguments, 0, 8, tally)
    assert tally.checked == 8
    assert [graph for graph, _ in tally.failures] == [2, 4, 5]
    causes = [text for _, text in tally.failures]
    assert "during it with status" in causes[0]
    assert "no answer" in causes[1]
    assert causes[2] == "wrong"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_makes_calls(family: str) -> None:
    drawing = Drawing(RandomChooser("seed"))
    for dtype in (torch.float32, torch.int64, torch.float32):
        drawing.add_input((3, 4), dtype)
    assert any(FAMILIES[family](drawing) is not None for _ in range(20))


def test_a_seed_gives_one_program() -> None:
    programs = [repr(draw_program(RandomChooser(f"seed/{k}"))) for k in range(20)]
    assert programs == [repr(draw_program(RandomChooser(f"seed/{k}"))) for k in range(20)]
    assert len(set(programs)) == 20


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "got", "wanted", "ideal", "error"),
    [
        (torch.float32, [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], None),
        (torch.float32, [1.0, 2.0], [1.0, INF], [1.0, 2.0], PyTorchFault),
        (torch.float32, [1.0, 4.0], [1.0, NAN], [1.0, 2.0], AssertionError),
        (torch.bfloat16, [1.0, 2.0], [1.0, NAN], [1.0, 2.0], PyTorchFault),
        (torch.bfloat16, [1.0, NAN], [1.0, 2.0], [1.0, NAN], PyTorchFault),
        (torch.bfloat16, [9.0, 2.0], [1.0, NAN], [1.0, 2.0], AssertionError),
        (torch.bfloat16, [1.0, 9.0], [1.0, NAN], [1.0, 2.0], AssertionError),
        (torch.bfloat16, [1.0, NAN], [1.0, 2.0], [1.0, 2.0], AssertionError),
        (torch.float16, [1.0, 2.0], [1.0, NAN], [1.0, 2.0], PyTorchFault),  # it overflowed
        (torch.float16, [1.0, NAN], [1.0, 2.0], [1.0, NAN], PyTorchFault),
    ],
)
def test_whose_fault_it_is(dtype, got, wanted, ideal, error):
    program = Program([Value("x0", torch.zeros(2, dtype=dtype), True)], ["zeros"], [], ["t0"])
    values = [torch.tensor(v, dtype=dtype) for v in (got, wanted)]
    outcome = None
    try:
        precise = [torch.tensor(ideal).double()]
        compare("kernels", [values[0]], [values[1]], precise, [], program)
    except (PyTorchFault, AssertionError) as raised:
        outcome = type(raised)
    assert outcome is error


def test_roundings_that_cancel_are_no_tolerance():
    # In bfloat16 each x is exactly ±1, and the sum exactly 0; with other roundings it is not.
    x = torch.tensor([1.25, -1.75, 2.25, -2.75], dtype=torch.bfloat16)
    program = Program([Value("x0", x, True)], ["x"], [("t0", "x0 * torch.rsqrt(x0 * x0)")])
    program.steps.append(("t1", "t0.sum(0, keepdim=True)"))
    program.results = ["t1"]
    assert torch.equal(program.precise()[0].round(decimals=6), torch.zeros(1).double())
    assert torch.equal(program.precise(1)[0], program.precise()[0])
    program.rounded["t0"] = torch.bfloat16
    moved = program.precise(1)
    assert 0 < moved[0].abs() < 4 * 2**-8
    wanted, got = torch.zeros(1).bfloat16(), torch.full((1,), 2e-3).bfloat16()
    compare("kernels", [got], [wanted], program.precise(), [moved], program)
    with pytest.raises(AssertionError):
        compare("kernels", [got * 100], [wanted], program.precise(), [moved], program)
