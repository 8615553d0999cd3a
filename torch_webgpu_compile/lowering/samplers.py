"""``webgpu::draw``: rejection sampling inside of a kernel, each element by itself.

An element's uniform numbers are those that ``webgpu::uniform`` gives it for a sequence of seeds:
the first half is the seed's, the others are a hash of its second half and of how many numbers there
were before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..ir.scalar import FunctionCall, Index, cast
from ..symbolic.sizes import as_expr, contiguous_strides, linearize
from ..torch_ops import custom_ops
from ..torch_ops import sampling as _sampling  # noqa: F401  defines the operator
from ..user_wgsl.modules import WgslFunction
from .builder import Builder, operand
from .random import U32, hashed
from .registry import lowers
from .value import Value, has_no_elements, positions, zeros

# Loops end: a number that is refused so often is one in 10²⁰.
_RANDOM = f"""
fn hash(number: u32) -> u32 {{
  var x = number;
  x = (x ^ (x >> {custom_ops.ROUNDS[0][0]}u)) * {custom_ops.ROUNDS[0][1]}u;
  x = (x ^ (x >> {custom_ops.ROUNDS[1][0]}u)) * {custom_ops.ROUNDS[1][1]}u;
  return x ^ (x >> 16u);
}}
struct Numbers {{
  element: u32,
  seed: u32,
}}
// Uniform in (0, 1), without its ends.
fn uniform(numbers: ptr<function, Numbers>) -> f32 {{
  (*numbers).seed += {custom_ops.WEYL}u;
  let bits = hash((*numbers).element ^ hash((*numbers).seed));
  return (f32(bits >> 9u) + 0.5) * 1.1920929e-7;
}}
// log(1 + x) - x, which is s · (2z · (1/3 + z/5 + …) - x) of s = x / (2 + x) and z = s² near 0.
fn log1p_rest(x: f32) -> f32 {{
  if (abs(x) > 0.5) {{ return log(1.0 + x) - x; }}
  let s = x / (2.0 + x);
  let z = s * s;
  return s * (z * (0.66666667 + z * (0.4 + z * (0.28571429 + z * (0.22222222 + z * (0.18181818
    + z * 0.15384615))))) - x);
}}
// log k! without the terms of Stirling's formula, for k of at least 1.
fn stirling_rest(k: f32) -> f32 {{
  let z = 1.0 / (k * k);
  return (0.083333333 - z * (0.0027777778 - z * (7.9365079e-4 - z * 5.9523810e-4))) / k;
}}
"""

# G. Marsaglia and W. W. Tsang, "A Simple Method for Generating Gamma Variables", 2000. With
# t = c·x, the sum of x²/2 and d·(1 - v + log v) is d times a function of t that is small.
_GAMMA = """
fn gamma(shape: f32, element: u32, seed: u32) -> f32 {
  var numbers = Numbers(element, seed);
  let d = shape - 0.33333333;
  let c = 0.33333333 / sqrt(d);
  for (var k = 0; k < 64; k++) {
    let radius = sqrt(-2.0 * log(uniform(&numbers)));
    let x = radius * cos(6.2831853 * uniform(&numbers));
    let u = uniform(&numbers);
    let t = c * x;
    if (t <= -1.0) { continue; }
    let square = x * x;
    var limit = t * t * t * t * (-0.75 + t * (0.6 + t * (-0.5 + t * (0.42857143 - t * 0.375))));
    if (abs(t) > 0.1) { limit = 3.0 * log1p_rest(t) + t * t * (1.5 - t); }
    if (u < 1.0 - 0.0331 * square * square || log(u) < d * limit) {
      return d * (1.0 + t) * (1.0 + t) * (1.0 + t);
    }
  }
  return d;
}
"""

# W. Hörmann, "The Transformed Rejection Method for Generating Poisson Random Variables", 1993
# (PTRS); below 10 as many uniform numbers as have a product above exp(-rate).
_POISSON = """
fn log_mass(k: f32, rate: f32) -> f32 {
  if (k < 0.5) { return -rate; }
  return k * log1p_rest((rate - k) / k) - 0.5 * log(6.2831853 * k) - stirling_rest(k);
}
fn poisson(rate: f32, element: u32, seed: u32) -> f32 {
  var numbers = Numbers(element, seed);
  if (rate < 10.0) {
    let least = exp(-rate);
    var product = uniform(&numbers);
    var count = 0;
    while (product > least && count < 100) {
      product *= uniform(&numbers);
      count++;
    }
    return f32(count);
  }
  let b = 0.931 + 2.53 * sqrt(rate);
  let a = -0.059 + 0.02483 * b;
  let scale = log(1.1239 + 1.1328 / (b - 3.4));
  let most = 0.9277 - 3.6224 / (b - 2.0);
  for (var n = 0; n < 256; n++) {
    let u = uniform(&numbers) - 0.5;
    let v = uniform(&numbers);
    let side = 0.5 - abs(u);
    let k = floor((2.0 * a / side + b) * u + rate + 0.43);
    if (side >= 0.07 && v <= most) { return k; }
    if (k < 0.0 || (side < 0.013 && v > side)) { continue; }
    if (log(v) + scale - log(a / (side * side) + b) <= log_mass(k, rate)) { return k; }
  }
  return floor(rate);
}
"""

# W. Hörmann, "The Generation of Binomial Random Variates", 1993 (BTRS); for a mean below 10 the
# successes are counted by the trials between them.
_BINOMIAL = """
fn log_mass(k: f32, count: f32, p: f32) -> f32 {
  let rest = count - k;
  if (k < 0.5) { return count * (log1p_rest(-p) - p); }
  if (rest < 0.5) { return count * log(p); }
  let spread = k * log1p_rest((count * p - k) / k)
    + rest * log1p_rest((count * (1.0 - p) - rest) / rest);
  return spread - 0.5 * log(6.2831853 * k * (rest / count))
    + stirling_rest(count) - stirling_rest(k) - stirling_rest(rest);
}
fn binomial(count: f32, p: f32, element: u32, seed: u32) -> f32 {
  var numbers = Numbers(element, seed);
  let mean = count * p;
  if (mean <= 0.0) { return 0.0; }
  if (mean < 10.0) {
    let failure = log1p_rest(-p) - p;
    var successes = 0;
    var trials = 0.0;
    while (successes < 100) {
      trials += max(ceil(log(uniform(&numbers)) / failure), 1.0);
      if (trials > count) { break; }
      successes++;
    }
    return f32(successes);
  }
  let deviation = sqrt(mean * (1.0 - p));
  let b = 1.15 + 2.53 * deviation;
  let a = -0.0873 + 0.0248 * b + 0.01 * p;
  let alpha = (2.83 + 5.1 / b) * deviation;
  let most = 0.92 - 4.2 / b;
  let mode = log_mass(floor((count + 1.0) * p), count, p);
  for (var n = 0; n < 256; n++) {
    let u = uniform(&numbers) - 0.5;
    let v = uniform(&numbers);
    let side = 0.5 - abs(u);
    let k = floor((2.0 * a / side + b) * u + mean + 0.5);
    if (k < 0.0 || k > count) { continue; }
    if (side >= 0.07 && v <= most) { return k; }
    if (log(v * alpha / (a / (side * side) + b)) <= log_mass(k, count, p) - mode) { return k; }
  }
  return floor(mean);
}
"""


def _function(name: str, text: str, parameters: Sequence[str]) -> WgslFunction:
    types = [*((p, "f32") for p in parameters), ("element", "u32"), ("seed", "u32")]
    return WgslFunction(f"webgpu::{name}", _RANDOM + text, name, tuple(types), (("", "f32"),))


_FUNCTIONS = {
    "gamma": _function("gamma", _GAMMA, ["shape"]),
    "poisson": _function("poisson", _POISSON, ["rate"]),
    "binomial": _function("binomial", _BINOMIAL, ["count", "p"]),
}


@lowers(torch.ops.webgpu.draw.default)
def lower_draw(
    builder: Builder, seed: Value, distribution: str, parameters: Sequence[Value]
) -> Value:
    """A number of a distribution for each element of its parameters; see ``torch_ops.sampling``."""
    sizes = builder.out.sizes
    if has_no_elements(sizes):
        return zeros(sizes, dtypes.float32)
    number = linearize(positions(sizes), contiguous_strides(sizes))
    first, second = (cast(seed.at([as_expr(k)]), U32) for k in (0, 1))
    element = hashed(cast(Index(number), U32) * custom_ops.WEYL + first)
    given = [operand(value, sizes, dtypes.float32) for value in parameters]
    body = FunctionCall(_FUNCTIONS[distribution], (*given, element, second), 0)
    return builder.pointwise(body, sizes)
