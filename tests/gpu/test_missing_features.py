"""int64 and float16 on GPUs whose WGSL has neither type: the same results, and none on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.providers import lose
from torch_webgpu_compile import counters

pytestmark = pytest.mark.usefixtures("fresh")

_LOW, _HIGH = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
_NUMBERS = (0, 1, -1, 3, -7, 255, 2**31 - 1, -(2**31), 2**32, 2**32 + 5, -(2**40) - 3, 10**18)
EXTREME = torch.tensor([*_NUMBERS, _LOW, _HIGH, _LOW + 1, 2**62])
SMALL = EXTREME.remainder(63)
# Not the lowest: PyTorch dies of its quotient by -1.
DIVIDENDS = torch.where(EXTREME == _LOW, 7, EXTREME)
DIVISORS = torch.where(DIVIDENDS == 0, 5, DIVIDENDS)
FLOATS = torch.tensor([0.0, -0.0, 1.5, -1.5, 2.0**31, -(2.0**40), 1e18, -1e18, 0.99, -(2.0**63)])


def truncated(a: Tensor, b: int) -> Tensor:
    """The quotient without its fraction."""
    return torch.div(a, b, rounding_mode="trunc")


INTEGERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sums": (lambda a, b: (a + b, a - b, -a, a.abs(), a.sign()), (EXTREME[:, None], EXTREME)),
    "products": (lambda a, b: (a * b, a**3, a.square()), (EXTREME[:, None], EXTREME)),
    "quotients": (
        lambda a, b: (
            torch.div(a, b, rounding_mode="floor"),
            torch.div(a, b, rounding_mode="trunc"),
            a % b,
            a.fmod(b),
            torch.gcd(a, b),
        ),
        (DIVIDENDS[:, None], DIVISORS),
    ),
    "quotients that 32 bits hold, or may not": (
        lambda i: tuple(
            operator(i.long(), divisor)
            for divisor in (1, 7, 2**31 - 1, 2**31, -1, -7)
            for operator in (torch.floor_divide, torch.remainder, torch.fmod, truncated)
        ),
        (torch.tensor([-(2**31), 1 - 2**31, -8, -7, -1, 0, 1, 6, 2**31 - 1], dtype=torch.int32),),
    ),
    "comparisons": (
        lambda a, b: (a < b, a <= b, a == b, a != b, a > b, a >= b, a.minimum(b), a.maximum(b)),
        (EXTREME[:, None], EXTREME),
    ),
    "bits": (lambda a, b: (a & b, a | b, a ^ b, ~a), (EXTREME[:, None], EXTREME)),
    "shifts": (lambda a, b: (a << b, a >> b), (EXTREME[:, None], SMALL)),
    "powers": (lambda a, b: a**b, (EXTREME[:, None], torch.tensor([0, 1, 2, 5, 63, -1, -2, _LOW]))),
    "constants": (
        lambda a: (a + 2**40, a * -3, a.clamp(-(2**33), 2**33), a.where(a > 0, a // 10)),
        (EXTREME,),
    ),
    "to others": (
        lambda a: (a.float(), a.int(), a.to(torch.uint8), a.bool(), a.to(torch.bfloat16)),
        (torch.cat([EXTREME, 2**24 + torch.arange(-3, 4), 2**53 + torch.arange(-3, 4)]),),
    ),
    "of others": (lambda a: (a.long(), (a / 2**40).int().long(), (a > 0).long()), (FLOATS,)),
    "reductions": (
        lambda a: (a.sum(1), a.amax(1), a.argmax(1), a.cumsum(1), a.prod(0), (a > 0).sum()),
        (EXTREME.repeat(50).view(8, 100),),
    ),
    "positions": (
        lambda t, i, a: (
            F.embedding(i, t),
            t[i],
            torch.zeros(5, dtype=torch.int64).scatter_add(0, i, a),
            torch.zeros(5, dtype=torch.int64).index_put((i,), a, accumulate=True),
            torch.zeros(20, dtype=torch.int64).index_put((i + torch.arange(4) * 5,), a),
            torch.arange(7) * 2**33,
        ),
        (torch.randn(5, 3), torch.tensor([0, 4, -1, 2]) % 5, EXTREME[-4:]),
    ),
    "orders": (lambda a: (*a.sort(), *a.topk(3)), (EXTREME,)),
}
SPECIAL = [
    float("nan"),
    float("inf"),
    float("-inf"),
    -0.0,
    6e-8,
    5e-5,
    1.0,
    1 / 3,
    65504.0,
    -65504.0,
]
HALVES = torch.tensor([*SPECIAL, *torch.linspace(-9, 9, 27).tolist()]).half()

SMALL_FLOATS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (lambda a: (a * 2, a.float(), a + 1, a.relu(), a.view(torch.int16)), (HALVES,)),
    "of float32": (lambda a: a.half(), (torch.linspace(-70000, 70000, 1001) / 3,)),
    "rows": (
        lambda a: (a.softmax(-1), F.layer_norm(a, (37,))),
        (torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).half(),),
    ),
    "products": (lambda a: a @ a.t(), (torch.eye(37).half() * 3,)),
    "views": (lambda a: a.t()[1:, ::2] + 1, (torch.arange(35.0).view(5, 7).half(),)),
}


def check(function: Callable[..., Any], *arguments: Tensor) -> None:
    counters.reset()
    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    got, wanted = compiled(*arguments), function(*arguments)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert not counters.fallbacks


@pytest.mark.parametrize("name", INTEGERS)
def test_int64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose("shader-int64", monkeypatch)
    check(INTEGERS[name][0], *INTEGERS[name][1])


@pytest.mark.parametrize("wrong", [7, 2**32 + 1, _LOW])
def test_an_int64_out_of_range_is_named(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lose("shader-int64", monkeypatch)
    compiled = torch.compile(lambda t, i: t[i], backend="webgpu", fullgraph=True)
    with pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
        compiled(torch.ones(5), torch.tensor([0, wrong, 2]))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_float16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose("shader-f16", monkeypatch)
    check(SMALL_FLOATS[name][0], *SMALL_FLOATS[name][1])


@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
def test_numbers_in_float64_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute with them in float32; results that are float64 are the host's."""

    def function(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        less = number - 1e-9
        return x * less, less, less.reciprocal().sqrt(), (less + 1).to(torch.float64), less.view(1)

    lose("shader-f64", monkeypatch)
    arguments = torch.randn(5), torch.tensor(1 / 3, dtype=torch.float64)
    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=1e-6, atol=0)
    for got, wanted in zip(compiled(*arguments)[1:], function(*arguments)[1:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-15, atol=0)
    counters.reset()
    scaled = torch.compile(lambda x, number: x * (number - 1e-9), backend="webgpu", fullgraph=True)
    torch.testing.assert_close(scaled(*arguments), function(*arguments)[0])
    assert list(counters.fallbacks) == ["aten._to_copy.default"]
