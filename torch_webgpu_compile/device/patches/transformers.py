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
import functools
from typing import Any

import torch

from .. import devices
from ..import_hooks import after_import
from .accelerator import is_wanted


def install() -> None:
    """Has ``transformers`` choose the device, once it is imported."""
    after_import("transformers.training_args", _choose_in_training)
    after_import("transformers.pipelines.base", _choose_in_pipelines)
    after_import("transformers.generation.utils", _compile_in_generate)


def _choose_in_training(module: Any) -> None:
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


def _choose_in_pipelines(module: Any) -> None:
    """``pipeline(...)`` without a device takes the first accelerator; numbers are its devices'."""
    pipeline: Any = getattr(module, "Pipeline", None)
    if pipeline is None:
        return
    construct = pipeline.__init__

    @functools.wraps(construct)
    def __init__(self: Any, model: Any, *rest: Any, device: Any = None, **keywords: Any) -> None:
        is_placed = getattr(model, "hf_device_map", None) is not None
        if device is None and not is_placed and is_wanted():
            device = torch.device(devices.NAME)
        elif type(device) is int and device >= 0 and is_wanted():
            device = torch.device(devices.NAME, device)
        construct(self, model, *rest, device=device, **keywords)

    pipeline.__init__ = __init__


def _compile_in_generate(module: Any) -> None:
    """``generate`` compiles its steps on the device where it would on CUDA: with a static cache."""
    mixin: Any = getattr(module, "GenerationMixin", None)
    decide = getattr(mixin, "_valid_auto_compile_criteria", None)
    if decide is None:
        return
    from transformers.generation.configuration_utils import CompileConfig

    @functools.wraps(decide)
    def _valid_auto_compile_criteria(self: Any, model_kwargs: Any, generation_config: Any) -> bool:
        given = generation_config.compile_config
        is_here = self.device.type == devices.NAME
        # With a configuration that cannot be followed it warns: none is made up for such a cache.
        if not is_here or (given is None and not _is_static(_cache_of(model_kwargs))):
            return bool(decide(self, model_kwargs, generation_config))
        config = CompileConfig() if given is None else copy.copy(given)
        # The one exception to the list of device types, made for tests on the CPU.
        config._compile_all_devices = True
        generation_config.compile_config = config
        try:
            return bool(decide(self, model_kwargs, generation_config))
        finally:
            generation_config.compile_config = given

    mixin._valid_auto_compile_criteria = _valid_auto_compile_criteria


def _cache_of(model_kwargs: Any) -> Any:
    names = ("cache", "past_key_values", "cache_params")  # the latter two before 5.24
    return next((model_kwargs[name] for name in names if model_kwargs.get(name) is not None), None)


def _is_static(cache: Any) -> bool:
    own = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    return bool(getattr(cache, "is_compileable", False)) and type(own).__name__ != "DynamicCache"
