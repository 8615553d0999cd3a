"""What is done with one of PyTorch's operator samples (OpInfo), for each kind of check."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.device_compare import has_ties, same, wide, without_ties
from tests.device_dynamic import (
    FACTORS,
    NOT_REPEATED,
    Compilations,
    Recompiled,
    can_grow,
    grown,
    is_large,
)
from tests.device_exceptions import (
    OPEN,
    OUT_ANYWHERE,
    OUT_OF_ANY_DTYPE,
    STRIDES_OF_OUT,
    WRONG_WHEN_WATCHED,
    name_of,
)
from tests.device_values import copied, on_cpu, on_device


class Skip(Exception):
    """A sample that says nothing about the device."""


def _of(sample: Any) -> tuple[Any, Any, Any]:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def _call(function: Callable[..., Any], values: tuple[Any, Any, Any]) -> Any:
    torch.manual_seed(0)
    first, args, kwargs = values
    return function(first, *args, **kwargs)


class _RandomOperators(TorchDispatchMode):
    """Notices operators that take random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Expected:
    """What PyTorch gives on the CPU: results or an error, and whether they are random."""

    value: Any
    error: Exception | None
    is_random: bool


def _expected(function: Callable[..., Any], values: Any, *, watch: bool = True) -> _Expected:
    """Watching makes some operators forget their ``out=``: `torch.linalg.matrix_rank`."""
    mode = _RandomOperators()
    try:
        with mode if watch else nullcontext():
            return _Expected(_call(function, values), None, mode.found)
    except Exception as error:
        return _Expected(None, error, mode.found)


def _may_watch(info: Any, sample: Any) -> bool:
    return name_of(info) not in WRONG_WHEN_WATCHED or not sample.input.is_complex()


def _fails_alike(function: Callable[..., Any], values: Any, error: Exception) -> None:
    """The device refuses what the CPU refuses. Other devices may do what the CPU cannot."""
    try:
        tree_map_only(Tensor, lambda t: t.cpu(), _call(function, values))
    except type(error):
        return
    except Exception as other:
        if isinstance(error, NotImplementedError) or isinstance(other, NotImplementedError):
            return
        raise AssertionError(f"{type(other).__name__} instead of {error!r}: {other}") from other
    if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
        return
    raise AssertionError(f"no error instead of {error!r}")


def _shapes_only(values: Any) -> Any:
    return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), values)


def _is_narrow(results: Any) -> bool:
    """Whether there are 16-bit results, which the device may round in other places."""
    dtypes = {leaf.dtype for leaf in tree_leaves(results) if isinstance(leaf, Tensor)}
    return bool(dtypes & {torch.float16, torch.bfloat16})


def _near(info: Any, function: Callable[..., Any], values: Any) -> Callable[[], Any]:
    """What gives the results in wider numbers, for those that differ from the CPU's."""

    def compute() -> Any:
        return without_ties(info, values, _expected(function, wide(values)).value)

    return compute


def _open(info: Any, values: Any) -> Any:
    """Sizes and dtypes alone, where the values are not determined."""
    return _shapes_only(values) if name_of(info) in OPEN else values


def run_forward(info: Any, sample: Any) -> None:
    """The operator's results."""
    values = _of(sample)
    moved = on_device(values, info)
    expected = _expected(info.op, copied(values), watch=_may_watch(info, sample))
    wanted = expected.value
    if expected.error is not None:
        _fails_alike(info.op, moved, expected.error)
        return
    got = on_cpu(_call(info.op, moved))
    if expected.is_random:
        got, wanted = _shapes_only(got), _shapes_only(wanted)
    got, wanted = (without_ties(info, values, found) for found in (got, wanted))
    same(info, _open(info, got), _open(info, wanted), _near(info, info.op, values))


def run_compiled(info: Any, sample: Any) -> None:
    """The results of ``torch.compile``, of tensors on the device."""
    values = _of(sample)
    moved = on_device(values, info)
    expected = _expected(info.op, copied(values), watch=_may_watch(info, sample))
    if expected.error is not None:
        raise Skip(f"PyTorch refuses: {expected.error}") from expected.error
    torch._dynamo.reset()

    def function(first: Any, args: Any, kwargs: Any) -> Any:
        return info.op(first, *args, **kwargs)

    try:
        got = on_cpu(torch.compile(function, backend="webgpu")(*moved))
    except torch._dynamo.exc.TorchRuntimeError as error:
        raise Skip(f"PyTorch cannot trace it: {error}") from error
    wanted = expected.value
    if expected.is_random:
        got, wanted = _shapes_only(got), _shapes_only(wanted)
    got, wanted = (without_ties(info, values, found) for found in (got, wanted))
    same(info, _open(info, got), _open(info, wanted))


def run_dynamic(info: Any, sample: Any) -> None:
    """The results at three sizes, the last without compiling anything.

    Raises:
        Recompiled: the last size was compiled for.
    """
    small = _of(sample)
    if info.name in NOT_REPEATED or not can_grow(small):
        raise Skip("nothing to grow")
    few = is_large(small)
    for factor in FACTORS:
        values = grown(small, factor, few)
        expected = _expected(info.op, copied(values), watch=_may_watch(info, sample))
        if expected.error is not None:
            raise Skip("its sizes are tied to other arguments")
        with Compilations() as compilations:
            got = on_cpu(_call(info.op, on_device(values, info)))
        wanted = expected.value
        if expected.is_random:
            got, wanted = _shapes_only(got), _shapes_only(wanted)
        near = _near(info, info.op, values)
        got, wanted = (without_ties(info, values, found) for found in (got, wanted))
        # Sums of many times as many terms, over up to four dimensions.
        same(info, _open(info, got), _open(info, wanted), near, scale=float(factor**4))
    if compilations.count:
        raise Recompiled(f"{compilations.count} plans for sizes of a kind seen twice")


def run_backward(info: Any, sample: Any) -> None:
    """Gradients of everything that asks for one."""
    values = _of(sample)
    moved = on_device(values, info)
    watch = _RandomOperators()
    try:
        wanted = _gradients(info, sample, copied(values), watch)
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"PyTorch cannot: {error}") from error
    got = _gradients(info, sample, moved)
    if watch.found or name_of(info) in OPEN or has_ties(info, values):
        got, wanted = _shapes_only(got), _shapes_only(wanted)

    def near() -> Any:
        return _gradients(info, sample, wide(values))

    same(info, got, wanted, near, scale=10.0)  # sums over the results


def _gradients(info: Any, sample: Any, values: Any, watch: Any = None) -> Any:
    """Of the sum of the results times fixed numbers.

    Args:
        watch: a mode that sees what the operator and its gradient do.
    """
    mode = nullcontext() if watch is None else watch
    with mode:
        result = _call(info.op, values)
    process = sample.output_process_fn_grad
    if process is not None:
        result = process(result)
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs or not inputs:
        raise Skip("nothing asks for a gradient")
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype).to(t.device)
        for t in outputs
    ]
    with mode:
        return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


def run_inplace(info: Any, sample: Any) -> None:
    """The in-place variant on a tensor of its own, and on a part of larger memory."""
    if sample.broadcasts_input or not isinstance(sample.input, Tensor):
        raise Skip("the result is larger than the argument")
    function = info.get_inplace()
    for layout in (_plain, _gapped):
        memory, first = layout(sample.input)
        values = memory, first, tuple(sample.args), dict(sample.kwargs)
        memory, first, *rest = copied(values)
        moved_memory, moved_first, *moved_rest = on_device(values)
        expected = _expected(function, (first, *rest))
        if expected.error is not None:
            _fails_alike(function, (moved_first, *moved_rest), expected.error)
            continue
        got = _call(function, (moved_first, *moved_rest))
        assert (got is moved_first) == (expected.value is first)
        if expected.is_random:
            continue
        same(info, moved_first, first, _near(info, info.op, _of(sample)))
        if not _is_narrow(first):
            same(info, moved_memory, memory)


def _plain(tensor: Tensor) -> tuple[Tensor, Tensor]:
    made = tensor.detach().clone()
    return made, made


def _gapped(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Every other element of rows that start at an odd offset."""
    *rows, last = tensor.shape or (1,)
    memory = torch.zeros([*rows, 2 * last + 3], dtype=tensor.dtype)
    part = memory[..., 3::2]
    part = part if tensor.dim() else part[0]
    return memory, part.copy_(tensor.detach())


def run_out(info: Any, sample: Any) -> None:
    """``out=``: empty, of the right sizes, in larger memory with gaps, of a wrong dtype."""
    values = _of(sample)
    expected = _expected(info.op, copied(values))
    wanted = expected.value
    tensors = tree_leaves(wanted)
    if expected.error is not None or not all(isinstance(t, Tensor) for t in tensors):
        raise Skip("no results to write")
    if expected.is_random or not tensors:
        raise Skip("random")
    near = _near(info, info.op, values)
    makers = [_same_sizes, _empty, _with_gaps]
    if info.name not in OUT_OF_ANY_DTYPE:
        makers.append(_other_dtype)
    for make in makers:
        outs = [make(t.detach()) for t in tensors]
        cpu_memory, cpu_outs, cpu_values = copied((*map(list, zip(*outs, strict=True)), values))
        memory, moved, moved_values = on_device((*map(list, zip(*outs, strict=True)), values))
        form = _form(wanted)
        error = _expected(_with_out(info.op, form(cpu_outs)), cpu_values, watch=False).error
        if error is not None:
            _fails_alike(_with_out(info.op, form(moved)), moved_values, error)
            continue
        _call(_with_out(info.op, form(moved)), moved_values)
        same(info, _open(info, on_cpu(moved)), _open(info, cpu_outs), near)
        if info.name not in STRIDES_OF_OUT:
            strides = [t.stride() for t in cpu_outs]
            assert [t.stride() for t in moved] == strides, "strides of out="
        if make is _with_gaps and not _is_narrow(cpu_outs):
            same(info, _open(info, on_cpu(memory)), _open(info, cpu_memory))


def run_odd_out(info: Any, sample: Any) -> None:
    """``out=`` that is too small, repeats its elements, is on the host, or is an argument."""
    values = _of(sample)
    expected = _expected(info.op, copied(values))
    wanted = expected.value
    tensors = tree_leaves(wanted)
    if expected.error is not None or not all(isinstance(t, Tensor) for t in tensors):
        raise Skip("no results to write")
    if expected.is_random or not tensors or not _on_cpu_only(sample):
        raise Skip("random, or no tensors to say where")
    near = _near(info, info.op, values)
    form = _form(wanted)
    fitting = _with_out(info.op, form([torch.ones_like(t) for t in tensors]))
    if _expected(fitting, copied(values), watch=False).error is not None:
        raise Skip("no out=")
    for make in (_too_small, _expanded, *_arguments_like(tensors[0], values)):
        rest = [torch.ones_like(t) for t in tensors[1:]]
        memory, first, cpu_values = make(tensors[0].detach(), copied(values))
        moved_memory, moved_first, moved_values = make(
            tensors[0].detach().to("webgpu"), on_device(values)
        )
        outs, moved = [first, *rest], [moved_first, *on_device(rest)]
        error = _expected(_with_out(info.op, form(outs)), cpu_values, watch=False).error
        if error is not None:
            _fails_alike(_with_out(info.op, form(moved)), moved_values, error)
        elif make is not _expanded and _is_defined(outs, tensors):
            _call(_with_out(info.op, form(moved)), moved_values)
            same(info, _open(info, on_cpu(moved)), _open(info, outs), near)
            if not _is_narrow(outs):
                same(info, _open(info, on_cpu(moved_memory)), _open(info, memory), near)
    if info.name in OUT_ANYWHERE:
        return
    here = form([torch.ones_like(t) for t in tensors])
    with pytest.raises(RuntimeError, match=r"[Dd]evice"):
        _call(_with_out(info.op, here), on_device(values))


def _on_cpu_only(sample: Any) -> bool:
    """Whether a sample has tensors, and says in no other way where the results are to be."""
    leaves = tree_leaves(_of(sample))
    has_place = any(isinstance(x, (torch.device, str)) for x in leaves)
    return not has_place and any(isinstance(x, Tensor) and x.dim() for x in leaves)


def _too_small(result: Tensor, values: Any) -> Any:
    """One element within memory that has room for the result."""
    memory = torch.full((result.numel() + 5,), 1, dtype=result.dtype, device=result.device)
    return memory, memory[1:2], values


def _expanded(result: Tensor, values: Any) -> Any:
    memory = torch.ones((), dtype=result.dtype, device=result.device)
    return memory, memory.expand(result.shape), values


def _arguments_like(result: Tensor, values: Any) -> list[Callable[[Tensor, Any], Any]]:
    """For each argument with the sizes of the result what makes it the ``out=``."""
    given = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    found = []
    for k, tensor in enumerate(given):
        if tensor.shape == result.shape and tensor.dtype is result.dtype and tensor.numel():

            def make(_: Tensor, values: Any, k: int = k) -> Any:
                argument = [x for x in tree_leaves(values) if isinstance(x, Tensor)][k]
                return argument, argument, values

            found.append(make)
    return found


def _is_defined(outs: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether PyTorch computed the same into ``outs``, which are perhaps what it read."""
    return all(
        torch.allclose(*(wide(x) for x in pair), equal_nan=True, rtol=1e-3, atol=1e-3)
        for pair in zip(outs, wanted, strict=True)
    )


def _form(wanted: Any) -> Callable[[list[Tensor]], Any]:
    return (lambda outs: outs[0]) if isinstance(wanted, Tensor) else tuple


def _with_out(function: Callable[..., Any], out: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs, out=out)


def _same_sizes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.ones(tensor.shape, dtype=tensor.dtype)
    return made, made


def _empty(tensor: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty(0, dtype=tensor.dtype)
    return made, made


def _with_gaps(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return _gapped(torch.ones(tensor.shape, dtype=tensor.dtype))


def _other_dtype(tensor: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.ones(tensor.shape, dtype=torch.int64)
    return made, made


def run_error(info: Any, error_input: Any) -> None:
    """What PyTorch refuses is refused with the same type of error."""
    values = _of(error_input.sample_input)
    error = _expected(info.op, copied(values)).error
    if error is None:
        raise Skip("PyTorch accepts it on the CPU")
    _fails_alike(info.op, on_device(values), error)


RUN = {
    "forward": run_forward,
    "backward": run_backward,
    "compiled": run_compiled,
    "dynamic": run_dynamic,
    "inplace": run_inplace,
    "out": run_out,
    "odd out": run_odd_out,
    "errors": run_error,
}
