"""Compiled graphs in PyTorch's precompile cache (``TORCH_CACHING_PRECOMPILE=1``).

PyTorch keeps what Dynamo made of a function, code and guards, from one process to the next, and
asks backends for what they made: `Artifact`. A process that finds both neither traces nor compiles.
Only inference graphs that need nothing of AOTAutograd are kept; PyTorch compiles the others again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext

from . import devices
from .backend import device_for
from .capture.aot import unwrapped
from .compiled import CompiledGraph
from .device_graph import DeviceGraph
from .options import resolve
from .plan import serialize
from .plan_cache import sources_digest, target_text
from .runtime.device import Device
from .signature import Signature

_FIELDS = (
    *("static_inputs", "saved", "forwarded", "counted", "seeds"),
    *("complex_inputs", "complex_outputs", "lazy"),
)
"""Of `Signature`."""


@dataclass
class Artifact(BackendCacheArtifact[Callable[..., Any]]):
    """One compiled graph, as data. PyTorch stores it by pickling.

    Raises (when unpickled):
        RuntimeError: it was made by another version of this package or for another GPU. PyTorch
            then says so and compiles the function; it could not if `after_deserialization` failed.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state["content"]
        if content["package"] != sources_digest():
            raise RuntimeError("it was compiled by another version of torch_webgpu_compile")
        if content["target"] != target_text(_device(content).target):
            raise RuntimeError("it was compiled for another GPU, or another version of its driver")
        self.__dict__.update(state)

    def after_deserialization(self) -> Callable[..., Any]:
        """The function that Dynamo's code calls."""
        content, device = self.content, _device(self.content)
        plan = serialize.from_json(json.loads(content["plan"]))
        signature = Signature(plan, **content["signature"])
        index = content["device"]
        if index is None:
            return unwrapped(CompiledGraph(plan, device, signature))
        return unwrapped(DeviceGraph(plan, device, index, signature))


def keep(name: str, compiled: Any, checked: bool) -> None:
    """Gives PyTorch a compiled graph, which is stored by ``torch.compiler.save_cache_artifacts``.

    Does nothing with a function around one.

    Args:
        name: PyTorch's name of the graph.
        compiled: takes Dynamo's arguments and gives its results.
        checked: whether its kernels keep the bounds checks.
    """
    if not isinstance(compiled, CompiledGraph | DeviceGraph):
        return
    content = {
        "package": sources_digest(),
        "target": target_text(compiled.device.target),
        "device": compiled.index if isinstance(compiled, DeviceGraph) else None,
        "checked": checked,
        "plan": json.dumps(serialize.to_json(compiled.plan)),
        "signature": {field: getattr(compiled.signature, field) for field in _FIELDS},
    }
    PrecompileContext.record_artifact(Artifact(name, content))


def _device(content: dict[str, Any]) -> Device:
    index = content["device"]
    if index is not None:
        return devices.get_device(index)
    return device_for(replace(resolve(None, None), checked=content["checked"]))
