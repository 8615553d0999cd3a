"""Elementwise operators: a WGSL function of scalars, applied to tensors that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..lowering.registry import LoweringFunction
from ..lowering.user_wgsl import lower_function
from ..torch_private import OpOverload
from ..user_wgsl.modules import WgslFunction, parse_function
from ..user_wgsl.source import find_source, remember
from .definition import Operator, define, results_schema

_SMALL_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool})
_INTEGERS = _SMALL_SIGNED | {torch.int64, torch.uint32}
_FLOATS = frozenset(
    {
        *(torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    }
)
_TAKEN = {
    "f32": _FLOATS | _INTEGERS,
    "f16": _FLOATS | _INTEGERS,
    "i32": _SMALL_SIGNED,
    "u32": frozenset({torch.uint8, torch.uint32, torch.bool}),
    "bool": frozenset({torch.bool}),
}
_NUMBERS = {
    "f32": torch.float32,
    "f16": torch.float32,
    "i32": torch.int32,
    "u32": torch.uint32,
    "bool": torch.bool,
}
_RANGES = {"i32": (-(1 << 31), (1 << 31) - 1), "u32": (0, (1 << 32) - 1)}
_STEPS = {
    torch.float64: "convert it with .float()",
    torch.int64: "convert it with .int(), if its values fit",
}


class ElementwiseOperator(Operator):
    """An operator that applies a WGSL function to every element of tensors.

    Tensors broadcast as PyTorch's do. Parameters of ``f32`` take floats of up to 32 bits, integers
    and bool; those of ``i32``, ``u32`` and ``bool`` what fits into these. Python numbers count as
    tensors without dimensions. A result of ``f32`` has the dtype to which PyTorch promotes the
    floats among the arguments, float32 if there are none; of ``i32``, ``u32`` and ``bool`` it is
    int32, uint32 and bool. A function that returns a struct gives a tuple of tensors.

    ``torch.func.vmap`` works. For gradients, see `register_gradient`; as of every operator that is
    defined with ``torch.library.custom_op``, PyTorch's ``torch.func.grad`` takes none of them.
    What WGSL's own functions compute is as accurate as the GPU's driver makes it: ``sin`` may be
    2⁻¹¹ off.
    """

    def __init__(self, name: str, function: WgslFunction) -> None:
        self.function = function
        overload = _defined(
            name,
            [parameter for parameter, _ in function.parameters],
            len(function.results),
            lambda *tensors: _empty_results(function, tensors),
            lower_function(function),
        )
        super().__init__(name, overload)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The function's results for tensors, or Python numbers, by position or by name.

        Raises:
            TypeError: an argument is missing, or none of these, or of a dtype that its parameter
                does not take.
            OverflowError: an integer does not fit.
        """
        given = list(arguments)
        for parameter, _ in self.function.parameters[len(given) :]:
            if parameter not in named:
                raise TypeError(f"{self.name}: missing the argument {parameter}")
            given.append(named.pop(parameter))
        if named or len(given) > len(self.function.parameters):
            wanted = ", ".join(parameter for parameter, _ in self.function.parameters)
            raise TypeError(f"{self.name} takes ({wanted}), got more")
        pairs = zip(given, self.function.parameters, strict=True)
        return self.overload(*[self._tensor(value, *parameter) for value, parameter in pairs])

    def _tensor(self, value: Any, parameter: str, type: str) -> Tensor:
        if isinstance(value, Tensor):
            return value
        is_integer = isinstance(value, (bool, int, torch.SymInt, torch.SymBool))
        if not is_integer and (type not in ("f32", "f16") or not _is_float(value)):
            what = value.__class__.__name__
            raise TypeError(f"{self.name}: {parameter} is {type}, got {what}")
        if type in _RANGES and not _RANGES[type][0] <= value <= _RANGES[type][1]:
            raise OverflowError(f"{self.name}: {parameter} is {type}, which {value} does not fit")
        return torch.scalar_tensor(value, dtype=_NUMBERS[type])

    def register_gradient(self, gradient: Any, entry: str | None = None) -> Any:
        """Gives the operator a gradient; may be a decorator of a Python function.

        Args:
            gradient: one of these.

                - WGSL (or the path of a file) with a function of the same parameters that returns
                  the partial derivatives by those that are ``f32`` or ``f16``, in order: a scalar
                  if there is one, else a vector or a struct. For an operator of one result. There
                  is no second derivative then.
                - A Python function of the gradient of each result, then the arguments as tensors,
                  that computes with PyTorch, or with operators such as this one, the gradient of
                  each argument: a tensor, of whatever sizes the arguments are broadcast to, or
                  None; a tuple of them if there are several arguments. It is differentiated again
                  for second derivatives.
            entry: the function in WGSL of several, by default named as the operator.

        Returns:
            ``gradient``.

        Raises:
            WgslError: there is no such function, or it has other parameters or results.
        """
        formula = gradient
        if not callable(gradient):
            formula = self._wgsl_gradient(gradient, entry)
        count = len(self.function.parameters)
        name = self.name

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            inputs = ctx.saved_tensors
            made = formula(*grads, *inputs)
            parts = (made,) if made is None or isinstance(made, Tensor) else tuple(made)
            if len(parts) != count:
                raise TypeError(f"the gradient of {name} gives {len(parts)} results, not {count}")
            needed = ctx.needs_input_grad
            return tuple(
                _reduced(part, tensor) if part is not None and wanted else None
                for part, tensor, wanted in zip(parts, inputs, needed, strict=True)
            )

        self.register_autograd(backward, setup_context=save)
        return gradient

    def _wgsl_gradient(self, given: Any, entry: str | None) -> Callable[..., Any]:
        title = f"{self.name}_backward"
        source = find_source(title, given, depth=2)
        function = parse_function(source, title, entry or _short(title))
        remember(source)
        own = self.function.parameters
        differentiable = [name for name, type in own if type in ("f32", "f16")]
        what = "its gradient"
        step = f"write it with the parameters ({', '.join(f'{n}: {t}' for n, t in own)})"
        if len(self.function.results) != 1:
            raise source.error(
                f"{self.name} has several results", 0, "write its gradient in PyTorch"
            )
        if [type for _, type in function.parameters] != [type for _, type in own]:
            raise source.error(f"{what} has other parameters than {self.name}", 0, step)
        floats = [type for _, type in function.results if type in ("f32", "f16")]
        if len(floats) != len(function.results) or len(floats) != len(differentiable):
            names = ", ".join(differentiable)
            raise source.error(
                f"{what} gives {len(function.results)} results",
                0,
                f"return a derivative, f32, by each of {names}",
            )
        count = len(differentiable)

        def fake(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            like = _common([grad, *tensors])
            return tuple(
                torch.empty_like(like, dtype=t.dtype if t.dtype in _FLOATS else torch.float32)
                for t, (_, type) in zip(tensors, own, strict=True)
                if type in ("f32", "f16")
            )

        parameters = ["grad_output", *(parameter for parameter, _ in own)]
        lowering = lower_function(function, times_first=True)
        overload = _defined(title, parameters, count, fake, lowering)

        def formula(grad: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
            made = overload(grad, *inputs)
            parts = iter((made,) if count == 1 else made)
            return tuple(next(parts) if name in differentiable else None for name, _ in own)

        return formula


def _defined(
    name: str,
    parameters: Sequence[str],
    count: int,
    fake: Callable[..., tuple[Tensor, ...]],
    lowering: LoweringFunction,
) -> OpOverload:
    """Defines an elementwise operator of tensors that has so many results; see `define`."""

    def results(*tensors: Tensor) -> Any:
        made = fake(*tensors)
        return made[0] if count == 1 else made

    schema = f"({', '.join(f'Tensor {p}' for p in parameters)}) -> {results_schema(count)}"
    overload = define(name, schema, results, lowering, pointwise=True)
    torch.library.register_vmap(overload, _batched(overload, count))
    return overload


def _is_float(value: Any) -> bool:
    return isinstance(value, (float, torch.SymFloat))


def _short(name: str) -> str:
    return name.rpartition("::")[2]


def _reduced(part: Tensor, like: Tensor) -> Tensor:
    """A gradient for an argument that was broadcast."""
    if part.shape != like.shape:
        part = part.sum_to_size(like.shape)
    return part.to(device=like.device, dtype=like.dtype)


def _empty_results(function: WgslFunction, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results without contents.

    Raises:
        TypeError: a tensor has a dtype that its parameter does not take.
        RuntimeError: sizes that do not broadcast.
    """
    for tensor, (parameter, type) in zip(tensors, function.parameters, strict=True):
        if tensor.dtype not in _TAKEN[type]:
            step = _STEPS.get(tensor.dtype, "convert it")
            raise TypeError(
                f"{function.name}: {parameter} is {type} and takes no {tensor.dtype}; {step}"
            )
    like = _common(tensors)
    floats = [
        tensor
        for tensor, (_, type) in zip(tensors, function.parameters, strict=True)
        if type in ("f32", "f16") and tensor.dtype in _FLOATS
    ]
    # As PyTorch: of tensors without dimensions only if there are no others.
    decisive = [t.dtype for t in floats if t.dim()] or [t.dtype for t in floats]
    promoted = reduce(torch.promote_types, decisive) if decisive else torch.float32
    return tuple(
        torch.empty_like(like, dtype=promoted if type in ("f32", "f16") else _NUMBERS[type])
        for _, type in function.results
    )


def _common(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor of the sizes, strides and device of PyTorch's elementwise operators' results."""
    with torch.no_grad():
        return reduce(torch.add, [torch.empty_like(t, dtype=torch.float32) for t in tensors])


def _batched(overload: OpOverload, count: int) -> Callable[..., Any]:
    """The rule of ``torch.func.vmap`` for an elementwise operator of so many results."""

    def rule(info: Any, dims: Sequence[int | None], *tensors: Tensor) -> Any:
        pairs = list(zip(tensors, dims, strict=True))
        rank = max(t.dim() - (dim is not None) for t, dim in pairs)
        aligned = [tensor if dim is None else _aligned(tensor, dim, rank) for tensor, dim in pairs]
        results = overload(*aligned)
        return results, 0 if count == 1 else (0,) * count

    return rule


def _aligned(tensor: Tensor, dim: int, rank: int) -> Tensor:
    """A batch whose elements broadcast to ``rank`` dimensions, the batch first."""
    moved = tensor.movedim(dim, 0)
    return moved.reshape(moved.shape[0], *[1] * (rank + 1 - moved.dim()), *moved.shape[1:])
