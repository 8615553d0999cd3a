"""`Manifest`: the contents of a bundle, as data. ``docs/bundle.md`` describes the files.

A manifest is the JSON that `plan.codec` makes of these dataclasses. Plans are JSON as
`plan.serialize` writes it, except that a kernel's ``wgsl`` is a number: its module is in
`Variant.kernels`, a list of texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ..dtypes import DType
from ..plan.codec import LEFT_OUT
from ..symbolic.sizes import Expr

FORMAT = "torch-webgpu-bundle"
VERSION = 1

MANIFEST = "manifest.json"
"""The name of the file in the bundle's folder."""

CHUNK_NBYTES = 4 << 20
"""How much of a file is hashed, and may be fetched, by itself. A multiple of 4."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a bundle.

    Attributes:
        nbytes: its length.
        sha256: of all of it, in hexadecimal.
        chunks: the same of each `Manifest.chunk_nbytes` of it; the last chunk may be shorter.
    """

    nbytes: int
    sha256: str
    chunks: tuple[str, ...]


Kind = Literal["parameter", "buffer", "optimizer", "tensor"]
"""Of state: a module's parameter, a persistent buffer, an optimizer's, or anything else."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that stays on the GPU between calls, and that entries share.

    Attributes:
        kind: where it was found.
        dtype: of its elements on the GPU and in the file.
        sizes: its shape; elements are in rows, without gaps.
        changes: whether an entry writes it.
        file: the safetensors file with its first value; None where all of its bytes are 0.
        offset: of its first byte in the file.
    """

    kind: Kind
    dtype: DType
    sizes: tuple[int, ...]
    changes: bool
    file: str | None
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Size:
    """A size symbol: a dimension of an input, in elements.

    Attributes:
        name: the dimension's name for people, as given to `torch.export.Dim`.
        low, high: its smallest and largest value.
        input, dim: where a call's value is found.
    """

    name: str
    low: int
    high: int
    input: str
    dim: int


@dataclass(frozen=True, slots=True)
class Argument:
    """What a position of `Plan.inputs` takes: one of the three.

    Attributes:
        input: the name of an input.
        state: the name of a state; where the plan has a `PlanOutput` that mutates this position,
            the call changes the state.
        seeds: how many rows of two random i32 the call draws: int32 (seeds, 2).
    """

    input: str | None = None
    state: str | None = None
    seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or a result of an entry. Elements of an input are in rows, without gaps.

    Attributes:
        sizes: its shape; null for a size of a result that data decide.
    """

    dtype: DType
    sizes: tuple[Expr | None, ...]

    @property
    def known_sizes(self) -> tuple[Expr, ...]:
        """The sizes that follow from those of the inputs."""
        return tuple(size for size in self.sizes if size is not None)


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that an entry returns: one of the three.

    Attributes:
        output: a position among the plan's outputs that mutate nothing.
        input, state: the name of what is returned, as it is after the call.
    """

    tensor: Tensor
    output: int | None = None
    input: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A callable of a bundle.

    Attributes:
        plan: the file with its plan.
        sizes: the plan's size symbols, by name.
        arguments: by position of `Plan.inputs`.
        inputs, results: by name, in order.
        structure: what the PyTorch function returned, with names of results for tensors: a
            tuple or list is a list, a dictionary or a named tuple an object of which each value is
            the same again, a tensor ``{"result": name}``, anything else ``{"constant": value}``.
    """

    plan: str
    sizes: dict[str, Size]
    arguments: tuple[Argument, ...]
    inputs: dict[str, Tensor]
    results: dict[str, Result]
    structure: str


@dataclass(frozen=True, slots=True)
class Variant:
    """All entries, compiled for one class of devices, with weights of one precision.

    Attributes:
        name: e.g. ``float32``.
        features: the WebGPU features that its kernels need.
        limits: the limits, by WebGPU's names, that a device has to have: those above the defaults
            that every device has.
        kernels: the file with the WGSL modules of all its plans: a list of texts.
    """

    name: str
    features: tuple[str, ...]
    limits: dict[str, int]
    kernels: str
    state: dict[str, State]
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class PackedState:
    """A state that is a matrix of floats in few bits, which kernels dequantize.

    Its sizes are (rows, words of a row), int32. A row has the fields of all of its blocks one after
    the other, each in whole words: the levels of all elements, the first in the lowest bits, the
    groups' scales, their minimums, and the blocks' half floats.

    Attributes:
        blocks: the format by GGUF's name: ``Q8_0``, ``Q4_1`` or ``Q4_K``.
        sizes: of the matrix, (rows, columns).
        error: the norm of what was lost, relative to that of the matrix.
    """

    blocks: str
    sizes: tuple[int, ...]
    error: float


@dataclass(frozen=True, slots=True)
class Weights:
    """What ``export(…, weights=…)`` made of the weights of linear layers and embeddings.

    Attributes:
        format: ``int8`` or ``int4``.
        group: elements of a row that share a scale.
        nbytes: of the packed states, with their scales, in each variant.
        original_nbytes: of the same weights in the model.
        error: the norm of what all of them lost, relative to theirs: of the weights themselves,
            not of results.
        states: those that are packed, by name.
    """

    format: str
    group: int
    nbytes: int
    original_nbytes: int
    error: float
    states: dict[str, PackedState]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds.

    Attributes:
        format, version: `FORMAT` and `VERSION`.
        name: of the bundle, for people.
        producer: what wrote it, for people.
        chunk_nbytes: see `File`.
        files: all others of the bundle, by path relative to the manifest.
        variants: the best first; a runtime takes the first that its device can run.
        weights: how weights are packed; absent where they are not.
    """

    format: str
    version: int
    name: str
    producer: str
    chunk_nbytes: int
    files: dict[str, File]
    variants: tuple[Variant, ...]
    weights: Weights | None = field(default=None, metadata=LEFT_OUT)
