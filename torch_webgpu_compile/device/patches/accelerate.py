"""`accelerate` takes the device where PyTorch has no other accelerator.

Patched: when they are imported, ``default_device``, ``_prepare_backend`` and ``set_device`` of
``accelerate.state.PartialState``, the list of devices with float16 and ``get_grad_scaler`` in
``accelerate.accelerator``, ``clear_device_cache`` in ``accelerate.utils.memory``,
``get_max_memory`` in ``accelerate.utils.modeling``, the enumeration ``DynamoBackend`` and the list
of its names, and ``_validate_launch_command`` in ``accelerate.commands.launch``. Tried with
accelerate 1.15; where a version has no such thing, nothing is changed. ``TORCH_WEBGPU_TRAINERS=0``
leaves all as it is, which `is_wanted` asks at each choice.

Why: it has a fixed list of device types and ends it with the CPU. (Its variable
``ACCELERATE_TORCH_DEVICE`` is no way to say it for everybody: it also wins over ``cpu=True``.)
For processes that were launched together it knows no backend then, and each trains alone.

Until: `accelerate` asks `torch.accelerator`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import after_import, around
from .accelerator import is_wanted


def install() -> None:
    """Adds the device to lists of ``accelerate``, once it is imported."""
    after_import("accelerate.accelerator", _allow_float16)
    after_import("accelerate.utils.dataclasses", _add_backend)
    after_import("accelerate.commands.config.config_utils", _name_backend)


@around("accelerate.state:PartialState.default_device")
def default_device(choose: Any, self: Any) -> torch.device:
    chosen: torch.device = choose(self)
    return torch.device(devices.NAME) if chosen.type == "cpu" and is_wanted() else chosen


@around("accelerate.state:PartialState._prepare_backend")
def prepare_backend(
    original: Any,
    self: Any,
    cpu: bool = False,
    sagemaker_dp: bool = False,
    backend: str | None = None,
) -> tuple[str | None, Any]:
    """Processes that were launched together train together, over gloo."""
    chosen, kind = original(self, cpu, sagemaker_dp, backend)
    is_launched = int(os.environ.get("LOCAL_RANK", -1)) != -1
    if kind.name == "NO" and is_launched and not cpu and is_wanted():
        return backend or "gloo", type(kind).MULTI_GPU
    return chosen, kind


@around("accelerate.state:PartialState.set_device")
def set_device(choose: Any, self: Any) -> None:
    """Each takes the device of its local rank; where there are fewer devices, several share one."""
    is_launched = self.device is None and self.distributed_type.name == "MULTI_GPU"
    if not is_launched or not is_wanted():
        choose(self)
        return
    index = self.local_process_index % devices.device_count()
    torch.get_device_module(devices.NAME).set_device(index)
    self.device = torch.device(devices.NAME, index)
    # Its own switch: DistributedDataParallel is not given the rank as its device.
    os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")


@around("accelerate.commands.launch:_validate_launch_command")
def validate_launch_command(validate: Any, args: Any) -> Any:
    """``accelerate launch --num_processes 2`` starts two: they may share a device."""
    other = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
    is_open = not any(getattr(args, name, False) for name in other)
    if is_open and (getattr(args, "num_processes", None) or 0) > 1 and is_wanted():
        args.multi_gpu = True
    return validate(args)


@around("accelerate.utils.memory:clear_device_cache")
def clear_device_cache(clear: Any, *arguments: Any, **keywords: Any) -> None:
    """``release_memory`` and the search for a batch size that fits give back what is free."""
    clear(*arguments, **keywords)
    if devices.opened():
        torch.get_device_module(devices.NAME).empty_cache()


@around("accelerate.utils.modeling:get_max_memory")
def get_max_memory(count: Any, max_memory: Any = None) -> Any:
    """Device maps are made for the devices that there are, by what memory is known to be free.

    Of a GPU with memory of its own, WebGPU tells nothing: everything is placed there. What does not
    fit ends in an `OutOfMemoryError`, and ``max_memory={0: "8GiB", "cpu": "30GiB"}`` divides it.
    One that shares the host's memory is not to have it twice, as `accelerate` says of others.
    """
    if not is_wanted():
        return count(max_memory)
    if max_memory is None:
        free = {index: _free_memory(index) for index in range(devices.device_count())}
        unknown = all(nbytes == sys.maxsize for nbytes in free.values())
        return {**free, **count()} if unknown else free
    module: Any = sys.modules["accelerate.utils.modeling"]
    mine: dict[int, float] = {}
    for index in sorted(place for place in max_memory if isinstance(place, int)):
        given = max_memory[index]
        mine[index] = module.convert_file_size_to_int(given) if isinstance(given, str) else given
        if index not in range(devices.device_count()):  # as `accelerate` does
            there = list(range(devices.device_count()))
            module.logger.warning(f"Device {index} is not available, of devices {there}")
    max_memory.update(mine)  # as `accelerate` does
    others = {place: max_memory[place] for place in max_memory if place not in mine}
    return {**mine, **count(others)}


def _free_memory(index: int) -> int:
    """Bytes; `sys.maxsize` where nothing tells."""
    try:
        free: int = torch.get_device_module(devices.NAME).mem_get_info(index)[0]
    except NotImplementedError:
        return sys.maxsize
    return free


def _allow_float16(module: Any) -> None:
    """Adds the device to the list of those that have float16, a constant of a function."""
    constructor = getattr(getattr(module, "Accelerator", None), "__init__", None)
    code = getattr(constructor, "__code__", None)
    if constructor is not None and code is not None:
        constructor.__code__ = code.replace(co_consts=tuple(map(_with_device, code.co_consts)))


@around("accelerate.accelerator:get_grad_scaler")
def get_grad_scaler(original: Any, *arguments: Any, **keywords: Any) -> Any:
    """The scaler of losses, which `accelerate` makes for CUDA then, is made for the device."""
    if is_wanted():
        return torch.amp.GradScaler(devices.NAME, **keywords)
    return original(*arguments, **keywords)


def _with_device(constant: Any) -> Any:
    is_list = isinstance(constant, tuple) and {"cuda", "xpu", "mps"} <= {
        entry for entry in constant if isinstance(entry, str)
    }
    return (*constant, devices.NAME) if is_list else constant


def _add_backend(module: Any) -> None:
    """Adds ``backend="webgpu"`` to the list of Dynamo's backends, an enumeration."""
    backends = getattr(module, "DynamoBackend", None)
    name = devices.NAME.upper()
    if backends is None or name in backends.__members__:
        return
    member = str.__new__(backends, name)
    member._name_ = member._value_ = name
    backends._member_map_[name] = backends._value2member_map_[name] = member
    backends._member_names_.append(name)


def _name_backend(module: Any) -> None:
    """Adds it to what ``accelerate launch --dynamo_backend`` and ``accelerate config`` offer."""
    names = getattr(module, "DYNAMO_BACKENDS", None)
    if isinstance(names, list) and devices.NAME.upper() not in names:
        names.append(devices.NAME.upper())
