"""Whether the parts of a bundle agree, before anything is allocated for it."""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

from ..errors import BundleError, VerificationError
from ..plan import serialize
from ..plan.model import HostStep, Plan
from ..plan.verify import verify_plan
from ..symbolic.sizes import as_expr, as_symbol
from .files import FILE_NAME, BundleFiles
from .manifest import Entry, File, Manifest, Variant
from .targets import LIMITS

_HASH = re.compile(r"[0-9a-f]{64}")
_FEATURES = frozenset({"shader-f16"})
_MAX_CHUNK = 64 << 20
_MAX_STATE = 1 << 40


def require(condition: bool, what: str) -> None:
    """Raises BundleError where something is not as it has to be."""
    if not condition:
        raise BundleError(f"manifest.json: {what}; export the model again")


def verify_manifest(manifest: Manifest) -> None:
    """Raises BundleError when the parts of a manifest do not agree."""
    chunk = manifest.chunk_nbytes
    require(0 < chunk <= _MAX_CHUNK and chunk % 4 == 0, f"chunks of {chunk} bytes")
    for name, file in manifest.files.items():
        _verify_file(name, file, chunk)
    require(bool(manifest.variants), "there are no variants")
    for variant in manifest.variants:
        require(set(variant.features) <= _FEATURES, f"the features {variant.features}")
        require(set(variant.limits) <= set(LIMITS), f"the limits {', '.join(variant.limits)}")
        require(min(variant.limits.values(), default=0) >= 0, "a limit is negative")
        for path in (variant.kernels, *(entry.plan for entry in variant.entries.values())):
            require(path in manifest.files, f"{path[:100]} is not among the files")
        _verify_states(variant, manifest)
        for name, entry in variant.entries.items():
            _verify_entry(name, entry, variant)


def _verify_file(name: str, file: File, chunk: int) -> None:
    require(FILE_NAME.fullmatch(name) is not None, f"{name[:100]!r} is no path inside of it")
    require(file.nbytes >= 0, f"{name} has {file.nbytes} bytes")
    hashes = (file.sha256, *file.chunks)
    require(all(_HASH.fullmatch(h) is not None for h in hashes), f"{name} has no SHA-256")
    require(len(file.chunks) == -(-file.nbytes // chunk), f"{name} has {len(file.chunks)} chunks")


def _verify_states(variant: Variant, manifest: Manifest) -> None:
    for name, state in variant.state.items():
        require(all(size >= 0 for size in state.sizes), f"the sizes of {name}")
        nbytes = prod(state.sizes) * state.dtype.itemsize
        require(nbytes <= _MAX_STATE and state.offset >= 0, f"{name} has {nbytes} bytes")
        if state.file is not None:
            file = manifest.files.get(state.file)
            inside = file is not None and state.offset + nbytes <= file.nbytes
            require(inside, f"{name} lies outside of its file")


def _verify_entry(name: str, entry: Entry, variant: Variant) -> None:
    for symbol, size in entry.sizes.items():
        spec = entry.inputs.get(size.input)
        found = spec is not None and 0 <= size.dim < len(spec.sizes)
        known = as_symbol(spec.sizes[size.dim]) if found and spec is not None else None
        require(
            known is not None and known.name == symbol and 0 <= size.low <= size.high,
            f"{name}: the size {symbol} is no dimension of an input",
        )
    for k, argument in enumerate(entry.arguments):
        given = (argument.input, argument.state, argument.seeds)
        require(sum(g is not None for g in given) == 1, f"{name}: argument {k} is not one thing")
        require(argument.input is None or argument.input in entry.inputs, f"{name}: argument {k}")
        require(argument.state is None or argument.state in variant.state, f"{name}: argument {k}")
        require(argument.seeds is None or 0 < argument.seeds <= 1 << 20, f"{name}: argument {k}")
    for label, result in entry.results.items():
        sources = (result.output, result.input, result.state)
        require(sum(s is not None for s in sources) == 1, f"{name}: the result {label[:100]}")
        require(result.input is None or result.input in entry.inputs, f"{name}: result {label}")
        require(result.state is None or result.state in variant.state, f"{name}: result {label}")
    try:
        json.loads(entry.structure)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"manifest.json: {name}: its structure is no JSON") from error


def read_kernels(files: BundleFiles, variant: Variant) -> list[str]:
    """The WGSL modules of a variant."""
    data = _json(files, variant.kernels)
    if type(data) is not list or not all(type(text) is str for text in data):
        raise BundleError(f"{variant.kernels} has no kernels; export the model again")
    return data


def read_plan(files: BundleFiles, variant: Variant, name: str, modules: list[str]) -> Plan:
    """An entry's plan, which fits the manifest. Raises BundleError for anything else."""
    entry = variant.entries[name]
    data = _json(files, entry.plan)
    try:
        for part in (data, data["preparation"]):
            for kernel in () if part is None else part["kernels"]:
                number = kernel["wgsl"]
                if type(number) is not int or not 0 <= number < len(modules):
                    raise ValueError("a kernel has no module")
                kernel["wgsl"] = modules[number]
        plan = serialize.from_json(data)
        verify_plan(plan)
        _verify_plan(plan, entry, variant)
    except (ValueError, TypeError, KeyError, AttributeError, VerificationError) as error:
        raise BundleError(f"{entry.plan}: {error}; export the model again") from error
    return plan


def _json(files: BundleFiles, name: str) -> Any:
    try:
        return json.loads(files.read(name))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{name} is no JSON ({error}); export the model again") from error


def _verify_plan(plan: Plan, entry: Entry, variant: Variant) -> None:
    """Raises ValueError for a plan that is not one of this entry."""
    parts = [plan] if plan.preparation is None else [plan, plan.preparation]
    for part in parts:
        if any(isinstance(step, HostStep) for step in part.steps):
            raise ValueError("it has a step that only PyTorch can do")
    if len(plan.inputs) != len(entry.arguments):
        raise ValueError("it has other arguments than the entry")
    for k, (given, argument) in enumerate(zip(plan.inputs, entry.arguments, strict=True)):
        if given.buffer is None or argument.seeds is not None:
            continue
        buffer = plan.buffers[given.buffer]
        if argument.input is not None:
            spec = entry.inputs[argument.input]
            wanted, dtype = spec.sizes, spec.dtype
        else:
            state = variant.state[argument.state or ""]
            wanted, dtype = tuple(map(as_expr, state.sizes)), state.dtype
        if buffer.sizes != wanted or buffer.dtype.name != dtype.name:
            raise ValueError(f"argument {k} has another dtype or size than in the manifest")
    for output in plan.outputs:
        if output.mutates is None:
            continue
        state_name = entry.arguments[output.mutates].state
        if state_name is None or not variant.state[state_name].changes:
            raise ValueError("an output changes what is no state")
    returned = [o for o in plan.outputs if o.mutates is None]
    for name, result in entry.results.items():
        if result.output is not None:
            fits = 0 <= result.output < len(returned) and returned[result.output].buffer is not None
            if not fits:
                raise ValueError(f"the result {name} is no output")
