"""`transformers`: its ``Trainer`` and pipelines take the device, and ``generate`` compiles on it.

Patched: when they are imported, ``TrainingArguments._setup_devices`` and
``is_torch_bf16_gpu_available`` in ``transformers.training_args``, ``Pipeline.__init__``, and
``GenerationMixin._valid_auto_compile_criteria``. Tried with transformers 5.24, and ``generate``
with 5.17; where a version has no such function, nothing is changed. ``TORCH_WEBGPU_TRAINERS=0``
leaves all but ``generate`` as it is, which `is_wanted` asks at each choice. (Device maps are
`accelerate`'s.)

Why: each has a list of device types; those that choose a device end it with the CPU, also where
`accelerate` has chosen the device, and ``generate`` with a static cache runs eagerly on all others.

Until: they ask `torch.accelerator`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around
from .accelerator import is_wanted


@around("transformers.training_args:is_torch_bf16_gpu_available")
def has_bfloat16(original: Any) -> bool:
    return original() or is_wanted()


@around("transformers.training_args:TrainingArguments._setup_devices")
def setup_devices(choose: Any, self: Any) -> torch.device:
    chosen: torch.device = choose(self)
    state = getattr(self, "distributed_state", None)  # has asked `accelerate`
    if chosen.type == "cpu" and state is not None and state.device.type == devices.NAME:
        return torch.device("cpu") if self.use_cpu else state.device
    return chosen


@around("transformers.pipelines.base:Pipeline.__init__")
def construct(
    original: Any, self: Any, model: Any, *rest: Any, device: Any = None, **keywords: Any
) -> None:
    """Without a device the first accelerator is taken; numbers are its devices'."""
    is_placed = getattr(model, "hf_device_map", None) is not None
    if device is None and not is_placed and is_wanted():
        device = torch.device(devices.NAME)
    elif type(device) is int and device >= 0 and is_wanted():
        device = torch.device(devices.NAME, device)
    original(self, model, *rest, device=device, **keywords)


@around("transformers.generation.utils:GenerationMixin._valid_auto_compile_criteria")
def is_compiled(decide: Any, self: Any, model_kwargs: Any, generation_config: Any) -> bool:
    """``generate`` compiles its steps on the device where it would on CUDA: with a static cache."""
    given = generation_config.compile_config
    is_here = self.device.type == devices.NAME
    # With a configuration that cannot be followed it warns: none is made up for such a cache.
    if not is_here or (given is None and not _is_static(_cache_of(model_kwargs))):
        return bool(decide(self, model_kwargs, generation_config))
    from transformers.generation.configuration_utils import CompileConfig

    config = CompileConfig() if given is None else copy.copy(given)
    # The one exception to the list of device types, made for tests on the CPU.
    config._compile_all_devices = True
    generation_config.compile_config = config
    try:
        return bool(decide(self, model_kwargs, generation_config))
    finally:
        generation_config.compile_config = given


def _cache_of(model_kwargs: Any) -> Any:
    names = ("cache", "past_key_values", "cache_params")  # the latter two before 5.24
    return next((model_kwargs[name] for name in names if model_kwargs.get(name) is not None), None)


def _is_static(cache: Any) -> bool:
    own = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    return bool(getattr(cache, "is_compileable", False)) and type(own).__name__ != "DynamicCache"
