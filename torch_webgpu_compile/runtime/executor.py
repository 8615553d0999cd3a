"""`Executor`: runs a `Plan` on a `Device`.

    executor = Executor(plan, device)
    with executor.lock:
        bound = executor.bind(sizes, {"x": x_buffer})
        bound.replay()
        device.download_many([(bound.buffer("y"), 0, nbytes, address)])

Everything is resolved before the call: `bind` evaluates the plan once per set of sizes, and makes
bind groups once per set of memory; `replay` only records commands.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceError
from ..plan.lru_cache import LruCache
from ..plan.model import STATUS, HostStep, Plan
from .buffers import AnyBuffer, GpuBuffer, Serial
from .device import Device, unless_held
from .interface import Handle
from .launcher import Launcher, Preparation, RunHostStep
from .program import Segment
from .sections import Section, divide, peak_nbytes
from .sized import SizedPlan, SlicedKernel, size_plan

_NOTHING: Mapping[str, Any] = {}
_MOST_BINDINGS = 256


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call of a plan, for reports.

    Attributes:
        sizes: the value of every size symbol.
        memory: that buffers had in the last call, where there was one, by their names.
        peak_nbytes: the most that is taken of the pool at once for what is not returned.
        is_owned: whether the executor keeps that between calls.
    """

    sizes: Mapping[str, int]
    memory: Mapping[str, Serial]
    peak_nbytes: int
    is_owned: bool


class Executor:
    """Runs one plan.

    Args:
        plan: what to run.
        device: where.
        host_call: runs `HostStep`s; may be None for a plan without any.
        max_programs: sets of sizes that stay resolved. A compiled model meets few; an eager
            operator meets many.

    Attributes:
        lock: hold it over upload → replay → download when several threads use this executor: its
            buffers are the same for all calls.
        preparation: computes the plan's prepared buffers; None when it has none.
        changed: the inputs that the plan writes where they are.
        checks_indices: whether kernels of the plan may report an index that is out of range.
        groups: the bind groups in use.

    Raises:
        ShaderError: a kernel does not compile.
        DeviceError: the plan has host steps and there is no ``host_call``.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        host_call: RunHostStep | None = None,
        max_programs: int = 16,
    ) -> None:
        host_steps = [step.target for step in plan.steps if isinstance(step, HostStep)]
        if host_steps and host_call is None:
            raise DeviceError(
                f"plan {plan.name} runs {host_steps[0]} on the host, but the executor has no "
                "host_call; pass one"
            )
        self.plan = plan
        self.device = device
        self.lock = threading.RLock()
        self.host_call = host_call
        self.max_programs = max_programs
        self._pipelines = device.pipelines.compile_many(plan.kernels)
        self.preparation: Preparation | None = None
        if plan.preparation is not None:
            self.preparation = Preparation(Executor(plan.preparation, device), plan.prepared)
        changed = dict.fromkeys(o.buffer for o in plan.outputs if o.mutates is not None)
        self.changed = tuple(
            name for name in changed if name is not None and plan.buffers[name].role == "input"
        )
        self._constants: dict[str, GpuBuffer] = {}
        self._owned: dict[str | int, GpuBuffer] = {}
        self._sliced: dict[int, SlicedKernel | None] = {}
        self._sized_plans = LruCache[tuple[Any, ...], SizedPlan](max_programs)
        self._own_memory = LruCache[tuple[Any, ...], tuple[Launcher, dict[str, GpuBuffer]]](
            max_programs
        )
        self._launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()
        self.groups: weakref.WeakValueDictionary[tuple[Serial, ...], Handle] = (
            weakref.WeakValueDictionary()
        )
        self._parameters: weakref.WeakValueDictionary[bytes, GpuBuffer] = (
            weakref.WeakValueDictionary()
        )
        for name, data in plan.constants.items():
            buffer = self._constants[name] = device.allocate(len(data))
            device.upload(buffer, data)
        self.checks_indices = any(b.role == "status" for b in plan.buffers.values())
        device.add_reclaimable(self)
        device.add_holder(self)

    def held(self) -> tuple[str, int]:
        """The executor's own memory: constants, and intermediates between calls."""
        own = [*self._constants.values(), *self._owned.values(), *self._parameters.values()]
        return "compiled graphs and operators", sum(buffer.nbytes for buffer in own)

    def bind(
        self,
        sizes: Mapping[str, int] | None = None,
        externals: Mapping[str, AnyBuffer] | None = None,
    ) -> BoundPlan:
        """The plan with its sizes and memory resolved, ready to replay.

        Args:
            sizes: the value of every size symbol of the plan.
            externals: the caller's memory, by plan buffer name: for inputs, for outputs that the
                caller keeps, or for anything else, and what `prepared` gives. Other buffers that
                are not given belong to the executor; their contents last until its next call.

        Raises:
            DeviceError: a given buffer is too small, or bound for reading and for writing by one
                kernel; or a prepared buffer is missing.
            OutOfMemoryError: the plan's own buffers do not fit.
        """
        sizes = _NOTHING if sizes is None else sizes
        externals = _NOTHING if externals is None else externals
        key = (*sizes.items(), *externals)
        with self.lock:
            found = self._own_memory.find(key)
            if found is None:
                found = self._own_memory.keep(key, self._own(sizes, externals))
            launcher, own = found
            bound = BoundPlan(self, launcher, {**own, **externals})
            bound.segments()  # raises what there is to raise
        return bound

    def prepared(self, memory: Mapping[str, AnyBuffer]) -> dict[str, GpuBuffer]:
        """The plan's prepared buffers, by name, for inputs of which ``memory`` has the static ones.

        Ask before every call during which the inputs may have other contents than before.

        Raises:
            DeviceError: as `Launcher`.
        """
        preparation = self.preparation
        if preparation is None:
            return {}
        made = preparation([memory[name] for name in preparation.reads])
        return dict(zip(preparation.names, made, strict=True))

    def launcher(self, sizes: Mapping[str, int] | None = None) -> Launcher:
        """Runs the plan at these sizes on memory that is all the caller's; keep it for many calls.

        Raises:
            DeviceError: as `bind`.
        """
        with self.lock:
            sized = self._sized(_NOTHING if sizes is None else sizes)
        return self._launcher(sized)

    def sections(
        self, sizes: Mapping[str, int], given_up: Collection[str]
    ) -> list[tuple[Launcher, Section]]:
        """The plan at these sizes in sections, each of them run by a launcher; mostly only one.

        Memory for the places of a section is needed before it is launched, and what it releases may
        be dropped right after that.

        Args:
            given_up: the inputs, by name, that the caller has no use for during a call.

        Raises:
            DeviceError: as `bind`.
        """
        with self.lock:
            sized = self._sized(sizes)
        return [(self._launcher(s.plan), s) for s in divide(self.plan, sized, given_up)]

    def known_call(
        self, sizes: Mapping[str, int], given_up: Collection[str] | None = None
    ) -> KnownCall:
        """What is known of calls at these sizes; see `KnownCall`.

        Args:
            given_up: as of `sections`; None where calls are not in sections.

        Raises:
            DeviceError: as `bind`.
        """
        with self.lock:
            sized = self._sized(sizes)
            launchers = list(self._launchers)
        sections = [Section(sized)]
        if given_up is not None:
            sections = divide(self.plan, sized, given_up)
        memory: dict[str, Serial] = {}
        for launcher in launchers:
            memory |= launcher.last_memory()
        peak = peak_nbytes(sections, self.plan.returned)
        return KnownCall(sizes, memory, peak, bool(self._owned))

    def _launcher(self, sized: SizedPlan) -> Launcher:
        constants = [self._constants[name] for name in sized.names if name in self._constants]
        made = Launcher(self, sized, constants)
        self._launchers.add(made)
        return made

    @property
    def most_bindings(self) -> int:
        """Sets of memory that a launcher may stay bound to: 256 of them all, but two of each.

        More of a plan with few dispatches, as an operator that a step calls for each layer.
        """
        dispatches = sum(not isinstance(step, HostStep) for step in self.plan.steps)
        most = max(self.max_programs, _MOST_BINDINGS // max(1, dispatches))
        return max(2, min(most, _MOST_BINDINGS // max(1, len(self._launchers))))

    def _sized(self, sizes: Mapping[str, int]) -> SizedPlan:
        key = tuple(sizes.items())
        sized = self._sized_plans.find(key)
        if sized is None:
            sized = size_plan(
                self.plan,
                self.device,
                dict(sizes),
                self._pipelines,
                self._parameters,
                self._sliced,
            )
            self._sized_plans.keep(key, sized)
        return sized

    def _own(
        self, sizes: Mapping[str, int], externals: Mapping[str, AnyBuffer]
    ) -> tuple[Launcher, dict[str, GpuBuffer]]:
        """The launcher, and the executor's own buffers for all names that are not given."""
        launcher = self._launcher(self._sized(sizes))
        for name in externals:
            if name not in self.plan.buffers:
                raise DeviceError(f"plan {self.plan.name} has no buffer {name}")
        for name in launcher.prepared:
            if name not in externals:
                raise DeviceError(
                    f"plan {self.plan.name} needs its prepared buffer {name}; give bind() what "
                    "prepared() returns"
                )
        return launcher, self._constants | self._intermediates(launcher.sized, externals)

    def _intermediates(
        self, sized: SizedPlan, given: Mapping[str, AnyBuffer]
    ) -> dict[str, GpuBuffer]:
        """The executor's memory for the plan buffers that are not given."""
        places: dict[str, str | int] = {}
        needed: dict[str | int, int] = {}
        for name, nbytes in zip(sized.names, sized.nbytes, strict=True):
            if name not in given and name not in self._constants and name != STATUS:
                slot = self.plan.buffers[name].slot
                place = places[name] = name if slot is None else slot
                needed[place] = max(needed.get(place, 0), nbytes)
        small = [
            place
            for place, nbytes in needed.items()
            if place not in self._owned or self._owned[place].capacity < nbytes
        ]
        if any(place in self._owned for place in small):
            self._own_memory.clear()  # what was made for the old memory would keep it alive
        for place in small:
            self._owned.pop(place, None)
        # Running out of memory may empty `_owned` in between (`reclaim`).
        buffers = {place: self._owned[place] for place in needed if place in self._owned}
        for place in small:
            buffers[place] = self.device.allocate(needed[place])
        self._owned |= buffers
        return {name: buffers[place] for name, place in places.items()}

    def reclaim(self) -> None:
        """Drops what was resolved and the executor's buffers; bound plans in use keep theirs."""
        made = self._own_memory, self._sized_plans, self._owned
        unless_held(self.lock, *(known.clear for known in made))


class BoundPlan:
    """A plan with sizes and memory. Keeps the caller's buffers alive while it is held.

    Attributes:
        executor: whose plan this is.
        memory: of all plan buffers, by name.
        sizes: values of the plan's size symbols.
        dispatch_count: dispatches per replay (those with an empty grid are not made).
    """

    __slots__ = ("_buffers", "_launcher", "dispatch_count", "executor", "memory")

    def __init__(
        self, executor: Executor, launcher: Launcher, memory: Mapping[str, AnyBuffer]
    ) -> None:
        self.executor = executor
        self._launcher = launcher
        self.memory = memory
        self._buffers = [memory[name] for name in (*launcher.names, *launcher.prepared)]
        self.dispatch_count = launcher.dispatch_count

    @property
    def sizes(self) -> dict[str, int]:
        """See the class."""
        return self._launcher.sized.sizes

    def segments(self) -> Sequence[Segment]:
        """The recordings and host steps of `replay`, in order."""
        return self._launcher.segments(self._buffers)

    def buffer(self, name: str) -> AnyBuffer:
        """The memory of a plan buffer: the caller's own where it was given to `Executor.bind`."""
        return self.memory[name]

    def replay(self) -> None:
        """Records the plan's commands (see `CommandQueue`). Waits only for host steps.

        Raises:
            DeviceError, DeviceLostError: the device refused these or earlier commands; the executor
                stays usable.
        """
        with self.executor.lock:
            self._launcher.run(self._buffers, may_share=True)
