"""``python -m tests.learning [--steps 300] [task ...]``: trainings on the device and on the CPU.

For each task: the loss at the end and the accuracy, of the CPU, of the CPU with other orders of the
rows, and of the device, eager and compiled; and the ratio of a run's difference from the CPU to the
difference that is allowed (`tests.learning.curves.excess`): at most 1. The exit status is 1 where
one is more, or an accuracy is further from the CPU's than the other orders' are.
"""

from __future__ import annotations

import argparse
import sys
import time

from torch_webgpu_compile import register_device

from .curves import Run, excess, train
from .tasks import TASKS


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", nargs="*", help="default: all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--orders", type=int, default=3, help="other orders of the rows")
    given = parser.parse_args()
    register_device()
    is_right = True
    for name in given.task or TASKS:
        task = TASKS[name]
        reference = train(task, "cpu", given.steps)
        others = [train(task, "cpu", given.steps, order=k) for k in range(given.orders)]
        _show(name, "cpu", reference)
        for k, other in enumerate(others):
            _show(name, f"cpu, order {k}", other, f"{_difference(other, reference):.1e}")
        away = max(abs(other.accuracy - reference.accuracy) for other in others)
        for form in ("eager", "compiled"):
            start = time.perf_counter()
            run = train(task, "webgpu", given.steps, is_compiled=form == "compiled")
            ratio = excess(run, reference, others)
            further = abs(run.accuracy - reference.accuracy) - away
            seconds = time.perf_counter() - start
            result = f"{_difference(run, reference):.1e}  ratio {ratio:.2f}  {seconds:.0f} s"
            _show(name, f"webgpu, {form}", run, result)
            is_right &= ratio <= 1 and further <= max(0.01, 0.5 * away)
    return 0 if is_right else 1


def _difference(run: Run, reference: Run) -> float:
    return float((run.losses - reference.losses).abs().max())


def _show(name: str, form: str, run: Run, more: str = "") -> None:
    end = float(run.losses[-20:].mean())
    print(f"{name:12} {form:17} loss {end:.4f}  accuracy {run.accuracy:7.4f}  {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
