"""Entries of the plan cache, damaged in every way: what they hold is refused, or right.

`damaged` changes bytes; `altered` changes the plan's JSON, and the entry gets a right checksum, so
that only the schema and the verifier stand between it and a call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch_webgpu_compile.plan.model import Dispatch, HostStep, Plan
from torch_webgpu_compile.symbolic.sizes import ZERO

Json = Any
Place = tuple[Any, Any]  # a list or dictionary, and an index or key of it

_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 256, 65_536, 1 << 31, 1 << 63, 10**400, 1.5, 1e300),
    *("", "x", "torch.load", "aten.from_file.default", "aten._print.default", "\0", "a" * 2_000),
    *(
        [],
        {},
        [[]],
        {"c": 1, "t": []},
        {"HostBuffer": {"buffer": "x", "strides": None}},
        {"float": "nan"},
        {"Expr": 3},
    ),
)


def damaged(entry: bytes, chance: random.Random) -> bytes:
    """The entry with flipped bits, cut, or with a part of it elsewhere."""
    data = bytearray(entry)
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    match chance.randrange(6):
        case 0:
            place = chance.randrange(len(data))
            data[place] ^= 1 << chance.randrange(8)
        case 1:
            return bytes(data[:start])
        case 2:
            del data[start:end]
        case 3:
            data[start:start] = data[start:end]
        case 4:
            data[start:end] = bytes(end - start)
        case 5:
            for place in range(start, min(end, start + 64)):
                data[place] = chance.randrange(256)
    return bytes(data)


def altered(data: Json, chance: random.Random) -> Json:
    """A copy of a plan's JSON in which something is missing, moved, doubled or something else."""
    made = copy.deepcopy(data)
    places = list(_places(made))
    holder, key = chance.choice(places)
    value = holder[key]
    match chance.randrange(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = copy.deepcopy(chance.choice(_VALUES))
        case 2 if type(value) is int:
            holder[key] = value + chance.choice((-256, -16, -4, -1, 1, 4, 16, 256))
        case 3 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        case 4 if isinstance(holder, list):
            other = chance.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
        case 5:
            for _ in range(chance.choice((1, 40, 200))):
                value = chance.choice(([value], {"c": 0, "t": [[1, value]]}))
            holder[key] = value
        case 6:
            same = [(h, k) for h, k in places if type(h[k]) is type(value)]
            other, place = chance.choice(same)
            holder[key] = copy.deepcopy(other[place])
        case _:
            other, place = chance.choice(places)
            holder[key] = copy.deepcopy(other[place])
    return made


def _places(data: Json) -> Iterator[Place]:
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield data, key
        yield from _places(data[key])


def without_reports(plan: Plan) -> Plan:
    """The plan without what only people read, and what may be otherwise.

    Those are the slots, and the layouts of intermediates: kernels have them in their text, and
    those that the host reads are the graph's.
    """
    buffers = {
        name: replace(buffer, slot=None, strides=(), sizes=())
        if buffer.role == "intermediate"
        else buffer
        for name, buffer in plan.buffers.items()
    }
    kernels = tuple(
        replace(k, name="", kind="", ops=(), sources=(), workgroup_size=(1, 1, 1))
        for k in plan.kernels
    )
    kernels = tuple(replace(kernel, workgroup_nbytes=0) for kernel in kernels)
    inner = plan.preparation
    return replace(
        plan,
        name="",
        kernels=kernels,
        buffers=buffers,
        steps=tuple(_without_reports(step) for step in plan.steps),
        preparation=None if inner is None else without_reports(inner),
    )


def _without_reports(step: Any) -> Any:
    match step:
        case Dispatch():
            return replace(step, bytes_read=ZERO, bytes_written=ZERO, flops=ZERO)
        case HostStep():
            return replace(step, source="")


def without_program(plan: Plan) -> Plan:
    """What is left of `without_reports` without what kernels compute: no verifier can know that.

    That is their text, grids, parameters and checks, and what runs when on which buffers.
    """
    inner = plan.preparation
    return replace(
        without_reports(plan),
        kernels=(),
        steps=tuple(step for step in without_reports(plan).steps if isinstance(step, HostStep)),
        preparation=None if inner is None else without_program(inner),
    )
