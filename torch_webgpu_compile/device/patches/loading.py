"""`transformers`: models that are loaded to the device do not ask for their bytes in one piece.

Patched: ``caching_allocator_warmup`` in ``transformers.modeling_utils``, once it is imported. Tried
with transformers 5.24; where a version has no such function, nothing is changed.

Why: before it loads weights to an accelerator, ``from_pretrained`` allocates a tensor of all their
bytes and frees it, for allocators that divide what is freed. Memory here is not divided: the GPU
would hold the model twice, and one larger than the adapter's largest buffer could not be loaded.

Until: that function leaves out devices whose allocator does not divide what is freed, as it leaves
out "mps" and "neuron".
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import devices
from ..import_hooks import after_import


def install() -> None:
    """Has ``transformers`` allocate tensor by tensor, once it is imported."""
    after_import("transformers.modeling_utils", _allocate_as_loaded)


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
