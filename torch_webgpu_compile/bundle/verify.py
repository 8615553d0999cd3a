"""Whether a bundle is what `docs/bundle.md` says, before anything of it is used.

A bundle may have been changed by anybody. Its files are checked against the manifest's hashes as
they are read; everything that a file refers to has to be there, and to be of the type and shape
that it is used as. What only a call decides, `bundle` checks when it evaluates sizes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dtypes import DType, int32
from ..errors import BundleError, UnsupportedOp, VerificationError
from ..plan import serialize
from ..plan.codec import Json, codec_of
from ..plan.model import FIRST_CHECK, HostStep, Plan, PlanBuffer, PlanOutput
from ..plan.size_sources import size_sources
from ..plan.verify import verify_plan
from ..symbolic.sizes import (
    LARGEST_SIZE,
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_expr,
    as_symbol,
    symbols_of,
)
from .hashing import check_presence, checked_pieces, is_file_name
from .manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    Argument,
    Entry,
    File,
    Manifest,
    Result,
    State,
    Tensor,
    Variant,
)
from .targets import LIMITS
from .tensors import data_start

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_MANIFEST_NBYTES = 256 << 20
_FEATURES = frozenset({"shader-f16"})
_MAX_CHUNK_NBYTES = 64 << 20
_MAX_SEEDS = 1 << 20
_MAX_NBYTES = 1 << 53  # the integers that JavaScript has
_MAX_RANK = 64
_MAX_DEPTH = 64  # of what a function returns

# What data of another form than expected makes the decoders raise.
_DAMAGE = (ValueError, TypeError, ArithmeticError, RecursionError, LookupError, AttributeError)

JsonChange = Callable[[dict[str, Json]], Json]


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a bundle, of which all but the bytes of the weights has been verified.

    Args:
        path: the bundle's folder.

    Raises:
        BundleError: a file is missing or damaged, or they do not agree.
    """
    reader = open_bundle(path)
    for variant in reader.manifest.variants:
        reader.plans(variant)
    return reader.manifest


@dataclass(frozen=True, slots=True)
class BundleReader:
    """The files of a bundle, whose manifest has been verified. Use `open_bundle`."""

    path: Path
    manifest: Manifest

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of a file in order; each piece is valid until the next one is asked for.

        Raises BundleError, at the latest after the last one, if it is not the manifest's file.
        """
        expected = self.manifest.files[name]
        return checked_pieces(self.path / name, expected, self.manifest.chunk_nbytes)

    def read_json(self, name: str, change: JsonChange | None = None) -> Json:
        """The content of a file, each object of it changed. Raises BundleError."""
        content = b"".join(self.pieces(name))
        try:
            return json.loads(content, object_hook=change)
        except _DAMAGE as error:
            raise BundleError(self.path / name, f"it is no JSON ({error})") from error

    def plans(self, variant: Variant) -> dict[str, Plan]:
        """The plans of a variant's entries, by name. Raises BundleError where they do not fit."""
        modules = self.read_json(variant.kernels)
        if not isinstance(modules, list) or not all(isinstance(text, str) for text in modules):
            raise BundleError(self.path / variant.kernels, "it is no list of texts")

        def with_module(kernel: dict[str, Json]) -> Json:
            if {"wgsl", "workgroup_size"} <= kernel.keys():
                number = kernel["wgsl"]
                known = type(number) is int and 0 <= number < len(modules)
                kernel["wgsl"] = modules[number] if known else None
            return kernel

        found = {}
        for name, entry in variant.entries.items():
            file = self.path / entry.plan
            try:
                plan = serialize.from_json(self.read_json(entry.plan, with_module))
                verify_plan(plan)
            except (serialize.PlanFormatError, VerificationError) as error:
                raise BundleError(file, f"it is no plan that can be run ({error})") from error
            _PlanChecks(file, entry, variant.state, plan).check()
            found[name] = plan
        return found


def open_bundle(path: str | os.PathLike[str]) -> BundleReader:
    """Reads and verifies the manifest of a bundle. Raises BundleError."""
    folder = Path(path)
    file = folder / MANIFEST
    manifest = _decoded(file)
    _ManifestChecks(folder, manifest).check()
    return BundleReader(folder, manifest)


def _decoded(file: Path) -> Manifest:
    try:
        if file.stat().st_size > _MAX_MANIFEST_NBYTES:
            raise BundleError(file, "it is larger than any manifest")
        text = file.read_bytes()
    except (OSError, ValueError) as error:
        raise BundleError(
            file.parent,
            f"there is no bundle here: {MANIFEST} cannot be read ({error})",
            "name the folder that torch_webgpu_compile.export has written",
        ) from error
    try:
        data = json.loads(text)
        kind, version = data["format"], data["version"]
    except _DAMAGE as error:
        raise BundleError(file, f"it is no manifest of a bundle ({error!r:.200})") from error
    if kind != FORMAT:
        raise BundleError(file, f"its format is {kind!r:.100}, that of a bundle {FORMAT!r}")
    if version != VERSION:
        raise BundleError(
            file,
            f"it has version {version!r:.100} of the format, this package reads {VERSION}",
            "export it again with this version of the package",
        )
    try:
        found: Manifest = codec_of(Manifest).decode(data)
    except _DAMAGE as error:
        raise BundleError(file, f"it is damaged ({error})") from error
    return found


class _Checks:
    """Checks of one file, or of a part of it, which errors name."""

    def __init__(self, file: Path, part: str = "") -> None:
        self._file, self._part = file, part

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise BundleError(self._file, self._part + what)


class _ManifestChecks(_Checks):
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder / MANIFEST)
        self._folder = folder
        self._manifest = manifest
        self._starts: dict[str, int] = {}

    def check(self) -> None:
        manifest = self._manifest
        nbytes = manifest.chunk_nbytes
        self._require(
            0 < nbytes <= _MAX_CHUNK_NBYTES and nbytes % 4 == 0, f"chunks of {nbytes} bytes"
        )
        for name, file in manifest.files.items():
            self._check_file(name, file)
        self._require(len(manifest.variants) > 0, "it has no variants")
        self._distinct([variant.name for variant in manifest.variants], "variants")
        for variant in manifest.variants:
            self._check_variant(variant)
            packed = {*(manifest.weights.states if manifest.weights else ())}
            self._require(packed <= {*variant.state}, "a packed weight is no state")

    def _distinct(self, names: Sequence[str], what: str) -> None:
        self._require(len(set(names)) == len(names), f"two {what} have one name")
        self._require(all(0 < len(name) <= 1000 for name in names), f"the names of {what}")

    def _check_file(self, name: str, file: File) -> None:
        self._require(is_file_name(name), f"no file of a bundle can be named {name!r:.200}")
        self._require(0 <= file.nbytes < _MAX_NBYTES, f"{name} has {file.nbytes} bytes")
        hashes = (file.sha256, *file.chunks)
        self._require(all(map(_SHA256.fullmatch, hashes)), f"{name} has no SHA-256")
        count = -(-file.nbytes // self._manifest.chunk_nbytes)
        self._require(
            len(file.chunks) == count,
            f"{name} has hashes of {len(file.chunks)} chunks, not {count}",
        )
        check_presence(self._folder / name, file)

    def _known_file(self, name: str) -> None:
        self._require(name in self._manifest.files, f"it lists no file {name!r:.200}")

    def _check_variant(self, variant: Variant) -> None:
        what = f"variant {variant.name}"
        unknown = {*variant.features} - _FEATURES | variant.limits.keys() - LIMITS.keys()
        self._require(not unknown, f"{what} needs what is not known: {sorted(unknown)!r:.200}")
        self._require(
            all(0 < value < _MAX_NBYTES for value in variant.limits.values()),
            f"{what} has the limits {variant.limits}",
        )
        self._known_file(variant.kernels)
        self._distinct([*variant.state], "states")
        for name, state in variant.state.items():
            self._check_state(name, state)
        self._require(len(variant.entries) > 0, f"{what} has no entries")
        self._distinct([*variant.entries], "entries")
        for name, entry in variant.entries.items():
            self._known_file(entry.plan)
            _EntryChecks(self._file, name, entry, variant.state).check()

    def _check_state(self, name: str, state: State) -> None:
        is_shape = len(state.sizes) <= _MAX_RANK and all(size >= 0 for size in state.sizes)
        self._require(
            is_shape and state.nbytes < _MAX_NBYTES,
            f"the state {name} has the sizes {state.sizes!r:.200}",
        )
        if state.file is None:
            self._require(state.offset == 0, f"the state {name} has an offset and no file")
            return
        self._known_file(state.file)
        if state.file not in self._starts:
            self._starts[state.file] = data_start(self._folder / state.file)
        end = self._manifest.files[state.file].nbytes
        self._require(
            self._starts[state.file] <= state.offset and state.offset + state.nbytes <= end,
            f"the state {name} lies outside of the tensors in {state.file}",
        )


class _EntryChecks(_Checks):
    """Checks of an entry, without its plan."""

    def __init__(self, file: Path, name: str, entry: Entry, states: Mapping[str, State]) -> None:
        super().__init__(file, f"entry {name}: ")
        self._entry = entry
        self._states = states

    def check(self) -> None:
        entry = self._entry
        symbols = self._sizes()
        for name, tensor in entry.inputs.items():
            is_known = None not in tensor.sizes
            self._require(is_known, f"the input {name} has a size that data decide")
            self._follows(tensor, symbols, f"the input {name}")
        for argument in entry.arguments:
            self._argument(argument)
        for kind in ("input", "state"):
            used = [found for a in entry.arguments if (found := getattr(a, kind)) is not None]
            self._require(len(set(used)) == len(used), f"one {kind} is two arguments")
        for name, result in entry.results.items():
            self._follows(result.tensor, symbols, f"the result {name}")
            self._result(name, result)
        try:
            structure = json.loads(entry.structure)
        except _DAMAGE as error:
            cause = f"{self._part}its structure is no JSON ({error})"
            raise BundleError(self._file, cause) from error
        self._structure(structure, 0)

    def _sizes(self) -> set[Symbol]:
        """The size symbols, each of which is a dimension of an input."""
        found = set()
        for name, size in self._entry.sizes.items():
            what = f"the size {name}"
            self._require(
                size.input in self._entry.inputs, f"{what} is of an input {size.input!r:.100}"
            )
            given = self._entry.inputs[size.input]
            self._require(0 <= size.dim < len(given.sizes), f"{what} is of dimension {size.dim}")
            dimension = given.sizes[size.dim]
            symbol = None if dimension is None else as_symbol(dimension)
            self._require(
                symbol is not None and symbol.name == name and name != FIRST_CHECK.name,
                f"{what} is not dimension {size.dim} of {size.input}",
            )
            assert symbol is not None
            self._require(
                max(0, symbol.lower) <= size.low <= size.high <= LARGEST_SIZE,
                f"{what} lies in {size.low} … {size.high}",
            )
            found.add(symbol)
        return found

    def _follows(self, tensor: Tensor, symbols: Collection[Symbol], what: str) -> None:
        used = set[Symbol]().union(*map(symbols_of, tensor.known_sizes))
        self._require(used <= set(symbols), f"{what} has a size that no input gives")

    def _one_of(self, values: Iterable[Any], what: str) -> None:
        self._require(sum(value is not None for value in values) == 1, f"{what} is not one thing")

    def _argument(self, argument: Argument) -> None:
        self._one_of((argument.input, argument.state, argument.seeds), "an argument")
        if argument.input is not None:
            known = argument.input in self._entry.inputs
            self._require(known, f"an argument is the input {argument.input!r:.100}")
        elif argument.state is not None:
            known = argument.state in self._states
            self._require(known, f"an argument is the state {argument.state!r:.100}")
        elif argument.seeds is not None:
            self._require(0 < argument.seeds <= _MAX_SEEDS, f"it draws {argument.seeds} seeds")

    def _result(self, name: str, result: Result) -> None:
        self._one_of((result.output, result.input, result.state), f"the result {name}")
        tensor = None
        if result.input is not None:
            tensor = self._entry.inputs.get(result.input)
        elif result.state is not None and (state := self._states.get(result.state)):
            tensor = tensor_of(state)
        same = result.output is not None or tensor == result.tensor
        self._require(same, f"the result {name} is another tensor than what it is")

    def _structure(self, value: Json, depth: int) -> None:
        self._require(depth <= _MAX_DEPTH, "its structure is nested too deeply")
        if isinstance(value, list):
            for item in value:
                self._structure(item, depth + 1)
            return
        self._require(isinstance(value, dict), "its structure has a value that is none")
        if value.keys() == {"constant"}:
            return
        if value.keys() == {"result"} and isinstance(value["result"], str):
            known = value["result"] in self._entry.results
            self._require(known, f"its structure has the result {value['result']!r:.100}")
            return
        for item in value.values():
            self._structure(item, depth + 1)


class _PlanChecks(_Checks):
    """A verified plan against its entry."""

    def __init__(self, file: Path, entry: Entry, states: Mapping[str, State], plan: Plan) -> None:
        super().__init__(file)
        self._entry = entry
        self._states = states
        self._plan = plan

    def check(self) -> None:
        plan, inner = self._plan, self._plan.preparation
        steps = (step for part in plan.all_plans for step in part.steps)
        hosts = [step.target for step in steps if isinstance(step, HostStep)]
        self._require(not hosts, f"it runs {hosts[:1]} on the host, which a bundle does not have")
        nested = [] if plan.plans is None else [*plan.all_plans][1:]
        prepared = [part.name for part in nested if part.preparation is not None]
        self._require(not prepared, f"{prepared[:1]} prepares something in another plan")
        for part in (plan, *nested):
            try:
                size_sources(part)
            except UnsupportedOp as error:
                raise BundleError(self._file, f"{part.name}: {error.cause}") from error
        self._arguments()
        if inner is not None:
            self._preparation(inner)
        self._mutations()
        returned = [output for output in plan.outputs if output.mutates is None]
        for name, result in self._entry.results.items():
            if result.output is not None:
                self._require(0 <= result.output < len(returned), f"it has no output for {name}")
                self._result(name, result.tensor, returned[result.output])

    def _arguments(self) -> None:
        plan, arguments = self._plan, self._entry.arguments
        self._require(
            len(plan.inputs) == len(arguments),
            f"it takes {len(plan.inputs)} arguments, the manifest has {len(arguments)}",
        )
        for position, (entry, argument) in enumerate(zip(plan.inputs, arguments, strict=True)):
            self._require(entry.buffer is not None, f"argument {position} is no tensor")
            buffer = plan.buffers[entry.buffer or ""]
            wanted = self._tensor(argument)
            self._same(buffer, buffer.dtype, wanted, f"argument {position}")

    def _tensor(self, argument: Argument) -> Tensor:
        if argument.input is not None:
            return self._entry.inputs[argument.input]
        if argument.state is not None:
            return tensor_of(self._states[argument.state])
        return Tensor(int32, (as_expr(argument.seeds or 0), as_expr(2)))

    def _same(
        self, layout: PlanBuffer | PlanOutput, dtype: DType, wanted: Tensor, what: str
    ) -> None:
        """Checks that a layout is that of a tensor in rows without gaps."""
        self._alike(layout, dtype, wanted, what)
        self._require(
            layout.offset in (None, ZERO) and _is_in_rows(layout.sizes, layout.strides),
            f"{what} is not in rows without gaps",
        )

    def _alike(
        self, layout: PlanBuffer | PlanOutput, dtype: DType, wanted: Tensor, what: str
    ) -> None:
        """Checks that a layout has a tensor's dtype and sizes."""
        self._require(
            dtype is wanted.dtype and layout.sizes == wanted.sizes,
            f"{what} is {dtype.name} {layout.sizes!r:.100}, "
            f"in the manifest {wanted.dtype.name} {wanted.sizes!r:.100}",
        )

    def _preparation(self, inner: Plan) -> None:
        states = {
            entry.buffer
            for entry, argument in zip(self._plan.inputs, self._entry.arguments, strict=True)
            if argument.state is not None
        }
        read = {entry.buffer for entry in inner.inputs}
        self._require(read <= states, "its preparation reads more than state")

    def _mutations(self) -> None:
        seen = set[int]()
        for output in self._plan.outputs:
            if output.mutates is None:
                continue
            name = self._entry.arguments[output.mutates].state
            self._require(name is not None, f"it changes argument {output.mutates}, not a state")
            state = self._states[name or ""]
            self._require(state.changes, f"it changes the state {name}, which does not change")
            self._require(output.mutates not in seen, f"it changes the state {name} twice")
            seen.add(output.mutates)
            if self._plan.plans is None:  # else a call decides what it gives
                buffer = self._plan.buffers[output.buffer or ""]
                self._same(output, buffer.dtype, tensor_of(state), f"the state {name}")

    def _result(self, name: str, tensor: Tensor, output: PlanOutput) -> None:
        self._require(output.buffer is not None, f"the result {name} is no tensor")
        if self._plan.plans is None:  # else a call decides what it gives
            dtype = self._plan.buffers[output.buffer or ""].dtype
            self._alike(output, dtype, tensor, f"the result {name}")


def _is_in_rows(sizes: Sequence[Expr], strides: Sequence[Expr]) -> bool:
    """Whether elements are in rows without gaps.

    Strides are compared from the last one on, so that products grow no longer than what was read.
    """
    wanted = ONE
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size is ZERO:
            return True
        if size is not ONE and stride is not wanted:
            return False
        wanted = wanted * size
    return True


def tensor_of(state: State) -> Tensor:
    """A state as a tensor of an entry."""
    return Tensor(state.dtype, tuple(map(as_expr, state.sizes)))


__all__ = ["BundleReader", "open_bundle", "read_manifest", "tensor_of"]
