"""A sized plan with its memory resolved, as lists of commands."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from ..errors import DeviceError
from ..plan.model import HostStep
from .buffers import AnyBuffer, Serial
from .interface import DispatchItem, DispatchRun, Handle
from .pacing import MAX_SECONDS
from .queue import MIN_BATCH, Recording
from .sized import SizedDispatch, SizedPlan

Segment = Recording | HostStep
"""What is recorded at once, or a host step."""


def build_segments(
    name: str,
    sized: SizedPlan,
    buffers: Sequence[AnyBuffer],
    groups: MutableMapping[tuple[Serial, ...], Handle],
) -> list[Segment]:
    """Binds a plan to memory.

    Args:
        name: the plan's, for errors.
        buffers: memory for `SizedPlan.names`.
        groups: bind groups that the programs of an executor share.

    Raises:
        DeviceError: a kernel would read and write one buffer.
    """
    segments: list[Segment] = []
    items: list[DispatchItem] = []
    made: list[SizedDispatch] = []
    last: Handle = None

    def close() -> None:
        nonlocal items, made, last
        if items:
            segments.append(Recording([DispatchRun(items)], name, made, sized.sizes))
        items, made, last = [], [], None

    for step in sized.steps:
        if isinstance(step, HostStep):
            close()
            segments.append(step)
            continue
        if len(items) == MIN_BATCH:
            close()  # the GPU starts with the first batches while the host encodes the others
        if made and sum(other.seconds for other in made) + step.seconds > MAX_SECONDS:
            close()
        pipeline = step.pipeline
        group = _bind_group(step, sized, buffers, groups)
        items.append((None if pipeline is last else pipeline, group, *step.grid))
        made.append(step)
        last = pipeline
    close()
    return segments


Users = Mapping[int, Sequence[tuple[int, int]]]
"""Of each buffer's position, the dispatches that bind it: (recording, number in it)."""


def users_of(segments: Sequence[Segment]) -> Users | None:
    """The dispatches that bind each buffer; None if there are host steps."""
    users: dict[int, list[tuple[int, int]]] = {}
    for k, recording in enumerate(segments):
        if isinstance(recording, HostStep):
            return None
        for number, step in enumerate(recording.steps):
            assert isinstance(step, SizedDispatch)
            for position in set(step.buffers):
                users.setdefault(position, []).append((k, number))
    return users


def rebind(
    segments: Sequence[Segment],
    users: Users,
    changed: Sequence[int],
    sized: SizedPlan,
    buffers: Sequence[AnyBuffer],
    groups: MutableMapping[tuple[Serial, ...], Handle],
) -> list[Segment]:
    """Recordings, which all segments of a plan are, with other memory at positions ``changed``.

    A step of a model has a hundred dispatches, of which a few read what is new in each call.

    Args:
        users: as `users_of` gives them for these.
        sized, buffers, groups: as in `build_segments`.

    Raises:
        DeviceError: a kernel would read and write one buffer.
    """
    runs: dict[int, DispatchRun] = {}
    recordings = [segment for segment in segments if isinstance(segment, Recording)]
    for k, number in {place for position in changed for place in users.get(position, ())}:
        run = runs.get(k)
        if run is None:
            old = recordings[k].commands[0]
            assert isinstance(old, DispatchRun)
            run = runs[k] = DispatchRun(old.items[:])
        step = recordings[k].steps[number]
        assert isinstance(step, SizedDispatch)
        pipeline, _, x, y, z = run.items[number]
        run.items[number] = (pipeline, _bind_group(step, sized, buffers, groups), x, y, z)
    return [
        recording.with_commands([runs[k]]) if k in runs else recording
        for k, recording in enumerate(recordings)
    ]


def _bind_group(
    step: SizedDispatch,
    sized: SizedPlan,
    buffers: Sequence[AnyBuffer],
    groups: MutableMapping[tuple[Serial, ...], Handle],
) -> Handle:
    for read, written in step.conflicts:
        if buffers[read].serial == buffers[written].serial:
            raise DeviceError(
                f"kernel {step.kernel.name} reads and writes {sized.names[written]} through two "
                "bindings; give bind() distinct buffers, or let the kernel use one read_write "
                "binding"
            )
    bound = [buffers[position] for position in step.buffers]
    key = (step.serial, *[buffer.serial for buffer in bound])
    group = groups.get(key)
    if group is None:
        handles = [buffer.handle for buffer in bound]
        starts = [buffer.offset_nbytes for buffer in bound]
        if step.uniform is not None:
            handles.append(step.uniform.handle)
            starts.append(0)
        group = groups[key] = step.make_group(handles, starts if any(starts) else ())
    return group
