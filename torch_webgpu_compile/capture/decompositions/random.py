"""Random operators on the GPU: decompositions into ``webgpu::seed`` and ``webgpu::uniform``.

Every random operator of a graph has a seed of its own. Seeds are drawn from PyTorch's default
generator at each call, so ``torch.manual_seed`` makes results repeatable; the numbers are not those
of eager PyTorch, as with other compilers. Operators with a generator argument, and those without a
row here, run on the host, with eager's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import custom_ops as _custom_ops  # noqa: F401  defines the operators
from ...torch_private import OpOverload, tree_map_only

aten = torch.ops.aten

# The significant bits of each dtype: a uniform number with more of them could round up to 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Integers are scaled from 24 random bits: a larger range would leave some of its values out.
_MAX_RANGE = 1 << 20
# For a larger range they are the remainder of 63 bits, three times this many.
_CHUNK = 21

# A number per call site keeps equal calls apart when common subexpressions are removed.
_streams = itertools.count()

Size = Sequence[int | torch.SymInt]
OptionalDevice = torch.device | None


def seed() -> Tensor:
    """The seed of one random operator: int32 (2,)."""
    found: Tensor = torch.ops.webgpu.seed.default(next(_streams))
    return found


def _uniform(size: Size, device: OptionalDevice, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) of a float dtype: multiples of 2⁻²⁴, in float64 of 2⁻⁴⁸."""
    if dtype == torch.float64:
        return _uniform(size, device).double() + _uniform(size, device).double() * 2.0**-24
    numbers: Tensor = torch.ops.webgpu.uniform.default(seed(), list(size), device)
    if dtype == torch.float32:
        return numbers
    scale = float(1 << _BITS[dtype])
    return ((numbers * scale).floor() / scale).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _normal(size: Size, device: OptionalDevice, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers to be rounded to ``dtype``, by Box and Muller's method."""
    wide = _wide(dtype)
    radius = (-2.0 * torch.log1p(-_uniform(size, device, wide))).sqrt()
    return radius * torch.cos(_uniform(size, device, wide) * (2.0 * math.pi))


def exponential_numbers(size: Size, device: OptionalDevice, dtype: torch.dtype) -> Tensor:
    """Exponentially distributed numbers of mean 1, to be rounded to ``dtype``."""
    return -torch.log1p(-_uniform(size, device, _wide(dtype)))


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _by_parts(self: Tensor, rule: Callable[..., Any], *arguments: float) -> Tensor:
    """A complex tensor like ``self`` of which both parts are what a rule for real ones gives."""
    parts = torch.view_as_real(torch.empty_like(self, memory_format=torch.contiguous_format))
    return torch.view_as_complex(rule(parts, *arguments))


def _in_order(rule: Callable[..., Any]) -> Callable[..., Any]:
    """``rule``, of single elements, with the strides of what PyTorch makes like ``self``."""

    @wraps(rule)
    def call(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
        preserves = keywords.get("memory_format") in (None, torch.preserve_format)
        strides = torch.empty_like(self).stride() if preserves else ()
        # Of equal strides, that of a dimension of one element is the inner one's.
        order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], self.shape[dim] == 1))
        if order == list(range(len(strides))):
            return rule(self, *arguments, **keywords)
        back = [order.index(dim) for dim in range(len(order))]
        results = rule(self.permute(order), *arguments, **keywords)
        return tree_map_only(Tensor, lambda result: result.permute(back), results)

    return call


def _seeded(rule: Callable[..., Any]) -> Callable[..., Any]:
    """``rule`` with an argument ``generator``: a call with one is left to the host."""

    @wraps(rule)
    def call(*arguments: Any, generator: Any = None, **keywords: Any) -> Any:
        return rule(*arguments, **keywords) if generator is None else NotImplemented

    return call


def _of_floats(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`_seeded`, for float tensors only."""

    @wraps(rule)
    def call(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
        return rule(self, *arguments, **keywords) if self.dtype in _BITS else NotImplemented

    return _seeded(call)


def _like(rule: Callable[..., Any]) -> Callable[..., Any]:
    """``rule`` in the sizes of a tensor, and unless they are given in its dtype and device."""

    @_in_order
    @wraps(rule)
    def call(
        self: Tensor,
        *arguments: Any,
        dtype: torch.dtype | None = None,
        device: OptionalDevice = None,
        **keywords: Any,
    ) -> Any:
        place = device or self.device
        return rule(*arguments, self.shape, dtype=dtype or self.dtype, device=place, **keywords)

    return call


@_seeded
def rand(
    size: Size, *, dtype: torch.dtype | None = None, device: OptionalDevice = None, **_: Any
) -> Any:
    """Uniform numbers of [0, 1) in a float dtype; of a complex one, in both parts.

    This and the functions below return NotImplemented for arguments that they do not cover
    (generators, integers): the call then runs on the host.
    """
    if _dtype(dtype).is_complex:
        return _by_parts(torch.empty(size, dtype=dtype, device=device), uniform)
    if _dtype(dtype) not in _BITS:
        return NotImplemented
    return _uniform(size, device, _dtype(dtype))


@_seeded
def randn(
    size: Size, *, dtype: torch.dtype | None = None, device: OptionalDevice = None, **_: Any
) -> Any:
    """Standard normal numbers in a float dtype; complex ones have variance ½ in each part."""
    if _dtype(dtype).is_complex:
        return normal_functional(torch.empty(size, dtype=dtype, device=device))
    if _dtype(dtype) not in _BITS:
        return NotImplemented
    return _normal(size, device, _dtype(dtype)).to(_dtype(dtype))


@_in_order
@_seeded
def uniform(self: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    """Uniform numbers of [low, high) like ``self``, a float or complex tensor."""
    if self.is_complex():
        return _by_parts(self, uniform, low, high)
    if self.dtype not in _BITS or _is_beyond(self.dtype, low, high, high - low):
        return NotImplemented
    return _uniform(self.shape, self.device, self.dtype) * (high - low) + low


@_in_order
@_seeded
def normal_functional(self: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    """Normal numbers like ``self``, a float or complex tensor."""
    if self.is_complex():  # its variance is the sum of that of its parts
        return _by_parts(self, normal_functional, mean, std / math.sqrt(2))
    if self.dtype not in _BITS:
        return NotImplemented
    return (_normal(self.shape, self.device, self.dtype) * std + mean).to(self.dtype)


@_seeded
def normal(mean: Any, std: Any = 1.0) -> Any:
    """Normal numbers whose ``mean``, ``std`` or both are tensors, which broadcast."""
    dtype = mean.dtype if isinstance(mean, Tensor) else std.dtype
    if dtype not in _BITS:
        return NotImplemented
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in given))  # type: ignore[no-untyped-call]
    return (_normal(shape, given[0].device, dtype) * std + mean).to(dtype)


@_seeded
def normal_size(mean: float, std: float, size: Size, **keywords: Any) -> Any:
    """Normal numbers of one ``mean`` and ``std`` in the given sizes."""
    numbers = randn(size, **keywords)
    return numbers if numbers is NotImplemented else numbers * std + mean


@_of_floats
def bernoulli(self: Tensor) -> Any:
    """1 with the probability that is the element of ``self``, else 0, in its float dtype."""
    return (_uniform(self.shape, self.device) < self).to(self.dtype)


@_seeded
def bernoulli_p(self: Tensor, p: float | Tensor = 0.5) -> Any:
    """1 with probability ``p``, which broadcasts, else 0, like ``self``."""
    return (_uniform(self.shape, self.device) < p).to(self.dtype)


@_in_order
@_of_floats
def exponential(self: Tensor, lambd: float = 1.0) -> Any:
    """Exponentially distributed numbers of mean 1 / lambd, like the float tensor ``self``."""
    return (exponential_numbers(self.shape, self.device, self.dtype) * (1.0 / lambd)).to(self.dtype)


@_in_order
def native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    """(input · mask / (1 − p), mask), with a bool mask that is False with probability p.

    Without ``train`` all elements stay as they are.
    """
    if not train or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    mask = _uniform(input.shape, input.device) >= p
    return torch.where(mask, input * (1.0 / (1.0 - p)), 0.0).to(input.dtype), mask


def native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """grad_output · mask · scale; PyTorch's decomposition makes it contiguous."""
    return grad_output * (mask.to(grad_output.dtype) * scale)


@_seeded
def randint(high: int, size: Size, **keywords: Any) -> Any:
    """Whole numbers of [0, high), see `randint_low`."""
    return randint_low(0, high, size, **keywords)


@_seeded
def randint_low(
    low: int,
    high: int,
    size: Size,
    *,
    dtype: torch.dtype = torch.int64,
    device: OptionalDevice = None,
    **_: Any,
) -> Any:
    """Whole numbers of [low, high), at most 2^63 of them, in ``dtype`` (int64 if None)."""
    if not 0 < high - low <= 1 << 63:
        return NotImplemented
    return _integers(size, device, low, high, dtype or torch.int64)


def _is_beyond(dtype: torch.dtype, *numbers: Any) -> bool:
    """Whether ``dtype`` cannot hold one of the numbers; symbolic floats are not asked."""
    if dtype == torch.bool:
        least, largest = 0.0, 1.0
    else:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        least, largest = limits.min, limits.max
    return any(not least <= x <= largest for x in numbers if not isinstance(x, torch.SymFloat))


def _nearest(number: int, bits: int) -> int:
    """A whole number rounded to so many significant bits, to even."""
    unit = 1 << max(0, abs(number).bit_length() - bits)
    return round(Fraction(number, unit)) * unit


def _within(low: int, high: int, bits: int) -> tuple[int, int]:
    """Bounds within [low, high) of numbers that stay there when rounded to so many bits.

    Source: ``update_from`` and ``update_to`` of ATen (``native/DistributionTemplates.h``).
    """
    nearest = _nearest(low + 1, bits)
    if nearest < low:
        low = nearest + (1 << (abs(low + 1).bit_length() - bits))
    nearest = _nearest(high - 1, bits)
    if nearest >= high:
        high = nearest - (1 << (abs(high - 1).bit_length() - bits))
    return low, high


def _integers(size: Size, device: OptionalDevice, low: int, high: int, dtype: torch.dtype) -> Any:
    """Whole numbers in [low, high); NotImplemented where ``dtype`` cannot hold them."""
    if _is_beyond(dtype, low, high - 1):
        return NotImplemented
    if dtype in _BITS and not -_largest(dtype) <= low < high <= _largest(dtype):
        low, high = _within(int(low), int(high), _BITS[dtype])
    if low >= high:
        return NotImplemented
    if high - low <= _MAX_RANGE:
        count = torch.sym_float(high - low)  # type: ignore[no-untyped-call]
        numbers = (_uniform(size, device) * count).to(torch.int32)
        return (numbers.to(dtype if abs(low) <= _largest(dtype) else torch.int64) + low).to(dtype)
    bits = _bits(size, device)
    if high - low < 1 << 63:
        bits = bits % (high - low)
    return (bits + low).to(dtype)


def _bits(size: Size, device: OptionalDevice) -> Tensor:
    """Whole numbers of 63 random bits, int64."""
    bits = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(3):
        chunk = (_uniform(size, device) * float(1 << _CHUNK)).to(torch.int64)
        bits = bits * (1 << _CHUNK) + chunk
    return bits


def _largest(dtype: torch.dtype) -> int:
    """The largest n such that a tensor of ``dtype`` holds every whole number up to n."""
    if dtype.is_floating_point:
        return 1 << _BITS[dtype]
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


@_seeded
def random_to(self: Tensor, to: int) -> Any:
    """Whole numbers of [0, to), like ``self``."""
    return random_from(self, 0, to)


@_in_order
@_seeded
def random_from(self: Tensor, from_: int = 0, to: int | None = None) -> Any:
    """Whole numbers of [from_, to), like ``self``; for None, up to the dtype's largest."""
    high = _largest(self.dtype) + 1 if to is None else to
    if not 0 < high - from_ <= 1 << 63:
        return NotImplemented
    return _integers(self.shape, self.device, from_, high, self.dtype)


@_in_order
@_seeded
def geometric(self: Tensor, p: float) -> Any:
    """The number of trials up to the first success, of probability ``p``; at least 1."""
    if not 0 < p < 1:
        return NotImplemented
    wide = _wide(self.dtype) if self.dtype in _BITS else torch.float32
    rate = -torch.log1p(-torch.full((), p, dtype=wide, device=self.device))
    trials = exponential_numbers(self.shape, self.device, self.dtype) / rate
    return trials.ceil().clamp(min=1).to(self.dtype)


@_in_order
@_of_floats
def cauchy(self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    """Numbers of the Cauchy distribution, like the float tensor ``self``."""
    quantile = torch.tan((_uniform(self.shape, self.device, _wide(self.dtype)) - 0.5) * math.pi)
    return (quantile * sigma + median).to(self.dtype)


@_in_order
@_of_floats
def log_normal(self: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    """e to normal numbers of this ``mean`` and ``std``, like the float tensor ``self``."""
    return (_normal(self.shape, self.device, self.dtype) * std + mean).exp().to(self.dtype)


@_in_order
@_seeded
def fused_dropout(self: Tensor, p: float) -> Any:
    """(self · mask / p, mask as uint8), where ``p`` is the probability to keep an element."""
    mask = _uniform(self.shape, self.device) < p
    return torch.where(mask, self * (1.0 / p), 0.0).to(self.dtype), mask.to(torch.uint8)


def rrelu_with_noise(
    self: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """(self · slope, slope): 1 where self > 0, else a uniform number of [lower, upper).

    Without ``training``, a leaky relu with the mean slope, and the noise as it is.
    """
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2), noise.clone()
    if generator is not None or self.dtype not in _BITS:
        return NotImplemented
    slope = _uniform(self.shape, self.device) * (upper - lower) + lower
    chosen = torch.where(self <= 0, slope, 1.0).to(self.dtype)
    return self * chosen, chosen


@_of_floats
def multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Any:
    """Without replacement the largest of p / q, where q is exponentially distributed.

    Replacement makes no difference to one sample. That probabilities are not negative, and that
    there are as many above 0 as samples, is not checked: the host would have to wait for the GPU.
    """
    if self.dim() not in (1, 2) or num_samples < 1:
        return NotImplemented  # PyTorch says what is wrong
    weights = self.to(_wide(self.dtype))
    if replacement and num_samples != 1:
        total = weights.cumsum(-1)
        chosen = (
            _uniform((*self.shape[:-1], num_samples), self.device, weights.dtype) * total[..., -1:]
        )
        return torch.searchsorted(total, chosen, right=True).clamp(max=self.shape[-1] - 1)
    race = weights / exponential_numbers(self.shape, self.device, weights.dtype).clamp_min(1e-30)
    if num_samples == 1:
        return race.argmax(-1, keepdim=True)
    return race.topk(num_samples).indices


@_seeded
def randperm(
    n: int, *, dtype: torch.dtype | None = None, device: OptionalDevice = None, **_: Any
) -> Any:
    """0, …, n - 1 in random order, in ``dtype`` (int64 if None): the order of random keys.

    Keys have 63 bits: of a million elements, any two are equal once in ten million permutations.
    """
    dtype = dtype or torch.int64
    if n < 0 or dtype.is_complex or dtype == torch.bool or n > _largest(dtype) + 1:
        return NotImplemented  # PyTorch says what is wrong
    return _bits([n], device).argsort().to(dtype)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.rand.default: rand,
    aten.rand.generator: rand,
    aten.rand_like.default: _like(rand),
    aten.rand_like.generator: _like(rand),
    aten.randn.default: randn,
    aten.randn.generator: randn,
    aten.randn_like.default: _like(randn),
    aten.randn_like.generator: _like(randn),
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal_functional,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.float_float: normal_size,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.exponential.default: exponential,
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.randint.default: randint,
    aten.randint.generator: randint,
    aten.randint.low: randint_low,
    aten.randint.low_generator: randint_low,
    aten.randint_like.default: _like(randint),
    aten.randint_like.low_dtype: _like(randint_low),
    aten.random.default: random_from,
    aten.random.to: random_to,
    getattr(aten.random, "from"): random_from,
    aten.geometric.default: geometric,
    aten.cauchy.default: cauchy,
    aten.log_normal.default: log_normal,
    aten.bernoulli.Tensor: bernoulli_p,
    aten._fused_dropout.default: fused_dropout,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
    aten.multinomial.default: multinomial,
    aten.randperm.default: randperm,
    aten.randperm.generator: randperm,
}
