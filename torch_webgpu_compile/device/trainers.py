"""`accelerate` and `transformers.Trainer` take the device where PyTorch has no other accelerator.

Both have a fixed list of device types and end it with the CPU. (Their variable
``ACCELERATE_TORCH_DEVICE`` is no way to say it for everybody: it also wins over ``cpu=True`` and
``use_cpu=True``.) `install` changes the end of the list, when the packages are imported.
``TORCH_WEBGPU_TRAINERS=0`` leaves them as they are, which `is_wanted` asks at each choice.

Goes when `accelerate` asks `torch.accelerator`. Tried with accelerate 1.15 and transformers 5.23;
where a version has no such function, nothing is changed.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from .. import devices
from . import accelerator
from .import_hooks import after_import


def install() -> None:
    """Has ``accelerate`` and ``transformers`` choose the device, once they are imported."""
    after_import("accelerate.state", _choose_in_accelerate)
    after_import("accelerate.accelerator", _allow_float16)
    after_import("accelerate.utils.dataclasses", _add_backend)
    after_import("transformers.training_args", _choose_in_transformers)
    after_import("transformers.integrations.accelerate", _place_models)
    after_import("transformers.pipelines.base", _choose_in_pipelines)


def is_wanted() -> bool:
    """Whether a tool that looks for an accelerator should find this one. It may open WebGPU."""
    if os.environ.get("TORCH_WEBGPU_TRAINERS", "1") == "0":
        return False
    return accelerator.current().type == devices.NAME and devices.device_count() > 0


def _choose_in_accelerate(module: Any) -> None:
    state = getattr(module, "PartialState", None)
    original = getattr(state, "default_device", None)
    if state is None or not isinstance(original, property) or original.fget is None:
        return
    choose = original.fget

    @functools.wraps(choose)
    def default_device(self: Any) -> torch.device:
        chosen: torch.device = choose(self)
        return torch.device(devices.NAME) if chosen.type == "cpu" and is_wanted() else chosen

    state.default_device = property(default_device)


def _allow_float16(module: Any) -> None:
    """Adds the device to the list of those that have float16, a constant of a function.

    The scaler of losses, which `accelerate` then makes for CUDA, is made for the device.
    """
    constructor = getattr(getattr(module, "Accelerator", None), "__init__", None)
    code = getattr(constructor, "__code__", None)
    if constructor is None or code is None:
        return
    constructor.__code__ = code.replace(co_consts=tuple(map(_with_device, code.co_consts)))
    make_scaler = getattr(module, "get_grad_scaler", None)
    if make_scaler is None:
        return

    @functools.wraps(make_scaler)
    def get_grad_scaler(*arguments: Any, **keywords: Any) -> Any:
        if is_wanted():
            return torch.amp.GradScaler(devices.NAME, **keywords)
        return make_scaler(*arguments, **keywords)

    module.get_grad_scaler = get_grad_scaler


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


def _choose_in_transformers(module: Any) -> None:
    has_bfloat16 = getattr(module, "is_torch_bf16_gpu_available", None)
    if has_bfloat16 is not None:
        module.is_torch_bf16_gpu_available = lambda: has_bfloat16() or is_wanted()
    arguments: Any = getattr(module, "TrainingArguments", None)
    original = getattr(arguments, "__dict__", {}).get("_setup_devices")
    if not isinstance(original, functools.cached_property):
        return
    choose = original.func

    @functools.wraps(choose)
    def _setup_devices(self: Any) -> torch.device:
        chosen: torch.device = choose(self)
        state = getattr(self, "distributed_state", None)  # has asked `accelerate`
        if chosen.type == "cpu" and state is not None and state.device.type == devices.NAME:
            return torch.device("cpu") if self.use_cpu else state.device
        return chosen

    replacement = functools.cached_property(_setup_devices)
    replacement.__set_name__(arguments, "_setup_devices")
    arguments._setup_devices = replacement


def _place_models(module: Any) -> None:
    """``from_pretrained(device_map="auto")``: what would be on the CPU as a whole is here.

    WebGPU does not tell how much memory there is to divide a model by. One that does not fit ends
    in an `OutOfMemoryError`; ``max_memory`` asks for another division, and gets PyTorch's.
    """
    choose = getattr(module, "_get_device_map", None)
    if choose is None:
        return

    @functools.wraps(choose)
    def _get_device_map(
        model: Any, device_map: Any, max_memory: Any = None, *rest: Any, **keywords: Any
    ) -> Any:
        chosen = choose(model, device_map, max_memory, *rest, **keywords)
        is_free = isinstance(device_map, str) and max_memory is None
        if is_free and set(map(str, chosen.values())) == {"cpu"} and is_wanted():
            return {"": devices.NAME}
        return chosen

    module._get_device_map = _get_device_map


def _choose_in_pipelines(module: Any) -> None:
    """``pipeline(...)`` without a device takes the first accelerator of its list."""
    pipeline: Any = getattr(module, "Pipeline", None)
    if pipeline is None:
        return
    construct = pipeline.__init__

    @functools.wraps(construct)
    def __init__(self: Any, model: Any, *rest: Any, device: Any = None, **keywords: Any) -> None:
        is_placed = getattr(model, "hf_device_map", None) is not None
        if device is None and not is_placed and is_wanted():
            device = torch.device(devices.NAME)
        construct(self, model, *rest, device=device, **keywords)

    pipeline.__init__ = __init__
