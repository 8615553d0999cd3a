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

from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around


@around("transformers.modeling_utils:caching_allocator_warmup")
def allocate(
    original: Any, model: Any, expanded_device_map: Any, *rest: Any, **keywords: Any
) -> Any:
    others = {name: d for name, d in expanded_device_map.items() if not _is_here(d)}
    return original(model, others, *rest, **keywords)


def _is_here(device: Any) -> bool:
    """``device``: as in a device map, which may also say "disk" or, by a number, an accelerator."""
    return device != "disk" and torch.device(device).type == devices.NAME


@around("transformers.modeling_utils:PreTrainedModel._default_compile_config")
def compile_config(original: Any, self: Any) -> Any:
    config = original(self)
    if self.device.type == devices.NAME and config.backend == "inductor":
        from ...backend import webgpu  # the compiler, which takes a second

        config.backend, config.mode = webgpu, None  # "reduce-overhead" means CUDA graphs
    return config
