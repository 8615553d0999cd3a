"""The programs that are compiled: names, and functions that give their graphs to a `Tracer`.

Nothing here, nor in what is imported here, knows the inside of the package.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests import zoo
from tests.golden.graphs import GRAPHS

SAMPLES = 8
"""Of an operator's samples so many are looked at."""


class Tracer(Protocol):
    """Compiles what a program gives it."""

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``torch.compile``."""

    def call(self, op: Any, args: Any, kwargs: Any) -> None:
        """An eager call of an ATen operator."""

    def fail(self, what: str, error: Exception) -> None:
        """A part of the program raises an error."""

    def restart(self) -> None:
        """Forgets what it was given."""


Program = Callable[[Tracer], None]


def _golden(name: str, tracer: Tracer) -> None:
    function, arguments, dynamic = GRAPHS[name]
    with torch.no_grad():
        tracer.compile(function, dynamic=dynamic or None, fullgraph=True)(*arguments)


# ---- models

_ZOO = {
    "inference": zoo.INFERENCE,
    "training": zoo.TRAINING,
    "half": zoo.HALF,
    "dynamic": zoo.DYNAMIC,
}


def _model(name: str, tracer: Tracer) -> None:
    """On fake tensors, or on real ones where the model's own code reads values."""
    try:
        _run_model(*name.split("_", 1), tracer, FakeTensorMode(allow_non_fake_inputs=True))
    except DataDependentOutputException:
        tracer.restart()
        _run_model(*name.split("_", 1), tracer, nullcontext())


def _run_model(kind: str, name: str, tracer: Tracer, mode: Any) -> None:
    training = kind == "training"
    torch.set_default_dtype(torch.bfloat16 if kind == "half" else torch.float32)
    try:
        with mode, torch.set_grad_enabled(training):
            function, inputs = _ZOO[kind][name]()
            if isinstance(function, nn.Module):
                function.train(training)
            compiled = tracer.compile(function, dynamic=kind == "dynamic" or None)
            results = _tensors(compiled(*inputs))
            if training:
                sum(t.sum() for t in results if t.requires_grad).backward()
    finally:
        torch.set_default_dtype(torch.float32)


def _tensors(output: Any) -> list[Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


# ---- PyTorch's operator samples, which take seconds to import


def _operators() -> Mapping[str, Any]:
    from tests.eager_samples import OPERATORS

    return OPERATORS


def _dtypes(name: str) -> list[torch.dtype]:
    """float32, and one of the others that the operator has."""
    others = _operators()[name].supported_dtypes("cpu") & {
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
    ordered = sorted(others, key=str)
    return [torch.float32, *ordered[zlib.crc32(name.encode()) % max(len(ordered), 1) :][:1]]


def _samples(name: str, tracer: Tracer) -> None:
    """Two samples of each dtype, with gradients where there are any."""
    info = _operators()[name]
    for dtype in _dtypes(name):
        backward = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        made = info.sample_inputs("cpu", dtype, requires_grad=backward)
        for sample in list(itertools.islice(made, SAMPLES))[:: SAMPLES // 2]:

            def function(first: Any, args: Any, kwargs: Any) -> Any:
                return info.op(first, *args, **kwargs)

            torch._dynamo.reset()
            with torch.set_grad_enabled(backward):
                compiled = tracer.compile(function)
                try:
                    results = compiled(sample.input, sample.args, sample.kwargs)
                    wanted = [t for t in _tensors(results) if t.requires_grad]
                    if wanted:
                        sum(t.abs().sum() for t in wanted).backward()
                except Exception as error:  # what PyTorch refuses, or cannot trace
                    tracer.fail(str(dtype), error)


def _calls(name: str, tracer: Tracer) -> None:
    """The ATen calls of an operator's samples, in place and with ``out=`` too."""
    from tests.eager_samples import calls_of, variants_of

    for call in calls_of(_operators()[name], torch.float32, 2, backward=True):
        for variant in (call, *variants_of(call)):
            tracer.call(variant.op, variant.args, variant.kwargs)


_FAMILIES = {"zoo": _model, "samples": _samples, "calls": _calls, "golden": _golden}


def names() -> list[str]:
    """Those of all programs, the largest first."""
    models = [f"{kind}_{name}" for kind, found in _ZOO.items() for name in found]
    operators = list(_operators())
    found = {"zoo": models, "samples": operators, "calls": operators, "golden": list(GRAPHS)}
    return [f"{family}/{name}" for family, members in found.items() for name in members]


def program(name: str) -> Program:
    """The program with a name."""
    family, _, short = name.partition("/")
    return partial(_FAMILIES[family], short)


def is_chosen(name: str, share: int) -> bool:
    """Whether a program is one of a share: always the same ones of PyTorch's samples, all others.

    Args:
        share: one of so many.
    """
    family, _, short = name.partition("/")
    return family not in ("samples", "calls") or zlib.crc32(short.encode()) % share == 0


def seed() -> None:
    """Random numbers from the start."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
