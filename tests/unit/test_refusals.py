"""Stand-ins on the CPU say what PyTorch refuses, and nothing else."""

from __future__ import annotations

import itertools
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device_exceptions import name_of
from tests.opinfo import op_db
from torch_webgpu_compile.capture import refusals
from torch_webgpu_compile.capture.refusals import refusal

aten = torch.ops.aten
# Jiterators are for CUDA alone.
OPERATORS = {name_of(info): info for info in op_db if "jiterator" not in info.name}
DTYPES = (torch.float32, torch.int64, torch.bool, torch.float16, torch.complex64)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta").expand(sizes)


LARGE = {
    "dtypes of a product": (aten.mm.default, zeros(4096, 512), zeros(512, 64).half()),
    "dtypes of layers": (F.linear, zeros(8, 512).long(), zeros(64, 512), zeros(64)),
    "a dimension": (aten._softmax.default, zeros(4096, 512), 2, False),
    "indices": (
        *(aten.index_put.default, zeros(4096, 512)),
        *([zeros(200).long(), zeros(300).long()], zeros()),
    ),
    "rows": (aten.index_add.default, zeros(4096, 512), 0, zeros(20).long(), zeros(20, 511)),
    "padding": (aten.reflection_pad1d.default, zeros(1, 1, 4096), [4096, 0]),
    "one tensor read and written": (
        *(aten.index_add_.default, ROWS := torch.empty(4096, device="meta"), 0),
        *(zeros(4096).long(), ROWS),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_calls_are_refused(name: str) -> None:
    """Smaller sizes stand for large ones: the error says the same, and of the large ones."""
    function, *args = LARGE[name]
    error = refusal(function, args, {})
    assert isinstance(error, (RuntimeError, IndexError)), error


def test_what_is_drawn_and_said_stays_the_same() -> None:
    """Asking draws no random numbers, and a generator keeps its state."""
    generator = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), generator.get_state()
    given = {"generator": generator}
    assert refusal(aten.bernoulli.default, (torch.ones(3),), given) is None
    assert refusal(F.dropout, (torch.ones(3), 0.5), {}) is None
    assert str(refusal(aten.bernoulli_.float, (torch.ones(3), 1.5), given)).startswith("bernoulli_")
    for state, other in zip(before, (torch.get_rng_state(), generator.get_state()), strict=True):
        assert torch.equal(state, other)


def test_numbers_of_other_types_are_other_calls() -> None:
    """1 and 1.0 are equal, but not to a whole tensor that is changed."""
    whole = torch.ones(3, dtype=torch.int64)
    assert refusal(aten.add_.Tensor, (whole, 1), {}) is None
    assert refusal(aten.add_.Tensor, (whole, 1.0), {}) is not None
    assert whole.tolist() == [1, 1, 1]


def test_what_the_cpu_alone_cannot_do_is_not_refused() -> None:
    """Dtypes of floats without a kernel, statistics in another dtype, histograms of integers."""
    x, ones = torch.ones(2, 3, 4).bfloat16(), torch.ones(3)
    saved = ones, torch.ones(3).bfloat16(), ones.bfloat16()
    options = True, 0.1, [True, True, True]
    error = refusal(
        aten.native_batch_norm_backward.default, (x, x, *saved, *saved[:2], *options), {}
    )
    assert error is None
    assert refusal(aten.histc.default, (torch.arange(4), 3, 0, 3), {}) is None


@torch.library.custom_op("refusals_test::noting", mutates_args=())
def noting(x: Tensor) -> Tensor:
    """One of a user."""
    return x.clone()


TWO, THREE = torch.zeros(2, 3), torch.zeros(3)
NOT_ASKED = {
    "of a user": (torch.ops.refusals_test.noting.default, TWO),
    "of another namespace": (torch.ops.prims.add.default, TWO, TWO),
    "of a backward pass": (aten.reflection_pad1d_backward.default, TWO, THREE, [1, 1]),
    "called by PyTorch alone": (aten._fft_r2c.default, TWO, [9], 0, True),
    "called by PyTorch alone, as a function": (
        *(torch.native_batch_norm, TWO, torch.zeros(9), THREE, THREE, THREE),
        *(True, 0.1, 1e-5),
    ),
    "reading a file": (aten.from_file.default, "stand-in", True, 4),
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_kernels_that_need_not_check_are_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read and write beyond what is made up for them, or do something that lasts."""
    function, *args = NOT_ASKED[name]
    monkeypatch.setattr(refusals._Call, "refused", lambda *_, **__: pytest.fail("it is asked"))
    assert refusal(function, args, {}) is None


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.diag_embed, (torch.zeros(5, 5), 10_000)),
        (F.conv2d, (torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 3, 3), None, 1, 2_000)),
        (torch.Tensor.new_ones, (torch.zeros(1), (5_000, 5_000))),
    ],
    ids=["diagonal", "padding", "sizes alone"],
)
def test_numbers_may_be_sizes(function: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a result that takes more memory than a question is worth."""
    monkeypatch.setattr(refusals._Call, "_error", lambda *_: pytest.fail("it is computed"))
    assert refusal(function, args, {}) is None


class _Asks(TorchDispatchMode):
    """Asks of every operator whether it is refused, before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        error = refusal(func, args, kwargs) if func.namespace == "aten" else None
        result = func(*args, **kwargs)
        if error is not None:
            self.refused.append(f"{func}: {error!r}")
        return result


@pytest.mark.filterwarnings("ignore")  # of sparse tensors
@pytest.mark.rotates(32)
@pytest.mark.parametrize("name", OPERATORS)
def test_what_pytorch_takes_is_not_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions, and the operators that they consist of, as they are and with smaller sizes."""
    info = OPERATORS[name]
    for dtype, most in itertools.product(DTYPES, (refusals._MOST_ELEMENTS, 0)):
        if dtype not in info.supported_dtypes("cpu"):
            continue
        monkeypatch.setattr(refusals, "_MOST_ELEMENTS", most)
        torch.manual_seed(0)
        for sample in itertools.islice(info.sample_inputs("cpu", dtype), 4):
            asks = _Asks()
            error = refusal(info.op, (sample.input, *sample.args), sample.kwargs)
            # Of a sample that PyTorch refuses, what it took before counts.
            with warnings.catch_warnings(), suppress(RuntimeError, IndexError), asks:
                warnings.simplefilter("ignore")
                info.op(sample.input, *sample.args, **sample.kwargs)
                assert error is None, (dtype, most, error)
            assert not asks.refused, (dtype, most, asks.refused)
