"""Compiled graphs in PyTorch's precompile cache (``TORCH_CACHING_PRECOMPILE=1``).

PyTorch keeps what Dynamo made of a function, code and guards, from one process to the next, and
asks backends for what they made: `Artifact`. A process that finds both neither traces nor compiles.
Only inference graphs that need nothing of AOTAutograd are kept; PyTorch compiles the others again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..capture.graph.aot import unwrapped
from ..compiler import Loops
from ..host_steps.host_calls import find_overload
from ..ir.graph import LoopGraph
from ..options import CompileOptions, resolve
from ..plan import serialize
from ..plan.cache import sources_digest
from ..plan.cache_folder import digest_of
from ..plan.model import HostStep
from ..plan.verify import verify_plan
from ..runtime.device import Device, device_for
from ..target import Target
from ..tensors import devices
from ..torch_private import BackendCacheArtifact, PrecompileContext
from ..tuning.machines import measured_target
from .compiled_graph import CompiledGraph, PlanAt
from .device_graph import DeviceGraph
from .host_graph import HostGraph
from .signature import Signature

_OPTIONS = ("fusion", "deterministic", "fill_empty")
"""Of `CompileOptions`: what decides about code."""


@dataclass
class Artifact(BackendCacheArtifact[Callable[..., Any]]):
    """One compiled graph, as data. PyTorch stores it by pickling.

    Unpickling can run anything, so a folder of such artifacts has to be as safe as the program.
    What is checked here is what can happen by accident: the plan has a checksum, and it and its
    signature are verified as plans from a cache folder are, as far as they can be without a graph.

    Raises (when unpickled):
        RuntimeError: it was made by another version of this package or for another GPU, or it is
            damaged. PyTorch then says so and compiles the function; it could not if
            `after_deserialization` failed.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            content = state["content"]
            if content["package"] != sources_digest():
                raise RuntimeError("it was compiled by another version of torch_webgpu_compile")
            if content["target"] != _target(content, _device(content)).text:
                raise RuntimeError("it was compiled for another GPU, or another driver version")
            self._signature = _signature_of(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RuntimeError(f"it is damaged: {error!r}") from error
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_signature"}

    def after_deserialization(self) -> Callable[..., Any]:
        """The function that Dynamo's code calls."""
        content, device = self.content, _device(self.content)
        signature = self.__dict__.pop("_signature", None) or _signature_of(content)
        index, plan_at = content["device"], _plan_at(content, device)
        if index is None:
            return unwrapped(HostGraph(signature, device, plan_at))
        return unwrapped(DeviceGraph(signature, device, index, plan_at))


def _plan_at(content: dict[str, Any], device: Device) -> PlanAt | None:
    """Makes plans for other sizes; the graph that they are made of is read at the first."""

    @cache
    def loops() -> Loops:
        graph: LoopGraph = pickle.loads(content["loops"])
        return Loops(graph, _target(content, device), _options(content))

    return (lambda sizes: loops()(sizes)) if content["loops"] else None


def _signature_of(content: dict[str, Any]) -> Signature:
    """The plan and its signature. Raises TypeError, ValueError or RuntimeError for others."""
    text: str = content["plan"]
    if content["digest"] != digest_of((text.encode(), content["loops"], content["signature"])):
        raise ValueError("the plan or its signature has another checksum")
    plan = serialize.loads(text)
    verify_plan(plan)
    for part in plan.all_plans:
        for step in part.steps:
            if isinstance(step, HostStep):
                find_overload(step.target)
    return Signature(plan, *pickle.loads(content["signature"]))


def keep(name: str, compiled: Any, options: CompileOptions) -> None:
    """Gives PyTorch a compiled graph, which is stored by ``torch.compiler.save_cache_artifacts``.

    Does nothing with a function around one, or with a composed one that may need other plans.

    Args:
        name: PyTorch's name of the graph.
        compiled: takes Dynamo's arguments and gives its results.
        options: that it was compiled with.
    """
    if not isinstance(compiled, CompiledGraph) or compiled.plans_at:
        return
    text = serialize.dumps(compiled.plan).decode()
    signature = pickle.dumps((compiled.signature.phase, compiled.signature.static_inputs))
    loops, graph = compiled.plan_at, b""
    if isinstance(loops, Loops):
        graph = pickle.dumps(loops.graph)
    content = {
        "package": sources_digest(),
        "target": measured_target(compiled.device.target, options).text,
        "device": compiled.index if isinstance(compiled, DeviceGraph) else None,
        "checked": options.checked,
        "plan": text,
        "digest": digest_of((text.encode(), graph, signature)),
        "loops": graph,
        "options": {field: getattr(options, field) for field in _OPTIONS},
        "signature": signature,
    }
    PrecompileContext.record_artifact(Artifact(name, content))


def _options(content: dict[str, Any]) -> CompileOptions:
    return replace(resolve(None, None), **content["options"])


def _target(content: dict[str, Any], device: Device) -> Target:
    return measured_target(device.target, _options(content))


def _device(content: dict[str, Any]) -> Device:
    index = content["device"]
    if index is not None:
        return devices.get_device(index)
    return device_for(replace(resolve(None, None), checked=content["checked"]))
