"""PyTorch's operator samples (OpInfo) on the device, against the CPU.

A `Check` is one sample in one of the `KINDS`; running it raises AssertionError for a wrong answer.
Samples that PyTorch itself refuses must be refused on the device with the same type of error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import DecorateInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE = "webgpu"
KINDS = ("forward", "backward", "inplace", "out", "errors")

# Operators whose results hold whatever memory held, or that are about something else than values.
EXCEPTIONS = {
    "empty": "its values are undefined",
    "empty_like": "its values are undefined",
    "empty_permuted": "its values are undefined",
    "empty_strided": "its values are undefined",
    "new_empty": "its values are undefined",
    "new_empty_strided": "its values are undefined",
    "as_strided.partial_views": "its samples read memory that the sample itself does not hold",
    "to_sparse": "sparse tensors",
    "sparse.mm.reduce": "sparse tensors",
    "sparse.sampled_addmm": "sparse tensors",
    "torch.ops.aten._safe_softmax.default": "not a function of torch",
}
"""By operator name, with the reason."""

ERRORS_NOT_RAISED = {
    "scatter": "indices out of bounds are not noticed without waiting for the GPU",
    "scatter_add": "indices out of bounds are not noticed without waiting for the GPU",
    "kthvalue": "out= may be the input: it is read before anything is written",
    "narrow_copy": "the CPU raises an internal assertion, other devices an IndexError",
}
"""By operator name, with the reason."""

OUT_OF_CPU = {
    "avg_pool3d": "the CPU kernel ignores the strides of out=",
    "nn.functional.avg_pool3d": "the CPU kernel ignores the strides of out=",
    "narrow_copy": "the CPU kernel ignores the strides of out=",
    "nn.functional.gelu": "the CPU kernel ignores the strides of out=",
}
"""Operators whose ``out=`` is not compared, with the reason."""

# Results that an out= of any dtype takes here; the CPU wants one dtype.
_OUT_OF_ANY_DTYPE = frozenset(
    {"all", "any", "bucketize", "isin", "isneginf", "isposinf", "searchsorted", "signbit"}
)

# Operators that want some of their tensors on the CPU, wherever they run.
_WITH_CPU_TENSORS = frozenset({"tensor_split"})

# Results that are determined up to a sign, a phase, or the order of equal elements.
OPEN = frozenset({"svd", "linalg.svd", "linalg.eigh", "linalg.eig", "svd_lowrank", "pca_lowrank"})


class Skip(Exception):
    """A sample that says nothing about the device."""


def name_of(info: Any) -> str:
    """An OpInfo's name with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


OPERATORS = {name_of(info): info for info in op_db if name_of(info) not in EXCEPTIONS}


@dataclass(frozen=True)
class Check:
    """One sample in one way; ``run`` raises when the device is wrong."""

    label: str
    run: Callable[[], None]


def checks(info: Any, kind: str, dtype: torch.dtype, limit: int | None) -> Iterator[Check]:
    """The checks of an operator's first samples."""
    if not _applies(info, kind, dtype):
        return
    if kind == "errors":
        made: Any = info.error_inputs("cpu") if info.error_inputs_func else ()
    else:
        made = info.sample_inputs("cpu", dtype, requires_grad=kind == "backward")
    run = _RUN[kind]
    for number, sample in enumerate(itertools.islice(made, limit)):
        yield Check(f"sample {number}", lambda sample=sample: run(info, sample))


def _applies(info: Any, kind: str, dtype: torch.dtype) -> bool:
    if dtype not in info.supported_dtypes("cpu"):
        return False
    match kind:
        case "backward":
            return bool(info.supports_autograd) and dtype in info.supported_backward_dtypes("cpu")
        case "inplace":
            return info.get_inplace() is not None
        case "out":
            return bool(info.supports_out) and info.name not in OUT_OF_CPU
        case "errors":
            return dtype is torch.float32 and info.name not in ERRORS_NOT_RAISED
    return True


# ---- moving samples


def on_device(values: Any, info: Any = None) -> Any:
    """The same values on the device: the layouts, offsets and shared memory of ``values``."""
    if info is not None and info.name in _WITH_CPU_TENSORS:
        first, *rest = values
        return on_device(first), *copied(rest)
    storages: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = whole.to(DEVICE)
        memory = storages[storage._cdata].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    def place(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return move(value)
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(DEVICE)
        return DEVICE if isinstance(value, str) and value == "cpu" else value

    with torch.no_grad():
        return tree_map(place, values)


def on_cpu(values: Any) -> Any:
    """Detached CPU copies."""
    return tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), values)


def copied(values: Any) -> Any:
    """Copies with the layouts and shared memory of CPU tensors."""
    storages: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = whole.clone()
        memory = storages[storage._cdata].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return tree_map_only(Tensor, copy, values)


# ---- comparing


@cache
def _tolerances(name: str) -> dict[torch.dtype, tuple[float, float]]:
    """PyTorch's own tolerances of an operator: (relative, absolute), where it has any."""
    found: dict[torch.dtype, tuple[float, float]] = {}
    for entry in OPERATORS[name].decorators:
        for rule in entry.decorators if isinstance(entry, DecorateInfo) else [entry]:
            if isinstance(rule, toleranceOverride):
                given = {dtype: (tol.rtol, tol.atol) for dtype, tol in rule.d.items()}
            elif isinstance(rule, precisionOverride):
                given = {dtype: (atol, atol) for dtype, atol in rule.d.items()}
            else:
                continue
            for dtype, (rtol, atol) in given.items():
                r, a = found.get(dtype, (0.0, 0.0))
                found[dtype] = max(r, rtol), max(a, atol)
    return found


_DEFAULT = {
    # Sums of a few hundred elements in another order; PyTorch's default is 1.3e-6 and 1e-5.
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 1e-4),  # two roundings: the CPU's and the device's
    torch.bfloat16: (1.6e-2, 1e-4),
}


def same(info: Any, got: Any, wanted: Any, near: Any = None, scale: float = 1.0) -> None:
    """Values, dtypes and sizes; ``near``: the same computed in float32, which is right as well."""
    got_leaves, wanted_leaves = tree_leaves(got), tree_leaves(wanted)
    assert len(got_leaves) == len(wanted_leaves), (len(got_leaves), len(wanted_leaves))
    near_leaves = tree_leaves(near) if near is not None else [None] * len(got_leaves)
    for g, w, n in zip(got_leaves, wanted_leaves, near_leaves, strict=True):
        if not isinstance(w, Tensor):
            if isinstance(w, (float, complex)):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)
            else:
                assert g == w or isinstance(w, torch.device), (g, w)
            continue
        assert isinstance(g, Tensor), type(g)
        _same_tensor(info, g, w, n, scale)


def _same_tensor(info: Any, got: Tensor, wanted: Tensor, near: Any, scale: float) -> None:
    rtol, atol = _DEFAULT.get(wanted.dtype, (None, None))
    own = _tolerances(name_of(info)).get(wanted.dtype)
    if rtol is not None and own is not None:
        rtol, atol = max(rtol, own[0]), max(atol, own[1])
    if rtol is not None:
        rtol, atol = rtol * scale, atol * scale
    got = got.detach().cpu()
    options: dict[str, Any] = {"rtol": rtol, "atol": atol, "equal_nan": True}
    try:
        torch.testing.assert_close(got, wanted, **options)
    except AssertionError:
        if not isinstance(near, Tensor) or near.shape != wanted.shape:
            raise
        torch.testing.assert_close(got, near.to(wanted.dtype), **options)


def _wide(values: Any) -> Any:
    """16-bit floats as float32."""
    small = (torch.float16, torch.bfloat16)

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in small:
            return value.detach().float()
        return torch.float32 if value in small and isinstance(value, torch.dtype) else value

    return tree_map(widen, values)


# ---- running


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


def _expected(function: Callable[..., Any], values: Any) -> _Expected:
    watch = _RandomOperators()
    try:
        with watch:
            return _Expected(_call(function, values), None, watch.found)
    except Exception as error:
        return _Expected(None, error, watch.found)


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


def _near(info: Any, function: Callable[..., Any], values: Any, wanted: Any) -> Any:
    """16-bit results computed in float32."""
    dtypes = {leaf.dtype for leaf in tree_leaves(wanted) if isinstance(leaf, Tensor)}
    if not dtypes & {torch.float16, torch.bfloat16}:
        return None
    return _expected(function, _wide(values)).value


def _open(info: Any, values: Any) -> Any:
    """Sizes and dtypes alone, where the values are not determined."""
    return _shapes_only(values) if name_of(info) in OPEN else values


def run_forward(info: Any, sample: Any) -> None:
    """The operator's results."""
    values = _of(sample)
    moved = on_device(values, info)
    expected = _expected(info.op, copied(values))
    wanted = expected.value
    if expected.error is not None:
        _fails_alike(info.op, moved, expected.error)
        return
    got = on_cpu(_call(info.op, moved))
    if expected.is_random:
        got, wanted = _shapes_only(got), _shapes_only(wanted)
    near = _near(info, info.op, values, wanted)
    same(info, _open(info, got), _open(info, wanted), near)


def run_backward(info: Any, sample: Any) -> None:
    """Gradients of everything that asks for one."""
    values = _of(sample)
    moved = on_device(values, info)
    watch = _RandomOperators()
    try:
        with watch:
            wanted = _gradients(info, sample, copied(values))
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"PyTorch cannot: {error}") from error
    got = _gradients(info, sample, moved)
    if watch.found or name_of(info) in OPEN:
        got, wanted = _shapes_only(got), _shapes_only(wanted)
    same(info, got, wanted, scale=10.0)  # sums over the results


def _gradients(info: Any, sample: Any, values: Any) -> Any:
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
        near = _near(info, info.op, _of(sample), expected.value)
        same(info, moved_first, first, near)
        if near is None:
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
    near = _near(info, info.op, values, wanted)
    makers = [_same_sizes, _empty, _with_gaps]
    if info.name not in _OUT_OF_ANY_DTYPE:
        makers.append(_other_dtype)
    for make in makers:
        outs = [make(t.detach()) for t in tensors]
        cpu_memory, cpu_outs, cpu_values = copied((*map(list, zip(*outs, strict=True)), values))
        memory, moved, moved_values = on_device((*map(list, zip(*outs, strict=True)), values))
        form = _form(wanted)
        error = _expected(_with_out(info.op, form(cpu_outs)), cpu_values).error
        if error is not None:
            _fails_alike(_with_out(info.op, form(moved)), moved_values, error)
            continue
        _call(_with_out(info.op, form(moved)), moved_values)
        same(info, _open(info, on_cpu(moved)), _open(info, cpu_outs), near)
        assert [t.stride() for t in moved] == [t.stride() for t in cpu_outs], "strides of out="
        if near is None and make is _with_gaps:
            same(info, _open(info, on_cpu(memory)), _open(info, cpu_memory))


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


_RUN = {
    "forward": run_forward,
    "backward": run_backward,
    "inplace": run_inplace,
    "out": run_out,
    "errors": run_error,
}
