"""`transformers`: models are loaded to the device piece by piece, and compiled without Inductor.

Patched: when ``transformers.modeling_utils`` is imported, ``caching_allocator_warmup`` and
``PreTrainedModel._default_compile_config`` there. Tried with transformers 5.24; where a version has
no such function, nothing is changed.

Why: before it loads weights to an accelerator, ``from_pretrained`` allocates a tensor of all their
bytes and frees it, for allocators that divide what is freed. Memory here is not divided: the GPU
would hold the model twice, and one larger than the adapter's largest buffer could not be loaded.

``generate`` compiles with PyTorch's default backend. Its graphs come here all the same
(`default_backend`), but PyTorch imports Inductor, which takes longer than a first token.

Until: the one leaves out devices whose allocator does not divide what is freed, as it leaves out
"mps" and "neuron", and the other asks the device for its backend, as it does with "tpu".
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import devices
from ..import_hooks import after_import


def install() -> None:
    """Changes both functions, once ``transformers`` is imported."""
    after_import("transformers.modeling_utils", _change)


def _change(module: Any) -> None:
    _allocate_as_loaded(module)
    _compile_here(module)


def _allocate_as_loaded(module: Any) -> None:
    allocate = getattr(module, "caching_allocator_warmup", None)
    if allocate is None:
        return

    @functools.wraps(allocate)
    def caching_allocator_warmup(
        model: Any, expanded_device_map: Any, *rest: Any, **keywords: Any
    ) -> Any:
        others = {name: d for name, d in expanded_device_map.items() if not _is_here(d)}
        return allocate(model, others, *rest, **keywords)

    module.caching_allocator_warmup = caching_allocator_warmup


def _is_here(device: Any) -> bool:
    """``device``: as in a device map, which may also say "disk" or, by a number, an accelerator."""
    return device != "disk" and torch.device(device).type == devices.NAME


def _compile_here(module: Any) -> None:
    model: Any = getattr(module, "PreTrainedModel", None)
    configure = getattr(model, "_default_compile_config", None)
    if configure is None:
        return

    @functools.wraps(configure)
    def _default_compile_config(self: Any) -> Any:
        config = configure(self)
        if self.device.type == devices.NAME and config.backend == "inductor":
            from ...backend import webgpu  # the compiler, which takes a second

            config.backend, config.mode = webgpu, None  # "reduce-overhead" means CUDA graphs
        return config

    model._default_compile_config = _default_compile_config
