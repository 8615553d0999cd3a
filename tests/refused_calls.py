"""Calls that PyTorch refuses: what it raises on the CPU, and what is raised here.

The calls are PyTorch's error inputs of operators (`op_db`), modules (`module_db`) and optimizers
(`optim_db`). ``python -m tests.refused_calls [--compiled] [--cpu] [NAME …]`` prints those that are
taken, or refused with another error.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_map_only

from tests.device_exceptions import name_of
from tests.device_values import copied, on_device
from tests.opinfo import op_db

_BY_CONTENTS = "the values of its tensor are not looked at before it is computed"
_BY_KERNEL = "a kernel finds the index, and the error is raised when the host waits for it"
EXCEPTIONS = {
    **{f"multinomial {number}": _BY_CONTENTS for number in range(7, 21)},
    "multinomial 6": "it is about 2^24 categories, and smaller sizes stand for large ones",
    **dict.fromkeys(("gather 4", "scatter 3", "scatter_add 3", "nn.Embedding 0"), _BY_KERNEL),
}
"""Calls that are taken, or refused with another error, with the reason."""

Values = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RefusedCall:
    """A call that PyTorch refuses on the CPU.

    Attributes:
        name: which one it is.
        function: takes ``values``, and whether to compile what PyTorch refuses.
        values: on the CPU.
    """

    name: str
    function: Callable[..., Any]
    values: Values


def calls_of(info: Any) -> Iterator[RefusedCall]:
    """The error inputs of an OpInfo."""
    torch.manual_seed(0)
    made = info.error_inputs("cpu") if info.error_inputs_func else ()
    for number, error in enumerate(made):
        sample = error.sample_input
        values = (sample.input, *sample.args), dict(sample.kwargs)
        yield RefusedCall(f"{name_of(info)} {number}", info.op, values)


def calls_of_module(info: Any) -> Iterator[RefusedCall]:
    """The error inputs of a ModuleInfo, but those that its constructor refuses."""
    torch.manual_seed(0)
    made = info.module_error_inputs_func
    for number, error in enumerate(
        made(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
        if made
        else ()
    ):
        if error.error_on is not ModuleErrorEnum.FORWARD_ERROR:
            continue
        given = error.module_error_input
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        values = (module, *given.forward_input.args), dict(given.forward_input.kwargs)
        yield RefusedCall(f"{info.name} {number}", _call_module, values)


def _call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def calls_of_optimizer(info: Any) -> Iterator[RefusedCall]:
    """The error inputs of an OptimizerInfo."""
    for number, error in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
        given = error.optimizer_error_input
        values = (given.params,), dict(given.kwargs)
        yield RefusedCall(f"{info.name} {number}", partial(_optimize, info.optim_cls), values)


def _optimize(kind: Any, params: Any, **kwargs: Any) -> Any:
    if params is None:  # as PyTorch's own tests have it
        params = [torch.nn.Parameter(torch.randn(2, 3))]
    return kind(params, **kwargs)


def calls_by_name() -> dict[str, Callable[[], Iterator[RefusedCall]]]:
    """The calls of everything that has error inputs."""
    found: dict[str, Callable[[], Iterator[RefusedCall]]] = {}
    for info in op_db:
        if info.error_inputs_func:
            found[name_of(info)] = partial(calls_of, info)
    for info in module_db:
        if info.module_error_inputs_func:
            found[info.name] = partial(calls_of_module, info)
    for info in optim_db:
        if info.optim_error_inputs_func:
            found[info.name] = partial(calls_of_optimizer, info)
    return found


def raised(function: Callable[..., Any], values: Values) -> Exception | None:
    """What a call raises, at the latest when its results are read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = values
            tree_map_only(Tensor, lambda t: t.cpu(), function(*args, **kwargs))
    except Exception as error:
        return error
    return None


def moved(values: Values) -> Values:
    """The values on the device."""

    def place(value: Any) -> Any:
        return value.to("webgpu") if isinstance(value, torch.nn.Module) else value

    args, kwargs = on_device(copied(values))
    return tuple(map(place, args)), kwargs


def message(error: Exception) -> str:
    """The first line of an error's message, without names of devices."""
    text = (str(error).strip().splitlines() or [""])[0]
    text = text.replace("torch.webgpu.", "torch.")  # as the types of tensors are called
    return re.sub(r"\b(cpu|webgpu)(:0)?\b", "DEVICE", text)


def compiled(call: RefusedCall) -> Callable[..., Any]:
    """The call's function, compiled."""
    torch._dynamo.reset()
    function = call.function

    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(compiled_call, backend="webgpu")


def difference(call: RefusedCall, *, compile: bool, device: bool) -> str | None:
    """How a call differs from PyTorch's, "" if it does not; None if PyTorch takes it."""
    wanted = raised(call.function, copied(call.values))
    if wanted is None:
        return None
    function = compiled(call) if compile else call.function
    error = raised(function, moved(call.values) if device else copied(call.values))
    if error is None:
        return f"taken instead of {wanted!r}"
    if compile:
        return ""
    if type(error) is not type(wanted):
        return f"type: {error!r} instead of {wanted!r}"
    if message(error) != message(wanted):
        return f"message: {message(error)!r} instead of {message(wanted)!r}"
    return ""


def main() -> None:
    """Prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="tensors on the CPU (compiled)")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, calls in calls_by_name().items():
        if options.names and name not in options.names:
            continue
        for call in calls():
            found = difference(call, compile=options.compiled, device=not options.cpu)
            kind = "set aside" if found is None else found.split(" ")[0].rstrip(":") or "alike"
            counts[kind] += 1
            if found:
                print(call.name, found, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
