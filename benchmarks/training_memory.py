"""Bytes that a training step takes at most, without a GPU: `python -m benchmarks.training_memory`.

Which memory a step asks for, and when, does not depend on what is computed. So this runs steps of
`benchmarks.training` (forward, backward, AdamW, `zero_grad`, in f32) on a device that allocates as
an H200 does, by its limits and rates, and computes nothing. The columns: as the model is; with
``torch.utils.checkpoint`` around each layer, reentrant or not; with a policy that keeps the results
of products and attention, and computes the rest again; and, where it is the partitioner that
chooses, with half of what it would save (``torch._functorch.config.activation_memory_budget``).

    python -m benchmarks.training_memory [--output FILE] [case …]
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.plan.model import Kernel
from torch_webgpu_compile.runtime import adapters
from torch_webgpu_compile.runtime import device as devices
from torch_webgpu_compile.runtime.interface import BindGroupMaker, Command, DispatchRun, Span
from torch_webgpu_compile.target import Target

from . import targets
from .training import CASES, step_of

# Rates that were measured on an H200, and are stored under its name, are not for this.
H200 = replace(targets.H200, name="an H200's limits")


class _Handle:
    """Stands for an object of a provider."""


@dataclass
class CountingBackend:
    """A `runtime.native.NativeBackend` that has no memory and runs nothing; downloads are zeros."""

    lost_cause: str = ""
    submissions: int = 0
    _mapped: dict[Any, Any] = field(default_factory=dict)

    def find_loss(self) -> bool:
        return False

    def create_buffer(self, nbytes: int, usage: int) -> _Handle:
        return _Handle()

    def release_buffer(self, handle: Any) -> None:
        pass

    def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[_Handle, _Handle]:
        return _Handle(), _Handle()

    def bind_group_maker(
        self, layout: Any, ranges: Sequence[tuple[int, int]], name: str
    ) -> BindGroupMaker:
        return lambda buffers, starts: _Handle()

    def submit(self, commands: Sequence[Command], name: str) -> int:
        self.submissions += 1
        return self.submissions

    def wait(self, submission: int | None = None) -> None:
        pass

    def write_buffer(self, handle: Any, offset: int, source: int | bytes, nbytes: int) -> None:
        pass

    def fill_staging(self, handle: Any, address: int, nbytes: int, submission: int | None) -> None:
        pass

    def map(self, handle: Any, nbytes: int, submission: int | None) -> int:
        memory = self._mapped[handle] = ctypes.create_string_buffer(nbytes)
        return ctypes.addressof(memory)

    def unmap(self, handle: Any) -> None:
        self._mapped.pop(handle, None)

    def submit_timed(self, run: DispatchRun, name: str) -> list[Span] | None:
        return None


class _Adapter(adapters.AdapterInfo):
    def target(self) -> Target:
        return H200


def open_counting_device() -> None:
    """Makes such a device the only one of this process, before any other is opened."""
    info = _Adapter(
        0, H200.name, H200.vendor, H200.backend, "discrete", "", H200.features, {}, (32, 32)
    )
    adapters._found["wgpu"] = [(info, None)]

    def create(provider: str, info: Any, adapter: Any, checked: bool) -> devices.Device:
        return devices.Device(info, CountingBackend(), checked)

    devices.create_device = create  # type: ignore[assignment]
    register()


# -- what is kept for the backward -----------------------------------------------------------------

_COMPUTED_ONCE = ("linear", "mm", "addmm", "bmm", "convolution", "attention")


def _policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    name = str(getattr(op, "_opname", op))
    kept = any(part in name for part in _COMPUTED_ONCE)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(module: Any, **options: Any) -> None:
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _selective(module: Any) -> None:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    _checkpointed(module, use_reentrant=False, context_fn=contexts)


def _as_it_is(module: Any) -> None:
    pass


COLUMNS: dict[str, tuple[Callable[[Any], None], float]] = {
    "as it is": (_as_it_is, 1.0),
    "reentrant": (partial(_checkpointed, use_reentrant=True), 1.0),
    "not reentrant": (partial(_checkpointed, use_reentrant=False), 1.0),
    "selective": (_selective, 1.0),
    "half budget": (_as_it_is, 0.5),
}


def peak_nbytes(name: str, backend: str | None, column: str) -> int | None:
    """The most memory in use in three steps of a new process; None where a column does not apply.

    Args:
        name: of `training.CASES`.
        backend: of ``torch.compile``; None: eager.
        column: of `COLUMNS`.
    """
    change, budget = COLUMNS[column]
    if budget < 1 and backend is None:
        return None
    os.environ["TORCH_WEBGPU_CACHE"] = "0"
    open_counting_device()
    torch.manual_seed(0)
    case = CASES[name]
    module, inputs = case.build(False)
    try:
        change(module)
    except ValueError:  # a model without layers to put checkpoints around
        return None
    module, inputs = module.to("webgpu"), tuple(x.to("webgpu") for x in inputs)
    memory: Any = torch.webgpu  # type: ignore[attr-defined]
    memory.reset_peak_memory_stats()
    step = step_of(case, module, inputs, backend)
    with functorch_config.patch(activation_memory_budget=budget):
        for _ in range(3):
            step()
    found: int = memory.max_memory_allocated()
    return found


def row(name: str, backend: str | None) -> str:
    """One model, eager or compiled."""
    cells = []
    for column in COLUMNS:
        # What one step leaves to the garbage collector would count in the next one's.
        with ProcessPoolExecutor(1, get_context("spawn")) as new_process:
            nbytes = new_process.submit(peak_nbytes, name, backend, column).result()
        cells.append("–" if nbytes is None else f"{nbytes / 1e9:.3f}")
    label = f"{name}, {'eager' if backend is None else 'compiled'}"
    return f"{label:<24}" + "".join(f"{cell:>15}" for cell in cells)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["gpt2", "vit_8", "resnet50_16", "convnext_8"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = [f"{'GB (10^9 bytes)':<24}" + "".join(f"{name:>15}" for name in COLUMNS)]
    print(lines[0])
    for name in arguments.cases:
        for backend in (None, "webgpu"):
            lines.append(row(name, backend))
            print(lines[-1], flush=True)
            if arguments.output is not None:
                arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
