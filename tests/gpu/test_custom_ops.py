"""Operators of others (``torch.library``), in eager calls and in compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.compiling import compiled
from torch_webgpu_compile import errors
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.fallbacks import FallbackWarning, reset_warnings

register()
pytestmark = pytest.mark.usefixtures("fresh")
places = pytest.mark.parametrize("place", ["cpu", "webgpu"])
SEEN: list[str] = []


@torch.library.custom_op("testing::scale", mutates_args={"out"}, device_types="cpu")
def scale(x: Tensor, out: Tensor, factor: float = 2.0) -> None:
    out.numpy()[:] = x.numpy() * factor


@torch.library.custom_op("testing::own", mutates_args={"total"}, device_types="cpu")
def own(x: Tensor, total: Tensor) -> Tensor:
    raise AssertionError("there is an implementation for the device")


@own.register_kernel("webgpu")
def _(x: Tensor, total: Tensor) -> Tensor:
    SEEN.append(x.device.type)
    total.add_(x.sum())
    return x.t() * 2  # neither the strides nor the memory of what the graph expects


@own.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


@torch.library.custom_op("testing::anywhere", mutates_args={"a", "b", "rest"})
def anywhere(x: Tensor, a: Tensor, b: Tensor | None, rest: list[Tensor]) -> tuple[Tensor, Tensor]:
    SEEN.append(x.device.type)
    a += x
    if b is not None:
        b *= 2
    for k, tensor in enumerate(rest):
        tensor.copy_(x + k)
    return x.sum(), a.clone()


@anywhere.register_fake
def _(x: Tensor, a: Tensor, b: Tensor | None, rest: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x.new_empty(()), torch.empty_like(a)


@torch.library.custom_op("testing::strides", mutates_args=(), device_types="cpu")
def strides_of(x: Tensor) -> Tensor:
    return torch.tensor(x.stride())


@strides_of.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.dim(), dtype=torch.int64)


LIBRARY = torch.library.Library("testing_library", "DEF")
LIBRARY.define("boxes(Tensor[] x, Tensor? w=None, *, int[] k=[1, 2]) -> (Tensor[], Tensor)")


def boxes(x: list[Tensor], w: Tensor | None = None, *, k: list[int]) -> tuple[list[Tensor], Tensor]:
    return [t * k[1] for t in x], x[0].sum(0)


def fake_boxes(x: list[Tensor], w: Any = None, *, k: Any = None) -> tuple[list[Tensor], Tensor]:
    return [torch.empty_like(t) for t in x], x[0].new_empty(x[0].shape[1:])


torch.library.impl(LIBRARY, "boxes", "CPU")(boxes)
torch.library.register_fake("testing_library::boxes", fake_boxes, lib=LIBRARY)


def a_part_of_a_result(x: Tensor) -> Any:
    made = torch.zeros(6, 5, device=x.device)
    scale(x[1:3], made[2:4])
    scale(x[0, 1:], made.diagonal()[1:], 3.0)
    return made + 1


def a_part_of_an_argument(x: Tensor) -> Any:
    scale(x[0:2] + 1, x[1:3])
    return x * 1


def two_views_of_one(x: Tensor) -> Any:
    made = x.clone()
    turned = made.t()
    results = anywhere(x[1], made[0], turned[2], [made[3], x[2]])
    return made, turned, results


def something_absent(x: Tensor) -> Any:
    made = x + 1
    return *anywhere(x, made, None, []), made * 2


def a_copy_of_what_it_reads(x: Tensor) -> Any:
    made = x.clone()
    scale(x, made)
    return made + x


def layouts(x: Tensor) -> Any:
    given = (x, x.t(), x[:, :2], x[0].expand(3, 5), x.t().contiguous())
    return [strides_of(t) for t in given]


def lists_and_keywords(x: Tensor) -> Any:
    (first, second), total = torch.ops.testing_library.boxes([x, x.t()], k=[3, 4])
    return first - 1, second, total


@places
@pytest.mark.parametrize(
    "function",
    [
        a_part_of_a_result,
        a_part_of_an_argument,
        two_views_of_one,
        something_absent,
        a_copy_of_what_it_reads,
        layouts,
        lists_and_keywords,
    ],
)
def test_results_and_what_is_changed(function: Callable[[Tensor], Any], place: str) -> None:
    x = torch.arange(20.0).reshape(4, 5) / 7
    changed = x.clone()
    wanted = function(changed)
    in_graph = compiled(function, dynamic=place == "webgpu" or None)
    for call in (in_graph, *([function] if place == "webgpu" else ())):
        reset_warnings()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                given = x.to(place, copy=True)
                got = tree_map_only(Tensor, Tensor.cpu, call(given))
                torch.testing.assert_close(got, wanted)
                torch.testing.assert_close(given.cpu(), changed)
        texts = [str(w.message) for w in caught if w.category is FallbackWarning]
        named = {text.partition(" ")[0] for text in texts}
        assert len(texts) == len(named), texts
        assert all("has no implementation for webgpu tensors" in text for text in texts)


@places
def test_an_implementation_for_the_device(place: str) -> None:
    def function(x: Tensor, total: Tensor) -> Tensor:
        return own(x + 1, total[1:]) - x.t()

    x, total = torch.rand(3, 4), torch.zeros(3)
    after = total + torch.tensor([0.0, 1.0, 1.0]) * (x + 1).sum()
    call, given = compiled(function, options={"fallback": "error"}), total.to(place)
    SEEN.clear()
    torch.testing.assert_close(call(x.to(place), given).cpu(), x.t() + 2)
    torch.testing.assert_close(given.cpu(), after)
    assert SEEN == ["webgpu"]


def test_an_implementation_for_all_devices_is_given_what_the_graph_is() -> None:
    x = torch.rand(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for place in ("cpu", "webgpu"):
            SEEN.clear()
            compiled(something_absent)(x.to(place))
            assert [place] == SEEN


@torch.library.custom_op("testing::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("testing::slope", mutates_args=(), device_types="cpu")
def slope(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(gradient.numpy() * x.cos().numpy())


sine.register_fake(torch.empty_like)
slope.register_fake(lambda gradient, x: torch.empty_like(x))
sine.register_autograd(
    lambda ctx, gradient: slope(gradient, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("testing::follow", mutates_args={"running"}, device_types="cpu")
def follow(x: Tensor, running: Tensor) -> None:
    running.mul_(0.9).add_(x.mean(0), alpha=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("running", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = sine(self.inner(x))
        follow(hidden.detach(), self.running[1])
        return self.outer(hidden - self.running[1])


def trained(place: str, wrap: Callable[[Any], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model().to(place)
    call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    for size in (5, 5, 7, 7):
        call(torch.linspace(-1, 1, size * 4).reshape(size, 4).to(place)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


@places
@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
def test_training(place: str) -> None:
    wanted = trained("cpu", lambda model: model)
    torch.testing.assert_close(trained(place, compiled), wanted)
    if place == "webgpu":
        torch.testing.assert_close(trained(place, lambda model: model), wanted)


@places
def test_refused_without_fallbacks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "error")
    with pytest.raises(Exception, match=r"testing.scale.default.*(?s:.*)test_custom_ops.py:\d+"):
        compiled(a_copy_of_what_it_reads)(torch.ones(2, 3, device=place))
    with pytest.raises(errors.UnsupportedOp, match=r"testing.scale.default.*no implementation"):
        a_copy_of_what_it_reads(torch.ones(2, 3, len(place), device="webgpu"))


@torch.library.custom_op("testing::other", mutates_args=())
def other(x: Tensor) -> Tensor:
    return x.sum(0)


other.register_fake(torch.empty_like)


@places
@pytest.mark.filterwarnings("ignore::torch_webgpu_compile.fallbacks.FallbackWarning")
def test_a_fake_implementation_that_is_wrong(place: str) -> None:
    with pytest.raises(errors.DeviceError, match=r"testing.other.default gave torch.float32\[3\]"):
        compiled(lambda x: other(x) + 1)(torch.ones(2, 3, device=place))
