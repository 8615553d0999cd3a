"""What PyTorch stores of a compiled function: its protocols, for functions of this package.

There are two ways to a process that neither traces nor compiles. ``aot_compile`` gives a function
that is saved to a file, for ``torch.compiler.load_compiled_function``: `SavedFunction`. And with
``TORCH_CACHING_PRECOMPILE=1`` PyTorch keeps what Dynamo made in its own cache folder: `Artifact`.

Where a graph needs nothing of AOTAutograd, this package's graph alone is stored. Else AOTAutograd
makes an entry as for its own cache, of forward and backward graphs that are `GraphCode`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch.fx import GraphModule

from ..capture.graph.wrappers import BoxedFunction, Surroundings
from ..torch_private import (
    BackendCacheArtifact,
    BundledAOTAutogradCacheArtifact,
    OutputCode,
    PrecompileContext,
    SerializableAOTDispatchCompiler,
    SerializableCallable,
    dynamo_config,
)


def is_kept() -> bool:
    """Whether PyTorch keeps what is compiled, for programs that then compile what does not fit."""
    return bool(dynamo_config.caching_precompile)


class GraphCode(OutputCode):
    """A compiled graph of AOTAutograd's, in the form in which AOTAutograd stores it.

    Args:
        run: the compiled graph. It is pickled, and made ready as it is unpickled.
    """

    def __init__(self, run: BoxedFunction) -> None:
        super().__init__()
        self._run = run
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Sequence[Any]:
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """There is nothing to prepare."""

    def post_compile(self, *_: object) -> None:
        """There is nothing to do before the first call."""

    def __copy__(self) -> GraphCode:
        return GraphCode(self._run)

    def __deepcopy__(self, _: object) -> GraphCode:
        return GraphCode(self._run)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphCode, (self._run,)


class SavedFunction(SerializableCallable):
    """The function of the arguments of Dynamo's graph, which can be saved.

    Args:
        call: the function.
        surroundings: what is this package's of it.
        serialize: gives AOTAutograd's entry; None where the function needs none.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        surroundings: Surroundings,
        serialize: Callable[[], Any] | None,
    ) -> None:
        self._call, self._surroundings, self._serialize = call, surroundings, serialize

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedFunction) -> bytes:
        """The function as bytes."""
        entry = None if fn._serialize is None else fn._serialize()
        return pickle.dumps((fn._surroundings, entry))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedFunction:
        """The function, ready on the GPU that is here. Raises what `StoredGraph.open` does."""
        surroundings, entry = pickle.loads(data)
        if entry is None:
            return SavedFunction(surroundings.around(None), surroundings, None)
        traced: Any = BundledAOTAutogradCacheArtifact("", entry).after_deserialization()
        return SavedFunction(surroundings.around(traced), surroundings, traced.serialize)


@dataclass
class Artifact(BackendCacheArtifact[Callable[..., Any]]):
    """A function that needs nothing of AOTAutograd, in PyTorch's precompile cache.

    PyTorch pickles it, and where unpickling raises, says so and compiles the function.
    """

    def __deepcopy__(self, _: object) -> Artifact:
        return self

    def after_deserialization(self) -> Callable[..., Any]:
        """The function that Dynamo's code calls."""
        surroundings: Surroundings = self.content
        return surroundings.around(None)


class Storing:
    """Has PyTorch store what comes of one graph of Dynamo's: see `capture.graph.aot.Storing`.

    Args:
        name: PyTorch's name of the graph.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def compiler(
        self, compile: Callable[[GraphModule, Sequence[Any]], BoxedFunction]
    ) -> Callable[[GraphModule, Sequence[Any]], BoxedFunction]:
        """``compile`` with functions of which AOTAutograd can make an entry to store."""

        def code(graph: GraphModule, inputs: Sequence[Any]) -> GraphCode:
            return GraphCode(compile(graph, inputs))

        return SerializableAOTDispatchCompiler(GraphCode, code)

    def capturing(self) -> AbstractContextManager[object]:
        """Has AOTAutograd find nothing in its cache, which knows nothing of this package."""
        config: Any = torch.compiler.config
        found: AbstractContextManager[object] = config.patch(cache_key_tag=f"webgpu {uuid4().hex}")
        return found

    def whole(self, traced: Callable[..., Any], surroundings: Surroundings) -> Callable[..., Any]:
        """The function of the arguments of Dynamo's graph."""
        is_direct = surroundings.direct is not None
        if is_direct and is_kept():
            PrecompileContext.record_artifact(Artifact(self._name, surroundings))
        serialize = None if is_direct else getattr(traced, "serialize", None)
        return SavedFunction(surroundings.around(traced), surroundings, serialize)
