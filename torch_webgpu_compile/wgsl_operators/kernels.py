"""Operators that are a whole kernel in WGSL, with its own grid and results of its own sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..lowering.user_wgsl import lower_kernel
from ..user_wgsl.modules import WgslKernel
from .definition import Operator, define, results_schema

_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "i32": torch.int32,
    "u32": torch.uint32,
}
_NUMBERS = {"f32": "float", "i32": "SymInt", "u32": "SymInt"}

OfArguments = Callable[..., Any]
"""A function of an operator's arguments: of tensors, of which sizes and dtypes are known, and
numbers; sizes and integers may be symbolic."""


class KernelOperator(Operator):
    """An operator that runs a kernel; `wgsl_op` explains its functions.

    Its tensors have the dtypes that the kernel declares, and any strides and offset: what is not
    contiguous is copied. `register_autograd` and `register_vmap` are those of ``torch.library``.
    """

    def __init__(
        self,
        name: str,
        kernel: WgslKernel,
        outputs: OfArguments,
        grid: OfArguments,
        uniforms: OfArguments | None,
    ) -> None:
        self.kernel = kernel
        self._outputs = outputs
        self._grid = grid
        self._uniforms = uniforms
        self._signature = inspect.signature(outputs)
        self._types = _argument_types(name, kernel, self._signature)
        parameters = ", ".join(
            _declared(f"{type} {argument}", self._signature.parameters[argument].default)
            for argument, type in self._types.items()
        )
        results = results_schema(len(kernel.outputs))
        names = list(self._types)
        order = [names.index(tensor) for tensor, _ in kernel.inputs]
        lowering = lower_kernel(kernel, order, self._launch)
        super().__init__(name, define(name, f"({parameters}) -> {results}", self._fake, lowering))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The kernel's results.

        Raises:
            TypeError: a tensor has another dtype than the kernel declares, or the functions of the
                operator do not give what they have to.
        """
        return self.overload(*arguments, **named)

    def _bound(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*arguments, **named)
        bound.apply_defaults()
        return bound.arguments

    def _fake(self, *arguments: Any, **named: Any) -> Any:
        """Results without contents."""
        given = self._bound(arguments, named)
        tensors = [(name, given[name], type) for name, type in self.kernel.inputs]
        for name, tensor, type in tensors:
            if tensor.dtype is not _DTYPES[type]:
                raise TypeError(
                    f"{self.name}: {name} is {type} and takes no {tensor.dtype}; convert it with "
                    f".to({_DTYPES[type]})"
                )
        made = self._outputs(**given)
        shapes = [made] if len(self.kernel.outputs) == 1 else list(made)
        if len(shapes) != len(self.kernel.outputs) or not all(map(_is_shape, shapes)):
            wanted = "a shape" if len(self.kernel.outputs) == 1 else "a shape for each result"
            raise TypeError(f"{self.name}: outputs gives {made!r}, not {wanted}")
        device = next((t.device for _, t, _ in tensors if t.device.type != "cpu"), None)
        like = tensors[0][1]
        results = tuple(
            like.new_empty(tuple(shape), dtype=_DTYPES[type], device=device or like.device)
            for shape, (_, type) in zip(shapes, self.kernel.outputs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    def _launch(self, *arguments: Any, **named: Any) -> tuple[tuple[Any, Any, Any], list[Any]]:
        """The grid, and the numbers of the kernel in order."""
        given = self._bound(arguments, named)
        found = self._grid(**given)
        sizes = tuple(found) if isinstance(found, Iterable) else (found,)
        if not 1 <= len(sizes) <= 3 or not all(map(_is_integer, sizes)):
            raise TypeError(f"{self.name}: grid gives {found!r}, not one to three integers")
        x, y, z = (*sizes, 1, 1)[:3]
        computed = dict(self._uniforms(**given)) if self._uniforms else {}
        names = [name for name, _ in self.kernel.uniforms]
        missing = [name for name in names if name not in given and name not in computed]
        unknown = [name for name in computed if name not in names or name in given]
        if missing or unknown:
            wanted = [name for name in names if name not in given]
            raise TypeError(
                f"{self.name}: uniforms gives {sorted(computed)}, not exactly {sorted(wanted)}"
            )
        return (x, y, z), [given.get(name, computed.get(name)) for name in names]


def _argument_types(name: str, kernel: WgslKernel, signature: inspect.Signature) -> dict[str, str]:
    """The types of an operator's arguments in its schema, in order.

    Raises:
        TypeError: the function has other parameters than the kernel's inputs and uniforms.
    """
    types = dict.fromkeys((tensor for tensor, _ in kernel.inputs), "Tensor")
    numbers = {number: _NUMBERS[type] for number, type in kernel.uniforms}
    found: dict[str, str] = {}
    for parameter in signature.parameters.values():
        type = types.get(parameter.name) or numbers.get(parameter.name)
        if type is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{name}: outputs takes {parameter.name}, which is no tensor that the kernel reads "
                f"({', '.join(types)}) and none of its uniforms ({', '.join(numbers) or 'none'})"
            )
        found[parameter.name] = type
    missing = [tensor for tensor in types if tensor not in found]
    if missing or not types:
        what = f"takes no {', '.join(missing)}" if missing else "has no tensor among its arguments"
        raise TypeError(f"{name}: outputs {what}; its parameters are the operator's arguments")
    return found


def _declared(argument: str, default: Any) -> str:
    return argument if default is inspect.Parameter.empty else f"{argument}={default}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, Iterable)
        and not isinstance(value, Tensor)
        and all(map(_is_integer, value))
    )
