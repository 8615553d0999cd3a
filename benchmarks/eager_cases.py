"""Eager calls: what a program does with tensors on a device where it does not compile.

A row makes a call of any sizes on any device. Inputs come from the CPU, so that every system gets
the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .limits import wait_of

Call = Callable[[], Any]
"""Without arguments; gives what it computes."""

_SHARES = (3, 5, 6)  # eighths of a size


@dataclass(frozen=True)
class Row:
    """An eager call.

    Attributes:
        name: on the command line and in results.
        make: (device, *sizes) → the call.
        sizes: those that are measured.
        small: those for a software adapter.
        others: of calls that a used process has made before; None: shares of the sizes.
        is_random: whether devices differ in what they draw.
        tokens: that a call generates.
    """

    name: str
    make: Callable[..., Call]
    sizes: tuple[int, ...]
    small: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] | None = None
    is_random: bool = False
    tokens: int = 0

    def other_sizes(self, small: bool) -> tuple[tuple[int, ...], ...]:
        """What a used process has seen, each unlike what is measured."""
        if self.others is not None:
            return self.others
        sizes = self.small if small else self.sizes
        return tuple(tuple(max(1, n * share // 8) for n in sizes) for share in _SHARES)


def _of(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Call]:
    """A function of one tensor."""

    def make(device: str, *sizes: int) -> Call:
        x = torch.randn(sizes).to(device, dtype)
        return lambda: function(x)

    return make


def _of_two(function: Callable[..., Any]) -> Callable[..., Call]:
    """A function of two tensors of one shape."""

    def make(device: str, *sizes: int) -> Call:
        x, y = torch.randn(sizes).to(device), torch.randn(sizes).to(device)
        return lambda: function(x, y)

    return make


def _empty(device: str, *sizes: int) -> Call:
    def call() -> None:  # what it holds is anything
        torch.empty(sizes, device=device)

    return call


def _index(device: str, rows: int, columns: int) -> Call:
    x, index = torch.randn(rows, columns).to(device), torch.randperm(rows).to(device)
    return lambda: x[index]


def _upload(device: str, *sizes: int) -> Call:
    x = torch.randn(sizes)
    return lambda: x.to(device)


def _randn(device: str, *sizes: int) -> Call:
    return lambda: torch.randn(sizes, device=device)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """A forward, and the gradients of all inputs."""
    leaves = [x.requires_grad_() for x in inputs]
    given: list[Tensor] = []

    def call() -> tuple[Tensor, ...]:
        result = function(*leaves)
        if not given:
            given.append(torch.ones_like(result))
        return torch.autograd.grad(result, leaves, given[0])

    return call


def _layer_norm(device: str, rows: int, columns: int) -> Call:
    x, weight, bias = (torch.randn(s).to(device) for s in ((rows, columns), columns, columns))
    return lambda: F.layer_norm(x, (columns,), weight, bias)


def _rms_norm(device: str, rows: int, columns: int) -> Call:
    x, weight = torch.randn(rows, columns).to(device), torch.randn(columns).to(device)
    return lambda: F.rms_norm(x, (columns,), weight)


def _batch_norm(device: str, batch: int, channels: int, side: int) -> Call:
    norm = nn.BatchNorm2d(channels).to(device)
    x = torch.randn(batch, channels, side, side).to(device)

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = norm(x)
            return result

    return call


def _linear(device: str, rows: int, inner: int, columns: int, *, backward: bool) -> Call:
    shapes = ((rows, inner), (columns, inner), (columns,))
    x, weight, bias = (torch.randn(shape).to(device) for shape in shapes)
    if backward:
        return _with_gradients(F.linear, x, weight, bias)
    return lambda: F.linear(x, weight, bias)


def _attention(device: str, batch: int, heads: int, length: int, size: int) -> Call:
    tensors = (torch.randn(batch, heads, length, size).to(device) for _ in range(3))
    return _with_gradients(F.scaled_dot_product_attention, *tensors)


def _masked_attention(device: str, batch: int, heads: int, length: int, size: int) -> Call:
    """Without gradients; some keys are left out."""
    tensors = [torch.randn(batch, heads, length, size).to(device) for _ in range(3)]
    mask = (torch.arange(length) < length - 3).expand(batch, 1, length, length).to(device)
    return lambda: F.scaled_dot_product_attention(*tensors, attn_mask=mask)


def _depthwise(device: str, batch: int, channels: int, side: int, *, backward: bool) -> Call:
    x, weight = torch.randn(batch, channels, side, side), torch.randn(channels, 1, 7, 7)
    x, weight = x.to(device), weight.to(device)
    convolve = partial(F.conv2d, padding=3, groups=channels)
    return _with_gradients(convolve, x, weight) if backward else lambda: convolve(x, weight)


def _convolution(
    device: str,
    batch: int,
    channels: int,
    side: int,
    filters: int,
    *,
    window: int,
    stride: int = 1,
    backward: bool,
) -> Call:
    x, weight = (
        torch.randn(batch, channels, side, side),
        torch.randn(filters, channels, *[window] * 2),
    )
    x, weight = x.to(device), weight.to(device)
    convolve = partial(F.conv2d, stride=stride, padding=window // 2)
    return _with_gradients(convolve, x, weight) if backward else lambda: convolve(x, weight)


def _top_50(x: Tensor) -> Any:
    return x.topk(min(50, x.shape[-1]))


def _matmul(device: str, size: int, *, dtype: torch.dtype = torch.float32) -> Call:
    x, y = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    return lambda: x @ y


def _row_product(device: str, size: int) -> Call:
    x, y = torch.randn(1, size).to(device), torch.randn(size, size).to(device)
    return lambda: x @ y


def _top_p(logits: Tensor) -> Tensor:
    """A token of the most probable ones that have 0.9 of the probability together."""
    ordered, tokens = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before > 0.9, 0.0)
    return tokens.gather(-1, torch.multinomial(kept, 1))


def _parameters(device: str, count: int, width: int) -> list[nn.Parameter]:
    found = []
    for _ in range(count):
        found.append(nn.Parameter(torch.randn(width, width).to(device)))
        found[-1].grad = torch.randn(width, width).to(device)
    return found


def _step(device: str, count: int, width: int, *, optimizer: Callable[..., Any]) -> Call:
    parameters = _parameters(device, count, width)
    stepped = optimizer(parameters, lr=1e-3)

    def call() -> Tensor:
        stepped.step()
        return parameters[-1].detach()

    return call


def _clip(device: str, count: int, width: int) -> Call:
    parameters = _parameters(device, count, width)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def _waited_mlp(device: str, batch: int) -> Call:
    """Each call is waited for. It is compiled on the device, and eager on CUDA."""
    from .cases import mlp

    model, _ = mlp(False)
    model, x = model.to(device), torch.rand(batch, 784).to(device)
    call = torch.compile(model, backend="webgpu") if device == "webgpu" else model
    wait = wait_of(device)

    def waited() -> Tensor:
        with torch.no_grad():
            result: Tensor = call(x)
        wait()
        return result

    return waited


def t5_encoder(small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """T5's small encoder."""
    from transformers import T5Config, T5EncoderModel

    from .cases import Hidden

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2} if small else {}
    model = T5EncoderModel(T5Config(**sizes))
    return Hidden(model), (torch.randint(30000, (1, 16) if small else (4, 128)),)


def _model(device: str, small: int, *, name: str) -> Call:
    """A model as the suite for training builds it, with nothing compiled."""
    from . import training

    cases = {**training.CASES, "t5_encoder": training.Case(t5_encoder, "forward")}
    case = cases[name]
    module, inputs = case.build(bool(small))
    if name.startswith("llama"):
        module = module.half()
    return training.step_of(case, module.to(device), tuple(x.to(device) for x in inputs), None)


TOKENS = 16
"""What `generate` adds to a prompt of as many."""


def _generate(device: str, small: int) -> Call:
    """Greedy decoding by transformers' ``generate``, with the cache that it takes by itself: it
    grows with every token."""
    from . import training

    logits, _ = training.llama(bool(small))
    model = logits.model.half().to(device).eval()
    model.generation_config.eos_token_id = None
    tokens = (torch.arange(TOKENS)[None] % 900 + 3).to(device)
    mask = torch.ones_like(tokens)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(tokens, attention_mask=mask, **settings)


_SQUARE, _TINY = (64, 64), (16, 16)
_MILLION, _FEW = (1 << 20,), (1 << 12,)
_OF_TEXT, _LITTLE_TEXT = (512, 768), (32, 48)
_LINEAR, _SMALL_LINEAR = (512, 768, 3072), (32, 48, 96)
_DEPTHWISE, _SMALL_DEPTHWISE = (8, 96, 56), (2, 16, 14)
_LISTS, _SHORT_LISTS = (148, 256), (12, 16)
_OTHER_LISTS = ((5, 24), (9, 40), (13, 56))

OPERATORS = (
    Row("add", _of_two(torch.add), _SQUARE, _TINY),
    Row("add_", _of(lambda x: x.add_(1)), _SQUARE, _TINY),
    Row("view", _of(lambda x: x.view(-1)), _SQUARE, _TINY),
    Row("slice", _of(lambda x: x[3:9]), _SQUARE, _TINY),
    Row("empty", _empty, _SQUARE, _TINY),
    Row("half", _of(Tensor.half), _SQUARE, _TINY),
    Row("contiguous", _of(lambda x: x.t().contiguous()), _SQUARE, _TINY),
    Row("sum", _of(torch.sum), _SQUARE, _TINY),
    Row("softmax", _of(lambda x: x.softmax(-1)), _SQUARE, _TINY),
    Row("cat", _of_two(lambda x, y: torch.cat((x, y))), _SQUARE, _TINY),
    Row("index", _index, _SQUARE, _TINY),
    Row("item", _of(Tensor.item), (1,), (1,)),
    Row("cpu", _of(Tensor.cpu), (64,), (16,)),
    Row("upload", _upload, (64,), (16,)),
    Row("layer_norm", _layer_norm, _OF_TEXT, _LITTLE_TEXT),
    Row("rms_norm", _rms_norm, _OF_TEXT, _LITTLE_TEXT),
    Row("gelu", _of(F.gelu), _OF_TEXT, _LITTLE_TEXT),
    Row("batch_norm", _batch_norm, (16, 64, 56), (2, 8, 14)),
    Row("randn", _randn, _MILLION, _FEW, is_random=True),
    Row("linear", partial(_linear, backward=False), _LINEAR, _SMALL_LINEAR),
    Row("linear_backward", partial(_linear, backward=True), _LINEAR, _SMALL_LINEAR),
    Row("masked_attention", _masked_attention, (4, 12, 256, 64), (1, 2, 32, 16)),
    Row("attention_backward", _attention, (4, 12, 256, 64), (1, 2, 32, 16)),
    Row("depthwise", partial(_depthwise, backward=False), _DEPTHWISE, _SMALL_DEPTHWISE),
    Row("depthwise_backward", partial(_depthwise, backward=True), _DEPTHWISE, _SMALL_DEPTHWISE),
    Row(
        "convolution_7_backward",
        partial(_convolution, window=7, stride=2, backward=True),
        (16, 3, 224, 64),
        (2, 3, 32, 16),
    ),
    Row(
        "convolution_1_backward",
        partial(_convolution, window=1, backward=True),
        (16, 256, 56, 64),
        (2, 32, 14, 16),
    ),
    Row(
        "convolution_3",
        partial(_convolution, window=3, backward=False),
        (16, 64, 56, 64),
        (2, 16, 14, 16),
    ),
    Row("matmul_bf16", partial(_matmul, dtype=torch.bfloat16), (2048,), (64,)),
    Row("matmul", _matmul, (2048,), (64,)),
    Row("row_product", _row_product, (4096,), (128,)),
    Row("topk", _of(_top_50), (1024, 50257), (4, 500)),
    Row("topk_row", _of(_top_50), (1, 128_000), (1, 1000)),
    Row("sort", _of(torch.sort), (4096, 4096), (16, 64)),
    Row("argsort", _of(torch.argsort), _MILLION, (1000,)),
    Row("median", _of(torch.median), _MILLION, (1000,)),
    Row("top_p", _of(_top_p), (1, 128_000), (1, 1000), is_random=True),
    # Other sizes would have Dynamo compile a graph of any size.
    Row("compiled_mlp_waited", _waited_mlp, (64,), (8,), ()),
    Row("clip_grad_norm", _clip, _LISTS, _SHORT_LISTS, _OTHER_LISTS),
    Row("sgd", partial(_step, optimizer=torch.optim.SGD), _LISTS, _SHORT_LISTS, _OTHER_LISTS),
    Row("adamw", partial(_step, optimizer=torch.optim.AdamW), _LISTS, _SHORT_LISTS, _OTHER_LISTS),
)


def _whole(name: str, make: Callable[..., Call], tokens: int = 0) -> Row:
    """A model. Its size is whether it is a small one."""
    return Row(name, make, (0,), (1,), ((1,),), tokens=tokens)


MODELS = (
    _whole("resnet50_step", partial(_model, name="resnet50_16")),
    _whole("convnext", partial(_model, name="convnext_8_forward")),
    _whole("t5_encoder", partial(_model, name="t5_encoder")),
    _whole("llama_f16", partial(_model, name="llama_512_forward")),
    _whole("generate", _generate, TOKENS),
)

ROWS = {row.name: row for row in (*OPERATORS, *MODELS)}
GROUPS = {
    name: tuple(row.name for row in rows)
    for name, rows in (("operators", OPERATORS), ("models", MODELS))
}
