"""`export`: PyTorch functions, with the state that they share, become a bundle."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..bundle.files import BundleWriter, TensorBytes
from ..bundle.manifest import (
    CHUNK_NBYTES,
    FORMAT,
    VERSION,
    Argument,
    Entry,
    Manifest,
    Result,
    Size,
    State,
    Variant,
)
from ..bundle.manifest import Tensor as TensorSpec
from ..bundle.target_file import package_version
from ..bundle.targets import allocated, bound, knows, needed_limits, target_of
from ..bundle.typescript import DECLARATIONS, declarations
from ..capture.control_flow.numbers import size_of
from ..captured import CapturedGraph, Phase
from ..compiler import compile_graph, host_numbers, native_operators
from ..dtypes import DType
from ..errors import OutOfMemoryError, UnsupportedOp
from ..lowering.symbols import SizeReader
from ..options import CompileOptions, resolve
from ..plan import serialize
from ..plan.model import Dispatch, HostStep, Plan
from ..plan.verify import verify_plan
from ..symbolic.sizes import INT32, as_symbol, evaluate
from ..target import Target
from ..torch_ops.dtypes import dtype_of
from .capture import CapturedFunction, capture_function
from .inputs import ExportInputs, largest
from .names import Key, Names, key_of
from .recorded import Recorded

if TYPE_CHECKING:
    from .packing import Packing


@dataclass(frozen=True)
class EntryPoint:
    """A function to export, and a call of it.

    Attributes:
        function: a module, a method, or any other callable.
        args, kwargs: of a call; its tensors become inputs, anything else is part of the program.
        dynamic_shapes: as `torch.export.export` takes them; None: sizes are those of the call.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None


RUNTIME = ("torch-webgpu", "torch-webgpu-composed", "torch-webgpu-report")
"""The modules that any bundle may need."""

PRECISIONS = ("float32", "float16")
PACKINGS = ("int8", "int4")


def export(
    function: Callable[..., Any] | Mapping[str, EntryPoint | tuple[Any, ...]],
    *arguments: Any,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    target: str | os.PathLike[str] | Target = "browser",
    precision: str | Sequence[str] = "float32",
    weights: str | None = None,
    name: str = "",
    shard_nbytes: int = 64 << 20,
    runtime: bool = True,
) -> Path:
    """Writes a bundle, which runs in browsers and in Python without PyTorch.

        export(model, (x,), "bundle/")                                       # one entry, "forward"
        export({"prefill": (prefill, (ids,)), "decode": (decode, (id, position))}, "bundle/")

    Each function is called once on fake tensors: what Python does in it is done at export. (It is
    called again where it leaves gradients, or changes numbers of Python; these are as after one
    call then, and nothing may be computed with them.) Tensors that it reaches, such as parameters,
    caches and the state of optimizers, become state of the bundle, with the values that they have
    now. Entries share it; what a call changes in place stays on the GPU. A training step is a
    function that calls ``backward()`` and ``optimizer.step()``. For pages, the folder gets
    ``bundle.d.ts``, the entries' types for TypeScript, and the runtime.

    Args:
        function: what to export, or several by name; see `EntryPoint`, as which a tuple is taken.
        arguments: the example arguments, if there is one function, and the folder.
        kwargs, dynamic_shapes: see `EntryPoint`; of one function.
        target: ``browser``: every device with WebGPU; ``desktop``: larger buffers; a `Target`,
            or the path of a file that ``doctor --save-target`` wrote.
        precision: ``float32``; ``float16``: weights, and what autocast computes in it, are half
            precision, for devices with ``shader-f16``; or both, and the device decides.
        weights: ``int8`` or ``int4``: those of linear layers and embeddings take so many bits of an
            element, and scales for groups of 32, in all precisions. What an entry changes, as
            in training, stays as it is, and so does what would not be smaller. The manifest's
            ``weights`` says which are packed, and what they have lost. The model stays as it is.
        name: of the bundle; by default that of the folder.
        shard_nbytes: most bytes of a file with weights, but for larger tensors.
        runtime: whether the folder gets the modules that run the bundle in a page, too
            (``torch-webgpu*.js``, 63 kB); a page that has them from npm needs none.

    Returns:
        The folder.

    Raises:
        UnsupportedOp: a function depends on values of tensors, or on numbers that its calls change,
            or needs an operator, a dtype or a limit that the target has not; the message names the
            operator and the line; or ``weights`` are given, and none can be packed.
        BundleError: the folder holds something else.
    """
    if isinstance(function, Mapping):
        if len(arguments) != 1 or kwargs is not None or dynamic_shapes is not None:
            raise TypeError(
                "export(entries, folder) takes the arguments and dynamic_shapes of each entry with "
                "it: {'decode': EntryPoint(decode, (ids,), dynamic_shapes=…)}"
            )
        (path,) = arguments
        entries = {
            key: value if isinstance(value, EntryPoint) else EntryPoint(*value)
            for key, value in function.items()
        }
    else:
        if len(arguments) != 2:
            raise TypeError("export takes a function, its example arguments, and a folder")
        examples, path = arguments
        if isinstance(examples, Tensor):
            examples = (examples,)
        entries = {"forward": EntryPoint(function, examples, kwargs, dynamic_shapes)}
    return write_bundle(
        entries,
        path,
        target=target,
        precision=precision,
        weights=weights,
        name=name,
        shard_nbytes=shard_nbytes,
        modules=RUNTIME if runtime else (),
    )


def write_bundle(
    entries: Mapping[str, EntryPoint],
    path: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | Target = "browser",
    precision: str | Sequence[str] = "float32",
    weights: str | None = None,
    name: str = "",
    shard_nbytes: int = 64 << 20,
    files: Mapping[str, bytes] = MappingProxyType({}),
    modules: Collection[str] = (),
) -> Path:
    """What `export` does.

    Args:
        files: contents of others that are to be in the bundle, by name.
        modules: of the runtime, to lie beside it.
    """
    _check_names(entries)
    precisions = (precision,) if isinstance(precision, str) else tuple(precision)
    if not precisions or not set(precisions) <= set(PRECISIONS):
        raise ValueError(f"precision={precision!r} is not valid; use {' or '.join(PRECISIONS)}")
    if weights is not None and weights not in PACKINGS:
        raise ValueError(f"weights={weights!r} is not valid; use {' or '.join(PACKINGS)}, or None")
    folder = Path(os.fspath(path))
    exporter = _Exporter(entries, target_of(target), resolve(None, None), shard_nbytes, weights)
    exporter.write(folder, name or folder.resolve().name, precisions, files, modules)
    return folder


def _check_names(entries: Mapping[str, EntryPoint]) -> None:
    if not entries:
        raise ValueError("export needs at least one entry")
    for name in entries:
        if not name.isidentifier():
            raise ValueError(f"the entry {name!r} is no name; use letters, digits and _")


@dataclass
class _Compiled:
    """An entry of a variant."""

    captured: CapturedFunction
    plan: Plan


class _Exporter:
    def __init__(
        self,
        entries: Mapping[str, EntryPoint],
        target: Target,
        options: CompileOptions,
        shard_nbytes: int,
        weights: str | None,
    ) -> None:
        self._entries = entries
        self._target = target
        self._options = replace(options, fallback="error")
        self._shard_nbytes = shard_nbytes
        self._names = Names({name: entry.function for name, entry in entries.items()})
        self._native = native_operators()
        self._states: dict[Key, str] = {}
        self._unnamed = itertools.count(1)
        self._weights = weights
        self._packing: Packing | None = None

    def write(
        self,
        folder: Path,
        name: str,
        precisions: Sequence[str],
        files: Mapping[str, bytes],
        modules: Collection[str],
    ) -> None:
        """Compiles everything, and then writes it."""
        with self._names.kept():
            if self._weights is not None:
                self._packing = self._packed(self._weights)
            whole = self._compiled("float32")
            compiled = {"float32": whole}
            if "float16" in precisions:
                changed = _changed(entry.captured for entry in whole.values())
                compiled["float16"] = self._compiled("float16", changed)
            # Half precision is the better one where it runs.
            order = [each for each in ("float16", "float32") if each in precisions]
            producer = f"torch_webgpu_compile {package_version()}, torch {torch.__version__}"
            with BundleWriter(folder, self._shard_nbytes) as writer:
                variants = tuple(self._variant(writer, each, compiled[each]) for each in order)
                for file, data in files.items():
                    writer.add(file, data)
                packed = None if self._packing is None else self._packing.described(self._states)
                made = Manifest(FORMAT, VERSION, name, producer, CHUNK_NBYTES, {}, variants, packed)
                beside = {DECLARATIONS: declarations(made).encode()}
                writer.finish(made, beside | _runtime(modules))

    # ---- compilation

    def _packed(self, format: str) -> Packing:
        """The weights, packed: all entries are captured, as what one of them changes is not."""
        from .packing import Packing  # registers operators

        packing = Packing(format)
        captured = [
            self._capture(name, entry, None, packing.find) for name, entry in self._entries.items()
        ]
        packing.pack(_changed(captured), self._names.known())
        return packing

    def _compiled(self, precision: str, changed: set[Key] | None = None) -> dict[str, _Compiled]:
        target, half = self._target, None
        if precision == "float16":
            target = replace(target, features=target.features | {"shader-f16"})

            def half(state: Tensor) -> bool:
                return state.dtype is torch.float32 and key_of(state) not in (changed or ())

        return {
            name: self._compile(name, entry, target, half) for name, entry in self._entries.items()
        }

    def _compile(
        self,
        name: str,
        entry: EntryPoint,
        target: Target,
        half: Callable[[Tensor], bool] | None,
    ) -> _Compiled:
        packing = self._packing
        captured = self._capture(name, entry, half, None if packing is None else packing.applied)

        def made(graph: CapturedGraph, phase: Phase) -> Plan:
            return compile_graph(graph, phase, target, self._options).plan

        try:
            plan = captured.plan(made)
            verify_plan(plan)
        except OutOfMemoryError as error:
            cause = f"a result does not fit into a buffer of the target {target.name} ({error})"
            raise UnsupportedOp(f"export of {name}", cause, _SMALLER) from error
        except UnsupportedOp as error:
            raise UnsupportedOp(
                error.op,
                f"{error.cause} (target {target.name})",
                "compute it outside of the exported function: a bundle has no host to run it on",
                error.source,
            ) from error
        _close_ranges(name, plan, captured, target)
        _check_plan(name, plan, captured.largest, captured, target)
        return _Compiled(captured, _published(plan))

    def _capture(
        self,
        name: str,
        entry: EntryPoint,
        half: Callable[[Tensor], bool] | None,
        change: Callable[[Recorded], Recorded] | None,
    ) -> CapturedFunction:
        inputs = ExportInputs(entry.function, entry.args, entry.kwargs or {}, entry.dynamic_shapes)
        return capture_function(name, inputs, self._names, self._native, host_numbers, half, change)

    # ---- writing

    def _variant(
        self, writer: BundleWriter, precision: str, entries: Mapping[str, _Compiled]
    ) -> Variant:
        known = self._names.known()
        known = known if self._packing is None else self._packing.named(known)
        states: dict[str, State] = {}
        values: dict[str, TensorBytes] = {}
        named: dict[str, list[str]] = {}
        for name, entry in entries.items():
            captured = entry.captured
            for k, tensor in enumerate(captured.states):
                key = key_of(tensor)
                found = known.get(key)
                if key not in self._states:
                    self._states[key] = found.name if found else f"tensor{next(self._unnamed)}"
                label = self._states[key]
                named.setdefault(name, []).append(label)
                before = states.get(label)
                if before is None:
                    kind = found.kind if found else "tensor"
                    data = tensor.detach().cpu()
                    data = (data.half() if k in captured.halved else data).contiguous()
                    values[label] = _tensor_bytes(data)
                    before = State(kind, _dtype(data), tuple(data.shape), False, None, 0)
                changes = before.changes or k in captured.changed
                states[label] = replace(before, changes=changes)
        places = writer.add_tensors(f"weights/{precision}", values)
        for label, (file, offset) in places.items():
            states[label] = replace(states[label], file=file, offset=offset)
        modules: dict[str, int] = {}
        made = {}
        for name, entry in entries.items():
            content = serialize.to_json(entry.plan)
            _number_modules(content, modules)
            path = f"plans/{precision}-{name}.json"
            writer.add(path, json.dumps(content, separators=(",", ":"), allow_nan=False).encode())
            made[name] = _entry(path, entry, named.get(name, []))
        kernels = f"kernels/{precision}.json"
        writer.add(kernels, json.dumps(list(modules), separators=(",", ":")).encode())
        limits = needed_limits((entry.plan, entry.captured.largest) for entry in entries.values())
        features = ("shader-f16",) if precision == "float16" else ()
        return Variant(precision, features, limits, kernels, states, made)


def _changed(captured: Iterable[CapturedFunction]) -> set[Key]:
    """The states that one of these changes."""
    return {key_of(each.states[k]) for each in captured for k in each.changed}


def _runtime(modules: Collection[str]) -> dict[str, bytes]:
    """Modules that run bundles in pages, and their types, as ``npm run build`` made them."""
    folder = resources.files(__package__) / "runtime"
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.partition(".")[0] in modules
    }


def _number_modules(plan: dict[str, Any], modules: dict[str, int]) -> None:
    """Puts numbers of modules in the place of their WGSL in a plan's JSON."""
    for kernel in plan["kernels"]:
        kernel["wgsl"] = modules.setdefault(kernel["wgsl"], len(modules))
    for part in filter(None, (plan["preparation"], *(plan["plans"] or ()))):
        _number_modules(part, modules)


def _entry(path: str, entry: _Compiled, states: Sequence[str]) -> Entry:
    captured = entry.captured
    arguments = [Argument(input=name) for name in captured.inputs]
    arguments += [Argument(state=name) for name in states]
    if captured.draft.phase.seeds:
        arguments.append(Argument(seeds=captured.draft.phase.seeds))
    read = SizeReader().size if entry.plan.plans is None else size_of

    given = captured.largest

    def spec_of(value: Tensor) -> TensorSpec:
        sizes = [size if _follows(size, given) else None for size in value.shape]
        return TensorSpec(_dtype(value), tuple(None if s is None else read(s) for s in sizes))

    inputs = {name: spec_of(fake) for name, fake in captured.inputs.items()}
    labels = [*captured.inputs, *states]
    results = {}
    for returned in captured.returned:
        spec = spec_of(returned.value)
        if returned.argument is None:
            results[returned.name] = Result(spec, output=returned.output)
        elif returned.argument < len(inputs):
            results[returned.name] = Result(spec, input=labels[returned.argument])
        else:
            results[returned.name] = Result(spec, state=labels[returned.argument])
    sizes = {}
    for d in captured.dimensions:
        where = (
            (name, dim)
            for name, spec in inputs.items()
            for dim, size in enumerate(spec.sizes)
            if size is not None
            if (symbol := as_symbol(size)) is not None and symbol.name == d.symbol
        )
        found = next(where, None)
        if found is None:
            raise UnsupportedOp(
                "export",
                f"the size {d.name} is no dimension of an input by itself",
                f"give an input whose dimension is Dim({d.name!r})",
            )
        sizes[d.symbol] = Size(d.name, d.low, d.high, *found)
    return Entry(path, sizes, tuple(arguments), inputs, results, json.dumps(captured.structure))


def _follows(size: Any, given: Collection[str]) -> bool:
    """Whether a size follows from those of the inputs."""
    if not isinstance(size, torch.SymInt):
        return True
    return {str(symbol) for symbol in size.node.expr.free_symbols} <= set(given)


def _tensor_bytes(data: Tensor) -> TensorBytes:
    flat = data.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(str(data.dtype).removeprefix("torch."), tuple(data.shape), flat)


def _dtype(value: Tensor) -> DType:
    dtype = dtype_of(value.dtype)
    if dtype is None:
        raise UnsupportedOp("export", f"{value.dtype} cannot be in a bundle", "use another dtype")
    return dtype


def _published(plan: Plan) -> Plan:
    """A plan without the names of where it was made, and without data for reports only."""

    def step(step: Any) -> Any:
        if not isinstance(step, Dispatch):
            return step
        checks = tuple(replace(check, source=_short(check.source)) for check in step.checks)
        return replace(step, checks=checks, traffic=())

    return replace(
        plan,
        kernels=tuple(replace(kernel, sources=()) for kernel in plan.kernels),
        steps=tuple(map(step, plan.steps)),
        preparation=None if plan.preparation is None else _published(plan.preparation),
        plans=None if plan.plans is None else tuple(map(_published, plan.plans)),
    )


def _short(source: str) -> str:
    """``file:line: code`` without the folders."""
    place, colon, code = source.partition(": ")
    return Path(place).name + colon + code


# ---- whether a plan runs on the target


def _close_ranges(name: str, plan: Plan, captured: CapturedFunction, target: Target) -> None:
    """Gives open sizes the largest value at which the plan runs, all of them at once."""
    opened = [d for d in captured.dimensions if d.is_open]
    if not opened:
        return

    def runs(size: int) -> bool:
        sizes = captured.largest | {d.symbol: max(d.hint, min(size, d.high)) for d in opened}
        try:
            _check_plan(name, plan, sizes, captured, target)
        except UnsupportedOp:
            return False
        return True

    least = max(d.hint for d in opened)
    if runs(least):
        size = largest(least, max(d.high for d in opened), runs)
        for d in opened:
            d.high = max(d.hint, min(size, d.high))


def _check_plan(
    name: str, plan: Plan, sizes: Mapping[str, int], captured: CapturedFunction, target: Target
) -> None:
    """Raises UnsupportedOp for a plan that the target cannot run at its largest sizes."""
    for part in plan.all_plans:
        for step in part.steps:
            if isinstance(step, HostStep):
                raise UnsupportedOp(
                    step.target,
                    f"the target {target.name} has no kernel for it, and a bundle has no host",
                    "compute it outside of the exported function",
                    step.source,
                )
            if isinstance(step, Dispatch):
                grid = [evaluate(size, sizes) for size in step.grid if knows(size, sizes)]
                wide = [
                    n for n in step.narrow if knows(n, sizes) and evaluate(n, sizes) not in INT32
                ]
                if wide or max(grid, default=0) > target.max_grid:
                    cause = f"its sizes{_at(captured)} are beyond 32-bit integers"
                    raise _too_large(part, step, cause)
        for step, nbytes in bound(part, sizes):
            if nbytes > target.max_binding_nbytes:
                cause = (
                    f"it reads or writes {nbytes:,} bytes{_at(captured)} of one tensor, a binding "
                    f"of the target {target.name} reaches {target.max_binding_nbytes:,}"
                )
                raise _too_large(part, step, cause)
        for nbytes in allocated(part, sizes):
            if nbytes > target.max_buffer_nbytes:
                raise UnsupportedOp(
                    f"export of {name}",
                    f"a tensor of {nbytes:,} bytes{_at(captured)} exceeds the "
                    f"{target.max_buffer_nbytes:,} of a buffer of the target {target.name}",
                    _SMALLER,
                )


_SMALLER = "lower the largest sizes (Dim(max=…)), split the tensor, or export for another target"


def _at(captured: CapturedFunction) -> str:
    sizes = ", ".join(f"{d.name} = {d.high}" for d in captured.dimensions)
    return f" (at {sizes})" if sizes else ""


def _too_large(plan: Plan, step: Dispatch, cause: str) -> UnsupportedOp:
    """The error for a dispatch."""
    kernel = plan.kernels[step.kernel]
    what = ", ".join(kernel.ops) or kernel.name
    return UnsupportedOp(what, cause, _SMALLER, next(iter(kernel.sources), ""))
